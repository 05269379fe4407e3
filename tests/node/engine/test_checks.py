from __future__ import annotations

import pytest

from node.engine.checks import check_length, check_request
from node.engine.sequence import Sampling
from node.errors import ContextLengthError, RequestError
from tests.fakes import request


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"stop": ("a", "")}, "stop"),
        ([1, 10], {}, "prompt"),
        ([1, -1], {}, "prompt"),
        ([1], {"sampling": Sampling(logit_bias=((3, 1.0), (10, 1.0)))}, "logit_bias"),
    ],
)
def test_what_no_engine_can_serve_is_refused_by_name(prompt: list[int], fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_request(request(prompt, **fields), 10)  # pyright: ignore[reportArgumentType]
    assert refused.value.param == param


def test_the_rest_passes() -> None:
    check_request(request([0, 9], sampling=Sampling(logit_bias=((9, 1.0),))), 10)
    check_request(request([10**9]), None)


def test_the_prompt_and_one_token_must_fit() -> None:
    check_length(request([1] * 9), 10)
    with pytest.raises(ContextLengthError) as refused:
        check_length(request([1] * 10), 10)
    assert (refused.value.num_tokens, refused.value.limit) == (10, 10)
