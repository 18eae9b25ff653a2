"""Requests and completions as a few arrays: a step has tens of thousands, and an object each would cost more than the tokens.

Requests with equal prompts share one copy of it, and all that are sampled alike one record of how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from burnish.core.engine import Completion, Finish, Request, SamplingOptions


@dataclass(frozen=True)
class Requests:
    """Many requests."""

    ids: list[str]
    prompts: np.ndarray  # int32, the tokens of all distinct prompts
    bounds: np.ndarray  # int64, where each of them begins, and the end
    columns: np.ndarray  # int64 [4, n]: which prompt, which sampling, tokens generated before, priority
    keys: np.ndarray  # uint64 [n]
    samplings: list[SamplingOptions]


@dataclass(frozen=True)
class Completions:
    """Many completions."""

    ids: list[str]
    tokens: np.ndarray  # int32, of all
    bounds: np.ndarray  # int64, where each begins, and the end
    logp: np.ndarray  # float32, of all
    finish: list[Finish]
    versions: np.ndarray  # int64 [n]
    raw_logp: np.ndarray  # float32, of those that asked for it, one after the other
    has_raw: np.ndarray  # bool [n]


def pack_requests(requests: Sequence[Request]) -> Requests:
    """Requests as arrays."""
    prompts: dict[tuple[int, ...], int] = {}
    samplings: dict[SamplingOptions, int] = {}
    prompt, sampling, last = -1, -1, None
    which = []
    for (
        request
    ) in requests:  # the samples of a prompt follow each other, and most are sampled alike: no need to look up
        if last is None or request.tokens != last.tokens:
            prompt = prompts.setdefault(request.tokens, len(prompts))
        if last is None or request.sampling is not last.sampling:
            sampling = samplings.setdefault(request.sampling, len(samplings))
        which.append((prompt, sampling, request.generated, request.priority))
        last = request
    return Requests(
        ids=[request.id for request in requests],
        prompts=np.fromiter(chain.from_iterable(prompts), dtype=np.int32),
        bounds=_bounds([len(tokens) for tokens in prompts]),
        columns=np.array(which, dtype=np.int64).reshape(-1, 4).T.copy(),
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
    tokens, bounds, at = packed.tokens.astype(np.int64), packed.bounds.tolist(), 0
    found = []
    for k, (id, finish, version, has_raw) in enumerate(
        zip(packed.ids, packed.finish, packed.versions.tolist(), packed.has_raw.tolist(), strict=True)
    ):
        start, stop = bounds[k], bounds[k + 1]
        raw = packed.raw_logp[at : at + stop - start] if has_raw else None
        at += stop - start if has_raw else 0
        found.append(Completion(id, tokens[start:stop], packed.logp[start:stop], finish, version, raw_logp=raw))
    return found


def _bounds(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype=dtype)
