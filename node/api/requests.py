"""What OpenAI's clients send to chat and completions: each known field is honoured, harmless by definition, or refused.

A field that is not known at all is ignored, with a line in the debug log: clients send new ones all the time.
"""

from __future__ import annotations

import logging
import reprlib
import secrets
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic import ValidationError as PydanticValidationError
from pydantic_core import PydanticCustomError

from node.engine.sequence import Sampling
from node.errors import RequestError

log = logging.getLogger(__name__)

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
UNSUPPORTED = "unsupported_parameter"

EXTENSIONS: dict[str, tuple[Any, ...]] = {
    # what other servers take beside OpenAI's fields, and the values that ask for nothing
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "repeat_penalty": (1, 1.0),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "use_beam_search": (False,),
}
"""Fields that would change the answer if they were honoured: to ignore them would be to lie."""


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 2, 3, 3


def _shown(value: Any) -> str:
    """A value as an error may quote it: two levels deep, a hundred characters at most."""
    text = _REPR.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return value is None or any(value == one and type(value) is type(one) for one in harmless)


def _some(*harmless: Any) -> Any:
    """A validator that takes nothing, or one of `harmless`."""

    def check(value: Any) -> Any:
        if _is_harmless(value, harmless):
            return None
        raise PydanticCustomError(UNSUPPORTED, "{value} is not supported here", {"value": _shown(value)})

    return BeforeValidator(check)


def _stops(value: Any) -> Any:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("has to be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"holds {len(stops)} strings; at most {MAX_STOPS} are allowed")
    if "" in stops:
        raise ValueError("holds an empty string, which would stop everything")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"holds a string of more than {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _logit_bias(value: Any) -> Any:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("has to be an object of token ids and numbers")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit()):
            raise ValueError(f"has the key {_shown(key)}, which is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"has the value {_shown(bias)}; biases lie between -100 and 100")
        pairs[int(key)] = float(bias)
    return tuple(sorted(pairs.items()))


def _messages(value: Any) -> Any:
    """Types of content parts; all else about messages is `node.models.messages`' to say."""
    for i, message in enumerate(value if isinstance(value, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and not isinstance(part.get("type"), str):
                param = f"messages[{i}].content[{j}].type"
                raise RequestError(f"'{param}' has to be a string.", param=param)
    return value


Number = StrictFloat | StrictInt
Unused = Annotated[None, _some()]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")
    include_usage: StrictBool | None = None
    include_obfuscation: Annotated[None, _some(False)] = None


class CommonFields(BaseModel):
    """Fields of both endpoints. None means what leaving them out means."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias)] = ()
    seed: StrictInt | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None

    user: StrictStr | None = None  # who asks makes no difference to the answer

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, logprobs: int | None, *, vocab_size: int) -> Sampling:
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}, but the vocabulary has {vocab_size}.", param="logit_bias"
                )
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, self.top_k or 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias,
            seed=secrets.randbits(63) if self.seed is None else self.seed,
            logprobs=logprobs,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


class ChatRequest(CommonFields):
    messages: Annotated[list[Any], BeforeValidator(_messages)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[StrictStr, Any] | None = None
    reasoning_effort: StrictStr | None = None

    # harmless by definition: labels, and hints that change nothing but cost or routing elsewhere
    metadata: dict[str, Any] | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: StrictStr | None = None
    service_tier: Annotated[None, _some("auto", "default")] = None
    store: Annotated[None, _some(False)] = None
    modalities: Annotated[None, _some(["text"])] = None
    verbosity: Annotated[None, _some("medium")] = None
    response_format: Annotated[None, _some({"type": "text"})] = None
    parallel_tool_calls: StrictBool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    audio: Unused = None
    moderation: Unused = None
    prediction: Unused = None
    web_search_options: Unused = None
    functions: Annotated[None, _some([])] = None
    function_call: Annotated[None, _some("none")] = None

    @property
    def token_limit(self) -> int | None:
        both = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(both) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens are the same thing and differ.",
                "Send one of them.",
                param="max_completion_tokens",
            )
        return both.pop() if both else None

    @property
    def num_logprobs(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
            return None
        return self.top_logprobs or 0

    def check_tools(self) -> None:
        """Calls have to be parsed and enforced to be of use: until then they are refused, not hoped for."""
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice other than 'none' is not supported yet.", param="tool_choice", code=UNSUPPORTED
            )
        if self.tools and self.tool_choice != "none":
            raise RequestError(
                "Tools are not supported yet.",
                "Leave 'tools' out, or send tool_choice 'none'.",
                param="tools",
                code=UNSUPPORTED,
            )


class CompletionRequest(CommonFields):
    prompt: StrictStr | list[Any]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: StrictBool | None = None
    suffix: Annotated[None, _some("")] = None
    best_of: Annotated[None, _some(1)] = None


Fields = TypeVar("Fields", bound=BaseModel)


def parse(kind: type[Fields], data: Any) -> Fields:
    """Raises RequestError naming the first field that is wrong."""
    if not isinstance(data, dict):
        raise RequestError("The body has to be a JSON object.")
    try:
        request = kind.model_validate(data)
    except PydanticValidationError as exc:
        raise _translated(exc, data) from exc
    for name, value in (request.model_extra or {}).items():
        if name not in EXTENSIONS:
            log.debug("ignored the unknown field %s", _shown(name))
        elif not _is_harmless(value, EXTENSIONS[name]):
            cure = "Send repetition_penalty." if name == "repeat_penalty" else "Leave it out."
            raise RequestError(f"'{name}' is not supported here.", cure, param=name, code=UNSUPPORTED)
    return request


def _translated(exc: PydanticValidationError, data: dict[str, Any]) -> RequestError:
    first = exc.errors(include_url=False, include_context=False)[0]
    names = [part for part in first["loc"] if not (isinstance(part, str) and ("-" in part or "[" in part))]
    names = [name for name in names if name not in ("float", "int", "str", "bool", "none")]
    param = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).lstrip(".")
    if first["type"] == "missing":
        return RequestError(f"'{param}' is required.", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    joint = " " if first["type"] == "value_error" else ": "
    code = UNSUPPORTED if first["type"] == UNSUPPORTED else "invalid_type"
    return RequestError(f"'{param}'{joint}{message}.", param=param, code=code)
