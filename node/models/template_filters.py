"""The filters and functions that chat templates get here: those that `transformers` offers, each within the budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from html import escape
from typing import Any

import jinja2
from jinja2 import pass_environment
from jinja2.filters import FILTERS, make_attrgetter

from node.models.template_budget import OverBudgetError, bounded_items, current_budget, measure, spend_on_replace

MAX_WIDTH = 1000
PLAIN_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
    *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select"),
    *("selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper", "wordcount"),
)
"""jinja2's own that cannot make more than they are given."""


class TemplateRefusal(jinja2.TemplateRuntimeError):
    """The template called `raise_exception`."""


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As `transformers` defines it: plain JSON, no HTML escapes."""
    if (indent if isinstance(indent, int) else len(indent or "")) > 16:
        raise OverBudgetError("it indents too far")
    current_budget.get().spend(measure(value))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # the mark that keeps names of control tokens apart has to stay what it is
    return text.replace("\\ufdd0", "\ufdd0") if ensure_ascii else text


@pass_environment
def join_filter(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    items = bounded_items(value)
    current_budget.get().spend(measure(items) + len(d) * len(items))
    if attribute is not None:
        items = list(map(make_attrgetter(environment, attribute), items))
        current_budget.get().spend(measure(items))
    return str(d).join(map(str, items))


def replace_filter(value: Any, old: str, new: str, count: int | None = None) -> str:
    text = str(value)
    spend_on_replace(text, str(old), str(new), -1 if count is None else count)
    return text.replace(str(old), str(new), -1 if count is None else count)


def indent_filter(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = " " * min(width, MAX_WIDTH + 1) if isinstance(width, int) else width
    if len(space) > MAX_WIDTH:
        raise OverBudgetError("it indents too far")
    lines = str(value).splitlines() or [""]
    current_budget.get().spend(len(value) + len(space) * len(lines))
    rest = [space + line if line or blank else line for line in lines[1:]]
    return "\n".join([space + lines[0] if first else lines[0], *rest])


@pass_environment
def sum_filter(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: Any = None, start: float = 0
) -> Any:
    values = map(make_attrgetter(environment, attribute), iterable) if attribute is not None else iterable
    total = 0
    for value in (start, *bounded_items(values)):
        if not isinstance(value, int | float):
            raise TypeError("sum adds numbers")
        total += value
    return total


def round_filter(value: float, precision: int = 0) -> float:
    return round(float(value), max(-20, min(20, precision)))


def raise_exception(message: Any = "") -> None:
    raise TemplateRefusal(str(message)[:2000])


def strftime_now(format: str) -> str:
    if len(format) > 100 or re.search(r"\d{3}", format):
        raise OverBudgetError("it formats a date with a long pattern")
    return datetime.now().strftime(format)


def _escape(value: Any) -> str:
    return escape(str(value))


TEMPLATE_FILTERS: dict[str, Callable[..., Any]] = {
    **{name: FILTERS[name] for name in PLAIN_FILTERS},
    "e": _escape,
    "escape": _escape,
    "indent": indent_filter,
    "join": join_filter,
    "replace": replace_filter,
    "round": round_filter,
    "safe": str,
    "sum": sum_filter,
    "tojson": tojson,
}
TEMPLATE_FUNCTIONS: dict[str, Callable[..., Any]] = {"raise_exception": raise_exception, "strftime_now": strftime_now}
