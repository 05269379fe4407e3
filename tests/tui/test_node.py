"""The life of a node as its user sees it: real processes, a tiny model, a home folder of its own."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from pathlib import Path

import httpx
import pytest

from node.instance import run_folder, socket_path
from node.ports import listen
from tests.tui.conftest import TIMEOUT_S, Cluster, RunningNode, free_port
from tui.client import NodeClient

QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}


def test_up_answers_status_down(cluster: Cluster, tiny_model: Path) -> None:
    with RunningNode(cluster, tiny_model) as node:
        assert node.wait_ready() == f"ready model=tiny api={node.api}/v1 nodes=1"
        answer = httpx.post(f"{node.api}/v1/chat/completions", json=QUESTION, timeout=TIMEOUT_S)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4

        shown = cluster.run("status", "--json")
        assert (shown.returncode, shown.stderr) == (0, "")
        check_document(json.loads(shown.stdout), node)
        assert "tiny  ready  solo" in cluster.run("status").stdout

        assert stat.S_IMODE(socket_path(cluster.home).stat().st_mode) == 0o600
        assert stat.S_IMODE(run_folder(cluster.home).stat().st_mode) == 0o700

        down = cluster.run("down")
        assert (down.returncode, down.stderr) == (0, "stopped\n")
        assert node.process.wait(TIMEOUT_S) == 0
    assert not socket_path(cluster.home).exists()
    assert cluster.run("status").returncode == 1


def check_document(document: dict, node: RunningNode) -> None:
    """DESIGN 4.6, key for key."""
    assert set(document) == {"self", "api", "nodes", "links", "deployments"}
    assert (document["api"], document["links"]) == (f"{node.api}/v1", [])
    (only,) = document["nodes"]
    assert set(only) == {"id", "name", "address", "state", "backend", "device", "memory", "profile"}
    assert (only["id"], only["state"], only["backend"]) == (document["self"], "ready", "cpu")
    assert 0 < only["memory"]["used"] < only["memory"]["budget"]
    assert set(only["profile"].values()) == {None}
    (deployment,) = document["deployments"]
    assert (deployment["model"], deployment["state"]) == ("tiny", "ready")
    plan = deployment["plan"]
    stage = {"node": document["self"], "layers": [0, 3], "tensor": [0, 1]}
    assert (plan["mode"], plan["decode"], plan["prefill"]) == ("solo", [stage], [stage])
    assert plan["predicted"] == {"ttft_ms": None, "tpot_ms": None, "prompt": None, "context": 2048}
    assert plan["reasons"]
    assert (deployment["requests"]["finished"], deployment["requests"]["failed"]) == (1, 0)


def test_up_again_says_that_it_runs(cluster: Cluster, tiny_model: Path) -> None:
    with RunningNode(cluster, tiny_model) as node:
        ready = node.wait_ready()
        again = ("up", tiny_model, "--api-port", node.port, "--threads", 1)
        same = cluster.run(*again)
        assert (same.returncode, same.stdout) == (0, f"{ready}\n")
        assert f"already running (pid {node.process.pid})" in same.stderr
        other = cluster.run(*again, "--context", 512)
        assert (other.returncode, other.stdout) == (2, "")
        assert "with other settings: --context" in other.stderr and "cluster down" in other.stderr
        assert node.process.poll() is None


def test_run_asks_the_running_node_and_else_loads(cluster: Cluster, tiny_model: Path) -> None:
    ask = ("run", tiny_model, "hello", "--max-tokens", 4, "--temperature", 0)
    alone = cluster.run(*ask)
    assert alone.returncode == 0, alone.stderr
    with RunningNode(cluster, tiny_model) as node:
        node.wait_ready()
        served = cluster.run(*ask)
        piped = cluster.run("run", tiny_model, "--max-tokens", 4, "--temperature", 0, input="hello")
        counted = json.loads(cluster.run("status", "--json").stdout)["deployments"][0]["requests"]
    assert alone.stdout == served.stdout == piped.stdout
    assert counted["finished"] == 2


def test_run_tells_the_endpoints_refusals(cluster: Cluster, tiny_model: Path) -> None:
    long = "hello " * 4000
    alone = cluster.run("run", tiny_model, input=long)
    with RunningNode(cluster, tiny_model) as node:
        node.wait_ready()
        served = cluster.run("run", tiny_model, input=long)
    for shown in (alone, served):
        assert (shown.returncode, shown.stdout) == (1, "")
        assert "error: This model's maximum context length is 2048 tokens" in shown.stderr
    empty = cluster.run("run", tiny_model)
    assert empty.returncode == 2 and "The prompt is empty" in empty.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains(cluster: Cluster, tiny_model: Path, number: int) -> None:
    with RunningNode(cluster, tiny_model) as node:
        node.wait_ready()
        body = QUESTION | {"max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{node.api}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as answer:
            lines = answer.iter_lines()
            next(lines)
            node.process.send_signal(number)
            rest = list(lines)
        assert rest[-2:].count("data: [DONE]") == 1 or "data: [DONE]" in rest
        finishes = [line for line in rest if '"finish_reason":"' in line.replace(" ", "")]
        assert len(finishes) == 1
        assert node.process.wait(TIMEOUT_S) == 0


def test_a_second_signal_does_not_wait(cluster: Cluster, tiny_model: Path) -> None:
    with RunningNode(cluster, tiny_model) as node:
        node.wait_ready()
        started, ended = threading.Event(), threading.Event()

        def ask_for_ever() -> None:
            body = QUESTION | {"max_tokens": 1900, "stream": True, "n": 1}
            try:
                with httpx.stream("POST", f"{node.api}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as answer:
                    for _ in answer.iter_lines():
                        started.set()
            except httpx.HTTPError:
                pass
            finally:
                ended.set()

        threading.Thread(target=ask_for_ever).start()
        assert started.wait(TIMEOUT_S)
        node.process.send_signal(signal.SIGTERM)
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(TIMEOUT_S) == 0
        assert ended.wait(TIMEOUT_S)


def test_kill_leaves_nothing_that_a_new_node_trips_over(cluster: Cluster, tiny_model: Path) -> None:
    with RunningNode(cluster, tiny_model) as first:
        first.wait_ready()
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(TIMEOUT_S)
        assert socket_path(cluster.home).exists()
        assert cluster.run("status").returncode == 1
        assert cluster.run("down").stderr == "no node is running\n"
        with RunningNode(cluster, tiny_model, port=first.port) as second:
            second.wait_ready()
            assert cluster.run("down").returncode == 0


def test_a_taken_port_names_its_owner(cluster: Cluster, tiny_model: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        shown = cluster.run("up", tiny_model, "--api-port", taken.getsockname()[1])
    assert (shown.returncode, shown.stdout) == (1, "")
    assert f"(pid {os.getpid()})" in shown.stderr and "--api-port" in shown.stderr


def test_settings_come_from_environment_and_file(cluster: Cluster, tiny_model: Path) -> None:
    (cluster.home / "config.toml").write_text('context = 128\nname = "from-the-file"\n')
    cluster.env |= {"ROOST_CONTEXT": "256", "ROOST_MODEL": str(tiny_model)}
    with RunningNode(cluster) as node:
        assert node.wait_ready().startswith("ready model=tiny ")
        document = json.loads(cluster.run("status", "--json").stdout)
        cluster.run("down")
    assert document["nodes"][0]["name"] == "from-the-file"
    assert document["deployments"][0]["plan"]["predicted"]["context"] == 256


def test_a_key_is_asked_for_and_never_shown(cluster: Cluster, tiny_model: Path) -> None:
    cluster.env |= {"ROOST_API_KEY": "hush-hush"}
    with RunningNode(cluster, tiny_model, "--api-host", "0.0.0.0") as node:
        node.wait_ready()
        refused = httpx.get(f"{node.api}/v1/models")
        allowed = httpx.get(f"{node.api}/v1/models", headers={"Authorization": "Bearer hush-hush"})
        assert (refused.status_code, allowed.status_code) == (401, 200)
        asked = cluster.run("run", tiny_model, "hello", "--max-tokens", 2)
        assert asked.returncode == 0, asked.stderr
        shown = cluster.run("status", "--json").stdout + node.log()
        with NodeClient(cluster.home) as client:
            shown += str(client.settings())
    assert "hush-hush" not in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonesuch"], 1, "nonesuch"),
        (["./missing.gguf"], 1, "missing.gguf"),
        (["TINY", "--memory", "1MiB"], 1, "may use 1.00 MiB (--memory)"),
        (["TINY", "--context", "4096"], 2, "was trained for a context of 2048 tokens, not 4096"),
    ],
)
def test_up_refuses_what_cannot_be(
    cluster: Cluster, tiny_model: Path, arguments: list[str], code: int, words: str
) -> None:
    shown = cluster.run("up", "--api-port", free_port(), *(tiny_model if a == "TINY" else a for a in arguments))
    assert (shown.returncode, shown.stdout) == (code, "")
    assert words in shown.stderr and "hint: " in shown.stderr and "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("keep", "commands"), [(0, ["up"]), (3, ["run"]), (100, ["bench"]), (5000, ["up", "run", "bench"])]
)
def test_a_truncated_file_is_refused(cluster: Cluster, tiny_model: Path, keep: int, commands: list[str]) -> None:
    broken = cluster.home / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:keep])
    for command in commands:
        arguments = ["hello"] if command == "run" else []
        shown = cluster.run(command, broken, *arguments, ROOST_API_PORT=str(free_port()))
        assert (shown.returncode, shown.stdout) == (1, "")
        assert "error: " in shown.stderr and "broken.gguf" in shown.stderr and "Traceback" not in shown.stderr


def test_bench_prints_one_document(cluster: Cluster, tiny_model: Path) -> None:
    shown = cluster.run("bench", tiny_model, "--json", "--threads", 1, "--prompt", 40, "--decode", 8, "--repeat", 2)
    assert shown.returncode == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert (document["threads"], document["prompt_tokens"], document["decode_tokens"]) == (1, 40, 8)
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "read_bytes_per_s"):
        rates = document[name]
        assert 0 < rates["min"] <= rates["median"] <= rates["max"] and len(rates["runs"]) == 2
    median = document["decode_tokens_per_s"]["median"] / document["read_bytes_per_s"]["median"]
    assert document["roofline_share"] == pytest.approx(document["decode_bytes_per_token"] * median)
    assert "llama" not in document


def test_models_and_rm_of_an_empty_store(cluster: Cluster) -> None:
    document = json.loads(cluster.run("models", "--json").stdout)
    assert document["installed"] == [] and "smollm2:135m" in [entry["id"] for entry in document["pullable"]]
    missing = cluster.run("rm", "smollm2:135m")
    assert missing.returncode == 1 and "is not installed" in missing.stderr
