"""What is refused before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from node.engine.sequence import Request
from node.errors import ContextLengthError, RequestError


def check_request(request: Request, vocab_size: int | None) -> None:
    """Raises RequestError for what no engine can serve. Without a `vocab_size` tokens are taken as they are."""
    if not request.prompt:
        raise RequestError("The prompt is empty.", "Send at least one token.", param="prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}.", "Ask for at least one.", param="max_tokens")
    if "" in request.stop:
        raise RequestError("A stop string is empty.", "Leave it out.", param="stop")
    if vocab_size is not None:
        _check_tokens("prompt", request.prompt, vocab_size)
        _check_tokens("logit_bias", [token for token, _ in request.sampling.logit_bias], vocab_size)


def check_length(request: Request, max_tokens: int) -> None:
    """Raises ContextLengthError when there is no room for the prompt and one token of answer."""
    if len(request.prompt) + 1 > max_tokens:
        raise ContextLengthError(len(request.prompt), max_tokens)


def _check_tokens(param: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(
            f"{param} names token {wrong}, which this model does not have.",
            f"Its tokens are 0 to {vocab_size - 1}.",
            param=param,
        )
