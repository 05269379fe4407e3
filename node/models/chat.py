"""From messages to the tokens of a prompt, by the model's own chat template.

Control tokens come from the template alone. Before rendering, names of control tokens in what users sent are broken by
a mark (a Unicode noncharacter); afterwards the unbroken names are control tokens and the marks are taken out of the
text between them. A prompt in which users name no control token has the same tokens as if the rendered text had been
encoded as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backends.weights.gguf import GGUFFile
from node.errors import ChatTemplateError, ModelFileError, RequestError
from node.models.hf_vocab import MAX_CONFIG_BYTES, read_json
from node.models.messages import Capabilities, fit_messages, read_messages
from node.models.probe import probe
from node.models.sandbox import SandboxedTemplate
from node.models.template_budget import MAX_DEPTH
from node.models.tokenizer import Tokenizer

log = logging.getLogger("roost.models")

NONCHARACTER = "\ufdd0"
UNMARKED_KEYS = ("role", "type")
"""Checked values, which templates build control tokens from ('<|' + role + '|>')."""

RESERVED = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "unk_token"))

FALLBACK = """\
{{ bos_token if starts_with_bos }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}{{ '\n\n' }}
{%- else %}{{ 'Assistant: ' if message.role == 'assistant' else 'User: ' }}{{ message.content }}{{ '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}"""
"""For models without a template, which were not trained to chat: a transcript that they can go on with."""

FALLBACK_STOP = ("\nUser:", "\nSystem:")

PROBE_SECONDS = 0.2
"""Processor time of each rendering that finds out what a template can do; real ones take a millisecond."""


class ChatTemplate:
    """`stop`: strings that end a turn beside the tokenizer's `eos_ids`; only the fallback has some. `capabilities`
    says what the template renders by itself. Safe to use from several threads."""

    def __init__(self, source: str | None, tokenizer: Tokenizer, *, tool_source: str | None = None) -> None:
        """`source` None is the fallback for base models; `tool_source` is used when there are tools.

        Raises ChatTemplateError when a template does not compile.
        """
        self._tokenizer = tokenizer
        self.source = FALLBACK if source is None else source
        self.is_fallback = source is None
        self.stop = FALLBACK_STOP if source is None else ()
        self._template = SandboxedTemplate(self.source)
        self._tool_template = SandboxedTemplate(tool_source) if tool_source else self._template
        self._fragments = _Fragments(tokenizer)
        self._globals = {
            "bos_token": _name(tokenizer, tokenizer.bos_id),
            "eos_token": _name(tokenizer, tokenizer.eos_id),
            "unk_token": "",
            "starts_with_bos": tokenizer.add_bos,
        }
        self.capabilities: Capabilities = probe(self._render_probe, self.source + (tool_source or ""))

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """From a GGUF file or a Hugging Face folder. Raises ModelFileError and ChatTemplateError."""
        templates = _folder_templates(path) if path.is_dir() else _gguf_templates(path)
        if "default" not in templates:
            log.info("%s has no chat template; messages are written as a plain transcript.", path)
        return cls(templates.get("default"), tokenizer, tool_source=templates.get("tool_use"))

    @property
    def supports_tools(self) -> bool:
        return self.capabilities.tools

    @property
    def supports_system(self) -> bool:
        """Whether system text has a place of its own; where not, it becomes part of the first user turn."""
        return self.capabilities.system

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the prompt. `kwargs` are the template's own switches (`enable_thinking`).

        Raises RequestError for messages that no model of this kind could take, ChatTemplateError with the template's
        words when it refuses them.
        """
        rendered, mark = self._render(messages, tools, add_generation_prompt, kwargs)
        pieces = self._tokenizer.controls.split(rendered)
        return self._tokenizer.encode_pieces(
            piece.replace(mark, "") if isinstance(piece, str) else piece for piece in pieces
        )

    def text(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt as people read it. Encoding this would lose what is control and what is text; use `render`."""
        rendered, mark = self._render(messages, tools, add_generation_prompt, kwargs)
        return rendered.replace(mark, "")

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool, kwargs: dict[str, Any]
    ) -> tuple[str, str]:
        """The rendered text and the mark in it."""
        if taken := RESERVED & kwargs.keys():
            raise RequestError(
                f"'chat_template_kwargs' may not set {', '.join(sorted(taken))}.", param="chat_template_kwargs"
            )
        if tools and not self.supports_tools:
            raise RequestError(
                "This model's chat template has no place for tools.", "Use a model that has.", param="tools"
            )
        fitted = fit_messages(read_messages(messages), self.capabilities)
        given = {"messages": fitted, "tools": tools or None, **kwargs}
        texts = list(_texts(given))
        mark = NONCHARACTER
        while any(mark in text for text in texts):
            mark += NONCHARACTER
        variables = {
            **self._globals,
            "documents": None,
            "add_generation_prompt": generate,
            **{name: self._fragments.mark_all(value, mark) for name, value in given.items()},
        }
        template = self._tool_template if tools else self._template
        return template.render(variables, _room_for(texts)), mark

    def _render_probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        template = self._tool_template if tools else self._template
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return template.render(self._globals | variables, _room_for(()), PROBE_SECONDS)


def _room_for(texts: list[str] | tuple[str, ...]) -> int:
    """Characters that a template may make on the way: it copies what it was given a few dozen times at most."""
    return (8 << 20) + 64 * sum(map(len, texts))


class _Fragments:
    """Beginnings and ends of control tokens' names, to see where text could become one together with its neighbour."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._controls = tokenizer.controls
        names = [control.text for control in tokenizer.controls]
        self._beginnings = {name[:i] for name in names for i in range(1, len(name))}
        self._ends = {name[i:] for name in names for i in range(1, len(name))}
        self._longest = max(map(len, names), default=0)

    def mark_all(self, value: Any, mark: str) -> Any:
        """A copy with every text marked. Keys are names to the template: they are marked inside only."""
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, Mapping):
            return {
                self.mark(str(key), mark, edges=False): part
                if key in UNMARKED_KEYS and isinstance(part, str)
                else self.mark_all(part, mark)
                for key, part in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark_all(part, mark) for part in value]
        return value

    def mark(self, text: str, mark: str, *, edges: bool = True) -> str:
        """`text` with marks inside the names in it, and at an edge where a name might begin or end."""
        cuts = {start + 1 for start, _, _ in self._controls.find(text, overlapping=True)}
        bare = text.strip() if edges else ""
        if bare:
            lengths = range(1, min(len(bare), self._longest - 1) + 1)
            first = text.index(bare[0])
            if any(bare[:length] in self._ends for length in lengths):
                cuts.add(first)
            if any(bare[-length:] in self._beginnings for length in lengths):
                cuts.add(first + len(bare))
        for cut in sorted(cuts, reverse=True):
            text = text[:cut] + mark + text[cut:]
        return text


def _name(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_text(token)


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Every text in a JSON value, keys too. Raises RequestError when it is nested deeper than templates can go."""
    if depth > MAX_DEPTH:
        raise RequestError(f"The request is nested more than {MAX_DEPTH} levels deep.", "Send a flatter one.")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield str(key)
            yield from _texts(part, depth + 1)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, depth + 1)


def _gguf_templates(path: Path) -> dict[str, str]:
    with GGUFFile.open(path) as file:
        keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
        return {
            name: template
            for name, key in keys.items()
            if isinstance(template := file.metadata.get(key), str) and template
        }


def _folder_templates(folder: Path) -> dict[str, str]:
    """chat_template.jinja wins over what tokenizer_config.json says, as in `transformers`."""
    listed = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(listed, str):
        listed = [{"name": "default", "template": listed}]
    templates = {
        entry["name"]: entry["template"]
        for entry in listed or ()
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    path = folder / "chat_template.jinja"
    try:
        if path.is_file() and path.stat().st_size <= MAX_CONFIG_BYTES:
            templates["default"] = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelFileError(f"{path} cannot be read: {exc}.", "Download it again.") from exc
    return templates


__all__ = ["ChatTemplate", "ChatTemplateError"]
