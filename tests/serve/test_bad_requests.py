"""Bad requests: status, OpenAI's error format, and a message that says what to do."""

from __future__ import annotations

import http.client
import json
from typing import Any

import openai
import pytest

from burnish.gateway.openai_schema import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)

JSON = {"Content-Type": "application/json"}
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 1}


def raw(
    running: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] = JSON
) -> tuple[int, Any, Any]:
    """Status, error and headers of a request that no client library would send."""
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, json.loads(text).get("error"), answer.headers


@pytest.mark.parametrize(
    ("options", "param", "code", "message"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter", "did you mean 'temperature'?"),
        ({"x y\n": 1}, "x y\n", "unknown_parameter", "unknown parameter"),
        ({"temperature": "1"}, "temperature", "invalid_type", "valid number"),
        ({"temperature": 3}, "temperature", "invalid_value", "less than or equal to 2"),
        ({"temperature": 1e-50}, "temperature", "invalid_value", "at least 1e-05"),
        ({"stop": ["a" * 257]}, "stop[0]", "invalid_value", "at most 256 characters"),
        ({"top_p": 0}, "top_p", "invalid_value", "greater than 0"),
        ({"n": 0}, "n", "invalid_value", "greater than or equal to 1"),
        ({"n": 1.5}, "n", "invalid_type", "valid integer"),
        ({"n": True}, "n", "invalid_type", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "expected 1 or more, or echo=true"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value", "greater than or equal to 0"),
        ({"max_tokens": 2**40}, "max_tokens", "context_length_exceeded", "has 2048 positions"),
        ({"prompt": "a" * 2048}, "prompt", "context_length_exceeded", "the prompt has 2048 tokens"),
        ({"prompt": None}, "prompt", "missing_required_parameter", "missing"),
        ({"prompt": ""}, "prompt", "empty_prompt", "no tokens"),
        ({"prompt": []}, "prompt", "invalid_value", "at least 1 item"),
        ({"prompt": [[]]}, "prompt", "empty_prompt", "no tokens"),
        ({"prompt": 3}, "prompt", "invalid_type", "valid list"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_value", "expected a text, a list of texts"),
        ({"prompt": ["a", [1, True]]}, "prompt[1]", "invalid_value", "expected a text"),
        ({"prompt": [1, 263]}, "prompt", "invalid_value", "no token 263; the model knows 0 to 262"),
        ({"prompt": [-1]}, "prompt", "invalid_value", "no token -1"),
        ({"stop": ["a"] * 5}, "stop", "invalid_value", "at most 4"),
        ({"stop": [""]}, "stop[0]", "invalid_value", "at least 1 character"),
        ({"seed": 2**63}, "seed", "invalid_value", "less than"),
        ({"logprobs": 6}, "logprobs", "invalid_value", "less than or equal to 5"),
        ({"echo": True, "stream": True}, "echo", "invalid_value", "not with stream=true"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "unsupported_parameter",
            "JSON could not be promised",
        ),
        ({"presence_penalty": 1}, "presence_penalty", "unsupported_parameter", "does not count those drawn before"),
        ({"best_of": 2}, "best_of", "unsupported_parameter", "or give 1"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "invalid_value", "expected token ids for keys, got 'five'"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "invalid_value", "expected token ids"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias.5", "invalid_value", "less than or equal to 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "invalid_type", "valid number"),
        ({"logit_bias": {"263": 1}}, "logit_bias", "invalid_value", "no token 263; the model knows 0 to 262"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "invalid_value", "named twice"),
        (
            {"logit_bias": {str(i): 1 for i in range(257)}},
            "logit_bias",
            "invalid_value",
            "got 257 tokens; a request may name 256",
        ),
        ({"raw_logprobs": True}, "raw_logprobs", "invalid_value", "only with logprobs"),
        ({"min_p": 1.5}, "min_p", "invalid_value", "less than or equal to 1"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter", "or give 0"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "only with stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "unknown"),
        ({"n": 128}, "n", "too_many_completions", "at most 72"),
        ({"prompt": ["a"] * 80}, "n", "too_many_completions", "80 completions"),
    ],
)
def test_a_bad_field_is_named_with_what_is_expected(
    random_server: Any, options: dict[str, Any], param: str, code: str, message: str
) -> None:
    status, error, _ = raw(random_server, "POST", "/v1/completions", json.dumps(GOOD | options).encode())
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"", "EOF"), (b"{", "EOF"), (b"[]", "not a JSON object"), (b"\xff", "not valid JSON"), (b"[" * 9999, "recursion")],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(random_server: Any, body: bytes, message: str) -> None:
    status, error, _ = raw(random_server, "POST", "/v1/completions", body)
    assert (status, error["code"]) == (400, "invalid_json")
    assert message in error["message"]


def test_half_a_character_and_an_endless_number_are_refused(random_server: Any) -> None:
    status, error, _ = raw(random_server, "POST", "/v1/completions", rb'{"model": "tiny", "prompt": "\ud83d"}')
    assert (status, error["code"]) == (400, "invalid_json")
    status, error, _ = raw(
        random_server, "POST", "/v1/completions", b'{"model": "tiny", "prompt": "a", "top_p": 1e999}'
    )
    assert (status, error["param"]) == (400, "top_p")


def test_other_models_paths_methods_and_types_have_their_status(random_server: Any) -> None:
    body = json.dumps(GOOD).encode()
    other = json.dumps(GOOD | {"model": "tinny"}).encode()
    for found, status, code in (
        (raw(random_server, "POST", "/v1/completions", other), 404, "model_not_found"),
        (raw(random_server, "POST", "/v1/nothing", body), 404, "not_found"),
        (raw(random_server, "GET", "/v1/completions"), 405, "method_not_allowed"),
        (
            raw(random_server, "POST", "/v1/completions", body, {"Content-Type": "text/plain"}),
            415,
            "unsupported_media_type",
        ),
        (raw(random_server, "GET", "/v1/models/other"), 404, "model_not_found"),
    ):
        assert (found[0], found[1]["code"], found[1]["type"]) == (status, code, "invalid_request_error")
    assert "did you mean 'tiny'" in raw(random_server, "POST", "/v1/completions", other)[1]["message"]


def test_the_client_raises_its_own_errors(random_server: Any) -> None:
    client = random_server.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", temperature=5)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature", "invalid_value", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_fields_that_ask_for_nothing_are_let_through() -> None:
    nothing = {name: values[0] for name, values in NEUTRAL_VALUES.items() if values} | dict.fromkeys(
        IGNORED_FIELDS, "x"
    )
    assert (
        parse_body(CompletionRequest, json.dumps(GOOD | nothing | {"best_of": 3, "n": 3, "top_p": None}).encode()).n
        == 3
    )
    for name, values in NEUTRAL_VALUES.items():
        with pytest.raises(ApiError, match=name):
            parse_body(CompletionRequest, json.dumps(GOOD | {name: "something else"}).encode())
        assert values == () or all(parse_body(CompletionRequest, json.dumps(GOOD | {name: v}).encode()) for v in values)


def test_every_field_of_the_client_is_known() -> None:
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params

    for kind, theirs in (
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat_params.CompletionCreateParamsBase),
    ):
        assert set(theirs.__annotations__) <= set(kind.model_fields) | set(NEUTRAL_VALUES) | IGNORED_FIELDS


def test_a_model_without_a_chat_template_says_so(start_server: Any, plain_tokenizer: Any) -> None:
    client = start_server(tokenizer=plain_tokenizer).client()
    with pytest.raises(openai.BadRequestError, match="use /v1/completions"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


def test_numbers_that_are_none_are_an_error_and_no_answer(start_server: Any) -> None:
    running = start_server()
    running.model.head.weight.data.fill_(float("nan"))
    running.model.logits = lambda hidden: hidden @ running.model.head.weight.T
    asked = {"model": "tiny", "prompt": [1], "max_tokens": 2}
    with pytest.raises(openai.InternalServerError, match="not numbers"):
        running.client().completions.create(**asked)
    with pytest.raises(openai.APIError, match="not numbers"):
        list(running.client().completions.create(**asked, stream=True))
    running.wait_until(running.is_idle)


def test_a_field_of_any_json_type_is_taken_or_refused_with_a_reason() -> None:
    dialogue = [{"role": "user", "content": "a"}]
    odd = [
        [{"role": "user", "content": 3}],
        [{"role": "assistant", "tool_calls": 3}],
        [{"role": "user", "content": [3]}],
    ]
    values = [
        None,
        True,
        0,
        -1,
        1.5,
        1e308,
        "",
        "x",
        [],
        [0],
        [[]],
        [None],
        [{}],
        {},
        {"a": 1},
        {"1": 1},
        ["a", 1],
        *odd,
    ]
    bases: list[tuple[Any, dict[str, Any]]] = [
        (ChatRequest, {"model": "m", "messages": dialogue}),
        (CompletionRequest, {"model": "m", "prompt": "a"}),
        (TokenizeRequest, {"prompt": "a"}),
        (DetokenizeRequest, {"tokens": [1]}),
    ]
    refusals: list[ApiError] = []
    for kind, base in bases:
        for name in [*kind.model_fields, *NEUTRAL_VALUES, *IGNORED_FIELDS, "other"]:
            for value in values:
                try:
                    parse_body(kind, json.dumps(base | {name: value}).encode())
                except ApiError as error:
                    refusals.append(error)
    assert {(error.status, bool(error.message)) for error in refusals} == {(400, True)}
