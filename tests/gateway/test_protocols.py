"""The protocols of agents: real clients read the answers, what they send back is recognised, and garbage gets an error that names it."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from burnish.gateway.calls import CallAnswer, CallChoice, ModelCall, continued
from burnish.gateway.chat_messages import answer_message
from burnish.gateway.openai_schema import ApiError
from burnish.gateway.protocols import PROTOCOLS, CallProtocol, api_key

httpx: Any = importlib.import_module(
    openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]
)  # httpx or httpx2
BY_PATH = {protocol.path: protocol for protocol in PROTOCOLS}
CHAT, RESPONSES, MESSAGES = BY_PATH["/chat/completions"], BY_PATH["/responses"], BY_PATH["/messages"]
GENERATE = BY_PATH["/inference/v1/generate"]
CALLS = [
    {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"b": 2,  "a": "\\u00fc"}'}},
    {"id": "call_b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
]
PLAIN = CallChoice({"role": "assistant", "content": "Hé\u2028llo"}, "stop", None, (5, 6, 0), (-0.5, -1.0, -0.25), ("Hé", "\u2028llo", "<|end|>"))  # fmt: skip
TALKS = replace(PLAIN, message={"role": "assistant", "content": "I add.", "reasoning_content": "Two\n\nnumbers.", "tool_calls": CALLS}, finish="tool_calls")  # fmt: skip
SILENT = replace(PLAIN, message={"role": "assistant", "content": None, "tool_calls": CALLS[:1]}, finish="tool_calls")
EMPTY = replace(PLAIN, message={"role": "assistant", "content": ""}, finish="length")
CHOICES = [PLAIN, TALKS, SILENT, EMPTY]
FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def answer_of(*choices: CallChoice) -> CallAnswer:
    return CallAnswer("abc", 1_700_000_000, choices, (1, 2, 3, 4))


class Endpoint:
    """Answers requests of real clients through a protocol, without sockets, and remembers the calls."""

    def __init__(self, *choices: CallChoice) -> None:
        self.answer, self.calls = answer_of(*choices), list[ModelCall]()
        self.http = httpx.Client(transport=httpx.MockTransport(self.handle))
        self.client = openai.OpenAI(base_url="http://x/v1", api_key="k", max_retries=0, http_client=self.http)

    def handle(self, request: Any) -> Any:
        protocol = BY_PATH[request.url.path.removeprefix("/v1")]
        try:
            call = protocol.parse(request.content, request.headers)
        except ApiError as error:
            status, body = protocol.error(error)
            return httpx.Response(status, json=body)
        self.calls.append(call)
        if call.is_stream:
            text = "".join(protocol.events(call, self.answer))
            return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})
        return httpx.Response(200, json=protocol.whole(call, self.answer))


def parse(protocol: CallProtocol, body: Any, **headers: str) -> ModelCall:
    return protocol.parse(json.dumps(body).encode(), headers)


USER: Any = {"role": "user", "content": "2 + 2?"}


@pytest.mark.parametrize("choice", CHOICES)
def test_a_chat_answer_is_read_whole_and_streamed_and_recognised_when_it_comes_back(choice: CallChoice) -> None:
    endpoint = Endpoint(choice)
    chat = endpoint.client.chat.completions
    whole = chat.create(model="m", messages=[USER], tools=[TOOL], logprobs=True, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
    message = whole.choices[0].message
    assert (message.content, whole.choices[0].finish_reason) == (choice.message["content"], choice.finish)
    assert [one.logprob for one in whole.choices[0].logprobs.content] == list(choice.logp)
    assert (whole.prompt_token_ids, whole.choices[0].token_ids) == ([1, 2, 3, 4], [5, 6, 0])
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 3)

    with chat.stream(model="m", messages=[USER], stream_options={"include_usage": True}) as stream:
        stream.until_done()
        joined = stream.current_completion_snapshot
    assert joined.usage == whole.usage
    streamed = joined.choices[0].message
    assert (streamed.content or None, joined.choices[0].finish_reason) == (message.content or None, choice.finish)
    assert [(c.id, c.function.name, c.function.arguments) for c in streamed.tool_calls or []] == [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in choice.message.get("tool_calls", [])
    ]

    results = [{"role": "tool", "tool_call_id": c.id, "content": "4"} for c in message.tool_calls or []]
    for back in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        chat.create(model="m", messages=[USER, back, *results, USER], tools=[TOOL])
        sent = endpoint.calls[-1]
        assert sent.messages is not None
        assert sent.messages[1] == answer_message(choice.message)
        assert sent.tools == (TOOL,)


def test_two_samples_and_completions_are_read_by_the_client() -> None:
    endpoint = Endpoint(PLAIN, EMPTY)
    two = endpoint.client.chat.completions.create(model="m", messages=[USER], n=2)
    assert [(c.index, c.message.content, c.finish_reason) for c in two.choices] == [(0, "Hé\u2028llo", "stop"), (1, "", "length")]  # fmt: skip
    texts = ["", ""]
    for chunk in endpoint.client.chat.completions.create(model="m", messages=[USER], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hé\u2028llo", ""]

    completions = endpoint.client.completions
    whole = completions.create(
        model="m", prompt="ab", n=2, logprobs=1, max_tokens=7, extra_body={"return_token_ids": True}
    )
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.token_logprobs == list(PLAIN.logp)
    assert whole.choices[0].logprobs.text_offset == [0, 2, 6]
    assert whole.choices[0].token_ids == [5, 6, 0]  # type: ignore[attr-defined]
    chunks = list(completions.create(model="m", prompt=[3, 4], stream=True, stream_options={"include_usage": True}))
    assert [c.choices[0].text for c in chunks[:-1]] == ["Hé\u2028llo", ""]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    assert [(c.text, c.token_ids, c.max_tokens) for c in endpoint.calls[2:]] == [("ab", None, 7), (None, (3, 4), 16)]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_response_is_read_whole_and_streamed_and_recognised_when_it_comes_back(choice: CallChoice) -> None:
    endpoint = Endpoint(choice)
    responses = endpoint.client.responses
    tool: Any = {"type": "function", **FUNCTION, "strict": True}
    whole = responses.create(model="m", input="2 + 2?", instructions="Add.", tools=[tool], include=["message.output_text.logprobs"])  # fmt: skip
    assert whole.output_text == (choice.message["content"] or "")
    assert whole.status == ("incomplete" if choice.finish == "length" else "completed")
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (4, 3)
    call = endpoint.calls[-1]
    assert call.tools == (TOOL,)
    assert call.messages == ({"role": "system", "content": "Add."}, USER)

    kinds = []
    with responses.stream(model="m", input="2 + 2?", instructions="Add.", tools=[tool]) as stream:
        for event in stream:
            kinds.append(event.type)
    if choice.finish != "length":  # the client's helper keeps no final response of those
        streamed = stream.get_final_response()
        assert [i.model_dump(exclude={"content", "parsed_arguments"}) for i in streamed.output] == [
            i.model_dump(exclude={"content"}) for i in whole.output
        ]
        assert streamed.output_text == whole.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    assert ("response.function_call_arguments.done" in kinds) == ("tool_calls" in choice.message)

    calls = choice.message.get("tool_calls", [])
    results = [{"type": "function_call_output", "call_id": c["id"], "output": "4"} for c in calls]
    for back in (whole.output, [item.model_dump() for item in whole.output]):
        history: Any = [USER, *back, *results, USER]
        responses.create(model="m", input=history, instructions="Add.", tools=[tool])
        sent = endpoint.calls[-1]
        assert sent.messages is not None
        assert sent.messages[2] == answer_message(choice.message)

    # With an id instead of the history the messages are the same.
    responses.create(
        model="m", previous_response_id=whole.id, instructions="Add.", input=[*results, USER], tools=[tool]
    )
    short = endpoint.calls[-1]
    assert short.previous_id == endpoint.answer.id
    assert continued(short, call, answer_message(choice.message)).messages == sent.messages


@pytest.mark.parametrize("choice", CHOICES)
def test_answers_have_every_field_of_the_published_types(choice: CallChoice) -> None:
    """The client itself reads answers without checking them."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent

    texts = BY_PATH["/completions"]
    checks: list[tuple[CallProtocol, Any, Any, Any]] = [
        (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 1}, ChatCompletion, ChatCompletionChunk),
        (texts, {"prompt": "a", "logprobs": 1}, Completion, Completion),
        (RESPONSES, {"input": "a", "top_logprobs": 0, "tools": [{"type": "function", **FUNCTION}]}, Response, ResponseStreamEvent),
    ]  # fmt: skip
    for protocol, body, whole, event in checks:
        call = parse(protocol, body)
        TypeAdapter(whole).validate_python(protocol.whole(call, answer_of(choice)))
        for text in protocol.events(call, answer_of(choice)):
            if text != "data: [DONE]\n\n":
                TypeAdapter(event).validate_json(text.partition("data: ")[2])


def test_an_error_reaches_the_clients_with_its_field() -> None:
    endpoint = Endpoint(PLAIN)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with pytest.raises(openai.BadRequestError, match="JSON could not be promised") as caught:
        endpoint.client.chat.completions.create(model="m", messages=[USER], response_format=form)
    assert caught.value.param == "response_format"
    error = ApiError(429, "later", code="queue_full")
    assert MESSAGES.error(error) == (429, {"type": "error", "error": {"type": "rate_limit_error", "message": "later"}})
    assert MESSAGES.error_event(error).startswith("event: error\ndata: {")
    assert RESPONSES.error_event(error).startswith('event: error\ndata: {"type":"error","code":"queue_full"')


def test_fields_of_agent_frameworks_are_accepted_and_what_they_do_not_get_is_recorded() -> None:
    body = {
        "model": "default", "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            USER | {"name": "bob"}, {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None},
            USER], "tools": [{"type": "function", "function": FUNCTION | {"strict": True}}], "tool_choice": "required", "parallel_tool_calls": False,
        "stream": True, "stream_options": {"include_usage": True}, "store": True, "metadata": {"agent": "solver"}, "user": "u", "n": 1,
        "reasoning_effort": "low", "max_completion_tokens": 9, "frequency_penalty": 0, "presence_penalty": 0.5, "logprobs": False, "seed": 3,
        "temperature": 0.3, "stop": "X", "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": False}, "no_such_field": [1],
    }  # fmt: skip
    call = parse(CHAT, body)
    assert call.messages is not None
    assert call.messages[0] == {"role": "system", "content": "ab"}
    assert call.messages[1:3] == ({**USER, "name": "bob"}, {"role": "assistant", "content": ""})
    assert (call.tools, call.agent, call.max_tokens, call.stop, call.seed) == ((TOOL,), "solver", 9, ("X",), 3)
    assert (call.is_stream, call.includes_usage, call.template_variables) == (True, True, {"enable_thinking": False})
    assert call.overridden == {
        "temperature": 0.3, "presence_penalty": 0.5, "reasoning_effort": "low", "tool_choice": "required", "parallel_tool_calls": False,
    }  # fmt: skip
    assert parse(CHAT, body | {"tool_choice": "none", "metadata": None}, **{"x-burnish-agent": "scout"}).tools == ()
    hosted = parse(RESPONSES, {"input": "a", "tools": [{"type": "web_search_preview"}]})
    assert (hosted.tools, hosted.overridden) == ((), {"tools": ["web_search_preview"]})
    assert api_key({"authorization": "Bearer k"}) == api_key({"x-api-key": "k"}) == "k"


def test_a_thread_that_no_server_stores_is_an_error_after_which_the_client_sends_the_whole_history() -> None:
    body = {"messages": [USER], "thread": {"type": "create"}}
    assert parse(MESSAGES, body).messages == (USER,)
    with pytest.raises(ApiError, match="send the whole history") as caught:
        parse(MESSAGES, body | {"thread": {"type": "continue", "previous_message_id": "msg_abc"}})
    status, found = MESSAGES.error(caught.value)
    assert (status, found["error"]["type"]) == (404, "not_found_error")
    assert found["error"]["details"] == {"error_code": "thread_not_found"}


SOUND = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": [SOUND]}]}, "messages[0].content[0].type", "reads only text"),
        ("/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "needs content"),
        ("/chat/completions", {"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "needs the id"),
        ("/chat/completions", {"messages": [USER], "top_logprobs": 5}, "top_logprobs", "sampled token alone"),
        ("/chat/completions", {"messages": [USER], "temperature": "hot"}, "temperature", "expected a number, got a text"),
        ("/chat/completions", {"messages": [USER] * 5000}, "messages", "got 5000 messages"),
        ("/chat/completions", {"messages": [USER], "tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "JSON schema"),
        ("/chat/completions", {"messages": [USER], "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "set by the server"),
        ("/completions", {"prompt": ["a", "b"]}, "prompt", "got 2 prompts"),
        ("/completions", {"prompt": [1, True]}, "prompt", "expected a text or token ids"),
        ("/responses", {"input": []}, "input", "one item at least"),
        ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference'"),
        ("/responses", {"input": "a", "previous_response_id": "x"}, "previous_response_id", "begins with 'resp_'"),
        ("/messages", {"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages", "end with a user's"),
        ("/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type", "only text, and"),
        ("/inference/v1/generate", {"sampling_params": {}}, "token_ids", "missing"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 22}}, "sampling_params.logprobs", "alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_reason(path: str, body: Any, param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse(BY_PATH[path], body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_arguments_that_are_no_object_and_numbers_that_are_infinite_are_refused() -> None:
    for arguments in ("[1]", "{", '"a"', '{"a": NaN}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(ApiError) as caught:
            parse(CHAT, {"messages": [{"role": "assistant", "tool_calls": [call]}]})
        assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
    body = b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "f", "parameters": {"x": 1e999}}}]}'
    with pytest.raises(ApiError, match="too large"):
        CHAT.parse(body, {})
    for number in (b"1e999", b"1" * 400):
        for name in (b"temperature", b"seed", b"n"):
            with pytest.raises(ApiError) as caught:
                CHAT.parse(b'{"messages": [{"role": "user", "content": "a"}], "%s": %s}' % (name, number), {})
            assert caught.value.param == name.decode()


NAMES = ["model", "messages", "role", "content", "type", "text", "input", "output", "tools", "function", "name", "parameters", "tool_calls", "id", "arguments", "system", "prompt", "call_id", "stop", "n", "input_schema", "tool_use_id", "thinking", "reasoning", "summary", "token_ids", "sampling_params", "logprobs", "metadata", "stream_options", "tool_choice", "temperature", "user", "assistant", "tool", "function_call", "function_call_output", "tool_use", "tool_result", "message", "auto", "max_tokens", "response_format", "stop_sequences", "seed"]  # fmt: skip
LEAVES = st.none() | st.booleans() | st.sampled_from(NAMES) | st.integers(-2, 3) | st.sampled_from([0.5, 2**70, 1e308]) | st.text(max_size=3)  # fmt: skip
JUNK = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=25,
)
GOOD: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [USER], "tools": [TOOL]},
    "/completions": {"prompt": "a"},
    "/responses": {"input": [USER]},
    "/messages": {"messages": [USER], "max_tokens": 3},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"logprobs": 1}},
}


@settings(max_examples=150, deadline=None)
@given(junk=st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=4), path=st.sampled_from(list(GOOD)), data=st.data())
def test_any_json_is_a_call_or_an_error_and_any_call_has_an_answer(junk: Any, path: str, data: st.DataObject) -> None:
    body = GOOD[path] | junk
    if data.draw(st.booleans()):  # junk deep inside a good body
        at = data.draw(st.sampled_from(list(GOOD[path])))
        body[at] = [{**USER, **junk}] if isinstance(GOOD[path][at], list) else junk
    protocol = BY_PATH[path]
    refused: ApiError | None = None
    try:
        call = parse(protocol, body)
    except ApiError as error:
        refused = error
    if refused is not None:
        assert (refused.status, bool(refused.message), bool(refused.param)) == (400, True, True)
        return
    assert sum(value is not None for value in (call.messages, call.text, call.token_ids)) == 1
    answer = answer_of(*[TALKS] * call.n)
    json.dumps(protocol.whole(call, answer), allow_nan=False)
    json.dumps([call.messages, call.tools, call.overridden, call.template_variables], allow_nan=False)
    assert path == GENERATE.path or all(text.endswith("\n\n") for text in protocol.events(call, answer))


@pytest.mark.parametrize("body", [b"", b"\xff", b"[" * 10**5, b"[]", b"{\"n\": NaN}", json.dumps({str(i): 1 for i in range(10**4)}).encode()])  # fmt: skip
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    for protocol in PROTOCOLS:
        with pytest.raises(ApiError) as caught:
            protocol.parse(body, {})
        assert caught.value.status == 400


def test_generate_takes_and_gives_token_ids() -> None:
    """The request and the checks of the client of verifiers."""
    options = {
        "stop_token_ids": [0, 9],
        "logprobs": 1,
        "skip_special_tokens": False,
        "max_tokens": 8,
        "temperature": 1.0,
    }
    call = parse(GENERATE, {"model": "m", "token_ids": [1, 2, 3, 4], "sampling_params": options, "cache_salt": "v1"})
    assert (call.token_ids, call.stop_tokens, call.max_tokens, call.logprobs) == ((1, 2, 3, 4), (0, 9), 8, True)
    found = GENERATE.whole(call, answer_of(TALKS))
    choice = found["choices"][0]
    assert (found["request_id"], choice["token_ids"], choice["finish_reason"]) == ("abc", [5, 6, 0], "stop")
    assert [(e["token"], e["logprob"]) for e in choice["logprobs"]["content"]] == [
        ("token_id:5", -0.5), ("token_id:6", -1.0), ("token_id:0", -0.25),
    ]  # fmt: skip
    with pytest.raises(ApiError, match="session stopped: 20 calls"):
        GENERATE.stopped(call, "x", 0, "20 calls")


def test_a_stopped_session_gets_a_plain_answer_in_the_form_asked_for() -> None:
    endpoint = Endpoint()
    call = ModelCall(messages=(USER,))
    endpoint.answer = CHAT.stopped(call, "x", 1, "The session has made its 20 calls.")
    chunks = list(endpoint.client.chat.completions.create(model="m", messages=[USER], stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "The session has made its 20 calls."
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert endpoint.client.responses.create(model="m", input="a").output_text == "The session has made its 20 calls."


def anthropic_history(choice: CallChoice, content: list[Any]) -> list[Any]:
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": [{"type": "text", "text": "4"}]} for c in choice.message.get("tool_calls", [])]  # fmt: skip
    last: Any = [*results, {"type": "text", "text": "Go"}, {"type": "text", "text": "on"}]
    return [USER, {"role": "assistant", "content": content}, {"role": "user", "content": last}]


def check_anthropic_history(call: ModelCall, choice: CallChoice) -> None:
    calls = choice.message.get("tool_calls", [])
    assert call.messages is not None
    assert call.messages[0] == {"role": "system", "content": "Add."}
    assert call.messages[2] == answer_message(choice.message)
    assert call.messages[3:] == (
        *({"role": "tool", "content": "4", "tool_call_id": c["id"]} for c in calls),
        {"role": "user", "content": "Go\non"},
    )


@pytest.mark.parametrize("choice", CHOICES)
def test_an_anthropic_message_is_recognised_when_it_comes_back(choice: CallChoice) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}
    body = {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Add."}],
        "messages": [USER],
        "tools": [tool],
    }
    call = parse(MESSAGES, body | {"stop_sequences": ["X"], "tool_choice": {"type": "any"}, "top_k": 3})
    assert (call.tools, call.stop, call.max_tokens) == ((TOOL,), ("X",), 5)
    assert call.overridden == {"tool_choice": {"type": "any"}, "top_k": 3}
    found = MESSAGES.whole(call, answer_of(choice))
    assert found["stop_reason"] == {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish]
    assert found["usage"]["input_tokens"] == 4
    check_anthropic_history(parse(MESSAGES, body | {"messages": anthropic_history(choice, found["content"])}), choice)
    stopped = MESSAGES.whole(call, answer_of(replace(PLAIN, stop_string="X")))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "X")


@pytest.mark.parametrize("choice", CHOICES)
def test_the_anthropic_client_reads_messages_whole_and_streamed(choice: CallChoice) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    endpoint = Endpoint(choice)
    client = anthropic.Anthropic(base_url="http://x", api_key="k", max_retries=0, http_client=endpoint.http)

    def asked(**more: Any) -> Any:
        return {"model": "m", "max_tokens": 5, "system": "Add.", "messages": [USER]} | more

    whole = client.messages.create(**asked())
    with client.messages.stream(**asked()) as stream:
        streamed = stream.get_final_message()
    assert [b.model_dump(exclude={"parsed_output"}) for b in streamed.content] == [
        b.model_dump() for b in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, 3)
    for content in (whole.content, [block.model_dump() for block in whole.content]):
        client.messages.create(**asked(messages=anthropic_history(choice, content)))
        check_anthropic_history(endpoint.calls[-1], choice)
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]\.source"):
        client.messages.create(**asked(messages=[{"role": "user", "content": [{"type": "image"}]}]))
