"""Stop strings and half characters: a stream shows what a search of the whole text would, and nothing early."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.stops import TextStream, first_stop
from tests.fakes import FakeTokenizer

LETTERS = FakeTokenizer()


def stream(text: str | list[int], *stops: str, sizes: list[int] | None = None) -> tuple[list[str], str | None]:
    """What each push shows, then the flush."""
    tokens = LETTERS.encode(text) if isinstance(text, str) else text
    live = TextStream(LETTERS.decoder(), stops)
    shown, at = [], 0
    for size in sizes or [1] * len(tokens):
        shown.append(live.push(tokens[at : at + size]))
        at += size
    shown.append(live.push(tokens[at:]))
    return [*shown, live.flush()], live.stopped


def slow_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read on until some stop string ends; of several that end there the longest counts."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=800, deadline=None)
@given(
    text=st.text("abé", max_size=14),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), max_size=3),
    sizes=st.lists(st.integers(0, 4), max_size=12),
)
def test_any_cut_into_tokens_shows_the_same(text: str, stops: list[str], sizes: list[int]) -> None:
    shown, stopped = stream(text, *stops, sizes=sizes)
    assert ("".join(shown), stopped) == slow_search(text, stops)


@settings(max_examples=400, deadline=None)
@given(text=st.text("ab", max_size=14), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_may_still_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    live, shown = TextStream(LETTERS.decoder(), tuple(stops)), ""
    for i, char in enumerate(text, start=1):
        shown += live.push(LETTERS.encode(char))
        if live.stopped is not None:
            return
        held = text[len(shown) : i]
        assert shown + held == text[:i]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_that_spans_tokens_never_shows_its_beginning() -> None:
    assert stream("one\n\nUser: two", "\n\nUser:") == ([*"one", *[""] * 13], "\n\nUser:")


def test_a_beginning_that_comes_to_nothing_is_shown_at_once() -> None:
    shown, stopped = stream("a<eb<en", "<end>")
    assert shown == ["a", "", "", "<eb", "", "", "", "", "<en"]
    assert stopped is None


def test_a_stop_inside_one_token_cuts_it() -> None:
    tokenizer = FakeTokenizer(["hello STOP world"])
    live = TextStream(tokenizer.decoder(), ("STOP",))
    assert live.push([257]) == "hello "
    assert live.stopped == "STOP"
    assert live.push([257]) == live.flush() == ""


def test_the_stop_that_is_complete_first_counts_though_another_began_before() -> None:
    shown, stopped = stream("xabcd", "abcd", "bc")
    assert ("".join(shown), stopped) == ("xa", "bc")


def test_of_stops_that_end_together_the_longest_counts() -> None:
    assert first_stop("xyz", ["z", "yz"]) == (1, "yz")
    assert first_stop("xyz", ["yz", "z"]) == (1, "yz")
    assert first_stop("xyz", ["q"]) is None


def test_half_characters_are_held_back() -> None:
    tokens = [1 + byte for byte in "a€b".encode()]
    assert stream(tokens)[0] == ["a", "", "", "€", "b", "", ""]


@pytest.mark.parametrize("stops", [(), ("�x",)])
def test_a_character_that_never_completes_is_shown_as_such_at_the_end(stops: tuple[str, ...]) -> None:
    tokens = [1 + byte for byte in "a€".encode()[:-1]]
    assert stream(tokens, *stops)[0] == ["a", "", "", "", "�"]


def test_the_last_flush_may_complete_a_stop() -> None:
    tokens = [1 + byte for byte in "a€".encode()[:-1]]
    shown, stopped = stream(tokens, "�")
    assert ("".join(shown), stopped) == ("a", "�")
