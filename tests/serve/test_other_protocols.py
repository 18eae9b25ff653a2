"""`/v1/responses` and `/v1/messages`: the chat that they describe is sampled, and answers have their own form."""

from __future__ import annotations

import http.client
import json
import secrets
from typing import Any

import openai
import pytest

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi é"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def will_say(running: Any, text: str, messages: Any = CHAT, **variables: Any) -> int:
    """Let the model say a text after a chat; return the tokens of the prompt."""
    tokenizer = running.tokenizer
    num = len(tokenizer.chat(messages, **variables))
    running.model.say([*tokenizer.encode(text), tokenizer.eos_ids[0]], after=num)
    return num


def post(running: Any, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if answer.headers["content-type"] == "application/json" else text


def respond(running: Any, **options: Any) -> Any:
    asked = {
        "model": running.name,
        "instructions": "Be kind.",
        "input": "Hi é",
        "temperature": 0,
        "max_output_tokens": 400,
    }
    return running.client().responses.create(**(asked | options))


def test_a_response_is_the_answer_to_the_same_chat(script_server: Any) -> None:
    num = will_say(script_server, "Hello é😀")
    found = respond(script_server, include=["message.output_text.logprobs"])
    assert (found.output_text, found.status, found.usage.input_tokens) == ("Hello é😀", "completed", num)
    assert found.usage.output_tokens == len(found.output[0].content[0].logprobs)
    events = list(respond(script_server, stream=True))
    assert [e.type for e in events][-1] == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello é😀"
    assert respond(script_server, max_output_tokens=3).incomplete_details.reason == "max_output_tokens"
    counted = post(script_server, "/v1/responses/input_tokens", {"model": "tiny", "instructions": "Be kind.", "input": "Hi é"})  # fmt: skip
    assert counted == (200, {"object": "response.input_tokens", "input_tokens": num})


def test_a_response_with_a_call_goes_on_with_its_result(script_server: Any) -> None:
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    will_say(script_server, f"So.\n{CALL}", tools=[TOOL])
    found = respond(script_server, tools=[tool])
    text, call = found.output
    assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("So.", "add", {"a": 1})

    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    result = {"role": "tool", "content": "1", "tool_call_id": call.call_id}
    will_say(script_server, "It is 1.", [*CHAT, {"role": "assistant", "content": "So.", "tool_calls": calls}, result], tools=[TOOL])  # fmt: skip
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
    history = [{"role": "user", "content": "Hi é"}, *found.output, output]
    assert respond(script_server, input=history, tools=[tool]).output_text == "It is 1."


def test_a_message_is_the_answer_to_the_same_chat(script_server: Any) -> None:
    body = {"model": "tiny", "max_tokens": 400, "system": "Be kind.", "messages": CHAT[1:], "temperature": 0}
    num = will_say(script_server, "Hello STOP no")
    assert post(script_server, "/v1/messages/count_tokens", body) == (200, {"input_tokens": num})
    status, found = post(script_server, "/v1/messages", body | {"stop_sequences": ["TOP", "STOP"]})
    assert (status, found["content"]) == (200, [{"type": "text", "text": "Hello "}])
    assert (found["stop_reason"], found["stop_sequence"], found["usage"]["input_tokens"]) == (
        "stop_sequence",
        "STOP",
        num,
    )
    status, text = post(script_server, "/v1/messages", body | {"stream": True})
    kinds = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert '"text":"Hello STOP no"' in text

    will_say(script_server, CALL, tools=[TOOL])
    tool = {"name": "add", "description": "adds", "input_schema": PARAMETERS}
    status, found = post(script_server, "/v1/messages", body | {"tools": [tool]})
    assert [(b["type"], b["name"], b["input"]) for b in found["content"]] == [("tool_use", "add", {"a": 1})]
    assert found["stop_reason"] == "tool_use"


def test_what_these_protocols_cannot_do_here_is_refused_in_their_own_form(random_server: Any) -> None:
    for options, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(random_server, **options)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        respond(random_server, model="other")
    body = {"model": "other", "max_tokens": 4, "messages": CHAT[1:]}
    status, found = post(random_server, "/v1/messages", body)
    assert (status, found["type"], found["error"]["type"]) == (404, "error", "not_found_error")
    status, found = post(random_server, "/v1/messages", body | {"model": "tiny", "max_tokens": 10**6})
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")


def test_a_key_is_taken_from_either_header(start_server: Any) -> None:
    running = start_server(api_key="sesame-42")
    body = {"model": "tiny", "max_tokens": 2, "messages": CHAT[1:]}
    assert post(running, "/v1/messages", body, **{"x-api-key": "sesame-42"})[0] == 200
    status, found = post(running, "/v1/messages", body, **{"x-api-key": "sesame"})
    assert (status, found["error"]["type"]) == (401, "authentication_error")


VOTE = {"name": "majority", "n": 9, "answer": "exact"}
SHORT = {"model": "tiny", "max_tokens": 2, "system": "Be kind.", "messages": CHAT[1:]}


@pytest.fixture
def vote(random_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The vote of a chat with a seed. Requests of the other protocols, which have no seeds, draw the same one."""
    monkeypatch.setattr(secrets, "randbits", lambda num_bits: 4)
    return random_server.client().chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=2, seed=4, extra_body={"strategy": VOTE}
    )


def facts(strategy: dict[str, Any]) -> dict[str, Any]:
    """What equal searches have in common: all but the seconds."""
    return strategy | {"wall_s": strategy["wall_s"] > 0}


def test_a_strategy_answers_a_response_as_it_answers_the_chat(random_server: Any, vote: Any) -> None:
    options = {"temperature": 1, "max_output_tokens": 2, "extra_body": {"strategy": VOTE}}
    found = respond(random_server, **options)
    assert found.output_text == vote.choices[0].message.content
    assert facts(found.strategy) == facts(vote.strategy)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (
        vote.usage.prompt_tokens,
        vote.usage.completion_tokens,
    )
    assert found.usage.output_tokens > 9
    *_, last = respond(random_server, stream=True, **options)
    assert last.type in ("response.completed", "response.incomplete")
    assert (last.response.output_text, facts(last.response.strategy)) == (found.output_text, facts(found.strategy))


def test_a_strategy_answers_a_message_as_it_answers_the_chat(random_server: Any, vote: Any) -> None:
    status, found = post(random_server, "/v1/messages", SHORT | {"strategy": VOTE})
    assert (status, found["content"][0]["text"]) == (200, vote.choices[0].message.content)
    assert facts(found["strategy"]) == facts(vote.strategy)
    assert found["usage"]["output_tokens"] == vote.usage.completion_tokens
    status, text = post(random_server, "/v1/messages", SHORT | {"strategy": VOTE, "stream": True})
    comment, *events = text.split("\n\n")
    assert json.loads(comment.removeprefix(": "))["strategy"]["requests"] == 9
    (delta,) = [json.loads(one.partition("data: ")[2]) for one in events if one.startswith("event: message_delta")]
    assert facts(delta["strategy"]) == facts(found["strategy"])
    assert delta["usage"] == found["usage"]


def test_a_stop_sequence_of_a_chosen_message_is_named(script_server: Any) -> None:
    will_say(script_server, "Hello STOP no")
    body = SHORT | {"max_tokens": 40, "stop_sequences": ["TOP", "STOP"], "strategy": "single"}
    _, found = post(script_server, "/v1/messages", body)
    assert (found["content"][0]["text"], found["stop_reason"], found["stop_sequence"]) == (
        "Hello ",
        "stop_sequence",
        "STOP",
    )


def test_what_a_strategy_refuses_is_refused_in_the_form_of_the_protocol(random_server: Any) -> None:
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    for strategy, options, param in (
        ("majorty", {}, "strategy.name"),
        (7, {}, "strategy"),
        (VOTE, {"tools": [tool]}, "tools"),
        (VOTE, {"include": ["message.output_text.logprobs"]}, "logprobs"),
        (VOTE, {"temperature": 0}, "strategy"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            respond(random_server, **{"temperature": 1} | options, extra_body={"strategy": strategy})
        assert caught.value.param == param
    for options in ({}, {"stream": True}):
        status, found = post(random_server, "/v1/messages", SHORT | {"strategy": VOTE | {"m": 3}} | options)
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")
        assert "majority takes n, budget, answer" in found["error"]["message"]
    status, found = post(random_server, "/v1/messages", SHORT | {"strategy": VOTE, "return_token_ids": True})
    assert (status, "return_token_ids: not with strategy" in found["error"]["message"]) == (400, True)
