"""Every format reads back what it writes, what the family's template writes, and survives any other text."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.environments.tools.call_formats import (
    FORMATS,
    MalformedCall,
    ParsedCall,
    call_format,
    detect_format,
    render_tool_prompt,
)
from burnish.environments.tools.call_values import MAX_CALLS
from burnish.models.tokenizer import Tokenizer

TOKENIZERS = Path(__file__).parents[3] / "../shared/data/tokenizers"
NAMES = sorted(FORMATS)


def schema(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    schema("add", a="integer", b="integer"),
    schema("look_up", word="string", limit="integer", exact="boolean", near="number", where="object", tags="array"),
]
WORDS = st.text(st.sampled_from(string.ascii_letters + " é漢😀\"'\\{}[],:;\n`*#"), max_size=12)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6, allow_nan=False)
KEYS = st.text(st.sampled_from("abcxyz_"), min_size=1, max_size=5).filter(lambda key: key.isidentifier())
NESTED = st.recursive(
    WORDS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
LOOK_UPS = st.fixed_dictionaries(
    {},
    optional={
        "word": WORDS,
        "limit": st.integers(-(10**6), 10**6),
        "exact": st.booleans(),
        "near": st.floats(-1e6, 1e6, allow_nan=False),
        "where": st.dictionaries(KEYS, NESTED, max_size=3),
        "tags": st.lists(NESTED, max_size=3),
    },
)
CALLS = st.lists(
    st.builds(ParsedCall, st.just("look_up"), LOOK_UPS)
    | st.builds(lambda a, b: ParsedCall("add", {"a": a, "b": b}), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(calls=CALLS)
def test_calls_are_read_back_as_written(name: str, calls: list[ParsedCall]) -> None:
    chosen = FORMATS[name]
    found = chosen.parse(chosen.write(calls), TOOLS)
    assert found.calls == calls
    assert (found.content, found.text_after, found.calls_at) == ("", "", 0)


@settings(max_examples=25)
@given(calls=CALLS)
def test_calls_are_read_as_the_template_of_qwen_writes_them(calls: list[ParsedCall]) -> None:
    if not (TOKENIZERS / "qwen2.5").is_dir():
        pytest.skip("the tokenizer of Qwen2.5 is not on this machine")
    tokenizer = qwen()
    asked = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    messages = [{"role": "user", "content": "?"}]
    prompt = tokenizer.chat_text(messages, tools=TOOLS)
    whole = tokenizer.chat_text(
        [*messages, {"role": "assistant", "content": "I look.", "tool_calls": asked}],
        tools=TOOLS,
        add_generation_prompt=False,
    )
    assert whole.startswith(prompt)
    tokens = tokenizer.encode(whole[len(prompt) :].removesuffix("<|im_end|>\n"))
    found = FORMATS[detect_format(tokenizer)].parse(tokenizer.decode(tokens, skip_special=False), TOOLS)
    assert (found.content, found.calls) == ("I look.", calls)


_LOADED: dict[str, Tokenizer] = {}


def qwen() -> Tokenizer:
    return _LOADED.setdefault("qwen", _LOADED.get("qwen") or Tokenizer.load(TOKENIZERS / "qwen2.5"))


ADD = ParsedCall("add", {"a": 1, "b": 2})
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "gemma3": "```tool_code\nadd(a=1, b=2)\n```",
    "smollm2": '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_call>',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "lfm2": "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|>",
    "gpt_oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>',
}


@pytest.mark.parametrize("name", NAMES)
def test_one_call_has_exactly_the_form_of_its_family(name: str) -> None:
    assert FORMATS[name].write([ADD]) == WRITTEN[name]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ("llama3", '\n{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', [ADD]),
        ("llama3", '<|python_tag|>brave_search.call(query="x y")', [ParsedCall("brave_search", {"query": "x y"})]),
        ("llama3", "<|python_tag|>print(1)\nprint(2)", [ParsedCall("code_interpreter", {"code": "print(1)\nprint(2)"})]),
        ("llama3", '{"name": "now", "parameters": {}}; {"name": "add", "parameters": {"a": 1, "b": 2}} {"a": 1}', [ParsedCall("now", {}), ADD]),
        ("llama3", '{"name": "Ann", "age": 3}', []),
        ("llama3", 'The call is {"name": "add", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]now[ARGS]{}', [ADD, ParsedCall("now", {})]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}', [ADD]),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]', [ParsedCall("now", {})]),
        ("gemma3", "Let me see.\n```tool_code\nprint(add(1, 2))\n```\n", [ADD]),
        ("gemma3", "```tool_code\n[add(a=1, b=2), now()]\n```", [ADD, ParsedCall("now", {})]),
        ("gemma3", '```json\n{"name": "add", "parameters": {"a": 1, "b": 2}}\n```', [ADD]),
        ("gemma3", '{"name": "add", "arguments": {"a": 1, "b": 2}}', [ADD]),
        ("gemma3", '```json\n{"answer": 3}\n```', []),
        ("gemma3", '```tool_code\nrun(code="""```x```""")\n```', [ParsedCall("run", {"code": "```x```"})]),
        ("smollm2", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [ParsedCall("now", {})]),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": 2}<｜tool▁call▁end｜>', [ADD]),
        ("gemma4", '<|tool_call>call:f{x:<|"|>a{,"<|"|>,y:{z:[1,true]}}<tool_call|>', [ParsedCall("f", {"x": 'a{,"', "y": {"z": [1, True]}})]),
    ],
)  # fmt: skip
def test_other_forms_of_a_family_are_read(name: str, text: str, calls: list[ParsedCall]) -> None:
    assert FORMATS[name].parse(text, TOOLS).calls == calls


def test_raw_values_have_the_types_of_the_schema() -> None:
    given_types = {
        "text": "string",
        "count": "integer",
        "share": "number",
        "is_on": "boolean",
        "box": "object",
        "row": "array",
        "maybe": ["integer", "null"],
    }
    tool = schema("f")
    tool["function"]["parameters"]["properties"] = {key: {"type": kind} for key, kind in given_types.items()}
    values = {
        "text": "\n 1\n\n",
        "count": "\n3\n",
        "share": "\n0.5\n",
        "is_on": "\nTrue\n",
        "box": "\n{'a': None}\n",
        "row": "\n[1, 2]\n",
        "maybe": "\nnull\n",
        "unknown": "\n7\n",
    }
    inside = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"
    (call,) = FORMATS["qwen3_coder"].parse(text, [tool]).calls
    assert call == ParsedCall(
        "f",
        {"text": " 1\n", "count": 3, "share": 0.5, "is_on": True, "box": {"a": None}, "row": [1, 2], "maybe": None, "unknown": "7"},
    )  # fmt: skip
    (bad,) = FORMATS["qwen3_coder"].parse(text.replace("\n3\n", "\nthree\n"), [tool]).calls
    assert isinstance(bad, MalformedCall)
    assert bad.problem == "count: 'three' is not of type integer"


HERMES = WRITTEN["hermes"]


def test_text_around_calls_is_kept_and_drops_no_call() -> None:
    found = FORMATS["hermes"].parse(f"Before.\n{HERMES}\nBetween.\n{HERMES}\nAfter.")
    assert found.calls == [ADD, ADD]
    assert found.content == "Before.\nBetween.\nAfter."
    assert found.text_after == "Between.\nAfter."
    assert found.calls_at == len("Before.\n")


def test_a_malformed_block_is_a_call_with_a_problem_and_spoils_no_other() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'
    found = FORMATS["hermes"].parse(f"{HERMES}\n{broken}\n{HERMES}")
    assert [type(call) for call in found.calls] == [ParsedCall, MalformedCall, ParsedCall]
    bad = found.calls[1]
    assert isinstance(bad, MalformedCall)
    assert bad.text == broken
    assert "not valid JSON" in bad.problem


@pytest.mark.parametrize(
    ("inside", "problem"),
    [
        ('{"name": "f"}', 'no key "arguments"'),
        ('{"arguments": {}}', 'no key "name"'),
        ('{"name": 1, "arguments": {}}', '"name" is not a text'),
        ('{"name": "f", "arguments": "{}"}', '"arguments" is not a JSON object'),
        ('{"name": "f", "arguments": {}, "more": 1}', "'more'"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "-Infinity is not JSON"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "too large"),
        ('{"name": "f", "arguments": {"x": 1, "x": 2}}', "'x' stands twice"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"x": %s}}' % ("9" * 5000), "digits"),
        ('{"name": "f", "arguments": {"x": %s}}' % ("[" * 40 + "]" * 40), "nested more than 32"),
        ('{"name": "f", "arguments": {"x": "%s"}}' % ("y" * 1_000_000), "more than 262,144 characters"),
        ("[" * 100_000, "nested more than 32"),
        ("", "not valid JSON"),
    ],
)
def test_a_bad_call_says_what_is_wrong(inside: str, problem: str) -> None:
    (bad,) = FORMATS["hermes"].parse(f"<tool_call>{inside}</tool_call>").calls
    assert isinstance(bad, MalformedCall)
    assert problem in bad.problem
    assert len(bad.text) <= 2000


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import os", "only calls"),
        ("__import__('os').system('ls')", "not a plain name"),
        ("add(a=open('x'))", "not a plain value"),
        ("add(a=1+1)", "not a plain value"),
        ("add(**{'a': 1})", "`**`"),
        ("add(a=1, a=2)", "given twice"),
        ("add(1, 2, 3)", "give each argument a name"),
        ("add(a=", "not valid Python"),
        ("", "no call"),
        ("add(a=" + "-" * 50_000 + "1)", "not valid Python"),
        ("a" + ".b" * 30_000 + "()", "not valid Python"),
        ("add(a=" + "9" * 70_000 + ")", "characters"),
        ("add(a=0x" + "f" * 9000 + ")", "digits"),
    ],
)
def test_python_is_parsed_and_never_evaluated(code: str, problem: str) -> None:
    (bad,) = FORMATS["gemma3"].parse(f"```tool_code\n{code}\n```", TOOLS).calls
    assert isinstance(bad, MalformedCall)
    assert problem in bad.problem


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        (f"<think>\n{HERMES}\n</think>\n\nNo.", HERMES, "No.", 0),
        (f"{HERMES}\n</think>\n\nNo.", HERMES, "No.", 0),  # the prompt ended with <think>
        (f"<think>\nWell.\n</think>\n\n{HERMES}", "Well.", "", 1),
        (f"<think>\nWell.\n{HERMES}", f"Well.\n{HERMES}", "", 0),  # cut off
        (f"A <think> tag. {HERMES}", None, "A <think> tag.", 1),
        (f"<think>a</think> b <think>{HERMES}</think> c", f"a\n{HERMES}", "b  c", 0),
        ('<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>', None, "", 1),
        ('<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>', None, "", 1),
        ("plain \n", None, "plain \n", 0),
    ],
)
def test_calls_inside_reasoning_are_no_calls(text: str, reasoning: str | None, content: str, num_calls: int) -> None:
    found = FORMATS["hermes"].parse(text)
    assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, num_calls)


def test_a_bare_call_may_follow_reasoning() -> None:
    found = FORMATS["llama3"].parse("<think>Well.</think>\n" + WRITTEN["llama3"])
    assert (found.reasoning, found.content, found.calls) == ("Well.", "", [ADD])


def test_a_bare_call_that_is_cut_short_is_malformed() -> None:
    (bad,) = FORMATS["llama3"].parse('{"name": "add", "parameters": {"a": 1').calls
    assert isinstance(bad, MalformedCall)


def test_the_messages_of_gpt_oss_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}'
    )
    found = FORMATS["gpt_oss"].parse(text)
    assert (found.reasoning, found.content, found.calls) == ("I think.", "I add.", [ADD])
    found = FORMATS["gpt_oss"].parse("<|channel|>final<|message|>Three.")
    assert (found.reasoning, found.content, found.calls) == (None, "Three.", [])
    (bad,) = FORMATS["gpt_oss"].parse(text.replace("2}", "2")).calls
    assert isinstance(bad, MalformedCall)


PIECES = [
    *(mark for name in NAMES for mark in FORMATS[name].marks),
    "<think>", "</think>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "[ARGS]", "{", "}", "[", "]",
    '"', "\\", ":", ",", "1", "f(", ")", "=", "```", "\n", " ", "<|message|>", "<|call|>", "<|start|>", '<|"|>', "call:f", "<tool_call|>",
    '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "\ud7ff",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", ";", "<|tool_call_end|>", "é", "\0",
]  # fmt: skip


@settings(max_examples=150)
@given(text=st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join))
def test_no_text_makes_a_format_raise(text: str) -> None:
    for name in NAMES:
        found = FORMATS[name].parse(text, TOOLS)
        assert (found.calls_at is None) == (not found.calls)
        for call in found.calls:
            assert isinstance(call, ParsedCall | MalformedCall)
            if isinstance(call, ParsedCall):
                json.dumps(call.arguments, allow_nan=False).encode()
        if not found.calls and found.reasoning is None and name != "gpt_oss":
            assert found.content == text


@pytest.mark.parametrize("name", NAMES)
def test_more_calls_than_the_limit_end_in_an_error(name: str) -> None:
    found = FORMATS[name].parse(FORMATS[name].write([ADD] * (MAX_CALLS + 40)), TOOLS)
    assert len(found.calls) == MAX_CALLS + 1
    assert found.calls[:-1] == [ADD] * MAX_CALLS
    assert isinstance(found.calls[-1], MalformedCall)
    assert f"more than {MAX_CALLS} calls" in found.calls[-1].problem


@pytest.mark.parametrize(
    "piece", ["<tool_call>", '<tool_call>{\\"', "<think></think>", "<tool_call>{", "```tool_code\n", "[TOOL_CALLS]["]
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma3", "mistral"])
def test_a_megabyte_of_marks_is_read(name: str, piece: str) -> None:
    found = FORMATS[name].parse(piece * (1_000_000 // len(piece)), TOOLS)
    assert len(found.calls) <= MAX_CALLS + 1
    assert all(isinstance(call, MalformedCall) for call in found.calls)


# --- which format a model writes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "name"), [("qwen2.5", "hermes"), ("smollm2", "smollm2")])
def test_the_format_is_read_from_real_templates(folder: str, name: str) -> None:
    if not (TOKENIZERS / folder).is_dir():
        pytest.skip(f"the tokenizer {folder} is not on this machine")
    assert detect_format(Tokenizer.load(TOKENIZERS / folder)) == name


@pytest.mark.parametrize(
    ("template", "family", "name"),
    [
        ("{{ tools }}<tool_call>\n<function=", None, "qwen3_coder"),
        ("[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS]", None, "mistral"),
        ("<|start_header_id|>{{ tools }}", None, "llama3"),
        ("<start_of_turn>user", None, "gemma3"),
        ("{{ messages }}", "qwen3", "hermes"),
        (None, "gemma3_text", "gemma3"),
        ({"default": "{{ messages }}", "tool_use": "<tool_call>"}, None, "hermes"),
    ],
)
def test_the_format_comes_from_the_template_or_else_from_the_family(
    template: Any, family: str | None, name: str
) -> None:
    tokenizer = Tokenizer.from_characters("ab")
    tokenizer._inner.chat_template = template
    assert detect_format(tokenizer, family) == name


def test_an_unknown_template_asks_for_the_option() -> None:
    tokenizer = Tokenizer.from_characters("ab")
    with pytest.raises(UserError, match=r"is missing.*environment\.call_format.*hermes"):
        detect_format(tokenizer)
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        call_format("herms")


@pytest.mark.parametrize("name", NAMES)
def test_the_tool_prompt_has_every_schema_and_an_example_in_the_format(name: str) -> None:
    prompt = render_tool_prompt(name, TOOLS)
    for tool in TOOLS:
        assert json.dumps(tool["function"], ensure_ascii=False) in prompt
    assert FORMATS[name].write([ParsedCall("tool_name", {"argument": "value"})]) in prompt
