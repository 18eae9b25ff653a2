"""Request schemas of OpenAI's two APIs, as far as the engine supports them, and errors in OpenAI's format.

An unknown field is refused with the nearest known name. A field of OpenAI that the engine does not support is refused unless its
value has no effect (`NEUTRAL_VALUES`); fields that never change tokens are ignored (`IGNORED_FIELDS`). `null` means the field is left
out. Beyond OpenAI's there are `top_k`, `min_p`, `raw_logprobs`, `return_token_ids`, `strategy`, and for chats `chat_template_kwargs`.

A body may hold millions of wrong values, and pydantic makes an error object of several hundred bytes for each. Every list therefore
stops at its first wrong item (`FailFast`), and the length of every list and object is checked before its items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json
from typing_extensions import TypeAliasType

from burnish.config.errors import did_you_mean
from burnish.core.engine import MIN_TEMPERATURE

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
MAX_ERROR_TEXT = 600
MAX_STOPS = 4
MAX_STOP_LENGTH = 256
"""Most characters of a stop string: so many are compared for each new token."""
MAX_N = 128
INT64_LIMIT = 2**63
MAX_NAME = 200
"""Most characters of a name."""
MAX_FIELDS = 64
"""Most fields of one object."""
MAX_MESSAGES = 4096
MAX_PARTS = 16384
"""Most text parts of all messages together."""
MAX_TOOLS = 512
"""The most tools of a request, and the most tool calls of one message."""
MAX_TOKENS = 2**20
"""The most tokens of one `/detokenize` request."""
MAX_LOGIT_BIASES = 4096
"""Most keys of `logit_bias` that are parsed. The engine's bound is lower and has its own message."""

IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options",
    }
)  # fmt: skip
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "best_of": (),  # but for n itself
    "suffix": ("",),
    "store": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields of OpenAI that the engine does not support, with their values without effect."""
UNSUPPORTED_REASONS = {
    "frequency_penalty": "the engine draws each token from the model's distribution and does not count those drawn before",
    "presence_penalty": "the engine draws each token from the model's distribution and does not count those drawn before",
    "response_format": "the engine does not constrain tokens to a grammar, so JSON could not be promised; ask for it in the prompt",
    "best_of": "the engine does not rank completions; ask for n of them with logprobs",
}
"""Reasons, if the name does not tell."""


class ApiError(Exception):
    """An error response: {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}, with an HTTP status.

    `param` names the field, `code` is the reason in one word.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers
        # They may contain text of the client, of any length.
        self.message, self.param = message[:MAX_ERROR_TEXT], param if param is None else param[:MAX_ERROR_TEXT]

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """The error for a field with an invalid value."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def nan_error() -> ApiError:
    """The error for a model with NaN log-probs, whose samples mean nothing."""
    return ApiError(
        500, "the model computed log-probs that are not numbers; serve it with a wider --dtype", code="not_a_number"
    )


def internal_error() -> ApiError:
    """The error for a failure of the server. The log has its cause; the client gets no details."""
    # uvicorn closes the connection after a failure. The header keeps clients from reusing it.
    close = {"Connection": "close"}
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error", headers=close)


class StrictFields(BaseModel):
    """Base of the schemas. It is strict: `"1"` is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            unknown = next(name for name in value if name not in cls.model_fields)
            raise ValueError(f"got {len(value)} fields, among them {unknown[:MAX_NAME]!r}, which is not known")
        return value


def _at_most(limit: int, what: str) -> Callable[[Any], Any]:
    """A validator of the length of a list or object, before its items are validated."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"got {len(value)} {what}; expected {limit} at most")
        return value

    return check


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(StrictFields):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _as_named(value: Any) -> Any:
    """`majority` is short for `{"name": "majority"}`."""
    return {"name": value} if isinstance(value, str) else value


class SamplingFields(StrictFields):
    """Fields of both APIs."""

    model: str = Field(max_length=MAX_NAME)
    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_at_most(MAX_LOGIT_BIASES, "tokens"))
    ] = {}
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], FailFast(), BeforeValidator(_as_list)
    ] = Field(default=[], max_length=MAX_STOPS)
    seed: int | None = Field(None, ge=-INT64_LIMIT, lt=INT64_LIMIT)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    raw_logprobs: bool = False
    strategy: (
        Annotated[dict[str, Any], BeforeValidator(_at_most(MAX_FIELDS, "options")), BeforeValidator(_as_named)] | None
    ) = None
    """A test-time scaling strategy with its options, which `burnish.serve.search_request` reads."""

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        return self

    @field_validator("temperature")
    @classmethod
    def _not_nearly_zero(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"expected 0, for the likeliest token, or at least {MIN_TEMPERATURE:g}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _tokens(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name in value if not (name.isascii() and name.isdecimal() and len(name) < 10)]:
            raise ValueError(f"expected token ids for keys, got {wrong[0][:MAX_NAME]!r}")
        return value


def _as_prompts(value: Any) -> Any:
    """Prompts as a list: from a text, several texts, the token ids of one prompt, or of several."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return [value]
    return value


class CompletionRequest(SamplingFields):
    """The body of `POST /v1/completions`."""

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts), Field(min_length=1)]
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False

    @model_validator(mode="after")
    def _some_answer(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 leaves nothing to answer; expected 1 or more, or echo=true")
        if self.echo and self.stream:
            raise ValueError("echo: not with stream=true; a prompt is scored as a whole")
        return self

    @model_validator(mode="after")
    def _one_kind_of_prompt(self) -> CompletionRequest:
        for i, prompt in enumerate(self.prompt):
            is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
            if not (isinstance(prompt, str) or is_tokens):
                where = f"prompt[{i}]" if len(self.prompt) > 1 else "prompt"
                raise ValueError(
                    f"{where}: expected a text, a list of texts, token ids, or a list of lists of token ids"
                )
        return self


class TextPart(StrictFields):
    type: Literal["text"]
    text: str


class ImageUrl(StrictFields):
    url: str
    detail: Literal["auto"] | None = None


class ImagePart(StrictFields):
    type: Literal["image_url"]
    image_url: ImageUrl


def _as_parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("expected a text or a list of parts, which are texts and images")
    return value


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]
MessageContent = TypeAliasType("MessageContent", Annotated[list[ContentPart], FailFast(), BeforeValidator(_as_parts)])
# A named type, since a union hashes its members and pydantic's FailFast cannot be hashed.


class FunctionCall(StrictFields):
    name: str
    arguments: str


class ToolCall(StrictFields):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageContent | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), BeforeValidator(_at_most(MAX_TOOLS, "calls"))] = []
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return {key: v for key, v in value.items() if v is not None} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role} needs content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role tool needs the tool_call_id it answers")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("only an assistant's message has tool_calls or reasoning_content")
        return self

    @property
    def parts(self) -> list[str | dict[str, Any]]:
        """The content as texts and blocks of images, which have the URLs that the client sent."""
        return [
            part.text if isinstance(part, TextPart) else {"type": "image", "image": part.image_url.url}
            for part in self.content or []
        ]


class Function(StrictFields):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(StrictFields):
    type: Literal["function"]
    function: Function


def _bounded_messages(value: Any) -> Any:
    """Raise if there are too many messages or parts."""
    if not isinstance(value, list):
        return value
    _at_most(MAX_MESSAGES, "messages")(value)
    contents = [message.get("content") for message in value if isinstance(message, dict)]
    num_parts = sum(len(content) for content in contents if isinstance(content, list))
    if num_parts > MAX_PARTS:
        raise ValueError(f"the contents have {num_parts} parts together; expected {MAX_PARTS} at most")
    return value


class ChatRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(_bounded_messages)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Annotated[list[Tool], FailFast(), BeforeValidator(_at_most(MAX_TOOLS, "tools"))] = []
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: is the old name of max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        return self


class TokenizeRequest(StrictFields):
    """The body of `POST /tokenize`: a text, or a dialogue as the chat template writes it."""

    model: str | None = Field(None, max_length=MAX_NAME)
    prompt: str | None = None
    messages: Annotated[list[Any], BeforeValidator(_bounded_messages)] = []
    tools: Annotated[list[Any], BeforeValidator(_at_most(MAX_TOOLS, "tools"))] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("prompt: give a text here, or messages, and not both")
        return self


class DetokenizeRequest(StrictFields):
    """The body of `POST /detokenize`."""

    model: str | None = Field(None, max_length=MAX_NAME)
    tokens: Annotated[list[int], FailFast(), BeforeValidator(_at_most(MAX_TOKENS, "tokens"))]


Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def json_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse the body of a request; raise an `ApiError` unless it is a JSON object."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    return value


def parse_body(kind: type[Body], body: bytes | bytearray) -> Body:
    """Parse the body of a request; raise an `ApiError` if it is invalid."""
    fields = {name: v for name, v in json_object(body).items() if v is not None and name not in IGNORED_FIELDS}
    for name in [name for name in fields if name in NEUTRAL_VALUES and issubclass(kind, SamplingFields)]:
        neutral = _neutral_best_of(fields) if name == "best_of" else NEUTRAL_VALUES[name]
        if fields.pop(name) not in neutral:
            raise bad_value(name, _unsupported(name, neutral), "unsupported_parameter")
    request = validate_fields(kind, fields)
    if isinstance(request, CompletionRequest | ChatRequest):
        _check_logprobs(request)
    return request


def validate_fields(kind: type[Body], fields: dict[str, Any]) -> Body:
    """Make a request from its fields; raise an `ApiError` that names the first invalid one."""
    unknown = next((name for name in fields if name not in kind.model_fields), None)
    if unknown is not None:
        message = f"unknown parameter: {unknown}{did_you_mean(unknown[:MAX_NAME], kind.model_fields)}"
        raise ApiError(400, message, param=unknown, code="unknown_parameter")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _validation_error(
            error.errors(include_url=False, include_context=False, include_input=False)[0]
        ) from None


def _neutral_best_of(fields: dict[str, Any]) -> tuple[Any, ...]:
    """The value of `best_of` without effect: n, if it is a number."""
    n = fields.get("n", 1)
    return (n,) if isinstance(n, int) else ()


def _unsupported(name: str, neutral: Sequence[Any]) -> str:
    why = f" ({UNSUPPORTED_REASONS[name]})" if name in UNSUPPORTED_REASONS else ""
    return f"this server cannot do that{why}; leave it out" + "".join(f", or give {value!r}" for value in neutral)


def num_alternatives(request: CompletionRequest | ChatRequest) -> int:
    """Number of top log-probs that the request asks for at each token."""
    return request.top_logprobs if isinstance(request, ChatRequest) else request.logprobs or 0


def draws_likeliest(request: CompletionRequest | ChatRequest) -> bool:
    """Whether the drawn token is the likeliest under the reported log-probs. With a bias and `raw_logprobs` it may not be."""
    return request.temperature == 0 and not (request.raw_logprobs and request.logit_bias)


def _check_logprobs(request: CompletionRequest | ChatRequest) -> None:
    if request.raw_logprobs and (request.logprobs is None or request.logprobs is False):
        raise bad_value("raw_logprobs", "only with logprobs: it says which ones")


def _validation_error(error: ErrorDetails) -> ApiError:
    """The first error of pydantic as an `ApiError`."""
    path = error["loc"]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    if error["type"] == "missing":
        return ApiError(400, f"missing required parameter: {param}", param=param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {param}", param=param, code="unknown_parameter")
    message = error["msg"].removeprefix("Value error, ")
    if not param:  # an error of the whole body: our own validators name the field in the message
        param, _, message = message.partition(": ")
    is_type = error["type"].endswith("_type")
    return bad_value(param, message, "invalid_type" if is_type else "invalid_value")
