"""Requests and completions as a few arrays: a step has tens of thousands, and an object each would cost more than the tokens.

Requests with equal prompts share one copy of it, and all that are sampled alike one record of how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from burnish.core.engine import Completion, Finish, Request, SamplingOptions
from burnish.core.wire import Flat


@dataclass(frozen=True)
class Requests(Flat):
    """Many requests."""

    ids: list[str]
    prompts: np.ndarray  # int32, the tokens of all distinct prompts
    bounds: np.ndarray  # int64, where each of them begins, and the end
    columns: np.ndarray  # int64 [4, n]: which prompt, which sampling, tokens generated before, priority
    keys: np.ndarray  # uint64 [n]
    samplings: list[SamplingOptions]


@dataclass(frozen=True)
class Completions(Flat):
    """Many completions."""

    ids: list[str]
    tokens: np.ndarray  # int32, of all
    bounds: np.ndarray  # int64, where each begins, and the end
    logp: np.ndarray  # float32, of all
    finish: list[Finish]
    versions: np.ndarray  # int64 [n]
    raw_logp: np.ndarray  # float32, of those that asked for it, one after the other
    has_raw: np.ndarray  # bool [n]


def by_prompt(requests: Iterable[Request]) -> list[list[Request]]:
    """The requests with equal prompts together."""
    prompts: dict[tuple[int, ...], list[Request]] = {}
    group: list[Request] = []
    for request in requests:
        # The samples of a prompt mostly follow each other: to compare is quicker than to look up.
        if not group or (request.tokens is not group[0].tokens and request.tokens != group[0].tokens):
            group = prompts.setdefault(request.tokens, [])
        group.append(request)
    return list(prompts.values())


def pack_requests(groups: Sequence[Sequence[Request]]) -> Requests:
    """Requests as arrays; those of a group have equal prompts."""
    samplings: dict[SamplingOptions, int] = {}
    numbers: list[int] = []
    last: SamplingOptions | None = None
    requests = [request for group in groups for request in group]
    for request in requests:
        if request.sampling is not last:  # most are sampled alike: no need to look up
            last = request.sampling
            sampling = samplings.setdefault(last, len(samplings))
        numbers.append(sampling)
    prompts = [group[0].tokens for group in groups]
    columns = np.zeros((4, len(requests)), dtype=np.int64)
    columns[0] = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    values = (numbers, [request.generated for request in requests], [request.priority for request in requests])
    for row, column in zip(columns[1:], values, strict=True):
        if any(column):  # most are 0 throughout, and a list takes longer to read than to look at
            row[:] = column
    return Requests(
        ids=[request.id for request in requests],
        prompts=np.fromiter(chain.from_iterable(prompts), dtype=np.int32),
        bounds=_bounds([len(tokens) for tokens in prompts]),
        columns=columns,
        keys=np.array([request.key for request in requests], dtype=np.uint64),
        samplings=list(samplings),
    )


def unpack_requests(packed: Requests) -> list[Request]:
    """The inverse."""
    bounds = packed.bounds.tolist()
    prompts = [tuple(packed.prompts[a:b].tolist()) for a, b in zip(bounds, bounds[1:], strict=False)]
    rows = zip(packed.ids, packed.keys.tolist(), *packed.columns.tolist(), strict=True)
    return [
        Request(id, prompts[prompt], packed.samplings[sampling], key, generated, priority)
        for id, key, prompt, sampling, generated, priority in rows
    ]


def pack_completions(completions: Sequence[Completion]) -> Completions:
    """Completions as arrays."""
    raw = [c.raw_logp for c in completions if c.raw_logp is not None]
    return Completions(
        ids=[c.id for c in completions],
        tokens=_joined([c.tokens for c in completions], np.int32),
        bounds=_bounds([len(c.tokens) for c in completions]),
        logp=_joined([c.logp for c in completions], np.float32),
        finish=[c.finish for c in completions],
        versions=np.array([c.version for c in completions], dtype=np.int64),
        raw_logp=_joined(raw, np.float32),
        has_raw=np.array([c.raw_logp is not None for c in completions], dtype=bool),
    )


def unpack_completions(packed: Completions) -> list[Completion]:
    """The inverse."""
    tokens, logp, bounds, at = packed.tokens.astype(np.int64), packed.logp, packed.bounds.tolist(), 0
    columns = zip(packed.ids, packed.finish, packed.versions.tolist(), bounds, bounds[1:], strict=False)
    found = [Completion(id, tokens[a:b], logp[a:b], finish, version) for id, finish, version, a, b in columns]
    for k in np.flatnonzero(packed.has_raw).tolist():
        size = bounds[k + 1] - bounds[k]
        found[k].raw_logp = packed.raw_logp[at : at + size]
        at += size
    return found


def _bounds(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype=dtype)
