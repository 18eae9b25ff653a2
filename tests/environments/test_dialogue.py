"""Dialogues in tokens: what the model reads is what the template writes, and sampled tokens stay as they were sampled."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.data.row import Message
from burnish.environments.chat_shapes import ANSWER, TOOL, USER, Shape, compressed
from burnish.environments.chat_traits import split_reasoning
from burnish.environments.dialogue import ChatRenderer, Conversation, Extension
from burnish.models.chat_template import searched_texts
from burnish.models.tokenizer import Tokenizer
from tests.environments.chat_templates import QWEN3, TEMPLATES, small_tokenizer, tokenizer_with
from tests.models.test_tokenizer import real

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = re.compile(r"\n?<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
Turns = list[tuple[str | None, str, list[str]]]
"""Reasoning, answer, and results of its calls."""
NO_CALLS = frozenset({"llama3", "gemma", "smollm2"})
"""Templates that do not write tool calls."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def parse(text: str) -> tuple[str, str | None, Sequence[Any]] | None:
    """Reads the calls of the three forms that the tests write."""
    content, reasoning = split_reasoning(text)
    if content.startswith("[TOOL_CALLS]"):
        return "", reasoning, json.loads(content.removeprefix("[TOOL_CALLS]"))
    if content.startswith('{"name"'):
        call = json.loads(content)
        return "", reasoning, [{"name": call["name"], "arguments": call["parameters"]}]
    calls = [json.loads(found) for found in CALL.findall(content)]
    return CALL.sub("", content), reasoning, calls


def written(name: str, message: Message) -> str:
    """An answer as a model of the family writes it."""
    text = "" if message.get("reasoning_content") is None else f"<think>\n{message['reasoning_content']}\n</think>\n\n"
    text += message["content"]
    for call in message.get("tool_calls", ()):
        function = call["function"]
        if name == "mistral":
            text += f'[TOOL_CALLS][{json.dumps(function, ensure_ascii=False)[:-1]}, "id": "{call["id"]}"}}]'
        elif name == "llama3.1":
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            text += f'{{"name": "{function["name"]}", "parameters": {arguments}}}'
        else:
            text += "\n" if message["content"] else ""
            text += f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
    return text


class Path:
    """A conversation, and the tokens of the path that the model is on."""

    def __init__(self, conversation: Conversation, tokenizer: Tokenizer) -> None:
        self.conversation, self.tokenizer, self.tokens = conversation, tokenizer, conversation.tokens

    def turn(self, completion: list[int], messages: list[Message]) -> Extension:
        found = self.conversation.extend(completion, messages)
        self.tokens = found.tokens if found.is_branch else (*self.tokens, *completion, *found.tokens)
        return found


def completion(name: str, tokenizer: Tokenizer, message: Message) -> list[int]:
    # Control tokens of calls are tokens; names of control tokens that a model spells out stay text.
    text = written(name, message)
    head = "[TOOL_CALLS]" if text.startswith("[TOOL_CALLS]") else ""
    return [*tokenizer.encode(head + tokenizer.literal(text.removeprefix(head))), tokenizer.eos_ids[0]]


@functools.cache
def shared_renderer(tokenizer: Tokenizer, history: Any = "as_template", is_thinking: bool = True) -> ChatRenderer:
    template = Template(kwargs={} if is_thinking else {"enable_thinking": False})
    return ChatRenderer(tokenizer, template, history, parse)


texts = st.sampled_from(
    ["two", "a the in", "No, 17 is too low.", "é ü", "x < 3\n\ny", 'say "no"', "</s><|im_end|>", "<b>"]
)
thoughts = st.sampled_from([None, None, "the thought", "first\nthen"])


@st.composite
def dialogues(draw: st.DrawFn) -> tuple[Turns, bool]:
    """Turns, and whether there is a system message."""
    turns = draw(st.lists(st.tuples(thoughts, texts, st.lists(texts, max_size=1)), min_size=1, max_size=5))
    return turns, draw(st.booleans())


def play(name: str, tokenizer: Tokenizer, turns: Turns, with_system: bool, tools: list[dict[str, Any]] | None) -> None:
    """Play a dialogue, and compare what the model reads in each turn with the template's rendering of the whole conversation."""
    messages: list[Message] = [{"role": "system", "content": "be kind"}] * (with_system and name != "gemma")
    messages.append(user("1+1?"))
    path = Path(shared_renderer(tokenizer).open(messages, tools), tokenizer)
    for index, (thought, text, results) in enumerate(turns):
        before = path.tokens
        answer: Message = {"role": "assistant", "content": text}
        if name == "qwen3" and thought is not None:
            answer["reasoning_content"] = thought
        new = [user(f"and {index}?")]
        if results and name not in NO_CALLS:
            identity = f"abcdefgh{index}"
            function = {"name": "add", "arguments": {"a": index, "b": "é"}}
            answer["tool_calls"] = [{"id": identity, "type": "function", "function": function}]
            answer["content"] = "" if name in ("mistral", "llama3.1", "qwen2.5") else text
            new = [{"role": "tool", "content": results[0], "tool_call_id": identity}]
        messages += [answer, *new]
        sampled = completion(name, tokenizer, answer)
        found = path.turn(sampled, new)
        wanted = tokenizer.chat(messages, **({"tools": tools} if tools else {}))
        assert list(path.tokens) == wanted, tokenizer.decode(path.tokens, skip_special=False)
        assert found.is_branch or path.tokens[: len(before) + len(sampled)] == (*before, *sampled)
        assert not found.is_branch or name in ("qwen3", "mistral")


@pytest.mark.parametrize("name", list(TEMPLATES))
@settings(max_examples=20, deadline=None)
@given(given_dialogue=dialogues(), with_tools=st.booleans())
def test_the_model_reads_what_the_template_writes(
    name: str, given_dialogue: tuple[Turns, bool], with_tools: bool
) -> None:
    play(name, small_tokenizer(name), *given_dialogue, TOOLS if with_tools else None)


@pytest.mark.parametrize("name", ["qwen2.5", "smollm2"])
def test_the_model_reads_what_the_template_of_its_directory_writes(name: str) -> None:
    turns: Turns = [(None, "It is 2.", []), (None, "", ["17\n\n(twice)"]), (None, "Sure: 17!", []), (None, "yes", [])]
    for tools in (None, TOOLS):
        play(name, real(name), turns, tools is None, tools)


@settings(max_examples=20, deadline=None)
@given(given_dialogue=dialogues(), is_thinking=st.booleans())
def test_keep_goes_on_behind_the_sampled_tokens_with_what_the_template_writes_between(
    given_dialogue: tuple[Turns, bool], is_thinking: bool
) -> None:
    tokenizer = small_tokenizer("qwen3")
    template = Template(kwargs={} if is_thinking else {"enable_thinking": False})
    renderer = shared_renderer(tokenizer, "keep", is_thinking)
    total = renderer.num_turns, renderer.num_rewrites
    path = Path(renderer.open("1+1?"), tokenizer)
    messages, num_rewrites = [user("1+1?")], 0
    for index, (thought, text, results) in enumerate(given_dialogue[0]):
        answer: Message = {"role": "assistant", "content": f"{text} no. {index}"}
        if thought is not None and is_thinking:
            answer["reasoning_content"] = thought
        new: list[Message] = [{"role": "tool", "content": results[0]}] if results else [user("and?")]
        before, sampled = path.tokens, completion("qwen3", tokenizer, answer)
        read = tokenizer.chat_text(messages, **template.kwargs)
        messages += [answer, *new]
        found = path.turn(sampled, new)
        assert not found.is_branch
        assert path.tokens[: len(before) + len(sampled)] == (*before, *sampled)
        whole = tokenizer.chat_text(messages, **template.kwargs)
        assert found.tokens == tuple(tokenizer.encode(whole.rpartition(f" no. {index}")[2])[1:])
        num_rewrites += not whole.startswith(read + tokenizer.literal(written("qwen3", answer)))
    assert path.conversation.num_rewrites == renderer.num_rewrites - total[1] == num_rewrites
    assert renderer.num_turns - total[0] == len(given_dialogue[0])


# --- work ------------------------------------------------------------------------------------------------------------


def long_dialogue(renderer: ChatRenderer, num_turns: int, thought: str = "") -> list[int]:
    """The number of messages that are rendered in each turn."""
    tokenizer = renderer.tokenizer
    path, counts = Path(renderer.open("1+1?", TOOLS), tokenizer), []
    for index in range(num_turns):
        before = renderer.render.num_messages
        path.turn([*tokenizer.encode(f"{thought}it is {index}"), tokenizer.eos_ids[0]], [user(f"no, not {index}")])
        counts.append(renderer.render.num_messages - before)
    return counts


@pytest.mark.parametrize("name", ["qwen2.5", "llama3", "gemma"])
def test_an_appended_message_renders_nothing_once_its_shape_is_known(name: str) -> None:
    counts = long_dialogue(ChatRenderer(small_tokenizer(name)), 20)
    assert counts[3:] == [0] * 17


def test_a_branch_renders_no_history() -> None:
    renderer = ChatRenderer(small_tokenizer("qwen3"))
    counts = long_dialogue(renderer, 20, "<think>\nhm\n</think>\n\n")
    assert renderer.num_rewrites == 20
    assert counts[5:] == [0] * 15
    # With a space at its end, the answer is rendered, behind a short conversation.
    spaced = [{"role": "user", "content": "so?\n"}]
    path, end = Path(renderer.open("1+1?"), renderer.tokenizer), renderer.tokenizer.eos_ids[0]
    for _ in range(20):
        before = renderer.render.num_messages
        path.turn([*renderer.tokenizer.encode("<think>\nhm\n</think>\n\nno"), end], spaced)
    assert renderer.render.num_messages - before <= 7
    kept = long_dialogue(ChatRenderer(small_tokenizer("qwen3"), history="keep"), 20, "<think>\nhm\n</think>\n\n")
    assert kept[5:] == [0] * 15


def test_equal_prompts_are_one_tuple() -> None:
    renderer = ChatRenderer(small_tokenizer("qwen2.5"))
    assert renderer.open([user("a")]).tokens is renderer.open([user("a")]).tokens
    assert renderer.open([user("a")]).tokens != renderer.open([user("a")], TOOLS).tokens


def test_the_shape_of_a_long_conversation_is_short() -> None:
    thinks = Shape("assistant", reasoning="some")
    assert compressed([USER, ANSWER] * 9 + [USER]) == (USER, ANSWER, USER, ANSWER, USER)
    assert compressed([USER, *[ANSWER, TOOL] * 9]) == (USER, ANSWER, TOOL)
    long = [USER, ANSWER, USER, thinks, *[USER, ANSWER] * 4, USER, *[thinks, TOOL, ANSWER, TOOL] * 3]
    assert compressed(long) == (USER, ANSWER, USER, thinks, USER, ANSWER, USER, thinks, TOOL, ANSWER, TOOL)


def test_the_texts_that_a_template_searches_for_are_found() -> None:
    assert searched_texts(QWEN3) == ("</tool_response>", "<tool_response>", "</think>", "<think>")
    assert searched_texts("{% if 'tools' in messages[0] %}{{ 'a' | replace('[X]', '') }}{% endif %}") == ("[X]",)


@pytest.mark.parametrize("history", ["keep", "as_template"])
def test_forks_of_a_conversation_grow_on_their_own(history: Any) -> None:
    tokenizer = small_tokenizer("qwen3")
    renderer = shared_renderer(tokenizer, history)

    def said(text: str) -> list[int]:
        return [*tokenizer.encode(f"<think>\nhm {text}\n</think>\n\n{text}"), tokenizer.eos_ids[0]]

    def played(*texts: str) -> tuple[int, ...]:
        conversation = renderer.open("1+1?")
        return [conversation.extend(said(text), [user(f"so {text}?")]) for text in texts][-1].tokens

    trunk = renderer.open("1+1?")
    trunk.extend(said("a"), [user("so a?")])
    forks = [trunk.fork() for _ in range(3)]
    for fork, text in zip(forks, "bcd", strict=True):
        assert fork.extend(said(text), [user(f"so {text}?")]).tokens == played("a", text)
    assert trunk.extend(said("e"), [user("so e?")]).tokens == played("a", "e")
    assert forks[0].extend(said("f"), [user("so f?")]).tokens == played("a", "b", "f")
    assert trunk.extend(said("g"), [user("so g?")]).tokens == played("a", "e", "g")


# --- ends of turns -----------------------------------------------------------------------------------------------------


def test_an_answer_ends_once_whatever_ended_it() -> None:
    tokenizer = small_tokenizer("qwen2.5")
    end, other = tokenizer.eos_ids
    said, rest = tokenizer.encode("two"), tokenizer.encode("\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n")
    conversation = ChatRenderer(tokenizer).open("1+1?")
    assert conversation.extend([*said, end], [user("so?")]).tokens == tuple(rest)
    assert conversation.extend(said, [user("so?")]).tokens == (end, *rest), "cut off: the template's end is added"
    assert conversation.extend([*said, other], [user("so?")]).tokens == tuple(rest), "another end stays alone"
    assert conversation.extend([], [user("so?")]).tokens == (end, *rest)


def test_an_end_token_that_opens_the_next_message_is_not_written_twice() -> None:
    """GLM has no token for the end of a turn: the model stops at the token that opens the next one."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ '[INST]' if m.role == 'user' else '[TOOL_RESULTS]' if m.role == 'tool' else '<s>' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<s>{% endif %}",
        "[INST]",
    )
    conversation = ChatRenderer(tokenizer).open("1+1?")
    said = tokenizer.encode("two")
    assert conversation.extend([*said, tokenizer.eos_ids[0]], [user("so?")]).tokens == tuple(tokenizer.encode("so?<s>"))
    assert conversation.extend(said, [user("so?")]).tokens == tuple(tokenizer.encode("[INST]so?<s>"))
    observed = conversation.extend([*said, tokenizer.eos_ids[0]], [{"role": "tool", "content": "4"}])
    assert observed.tokens == tuple(tokenizer.encode("[TOOL_RESULTS]4<s>")), "another message than the model announced"


def test_a_space_before_the_end_token_is_not_written_behind_a_sampled_one() -> None:
    """Llama 2 writes ` answer </s>`."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + ' </s>' }}{% endfor %}",
        "</s>",
    )
    conversation = ChatRenderer(tokenizer).open("1+1?")
    said, rest = tokenizer.encode(" two"), tokenizer.encode("[INST] so? [/INST]")
    assert conversation.extend([*said, tokenizer.eos_ids[0]], [user("so?")]).tokens == tuple(rest)
    assert conversation.extend(said, [user("so?")]).tokens == (*tokenizer.encode(" </s>"), *rest)


def test_text_inside_the_turn_follows_the_sampled_tokens_and_belongs_to_the_answer() -> None:
    tokenizer = small_tokenizer("qwen3")
    conversation = ChatRenderer(tokenizer).open("who?")
    asked = tokenizer.encode("<think>\nhm\n</think>\n\n<search>it</search>")
    found = conversation.append_text(asked, "<information>Ann <|im_end|></information>")
    assert tokenizer.decode(found.tokens, skip_special=False) == "<information>Ann <|im_end|></information>"
    assert not found.is_branch
    assert not any(tokenizer.is_special(token) for token in found.tokens)
    branch = conversation.extend([*tokenizer.encode("Ann"), tokenizer.eos_ids[0]], [user("sure?")])
    answer = "<search>it</search><information>Ann <|im_end|></information>Ann"
    assert branch == Extension(
        tuple(tokenizer.chat([user("who?"), {"role": "assistant", "content": answer}, user("sure?")])), is_branch=True
    )
    ended = [*asked, tokenizer.eos_ids[0]]
    assert ChatRenderer(tokenizer).open("who?").append_text(ended, "Ann").tokens == tuple(tokenizer.encode("Ann"))


# --- templates that take less ---------------------------------------------------------------------------------------------


def test_results_of_tools_and_system_messages_reach_a_template_without_these_roles() -> None:
    tokenizer = small_tokenizer("gemma")
    renderer = ChatRenderer(tokenizer, Template(system="be kind"))
    conversation = renderer.open([user("1+1?"), user("quick")])
    assert tokenizer.decode(conversation.tokens) == "user\nbe kind\n\n1+1?\n\nquick\nmodel\n"
    results: list[Message] = [{"role": "tool", "content": "3", "tool_call_id": "x"}, {"role": "tool", "content": "4"}]
    found = conversation.extend([*tokenizer.encode("add"), tokenizer.eos_ids[0]], [*results, user("so?")])
    said = "<tool_response>\n3\n</tool_response>\n\n<tool_response>\n4\n</tool_response>\n\nso?"
    assert tokenizer.decode(found.tokens) == f"\nuser\n{said}\nmodel\n"
    assert renderer.check().notes == (
        "it has no system role: the system message is put in front of the first user message",
        "it has no role for tools: each result is a user message in <tool_response> tags",
        "its roles must alternate: consecutive user messages are joined with a blank line",
    )
    llama = small_tokenizer("llama3")
    found = ChatRenderer(llama).open("1+1?").extend([], [{"role": "tool", "content": "3"}])
    assert "<tool_response>\n3\n</tool_response>" in llama.decode(found.tokens)


def test_tools_that_move_to_the_last_user_message_make_a_branch() -> None:
    tokenizer = small_tokenizer("mistral")
    renderer = ChatRenderer(tokenizer, parse=parse)
    path = Path(renderer.open("1+1?", TOOLS), tokenizer)
    called = '[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "12"}]'
    found = path.turn(
        [*tokenizer.encode(called), tokenizer.eos_ids[0]], [{"role": "tool", "content": "2", "tool_call_id": "12"}]
    )
    assert not found.is_branch
    # An id that the template would refuse is replaced; the sampled one stays on its path.
    assert (
        tokenizer.decode(found.tokens, skip_special=False)
        == '[TOOL_RESULTS]{"content": 2, "call_id": "call00000"}[/TOOL_RESULTS]'
    )
    found = path.turn([*tokenizer.encode("two"), tokenizer.eos_ids[0]], [user("sure?")])
    assert found.is_branch
    shown = tokenizer.decode(found.tokens, skip_special=False)
    assert shown.count("[AVAILABLE_TOOLS]") == 1
    assert shown.index("[AVAILABLE_TOOLS]") > shown.index("[TOOL_RESULTS]")
    assert not ChatRenderer(tokenizer).open("1+1?").extend(tokenizer.encode("two"), [user("sure?")]).is_branch


def test_calls_that_the_template_refuses_stay_text() -> None:
    tokenizer = small_tokenizer("llama3.1")
    renderer = ChatRenderer(tokenizer, parse=lambda text: (text, None, [{"name": "a", "arguments": {}}] * 2))
    found = renderer.open("1+1?").extend(
        [*tokenizer.encode("a() a()"), tokenizer.eos_ids[0]], [{"role": "tool", "content": "3"}]
    )
    assert "user\n\n<tool_response>\n3\n</tool_response>" in tokenizer.decode(found.tokens).replace(
        "<|end_header_id|>", ""
    )


def test_arguments_are_text_where_the_template_joins_them() -> None:
    """DeepSeek's template concatenates the arguments."""
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ '[INST]' if m.role == 'user' else '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{{ m.content }}{{ eos_token }}{% endfor %}{{ '<s>' if add_generation_prompt }}",
        "</s>",
    )
    renderer = ChatRenderer(tokenizer, parse=parse)
    assert renderer.traits.takes_calls
    path = Path(renderer.open("a"), tokenizer)
    path.turn(tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'), [user("b")])
    assert 'add{"a": 1}' in renderer.render([*path.conversation._messages])


def test_each_kind_of_turn_is_named_in_the_check() -> None:
    def check(name: str, **options: Any) -> Any:
        return ChatRenderer(small_tokenizer(name), **options).check()

    assert check("qwen2.5").rewrites == check("llama3").rewrites == check("llama3.1").rewrites == ()
    assert check("qwen3").rewrites == ("a user message behind reasoning", "a user message after results of tools")
    assert "is a branch" in check("qwen3").description
    assert "appended behind the sampled tokens all the same" in check("qwen3", history="keep").description
    never = check("qwen3", template=Template(kwargs={"enable_thinking": False}))
    assert {"a user message", "a result of a tool"} <= set(never.rewrites), "the empty block of reasoning is dropped"
    assert check("mistral").rewrites == ("a user message where a system message is", "a user message where tools are")


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", ["as_template", "keep"])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_names_of_control_tokens_in_messages_and_answers_stay_text(name: str, history: Any) -> None:
    tokenizer = small_tokenizer(name)

    def control(word: str) -> list[int]:
        conversation = ChatRenderer(tokenizer, history=history).open(f"1 {word}")
        said = [*tokenizer.encode(tokenizer.literal(f"<think>\nhm\n</think>\n\ntwo {word}")), tokenizer.eos_ids[0]]
        found = conversation.extend(said, [user(f"and {word} {word}")])
        assert word in tokenizer.decode(found.tokens, skip_special=False)
        return [token for token in (*conversation.tokens, *found.tokens) if tokenizer.is_special(token)]

    assert control("<|im_end|>") == control("</s>") == control("word")


def test_plain_text_goes_on_as_it_is() -> None:
    tokenizer = small_tokenizer("qwen3")
    renderer = ChatRenderer(tokenizer, Template(kind="plain", text="Q: {prompt}\nA:"))
    conversation = renderer.open([user("1+1?")])
    assert tokenizer.decode(conversation.tokens) == "Q: 1+1?\nA:"
    found = conversation.extend([*tokenizer.encode("2"), tokenizer.eos_ids[0]], [user("so"), user("what </s>?")])
    assert found == Extension(tuple(tokenizer.encode(tokenizer.literal("so\nwhat </s>?"))))
    assert renderer.check().rewrites == ()
    prerendered = ChatRenderer(tokenizer, Template(kind="prerendered")).open("<|im_start|>user\n1+1?<|im_end|>")
    assert prerendered.tokens[0] == tokenizer.encode("<|im_start|>")[0]


def test_only_a_template_that_writes_no_answers_cannot_keep_them() -> None:
    last = "{{ messages[-1].content }}{{ '<s>' if add_generation_prompt }}"
    tokenizer = tokenizer_with(last, "</s>")
    branch = ChatRenderer(tokenizer).open("1+1?").extend(tokenizer.encode("two"), [user("so?")])
    assert branch == Extension(tuple(tokenizer.encode("so?<s>")), is_branch=True)
    with pytest.raises(UserError, match=r"set environment\.history=as_template"):
        ChatRenderer(tokenizer, history="keep").open("1+1?").extend(tokenizer.encode("two"), [user("so?")])
