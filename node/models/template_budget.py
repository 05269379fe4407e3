"""What a chat template may use while it renders, and the checks that keep single operations within it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2

MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
"""Processor time of one rendering."""
MAX_NODES = 1 << 18
"""Values in one container, counted as often as they would be written out."""
MAX_DEPTH = 100
MAX_INT_BITS = 4096


class OverBudgetError(jinja2.TemplateRuntimeError):
    """The template asked for more than a chat template may."""


class Budget:
    """What one rendering has left: steps, characters produced and processor time."""

    def __init__(self, max_chars: int, max_seconds: float = MAX_SECONDS) -> None:
        self.steps = MAX_STEPS
        self.chars = max_chars
        self._max_seconds = max_seconds
        self._stop_at = time.thread_time() + max_seconds

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise OverBudgetError(f"it takes more than {MAX_STEPS} steps")
        if self.steps % 64 == 0 and time.thread_time() > self._stop_at:
            raise OverBudgetError(f"it computes for more than {self._max_seconds:g} seconds")

    def spend(self, num_chars: int) -> None:
        """Called before the characters are made."""
        self.chars -= num_chars
        if self.chars < 0:
            raise OverBudgetError("it produces too much text")


current_budget: ContextVar[Budget] = ContextVar("budget")


def measure(value: Any) -> int:
    """About how many characters `str(value)` has, found without making them. Values shared between containers count
    as often as they would be written. Raises OverBudgetError."""
    num_chars, num_nodes = 0, 0
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        num_nodes += 1
        if isinstance(item, str):
            num_chars += len(item)
        elif isinstance(item, Mapping):
            stack += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            stack += [(part, depth + 1) for part in item]
        else:
            num_chars += 8
        if num_nodes + len(stack) > MAX_NODES or depth > MAX_DEPTH:
            raise OverBudgetError("it builds a value that is too large")
    return num_chars + 8 * num_nodes


def counted(iterable: Iterable[Any]) -> Iterator[Any]:
    """The items, one step each."""
    budget = current_budget.get()
    for item in iterable:
        budget.step()
        yield item


def bounded_items(values: Iterable[Any]) -> list[Any]:
    return values if isinstance(values, list) else list(counted(values))


def spend_on_replace(text: str, old: str = "", new: str = "", count: int = -1) -> None:
    times = text.count(old) if count < 0 else min(count, text.count(old))
    current_budget.get().spend(len(text) + times * max(0, len(new) - len(old)))


def check_format(text: str) -> None:
    if re.search(r"[%{][^%{}a-zA-Z]*(\d{4}|\*)|\{[^{}]*[{\[.]", text):
        raise OverBudgetError("it formats with a wide or computed field")


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INT_BITS:
            raise OverBudgetError("it computes with huge numbers")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            current_budget.get().spend(max(0, times) * (measure(sequence) + 1))
            if not isinstance(sequence, str) and times * len(sequence) > MAX_NODES:
                raise OverBudgetError("it builds a value that is too large")
