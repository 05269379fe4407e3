"""How much context to serve when nobody said, and the cache's room for it: one rule for one node and for several.

The default context is the trained one, made shorter until its cache takes no more than half of what is free; up to
SPACIOUS_CONTEXT tokens may take all of it. Then there is room for up to FULL_CONTEXTS of them within the half.
"""

from __future__ import annotations

PAGE_TOKENS = 32
"""Caches are made of whole pages of this many tokens. The head counts room in these, so that its books agree with every
stage's."""

SMALLEST_CONTEXT = 512
SPACIOUS_CONTEXT = 8192
FULL_CONTEXTS = 4


def whole_pages(num_tokens: int) -> int:
    """`num_tokens` rounded up to whole pages, in tokens."""
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS


def cache_room(fits: int, trained: int, context: int | None) -> tuple[int, int]:
    """(context, kv_tokens) where `fits` tokens of cache, whole pages, are free on the tightest node."""
    half = fits // 2 // PAGE_TOKENS * PAGE_TOKENS
    if context is None:
        context = min(trained, max(half, min(fits, SPACIOUS_CONTEXT)))
    return context, max(context, min(FULL_CONTEXTS * context, half))
