"""The official client reads every kind of answer; its types are the specification."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.node.api.conftest import CONTEXT, Served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=20) as one:
        yield one


def strict(answer: Completion | ChatCompletion | ChatCompletionChunk) -> None:
    """Validates again, without the client's leniency."""
    type(answer).model_validate(answer.model_dump(), strict=True)


def test_chat(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy:1m", messages=served.say("one", "Hello, wörld 🦜!"))  # pyright: ignore
    strict(answer)
    assert answer.object == "chat.completion"
    assert answer.model == "toy:1m"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello, wörld 🦜!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    num_prompt = len(served.tokenizer.encode("user: one\nassistant:"))
    num_answer = len("Hello, wörld 🦜!".encode()) + 1  # and the end token
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_answer)
    assert answer.usage.total_tokens == num_prompt + num_answer
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra and answer.model_extra["timings"]["prompt_n"] == num_prompt


def test_chat_stream(served: Served, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="org/toy",
        messages=served.say("two", "Grüße, 你好 🦜🦜"),  # pyright: ignore
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    for chunk in chunks:
        strict(chunk)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert "".join(text or "" for text in texts) == "Grüße, 你好 🦜🦜"
    assert not any("\ufffd" in (text or "") for text in texts)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].choices[0].delta.content is None
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len("Grüße, 你好 🦜🦜".encode()) + 1


def test_the_stream_helper_accepts_it(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("helper", "w1 w2 w3 ")
    with client.chat.completions.stream(model="toy:1m", messages=messages) as stream:  # pyright: ignore
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content == "w1 w2 w3 "


def test_logprobs(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("lp", "w1 é")
    answer = client.chat.completions.create(
        model="toy:1m", messages=messages, logprobs=True, top_logprobs=2, temperature=0  # pyright: ignore
    )  # fmt: skip
    strict(answer)
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.content
    assert [one.token for one in logprobs.content] == ["w1 ", "\ufffd", "\ufffd"]
    assert [bytes(one.bytes or []) for one in logprobs.content] == [b"w1 ", b"\xc3", b"\xa9"]
    assert all(len(one.top_logprobs) == 2 for one in logprobs.content)
    assert all(one.logprob == one.top_logprobs[0].logprob > -0.001 for one in logprobs.content)


def test_choices_and_stop(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("choices", "w1 w2 STOP w3 ")
    answer = client.chat.completions.create(model="toy:1m", messages=messages, n=3, stop=["STOP", "never"])  # pyright: ignore
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"w1 w2 "}
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    chunks = list(
        client.chat.completions.create(model="toy:1m", messages=messages, n=3, stop="w3", stream=True)  # pyright: ignore
    )
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(one.delta.content or "" for one in mine) == "w1 w2 STOP "
        assert mine[-1].finish_reason == "stop"


def test_choices_draw_with_seeds_that_follow(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("drawn", "w1 " * 8)
    even = {
        str(token): -100 for token in (served.tokenizer.END, *served.tokenizer.encode("w1 "))
    }  # all others are alike

    def draw(seed: int | None, n: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="toy:1m", messages=messages, seed=seed, n=n, logit_bias=even, max_tokens=8  # pyright: ignore
        )  # fmt: skip
        return [choice.message.content for choice in answer.choices]

    drawn = draw(7, 3)
    assert len(set(drawn)) == 3
    assert drawn == draw(7, 3) == draw(7, 1) + draw(8, 1) + draw(9, 1)
    assert draw(None, 1) != draw(None, 1)


def test_a_transcript_stops_before_the_next_turn(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("transcript", "w1 \nuser: and so on")
    answer = client.chat.completions.create(model="toy:1m", messages=messages)  # pyright: ignore
    assert answer.choices[0].message.content == "w1 "


def test_length(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("long", "w1 " * 1000)
    for limit in ({"max_tokens": 7}, {"max_completion_tokens": 7}):
        answer = client.chat.completions.create(model="toy:1m", messages=messages, **limit)  # pyright: ignore
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content == "w1 " * 7
    answer = client.chat.completions.create(model="toy:1m", messages=messages)  # pyright: ignore
    assert answer.usage and answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


def test_completions(served: Served, client: openai.OpenAI) -> None:
    prompt = served.continue_with("abc", "w7 w8 ")
    answer = client.completions.create(model="toy:1m", prompt=prompt, logprobs=1, temperature=0)
    strict(answer)
    assert answer.choices[0].text == "w7 w8 "
    assert answer.choices[0].logprobs
    assert answer.choices[0].logprobs.tokens == ["w7 ", "w8 "]
    assert answer.choices[0].logprobs.text_offset == [0, 3]
    assert answer.choices[0].logprobs.top_logprobs == [
        {"w7 ": answer.choices[0].logprobs.token_logprobs[0]},  # pyright: ignore
        {"w8 ": answer.choices[0].logprobs.token_logprobs[1]},  # pyright: ignore
    ]
    echoed = client.completions.create(
        model="toy:1m", prompt=[prompt, served.continue_with("xyz", "w1 ")], echo=True, n=2
    )
    assert [one.text for one in echoed.choices] == ["abcw7 w8 ", "abcw7 w8 ", "xyzw1 ", "xyzw1 "]
    assert [one.index for one in echoed.choices] == [0, 1, 2, 3]
    assert echoed.usage and echoed.usage.prompt_tokens == 6
    ids = served.tokenizer.encode_prompt(prompt)
    for tokens in (ids, [ids]):
        assert client.completions.create(model="toy:1m", prompt=tokens).choices[0].text == "w7 w8 "
    chunks = list(client.completions.create(model="toy:1m", prompt=prompt, stream=True, echo=True))
    strict(chunks[-1])  # the client's types deny what its service sends before that: finish_reason null
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])  # pyright: ignore
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abcw7 w8 "


def test_only_completions_continue_their_prompt(served: Served, client: openai.OpenAI) -> None:
    client.completions.create(model="toy:1m", prompt=served.continue_with("cont", "w1 "))
    assert served.tokenizer.continued[-1] is True
    client.chat.completions.create(model="toy:1m", messages=served.say("cont", "w1 "))  # pyright: ignore
    assert served.tokenizer.continued[-1] is False


def test_models(client: openai.OpenAI) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["toy:1m"]
    assert cards[0].model_extra
    assert cards[0].model_extra["max_model_len"] == cards[0].model_extra["context_length"] == CONTEXT
    assert client.models.retrieve("toy:1m").id == client.models.retrieve("org/toy").id == "toy:1m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no/such:model")


def test_errors_are_what_the_client_expects(served: Served, client: openai.OpenAI) -> None:
    messages = served.say("x", "y")
    with pytest.raises(openai.NotFoundError, match="not served here") as missing:
        client.chat.completions.create(model="gpt-4", messages=messages)  # pyright: ignore
    assert missing.value.code == "model_not_found"
    long = [{"role": "user", "content": "x" * 2000}]
    with pytest.raises(openai.BadRequestError) as overflow:
        client.chat.completions.create(model="toy:1m", messages=long, stream=True)  # pyright: ignore
    assert overflow.value.code == "context_length_exceeded"
    tokens = len("user: \nassistant:") + 2000
    assert (
        f"This model's maximum context length is {CONTEXT} tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages." in overflow.value.message
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_failing_step_is_an_error_and_the_next_request_is_served(
    served: Served, client: openai.OpenAI, stream: bool
) -> None:
    messages = served.say("fails", "w1 w2 ")
    served.fail.append("the model caught fire")
    with pytest.raises(openai.APIError, match="caught fire"):
        answer = client.chat.completions.create(model="toy:1m", messages=messages, stream=stream)  # pyright: ignore
        list(answer)
    assert client.chat.completions.create(model="toy:1m", messages=messages).choices[0].message.content == "w1 w2 "  # pyright: ignore
