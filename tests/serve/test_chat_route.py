"""`/v1/chat/completions` through the real client: templates, tools, streams."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from burnish.config.data import Reward
from burnish.rewards.judge_options import DEFAULT_TEMPLATE, fill_template
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from tests.serve.conftest import byte_tokenizer

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi é"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}},
    }
]
IDS = {"return_token_ids": True}


def chat(running: Any, **options: Any) -> Any:
    return running.client().chat.completions.create(**({"model": running.name, "messages": MESSAGES} | options))


def say(running: Any, text: str, **options: Any) -> Any:
    """Let the scripted model answer a chat with a text and its end token."""
    tokenizer = running.tokenizer
    extra = {"tools": options["tools"]} if "tools" in options else {}
    prompt = tokenizer.chat(options.get("messages", MESSAGES), **extra)
    running.model.say([*tokenizer.encode(text), tokenizer.eos_ids[0]], after=len(prompt))
    return chat(running, temperature=0, max_completion_tokens=400, **options)


def joined(stream: Any) -> tuple[str, list[Any], str]:
    """Content, calls and the finish of a stream with one choice."""
    text, calls, finish = "", [], ""
    for chunk in stream:
        (choice,) = chunk.choices
        assert not finish
        text += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    return text, calls, finish


def test_a_chat_is_what_the_template_writes_and_its_answer(script_server: Any) -> None:
    found = say(script_server, "Hello é😀", extra_body=IDS)
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello é😀", "stop")
    assert choice.message.tool_calls is None
    assert found.object == "chat.completion"
    written = "<|im_start|>system\nBe kind.<|im_end|><|im_start|>user\nHi é<|im_end|><|im_start|>assistant\n"
    assert script_server.tokenizer.decode(found.prompt_token_ids, skip_special=False) == written
    assert choice.token_ids == [*script_server.tokenizer.encode("Hello é😀"), script_server.tokenizer.eos_ids[0]]
    assert found.usage.prompt_tokens == len(found.prompt_token_ids)
    assert found.usage.completion_tokens == len(choice.token_ids)


def test_a_stream_has_the_role_first_and_says_the_same(random_server: Any) -> None:
    asked = {"seed": 3, "max_completion_tokens": 30, "n": 2}
    whole = chat(random_server, **asked, extra_body=IDS)
    chunks = list(chat(random_server, **asked, stream=True, extra_body=IDS))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        assert [t for part in parts for t in part.token_ids] == choice.token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


def test_logprobs_have_a_token_its_bytes_and_no_alternatives(script_server: Any) -> None:
    found = say(script_server, "é!", logprobs=True, top_logprobs=0).choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in found] == [
        ("", []), ("é", [0xC3, 0xA9]), ("!", [33]), ("<|im_end|>", None),
    ]  # fmt: skip
    assert all(-1e-6 < entry.logprob <= 0 and entry.top_logprobs == [] for entry in found)
    greedy = say(script_server, "é!", logprobs=True, top_logprobs=1).choices[0].logprobs.content
    assert [entry.top_logprobs[0].token for entry in greedy] == ["", "é", "!", "<|im_end|>"]


def test_logprobs_of_a_chat_are_those_of_the_same_completion(random_server: Any) -> None:
    asked = {"seed": 8, "max_tokens": 10}
    of_chat = chat(random_server, **asked, logprobs=True, extra_body=IDS)
    prompt = of_chat.prompt_token_ids
    other = random_server.client().completions.create(model="tiny", prompt=prompt, **asked, logprobs=0, extra_body=IDS)
    assert other.choices[0].token_ids == of_chat.choices[0].token_ids
    found = [entry.logprob for entry in of_chat.choices[0].logprobs.content]
    assert found == pytest.approx(other.choices[0].logprobs.token_logprobs, abs=1e-6)
    (chunk,) = chat(random_server, **asked, logprobs=True, stream=True)
    assert [entry.logprob for entry in chunk.choices[0].logprobs.content] == pytest.approx(found, abs=1e-6)


def test_tools_reach_the_template_and_calls_come_back(script_server: Any) -> None:
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    found = say(script_server, text, tools=TOOLS, extra_body=IDS)
    prompt = script_server.tokenizer.decode(found.prompt_token_ids, skip_special=False)
    assert prompt.startswith("<|im_start|>tools\n")
    assert json.loads(prompt.split("\n")[1].removesuffix("<|im_end|><|im_start|>system")) == TOOLS[0]
    choice = found.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})

    content, calls, finish = joined(say(script_server, text, tools=TOOLS, stream=True))
    assert (content, finish) == ("I add.", "tool_calls")
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, "add", '{"a": 1}')]

    # The dialogue goes on with the message as it came, and the tool's answer.
    turn = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
    again = chat(script_server, messages=turn, max_tokens=1, extra_body=IDS)
    prompt = script_server.tokenizer.decode(again.prompt_token_ids, skip_special=False)
    assert f"<|im_start|>assistant\n{text}<|im_end|><|im_start|>tool\n1<|im_end|>" in prompt


def test_an_answer_of_calls_alone_has_no_content(script_server: Any) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    message = say(script_server, text, tools=TOOLS).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1
    content, calls, _ = joined(say(script_server, text, tools=TOOLS, stream=True))
    assert (content, len(calls)) == ("", 1)


def test_a_call_that_is_none_stays_text(script_server: Any) -> None:
    for text in ('<tool_call>{"name": "add"', "a < b <tool_", "<tool_call>x</tool_call> "):
        whole = say(script_server, text, tools=TOOLS).choices[0]
        assert (whole.message.content, whole.finish_reason) == (text, "stop")
        assert joined(say(script_server, text, tools=TOOLS, stream=True)) == (text, [], "stop")
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert say(script_server, text).choices[0].message.content == text  # nobody offered tools


def test_calls_behind_a_special_token_come_back(start_server: Any) -> None:
    template = "[AVAILABLE_TOOLS]{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
    running = start_server(tokenizer=byte_tokenizer(template, ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")))
    text = 'I add.[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    assert running.tokenizer.decode(running.tokenizer.encode(text)).startswith('I add.[{"name"')
    choice = say(running, text, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    content, calls, finish = joined(say(running, text, tools=TOOLS, stream=True))
    assert (content, finish, calls[0].function.name) == ("I add.", "tool_calls", "add")


def test_tools_are_refused_where_the_format_of_calls_is_unknown_unless_it_is_named(start_server: Any) -> None:
    tokenizer = byte_tokenizer("{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(openai.BadRequestError, match="--call-format"):
        chat(start_server(tokenizer=tokenizer), tools=TOOLS, max_tokens=1)
    running = start_server(tokenizer=tokenizer, call_format="llama3")
    message = say(running, '{"name": "add", "parameters": {}}', tools=TOOLS).choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == (None, "add")


def test_without_a_choice_of_tools_the_model_hears_of_none(script_server: Any) -> None:
    found = chat(script_server, tools=TOOLS, tool_choice="none", max_tokens=1, extra_body=IDS)
    assert "tools" not in script_server.tokenizer.decode(found.prompt_token_ids, skip_special=False)


def test_a_chat_without_a_limit_fills_the_positions(random_server: Any) -> None:
    messages = [{"role": "user", "content": "x" * 1950}]
    found = chat(random_server, messages=messages, seed=1)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.total_tokens == 2048


def test_messages_in_parts_developers_and_template_variables(random_server: Any) -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "é"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts, "name": None}]
    plain, other = (chat(random_server, messages=m, max_tokens=1, extra_body=IDS) for m in (MESSAGES, messages))
    assert plain.prompt_token_ids == other.prompt_token_ids
    louder = chat(random_server, max_tokens=1, extra_body={**IDS, "chat_template_kwargs": {"shout": "LOUD"}})
    assert "shout LOUD" in random_server.tokenizer.decode(louder.prompt_token_ids)


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        (
            {"extra_body": {"chat_template_kwargs": {"shot": 1}}},
            "chat_template_kwargs.shot",
            "no variable of that name",
        ),
        ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs.tools", "no variable"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role", "'system', 'developer'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "expected a text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]", "'text'"),
        ({"messages": [{"role": "tool", "content": "1"}]}, "messages[0]", "tool_call_id"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "not valid JSON",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
        ({"top_logprobs": 1}, "top_logprobs", "only with logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot do that"),
        ({"max_tokens": 5000}, "max_tokens", "has 2048 positions"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, "messages", "has 2048 positions"),
    ],
)
def test_what_a_chat_cannot_have_is_refused_by_name(
    random_server: Any, options: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(random_server, **options)
    assert caught.value.param == param
    assert message in caught.value.message


def test_a_chat_obeys_a_logit_bias_and_tells_the_models_own_logprobs(random_server: Any) -> None:
    asked = {"max_completion_tokens": 6, "logit_bias": {"70": 100}, "logprobs": True}
    found = chat(random_server, **asked, extra_body={**IDS, "raw_logprobs": True}).choices[0]
    assert found.token_ids == [70] * 6
    assert all(entry.logprob < -0.1 for entry in found.logprobs.content)
    with pytest.raises(openai.BadRequestError, match="only with logprobs"):
        chat(random_server, extra_body={"raw_logprobs": True})
    # The likeliest token of the model itself is not the one that the bias makes it draw.
    own = chat(random_server, **asked, temperature=0, top_logprobs=1, extra_body={"raw_logprobs": True}).choices[0]
    assert all(entry.top_logprobs[0].logprob > entry.logprob for entry in own.logprobs.content)
    assert chat(random_server, **asked, temperature=0, top_logprobs=1).choices[0].logprobs.content[0].top_logprobs


# --- the reward part `judge` on a model of `burnish serve` --------------------------------------------------------------


def test_a_served_model_judges(script_server: Any) -> None:
    question = fill_template(DEFAULT_TEMPLATE, "6 x 7?", "42", "42")
    prompt = script_server.tokenizer.chat([{"role": "user", "content": question}])
    said = 'Both are 42.\n{"correct": true}'
    script = [*script_server.tokenizer.encode(said), script_server.tokenizer.eos_ids[0]]
    script_server.model.say(script, after=len(prompt))
    options = {"url": script_server.url, "model": script_server.name, "max_tokens": 64}
    with Rewards(Reward(parts=[{"name": "judge", "options": options}])) as rewards:
        (score,) = rewards.score([ScoreRequest("a", "6 x 7?", "42", "s", "42", {})])
    assert (score.reward, score.error) == (1.0, None)
    assert score.details["judge"] == said


def test_a_name_the_server_does_not_know_is_a_failure_that_says_so(script_server: Any) -> None:
    with Rewards(Reward(parts=[{"name": "judge", "options": {"url": script_server.url, "model": "other"}}])) as rewards:
        (score,) = rewards.score([ScoreRequest("a", "6 x 7?", "42", "s", "42", {})])
    assert score.reward is None
    assert score.error is not None
    assert "answered 404" in score.error
