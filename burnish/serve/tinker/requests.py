"""Requests of the training API as records: JSON bodies by pydantic, and `forward_backward` in JSON or in protobuf.

The field names are those of the stock client's types. An unknown field is an error, except in the sampling options, where newer
clients add fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, FailFast, Field, ValidationError
from typing_extensions import TypeAliasType

from burnish.serve.tinker.protobuf import (
    MalformedMessage,
    Value,
    bytes_of,
    double_of,
    int_of,
    ints_of,
    read_fields,
    text_of,
)

NUMPY_TYPES: dict[int | str, type[np.generic]] = {
    **{1: np.float32, 2: np.int64, 3: np.int32},
    **{"float32": np.float32, "int64": np.int64},
}
"""Element types of tensors by their protobuf number and by their JSON name."""
BFLOAT16 = 4
M = TypeVar("M", bound=BaseModel)
# Lists stop at their first wrong item: a body may hold millions, and pydantic makes an error object for each.
Tokens = TypeAliasType("Tokens", Annotated[list[int], FailFast()])
Numbers = TypeAliasType("Numbers", Annotated[list[float], FailFast()])


class BadRequest(ValueError):
    """A request that is wrong by itself; the message tells the client how."""


class Body(BaseModel):
    """A JSON body. `type` repeats the name of the request and is not read."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)
    type: str | None = None


class Open(BaseModel):
    """A part of a body that may have fields this server does not know."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), frozen=True)


class CreateSession(Body):
    """`create_session`."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Body):
    """`session_heartbeat`."""

    session_id: str


class LoraOptions(Open):
    """Which adapters a model has."""

    rank: int = Field(ge=1, le=4096)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerOptions(Open):
    """Which optimizer a model has."""

    type: str = "adamw"


class CreateModel(Body):
    """`create_model`: adapters with `lora_config`, else all weights."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraOptions | None = None
    optimizer_config: OptimizerOptions = OptimizerOptions()


class AdamOptions(Open):
    """AdamW's numbers of one step, with the client's defaults."""

    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = 0.0
    """0 clips nothing."""


class ModelRequest(Body):
    """A request about one model. Requests of a model run in the order of `seq_id`, from 1 on."""

    model_id: str
    seq_id: int | None = None


class OptimStep(ModelRequest):
    """`optim_step`."""

    adam_params: AdamOptions | None = None
    optimizer_params: dict[str, Any] | None = None
    """Numbers of another optimizer."""


class SaveWeights(ModelRequest):
    """`save_weights`, `save_weights_for_sampler` and `save_weights_external`."""

    path: str | None = None
    ttl_seconds: int | None = Field(None, ge=1, le=10**10)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    """`load_weights` into a model, or, with a session, into a new model that the checkpoint describes."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerOptions | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(Body):
    """`create_sampling_session`: saved weights, or the base model."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(Body):
    """`join_sampling_session`."""

    sampling_session_id: str


class SamplingParams(Open):
    """How tokens are drawn."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    """Where a sample stops besides the model's end tokens. An empty list stops nowhere, not even there."""
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class JsonChunk(Open):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: Tokens | None = None


class JsonModelInput(Open):
    """A prompt or a training sequence."""

    chunks: list[JsonChunk]


class JsonTensor(Open):
    """A tensor, dense or in compressed sparse rows."""

    data: Numbers
    dtype: Literal["float32", "int64"]
    shape: list[int] | None = None
    sparse_crow_indices: Tokens | None = None
    sparse_col_indices: Tokens | None = None


class Sample(Body):
    """`asample`."""

    num_samples: int = Field(1, ge=1, le=4096)
    prompt: JsonModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    """`retrieve_future` and `cancel_future`. The server always sends whole results."""

    request_id: str
    allow_metadata_only: bool = False


class JsonDatum(Open):
    """A training sequence in JSON."""

    model_input: JsonModelInput
    loss_fn_inputs: dict[str, JsonTensor]


class JsonForwardInput(Open):
    """The data of `forward_backward` in JSON."""

    data: list[JsonDatum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class JsonForwardBackward(ModelRequest):
    """`forward_backward` and `forward` in JSON, as older clients send it."""

    forward_backward_input: JsonForwardInput = Field(
        validation_alias=AliasChoices("forward_backward_input", "forward_input")
    )
    forward_only: bool = False


class WeightsInfo(Body):
    """`weights_info`."""

    tinker_path: str


def parse_json(kind: type[M], data: bytes | bytearray) -> M:
    """A body of a kind; BadRequest with the first wrong field."""
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise BadRequest(f"{where}: {first['msg']}") from None


# --- training data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Datum:
    """One training sequence: input tokens [N], and the tensors of its loss by name, [N] or [N, K]."""

    tokens: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclass
class ForwardBackward:
    """`forward_backward` in either encoding."""

    model_id: str = ""
    seq_id: int | None = None
    data: list[Datum] = field(default_factory=list)
    loss_fn: str = ""
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def text_tokens(chunks: Iterable[JsonChunk]) -> list[int]:
    """The tokens of a prompt. Only text can be read here."""
    tokens = list[int]()
    for chunk in chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise BadRequest(f"a prompt has a part of type {chunk.type}; this server reads encoded_text only")
        tokens += chunk.tokens
    return tokens


def json_tensor(tensor: JsonTensor) -> np.ndarray:
    """A JSON tensor as an array; cells that a sparse one does not list are 0."""
    return shaped(json_values(tensor), tensor.shape, tensor.sparse_crow_indices, tensor.sparse_col_indices)


def json_values(tensor: JsonTensor) -> np.ndarray:
    """The values of a JSON tensor in a row."""
    try:
        return np.asarray(tensor.data, NUMPY_TYPES[tensor.dtype])
    except (ValueError, OverflowError) as error:  # NaN or an infinity as an integer
        raise BadRequest(f"a tensor of {tensor.dtype} has a value that is none: {error}") from error


def shaped(
    values: np.ndarray, shape: list[int] | None, rows: Any = None, columns: Any = None, fill: float = 0
) -> np.ndarray:
    """Values in their shape: as they are, or spread over sparse rows. Missing cells have the value `fill`."""
    try:
        if rows is None:
            return values if shape is None else values.reshape(shape)
        if shape is None or len(shape) != 2 or columns is None or len(rows) != shape[0] + 1:
            raise ValueError("sparse rows need a shape of two dimensions, and row pointers for each row")
        dense = np.full(shape, fill, values.dtype)
        dense[np.repeat(np.arange(shape[0]), np.diff(rows)), np.asarray(columns, np.int64)] = values
        return dense
    except (ValueError, IndexError) as error:
        raise BadRequest(f"a tensor of {values.size} values does not fit its shape {shape}: {error}") from error


def forward_backward_from_json(data: bytes | bytearray) -> ForwardBackward:
    """Read a `forward_backward` body in JSON."""
    asked = parse_json(JsonForwardBackward, data)
    inner = asked.forward_backward_input
    datums = [
        Datum(
            np.asarray(text_tokens(one.model_input.chunks), np.int64),
            {name: json_tensor(tensor) for name, tensor in one.loss_fn_inputs.items()},
        )
        for one in inner.data
    ]
    config = dict(inner.loss_fn_config or {})
    return ForwardBackward(asked.model_id, asked.seq_id, datums, inner.loss_fn, config, asked.forward_only)


def forward_backward_from_protobuf(data: bytes | bytearray) -> ForwardBackward:
    """Read a `forward_backward` body in protobuf (message ForwardBackwardRequest)."""
    found = ForwardBackward()
    older, newer = dict[str, float | str](), dict[str, float | str]()
    try:
        for number, value in read_fields(data):
            if number == 1:
                found.model_id = text_of(value)
            elif number == 2:
                found.seq_id = int_of(value)
            elif number == 3:
                found.data.append(_datum(value))
            elif number == 4:
                found.loss_fn = text_of(value)
            elif number == 5:
                older |= _entry(value, double_of)
            elif number == 6:
                found.forward_only = bool(int_of(value))
            elif number == 7:
                newer |= _entry(value, _config_value)
    except MalformedMessage as error:
        raise BadRequest(f"the body is no ForwardBackwardRequest: {error}") from error
    found.config = newer or older
    return found


T = TypeVar("T")


def _entry(message: Value, read: Callable[[Value], T]) -> dict[str, T]:
    """An entry of a map: its key is field 1, its value field 2."""
    key, values = "", list[T]()
    for number, value in read_fields(bytes_of(message)):
        if number == 1:
            key = text_of(value)
        elif number == 2:
            values.append(read(value))
    return {key: values[-1]} if values else {}


def _config_value(message: Value) -> float | str:
    for number, value in read_fields(bytes_of(message)):
        return double_of(value) if number == 1 else text_of(value)
    raise MalformedMessage("an option of the loss has no value")


def _datum(message: Value) -> Datum:
    tokens, inputs = list[np.ndarray](), dict[str, np.ndarray]()
    for number, value in read_fields(bytes_of(message)):
        if number == 1:
            tokens.append(_chunk(value))
        elif number == 2:
            inputs |= _entry(value, _tensor)
    return Datum(np.concatenate(tokens).astype(np.int64) if tokens else np.empty(0, np.int64), inputs)


def _chunk(message: Value) -> np.ndarray:
    for number, value in read_fields(bytes_of(message)):
        if number != 1:
            kind = {2: "image", 3: "dmel"}.get(number, f"number {number}")
            raise BadRequest(f"a training sequence has a part of type {kind}; this server reads encoded_text only")
        for inner, packed in read_fields(bytes_of(value)):
            if inner == 1:
                return _array(packed, np.int32)
    return np.empty(0, np.int32)


def _tensor(message: Value) -> np.ndarray:
    fields: Mapping[int, list[Value]] = {n: [] for n in range(1, 5)}
    for number, value in read_fields(bytes_of(message)):
        if number in fields:
            fields[number].append(value)
    kind = int_of(fields[3][-1]) if fields[3] else 0
    shape = [size for value in fields[4] for size in ints_of(value)] or None
    if fields[2]:
        parts = dict(read_fields(bytes_of(fields[2][-1])))
        rows, columns = (_array(parts.get(n, memoryview(b"")), np.int64) for n in (2, 3))
        return shaped(_numbers(parts.get(1, memoryview(b"")), kind), shape, rows, columns)
    return shaped(_numbers(fields[1][-1] if fields[1] else memoryview(b""), kind), shape)


def _numbers(value: Value, kind: int) -> np.ndarray:
    if kind == BFLOAT16:
        return (_array(value, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kind not in NUMPY_TYPES:
        raise MalformedMessage(f"a tensor has the element type {kind}, which is not known")
    return _array(value, NUMPY_TYPES[kind])


def _array(value: Value, kind: type[np.generic]) -> np.ndarray:
    data = bytes_of(value)
    if len(data) % np.dtype(kind).itemsize:
        raise MalformedMessage(f"{len(data)} bytes are no list of {np.dtype(kind)}")
    return np.frombuffer(data, kind)
