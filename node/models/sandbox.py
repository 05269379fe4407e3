"""Chat templates are programs that come with a download. They run here in jinja2's immutable sandbox, and within a
budget, because the sandbox alone lets a template loop for ever or grow a string until memory is gone.

The template's syntax tree is rewritten before it is compiled: every loop counts its rounds, every output, join, filter
result and container its size. Calls and operators are counted through the sandbox's own hooks. What no chat template
needs and no budget can see into (formatted widths, `lipsum`, methods of numbers) is not offered at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from node.errors import ChatTemplateError
from node.models.template_budget import (
    MAX_SECONDS,
    Budget,
    OverBudgetError,
    bounded_items,
    check_format,
    check_product,
    counted,
    current_budget,
    measure,
    spend_on_replace,
)
from node.models.template_filters import TEMPLATE_FILTERS, TEMPLATE_FUNCTIONS, TemplateRefusal

MAX_SOURCE_CHARS = 1 << 20

SAFE_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
            *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join"),
            *("lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex"),
            *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title"),
            "upper",
        )
    ),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(),
}


@pass_context
def _each(context: Any, iterable: Iterable[Any]) -> Iterator[Any]:
    return counted(iterable)


@pass_context
def _shown(context: Any, value: Any) -> Any:
    budget = current_budget.get()
    budget.step()
    budget.spend(len(value) if isinstance(value, str) else measure(value))
    return value


@pass_context
def _joined(context: Any, parts: list[Any]) -> str:
    current_budget.get().spend(measure(parts))
    return "".join(map(str, parts))


@pass_context
def _made(context: Any, value: Any) -> Any:
    budget = current_budget.get()
    budget.step()
    if isinstance(value, list | tuple | dict):
        measure(value)
    elif isinstance(value, str):
        budget.spend(len(value))
    return value


class _Metering(NodeTransformer):
    """Puts the filters above around what has to be counted."""

    def _around(self, node: Any, name: str) -> nodes.Expr:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._around(node.iter, "_each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._around(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            self._around(nodes.Const(child.data, lineno=child.lineno), "_shown")
            if isinstance(child, nodes.TemplateData)
            else self._around(child, "_shown")
            for child in node.nodes
        ]
        return node

    def _visit_made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._around(node, "_made")

    visit_Filter = visit_List = visit_Dict = _visit_made

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # on the left of an assignment or a loop it is a pattern, not a value
        return self._visit_made(node) if node.ctx == "load" else node


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in SAFE_METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        # jinja2 hands `str.format` out wrapped
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            args = (bounded_items(args[0]), *args[1:])
            budget.spend(measure(args[0]) + len(owner) * len(args[0]))
        elif isinstance(owner, str) and name == "replace":
            spend_on_replace(owner, *args)
        elif isinstance(owner, str) and name == "format":
            check_format(owner)
            budget.spend(measure(args) + measure(kwargs))
        return _made(None, super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget.get()
        budget.step()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.spend(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple):
            measure([left, right])
        elif operator == "*":
            check_product(left, right)
        elif operator == "**":
            if not all(isinstance(side, int | float) and abs(side) <= 64 for side in (left, right)):
                raise OverBudgetError("it raises to a high power")
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            budget.spend(len(left) + measure(right))
        return super().call_binop(context, operator, left, right)


def _sentence(exc: Exception) -> str:
    text = str(exc)[:500].strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


class _Generation(Extension):
    """`{% generation %}` marks what training looks at; for rendering it is just its contents."""

    tags = {"generation"}  # noqa: RUF012 as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation]
    )
    environment.filters = TEMPLATE_FILTERS | {"_each": _each, "_shown": _shown, "_joined": _joined, "_made": _made}
    del environment.globals["lipsum"]
    environment.globals |= TEMPLATE_FUNCTIONS
    return environment


_ENVIRONMENT = _environment()


class SandboxedTemplate:
    """A compiled template. Safe to use from several threads."""

    def __init__(self, source: str) -> None:
        """Raises ChatTemplateError when it does not compile."""
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"The chat template has {len(source)} characters.", f"Up to {MAX_SOURCE_CHARS} are accepted."
            )
        token = current_budget.set(Budget(8 * MAX_SOURCE_CHARS))
        try:
            self._template = _ENVIRONMENT.from_string(_Metering().visit(_ENVIRONMENT.parse(source)))
        except Exception as exc:  # the compiler of a foreign language fails in many ways, on hostile input in any
            raise ChatTemplateError(
                f"The model's chat template does not compile: {_sentence(exc)}", "Use another file of this model."
            ) from exc
        finally:
            current_budget.reset(token)

    def render(self, variables: Mapping[str, Any], max_chars: int, max_seconds: float = MAX_SECONDS) -> str:
        """`max_chars` bounds all text that is made on the way. Raises ChatTemplateError."""
        token = current_budget.set(Budget(max_chars, max_seconds))
        try:
            return self._template.render(variables)
        except TemplateRefusal as exc:
            raise ChatTemplateError(
                f"The model's chat template refuses these messages: {_sentence(exc)}", "Send them as it asks."
            ) from exc
        except OverBudgetError as exc:
            raise ChatTemplateError(
                f"The model's chat template was stopped: {exc}.", "Use a file of this model from a source you trust."
            ) from exc
        except Exception as exc:  # foreign code: whatever it raises is its failure, not ours
            raise ChatTemplateError(
                f"The model's chat template failed on these messages: {type(exc).__name__}: {_sentence(exc)}",
                "Check the messages' fields, or use another file of this model.",
            ) from exc
        finally:
            current_budget.reset(token)
