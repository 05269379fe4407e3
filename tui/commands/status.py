"""What runs here: the node, its memory and the models it serves. Exits with 1 when nothing runs."""

from __future__ import annotations

from typing import Any

from node.config import resolve_home
from node.units import format_bytes
from tui.client import NodeClient
from tui.options import Home, Json
from tui.output import print_json


def command(home: Home = None, as_json: Json = False) -> None:
    with NodeClient(resolve_home(home)) as client:
        document = client.status()
    if as_json:
        print_json(document)
        return
    print(f"api     {document['api']}")
    for node in document["nodes"]:
        print(f"node    {node['name']}  {node['state']}  {node['backend']}  {node['device']}")
        memory = node["memory"]
        print(f"memory  {format_bytes(memory['used'])} used of a budget of {format_bytes(memory['budget'])}")
    for deployment in document["deployments"]:
        print(describe(deployment))


def describe(deployment: dict[str, Any]) -> str:
    plan, requests = deployment["plan"], deployment["requests"]
    if plan is None:
        return f"model   {deployment['model']}  {deployment['state']}"
    counts = ", ".join(f"{requests[name]} {name}" for name in ("running", "waiting", "finished", "failed"))
    return (
        f"model   {deployment['model']}  {deployment['state']}  {plan['mode']}  "
        f"context {plan['predicted']['context']}  ({counts})"
    )
