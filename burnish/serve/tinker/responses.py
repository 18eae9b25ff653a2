"""Results of the training API, in protobuf for the stock client and in JSON for older ones and for people.

A result is kept as a record until it is fetched, and encoded as the fetching request accepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, Protocol

import numpy as np

from burnish.serve.tinker.protobuf import bytes_field, double_field, int_field, ints_field, map_field

PROTOBUF, JSON = "application/x-protobuf", "application/json"
RECORD_TYPE = "ArrayRecord"
DTYPES = {np.dtype(np.float32): (1, "float32"), np.dtype(np.int64): (2, "int64")}
"""Protobuf number and JSON name of an element type."""
STOP_REASONS = {"stop": 0, "length": 1}
NO_LOGPROB = -99999.0
"""The client's mark for a cell of a top-k table without a token."""
Category = Literal["user", "server", "unknown"]


class Result(Protocol):
    """What a finished request returns."""

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""


class BinaryResult(Result, Protocol):
    """A result that the stock client reads as protobuf only."""

    def to_protobuf(self) -> bytes:
        """The result as a message."""


@dataclass(frozen=True)
class JsonResult:
    """A result that has only a JSON form."""

    content: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.content


@dataclass(frozen=True)
class Failure:
    """A request that failed. `user`: the request was wrong; `server`: this server could not do it."""

    error: str
    category: Category

    def to_json(self) -> dict[str, Any]:
        return {"error": self.error, "category": self.category}


@dataclass(frozen=True)
class Table:
    """A tensor: dense values, or the values of sparse rows with their row pointers and columns."""

    values: np.ndarray
    shape: tuple[int, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    @staticmethod
    def dense(values: np.ndarray) -> Table:
        """A dense tensor in its own shape."""
        return Table(np.ascontiguousarray(values), values.shape)

    def to_protobuf(self) -> bytes:
        """Message Tensor."""
        if self.rows is None or self.columns is None:
            content = bytes_field(1, self.values.tobytes())
        else:
            parts = (self.values, self.rows.astype(np.int64), self.columns.astype(np.int64))
            content = bytes_field(2, b"".join(bytes_field(n, part.tobytes()) for n, part in enumerate(parts, 1)))
        return content + int_field(3, DTYPES[self.values.dtype][0]) + ints_field(4, list(self.shape))

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"data": self.values.ravel().tolist(), "dtype": DTYPES[self.values.dtype][1]}
        found["shape"] = list(self.shape)
        if self.rows is not None and self.columns is not None:
            found |= {"sparse_crow_indices": self.rows.tolist(), "sparse_col_indices": self.columns.tolist()}
        return found


# --- training ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingOutput:
    """The result of `forward_backward`: log-probs of every sequence's targets, [N] or [N, K], and metrics.

    The name of a metric ends with how values of several requests combine, such as `loss:sum`.
    """

    logprobs: Sequence[np.ndarray]
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        outputs = [{"logprobs": Table.dense(one).to_json()} for one in self.logprobs]
        return {"loss_fn_output_type": RECORD_TYPE, "loss_fn_outputs": outputs, "metrics": self.metrics}

    def to_protobuf(self) -> bytes:
        """Message ForwardBackwardOutput. Neighbours with equal trailing shapes share a record, since a record has one."""
        out = bytes_field(1, RECORD_TYPE)
        for trailing, group in groupby(self.logprobs, key=lambda one: one.shape[1:]):
            out += bytes_field(2, _record(list(group), trailing))
        return out + map_field(3, {name: double_field(2, value) for name, value in self.metrics.items()})


def _record(arrays: list[np.ndarray], trailing: tuple[int, ...]) -> bytes:
    """Message ArrayRecord with the field `logprobs`: all values in a row, with the byte offsets of each sequence."""
    offsets = np.cumsum([0, *(one.nbytes for one in arrays)], dtype=np.int64)
    tensor = bytes_field(1, b"".join(one.tobytes() for one in arrays)) + bytes_field(2, offsets.tobytes())
    tensor += int_field(3, DTYPES[np.dtype(np.float32)][0]) + ints_field(4, list(trailing))
    fields = map_field(2, {"logprobs": bytes_field(2, tensor)})
    return bytes_field(1, RECORD_TYPE) + fields + int_field(3, len(arrays))


# --- sampling ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopTable:
    """The likeliest tokens at each of `n` positions with their log-probs, [n, k]; a position without any has NO_LOGPROB."""

    tokens: np.ndarray
    logprobs: np.ndarray

    def to_protobuf(self) -> bytes:
        """Message TopkLogprobs."""
        length, k = self.tokens.shape
        content = bytes_field(1, self.tokens.astype(np.int32).tobytes())
        content += bytes_field(2, self.logprobs.astype(np.float32).tobytes())
        return content + int_field(3, k) + int_field(4, length)

    def to_json(self) -> list[list[tuple[int, float]] | None]:
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True)
        found = [[(t, x) for t, x in zip(*row, strict=True) if x != NO_LOGPROB] for row in rows]
        return [row or None for row in found]


@dataclass(frozen=True)
class SampledSequence:
    """One sample: tokens [T] and their log-probs [T] under the distribution that they were drawn from."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: str
    top: TopTable | None = None

    def to_protobuf(self) -> bytes:
        """Message SampledSequence."""
        content = int_field(1, STOP_REASONS[self.stop_reason])
        content += bytes_field(2, self.tokens.astype(np.int32).tobytes())
        content += bytes_field(3, self.logprobs.astype(np.float32).tobytes())
        return content + (b"" if self.top is None else bytes_field(4, self.top.to_protobuf()))

    def to_json(self) -> dict[str, Any]:
        top = None if self.top is None else self.top.to_json()
        content = {"tokens": self.tokens.tolist(), "logprobs": self.logprobs.tolist()}
        return {"stop_reason": self.stop_reason, **content, "topk_logprobs": top}


@dataclass(frozen=True)
class PromptScores:
    """What a request asked to know about its prompt of L tokens; None if it did not ask."""

    logprobs: np.ndarray | None = None
    """[L]; NaN where none was computed, as for the first token."""
    top: TopTable | None = None
    targets: Table | None = None
    """Log-probs of given tokens, [L - 1, K]."""
    drawn: tuple[Table, Table] | None = None
    """Tokens drawn at each position, and their log-probs, [L - 1, k] each."""


@dataclass(frozen=True)
class SampleOutput:
    """The result of `asample`."""

    sequences: Sequence[SampledSequence]
    prompt: PromptScores = field(default_factory=PromptScores)

    def to_protobuf(self) -> bytes:
        """Message SampleResponse."""
        out = b"".join(bytes_field(1, one.to_protobuf()) for one in self.sequences)
        prompt = self.prompt
        if prompt.logprobs is not None:
            out += bytes_field(2, prompt.logprobs.astype(np.float32).tobytes())
        if prompt.top is not None:
            out += bytes_field(3, prompt.top.to_protobuf())
        if prompt.targets is not None:
            out += bytes_field(5, prompt.targets.to_protobuf())
        if prompt.drawn is not None:
            out += bytes_field(6, b"".join(bytes_field(n, t.to_protobuf()) for n, t in enumerate(prompt.drawn, 1)))
        return out

    def to_json(self) -> dict[str, Any]:
        prompt = self.prompt
        found: dict[str, Any] = {"type": "sample", "sequences": [one.to_json() for one in self.sequences]}
        if prompt.logprobs is not None:
            found["prompt_logprobs"] = [None if np.isnan(x) else x for x in prompt.logprobs.tolist()]
        if prompt.top is not None:
            found["topk_prompt_logprobs"] = prompt.top.to_json()
        if prompt.targets is not None:
            found["target_prompt_logprobs"] = prompt.targets.to_json()
        if prompt.drawn is not None:
            found["prompt_alt_tokens"] = dict(
                zip(("tokens", "logprobs"), (table.to_json() for table in prompt.drawn), strict=True)
            )
        return found
