"""Chat templates: rendering always ends, and a failing template gives an error of one line."""

from __future__ import annotations

import threading

import pytest

from burnish.config.errors import UserError
from burnish.models import chat_template
from burnish.models.chat_template import render
from tests.models.test_tokenizer import real

ASKED = [{"role": "user", "content": "hi"}]
DOUBLED = (
    "{{% set all = namespace(text='xxxxxxxx') %}}{{% for i in range(90) %}}{{% set all.text = {} %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(10**12) %}x{% endfor %}", "does not end"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 30,200 steps"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not end"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than"),
        ("{% macro f() %}{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ f()|length }}", "writes more"),
        (DOUBLED.format("all.text ~ all.text"), "a text of"),
        (DOUBLED.format("all.text + all.text"), "a text of"),
        (DOUBLED.format("all.text.replace('x', 'xx')"), "a text of"),
        (DOUBLED.format("[all.text, all.text]|join"), "a text of"),
        ("{{ 'a' * 10**12 }}", "a text of"),
        ("{{ (messages * 10**9)|length }}", "a list of"),
        ("{{ 10**(10**10) }}", "a number of"),
        ("{{ 'a'|center(10**11) }}", "width"),
        ("{{ 'a'.ljust(10**11) }}", "width"),
        ("{{ '%99999999999d' % 1 }}", "width"),
        ("{{ '{:99999999999}'.format('a') }}", "width"),
        ("{{ '{:{}}'.format('a', 10**11) }}", "width"),
        ("{{ '{a:{b}}'.format_map({'a': 'a', 'b': 10**11}) }}", "width"),
        ("{{ '%*d'|format(10**11, 1) }}", "width"),
        ("{{ {}|tojson(10**11) }}", "width"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "does not end"),
        ("{{ messages[0].content.no.such }}", "refuses messages with roles user: 'str object' has no attribute"),
        ("{{ 1 / 0 }}", "refuses messages with roles user: ZeroDivisionError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_end_or_fails_is_refused(
    template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 30_000)  # makes the tests faster
    # In a thread, as in a server: no signal can interrupt it.
    found: list[BaseException] = []

    def work() -> None:
        try:
            render(template, ASKED, {})
        except BaseException as error:  # noqa: BLE001 - looked at below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (error,) = found
    assert isinstance(error, UserError)
    assert said in str(error)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
def test_a_template_writes_what_it_writes_in_transformers(name: str) -> None:
    tokenizer = real(name)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": [1, "é"]}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": " a{x}\n"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    for asked, tools in ((messages, [tool]), (messages[1:2], None)):
        wanted = tokenizer._inner.apply_chat_template(asked, tools=tools, tokenize=False, add_generation_prompt=True)
        assert tokenizer.chat_text(asked, tools=tools) == wanted


def test_a_template_finds_what_transformers_gives_it() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content ~ 1 }}{% endgeneration %}"
        "{{ m.thinking }} {{ {'é': '<'}|tojson }}{% endfor %}{{ strftime_now('%Y')|length }}{{ namespace(a=1).a }}{{ tools is none }}"
    )
    large = "{{ 20000|tojson }} {{ [20000]|tojson(indent=1) }} {{ '%d 20000'|format(20000) }} {{ '{} of {:,}'.format(20000, 30000) }}"
    assert render(large, ASKED, {}) == "20000 [\n 20000\n] 20000 20000 20000 of 30,000"  # values, not widths
    said = [{"role": "assistant", "content": "x", "reasoning_content": "t"}, *ASKED]
    assert render(template, said, {}) == 'x1t {"é": "<"}41True'
