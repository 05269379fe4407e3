"""Chat templates are foreign programs: what they may do, and that none of them can hang or fill the process."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from node.errors import ChatTemplateError
from node.models.sandbox import MAX_SOURCE_CHARS, SandboxedTemplate


def render(source: str, **variables: Any) -> str:
    return SandboxedTemplate(source).render(variables, 1 << 22)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for x in [1,2,3] %}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}", "1,2,3"),
        ("{% for x in range(9) %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 3 %}{% break %}{% endif %}"
         "{% endfor %}", "023"),
        ("{% for x in [1,2,3] if x > 1 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}", "1/2:2 2/2:3 "),
        ("{% for k, v in {'a': 1, 'b': 2}|items %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "6"),
        ("{% macro f(a, b='y') %}<{{ a }}{{ b }}>{% endmacro %}{{ f('x') }}{{ f('1', b='2') }}", "<xy><12>"),
        ("{% macro w() %}[{{ caller() }}]{% endmacro %}{% call w() %}in{% endcall %}", "[in]"),
        ("{% set a, b = 1, 2 %}{{ b ~ a ~ 'x' }}{% set c %}block{{ a }}{% endset %}{{ c }}", "21xblock1"),
        ("{% generation %}kept{% endgeneration %}", "kept"),
        ("  {%- if true %}\n  x\n  {% endif %}\ny", "  x\ny"),
        ("{{ 'a,b'.split(',')|join('-') }}{{ ' x '|trim }}{{ 'abc'[::-1] }}{{ [3,1,2]|sort|first }}", "a-bxcba1"),
        ("{{ ['a']|map('upper')|list }}{{ [{'r':1},{'r':2}]|selectattr('r','equalto',2)|list|length }}", "['A']1"),
        ("{{ 'a\nb'|indent(2) }}{{ 'aXbX'|replace('X','-') }}{{ [1,2]|sum }}{{ 2.567|round(1) }}", "a\n  ba-b-32.6"),
        ("{{ '%s-%d' % ('a', 3) }}{{ '{}{:>3}'.format('x', 1) }}{{ 'a' * 2 }}{{ 7 % 4 }}{{ 2 ** 3 }}", "a-3x  1aa38"),
        ("{{ missing }}{{ missing is defined }}{{ x is none }}{{ '<b>'|e }}{{ '<b>'|safe }}", "FalseFalse&lt;b&gt;<b>"),
        ("{% filter upper %}shout{% endfilter %}{{ cycler('a', 'b').next() }}{{ dict(a=1).a }}", "SHOUTa1"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source, x=1) == expected


def test_tojson_is_what_transformers_has() -> None:
    value = {"b": [1, "é<'&"], "a": None}
    assert render("{{ v|tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v|tojson(indent=2) }}", v=value) == json.dumps(value, ensure_ascii=False, indent=2)
    assert render("{{ v|tojson(sort_keys=true) }}", v=value) == json.dumps(value, ensure_ascii=False, sort_keys=True)
    assert render("{{ v|tojson(separators=(',', ':')) }}", v=value) == json.dumps(
        value, ensure_ascii=False, separators=(",", ":")
    )
    assert render("{{ v|tojson(ensure_ascii=true) }}", v=value) == json.dumps(value)


def test_dates() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_refusals_carry_the_template_s_words() -> None:
    with pytest.raises(ChatTemplateError, match=r"refuses these messages: No system role, please!") as caught:
        render("{{ raise_exception('No system role, please!') }}")
    assert caught.value.cure


GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}", "too much text|steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps|seconds"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "Recursion"),
        ("{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", "Recursion|steps"),
        (GROW % ("'a'", "ns.x ~ ns.x"), "too much text"),
        (GROW % ("'a'", "ns.x + ns.x"), "too much text"),
        (GROW % ("'a'", "ns.x * 9"), "too much text"),
        (GROW % ("'a'", "'%s%s' % (ns.x, ns.x)"), "too much text"),
        (GROW % ("'a'", "'{}{}'.format(ns.x, ns.x)"), "too much text"),
        (GROW % ("'a'", "[ns.x, ns.x]|join"), "too much text"),
        (GROW % ("'a'", "ns.x.join([ns.x, ns.x])"), "too much text"),
        (GROW % ("'aa'", "ns.x.replace('a', 'aaaa')"), "too much text"),
        (GROW % ("'aa'", "ns.x|replace('a', 'aaaa')"), "too much text"),
        (GROW % ("[1]", "[ns.x, ns.x]"), "too large"),
        (GROW % ("[1]", "ns.x + ns.x"), "too large"),
        (GROW % ("[1]", "ns.x * 9"), "too large|too much"),
        (GROW % ("[1]", "{'a': ns.x, 'b': ns.x}"), "too large"),
        (GROW % ("[1]", "(ns.x, ns.x)"), "too large"),
        (GROW % ("[1]", "dict(a=ns.x, b=ns.x)"), "too large"),
        (GROW % ("[1]", "[none, none]|map('default', ns.x, true)|list"), "too large"),
        (GROW % ("9", "ns.x * ns.x"), "huge numbers"),
        ("{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + GROW % ("'a'", "f(ns.x)"), "too much text"),
        ("{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
         "{% set ns.x = y %}{% endfor %}", "too much text"),
        ("{{ 'a' * 10000000000 }}", "too much text"),
        ("{{ [0] * 10000000000 }}", "too much text|too large"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "high power"),
        ("{{ '%999999999d' % 1 }}", "wide"),
        ("{{ '%*d' % (999999999, 1) }}", "wide"),
        ("{{ '{:>999999999}'.format(1) }}", "wide"),
        ("{{ '{:>{}}'.format(1, 999999999) }}", "wide"),
        ("{{ 'a\nb'|indent(999999999) }}", "indents too far"),
        ("{{ [1]|tojson(indent=999999999) }}", "indents too far"),
        ("{{ 'a'.center(999999999) }}", "unsafe"),
        ("{{ 'a'.zfill(999999999) }}", "unsafe"),
        ("{{ (5).to_bytes(999999999, 'big') }}", "unsafe"),
        ("{{ range(99999999) }}", "Range too big"),
        ("{{ range(99999)|join('b' * 99999) }}", "too much text"),
        ("{{ [[0]]|sum(start=[]) }}", "numbers"),
        ("{{ strftime_now('%999999999Y') }}", "long pattern"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ [].append(1) }}", "unsafe"),
        ("{{ '{0.__class__}'.format(1) }}", "wide or computed"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ missing.field }}", "undefined"),
    ],
)  # fmt: skip
def test_hostile_templates_end_in_an_error(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% if %}", "does not compile: Expected an expression"),
        ("{{ 'a'|center(9) }}", "No filter named 'center'"),
        ("{{ 'a'|xmlattr }}", "No filter named"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        ("{% for a in b %}" * 200 + "{% endfor %}" * 200, "does not compile"),
        ("x" * (MAX_SOURCE_CHARS + 1), "characters"),
        ("{{ lipsum(9) }}", "undefined"),
    ],
)
def test_broken_templates_are_refused(source: str, words: str) -> None:
    with pytest.raises(ChatTemplateError, match=words):
        render(source)


def test_one_rendering_does_not_spend_another_s_budget() -> None:
    template = SandboxedTemplate("{% for i in range(50000) %}{% for j in range(9) %}{% endfor %}{% endfor %}done")
    for _ in range(2):
        assert template.render({}, 1000) == "done"


def test_the_room_for_text_is_exact() -> None:
    template = SandboxedTemplate("{{ text }}")
    assert template.render({"text": "a" * 1000}, 1000) == "a" * 1000
    with pytest.raises(ChatTemplateError, match="too much text"):
        template.render({"text": "a" * 1001}, 1000)
