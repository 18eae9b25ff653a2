"""Requests and completions packed into a few arrays, to send them between processes.

A step has tens of thousands of them; one object each would cost more than their tokens. Requests with equal prompts share one
copy of the prompt, and requests with equal sampling options one record of them. A picture is sent once for all prompts that show it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np

from burnish.core.engine import Completion, CompletionFinish, Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan

INTEGER_FIELDS = ("generated", "priority", "may_continue")
"""Further fields of a request with small integers."""


@dataclass(frozen=True)
class PackedRequests:
    """Requests as arrays. They go by consecutive numbers, which are cheaper than ids."""

    first: int
    """Number of the first request."""
    prompts: np.ndarray  # int32, tokens of all distinct prompts
    bounds: np.ndarray  # int64 [prompts + 1], offsets of the prompts
    columns: np.ndarray  # int64 [5, n]: prompt index, sampling index, then `NUMBERS`
    keys: np.ndarray  # uint64 [n]
    samplings: list[SamplingOptions]
    pictures: list[Picture] = field(default_factory=list)
    """The pictures of all prompts, each once."""
    spans: list[list[tuple[int, int]]] | None = None
    """Of each prompt: (first token, index of the picture); None if there are no pictures."""


@dataclass(frozen=True)
class PackedCompletions:
    """Completions as arrays."""

    columns: np.ndarray  # int64 [4, n]: number of the request, number of tokens, version, whether it has `raw_logp`
    finish: list[CompletionFinish]
    tokens: np.ndarray  # int32, of all
    logp: np.ndarray  # float32, of all
    raw_logp: np.ndarray | None  # float32, of the requests that asked for it, concatenated
    experts: list[np.ndarray | None] | None = None  # of models with experts, if they are recorded

    @property
    def numbers(self) -> list[int]:
        """Numbers of the requests."""
        found: list[int] = self.columns[0].tolist()
        return found


def group_by_prompt(requests: Iterable[Request]) -> list[list[Request]]:
    """Group requests by prompt: its tokens and its pictures."""
    requests = list(requests)
    prompts: dict[Any, list[Request]] = {}
    by_prompt = _tokens_and_pictures if any(request.pictures for request in requests) else attrgetter("tokens")
    # Samples of a prompt mostly follow each other, and a comparison is faster than a lookup.
    for prompt, group in groupby(requests, by_prompt):
        if prompt in prompts:
            prompts[prompt].extend(group)
        else:
            prompts[prompt] = list(group)
    return list(prompts.values())


def _tokens_and_pictures(request: Request) -> Any:
    return request.tokens, tuple((span.start, span.picture.key) for span in request.pictures)


def distinct_requests(groups: Iterable[Sequence[Request]]) -> list[Request]:
    """A subset of the requests with every combination of prompt and sampling options. Each group has one prompt."""
    found = []
    for group in groups:
        found.append(group[0])
        if not _all_equal(samplings := _samplings(group)):
            found += [one for one, sampling in zip(group, samplings, strict=True) if sampling is not samplings[0]]
    return found


def pack_requests(groups: Sequence[Sequence[Request]], first: int = 0) -> PackedRequests:
    """Pack requests under the numbers from `first` on. Each group has one prompt."""
    requests = list(chain.from_iterable(groups))
    samplings = _samplings(requests)
    known = {samplings[0]: 0} if requests else {}
    columns = np.zeros((2 + len(INTEGER_FIELDS), len(requests)), dtype=np.int64)
    columns[0] = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    if not _all_equal(samplings):
        columns[1] = [known.setdefault(sampling, len(known)) for sampling in samplings]
    for row, name in enumerate(INTEGER_FIELDS, 2):
        column = list(map(attrgetter(name), requests))
        if any(column):  # most columns are all 0, and a check is faster than a conversion
            columns[row] = column
    prompts = [group[0].tokens for group in groups]
    lengths = [len(tokens) for tokens in prompts]
    pictures, spans = _pack_pictures([group[0] for group in groups])
    content = struct.pack(f"={sum(lengths)}i", *chain.from_iterable(prompts))  # takes half the time of numpy
    return PackedRequests(
        first=first,
        prompts=np.frombuffer(content, dtype=np.int32),
        bounds=_offsets(lengths),
        columns=columns,
        keys=np.array(list(map(attrgetter("key"), requests)), dtype=np.uint64),
        samplings=list(known),
        pictures=pictures,
        spans=spans,
    )


def _pack_pictures(requests: Sequence[Request]) -> tuple[list[Picture], list[list[tuple[int, int]]] | None]:
    """The distinct pictures of requests, and the spans of each request with the index of its picture."""
    if not any(request.pictures for request in requests):
        return [], None
    index: dict[int, int] = {}
    pictures: list[Picture] = []
    spans = []
    for request in requests:
        for span in request.pictures:
            if index.setdefault(span.picture.key, len(pictures)) == len(pictures):
                pictures.append(span.picture)
        spans.append([(span.start, index[span.picture.key]) for span in request.pictures])
    return pictures, spans


def _samplings(requests: Sequence[Request]) -> list[SamplingOptions]:
    return list(map(attrgetter("sampling"), requests))


def _all_equal(samplings: Sequence[SamplingOptions]) -> bool:
    """Whether all are equal. Most are the same object, which `count` compares by identity first."""
    return not samplings or samplings.count(samplings[0]) == len(samplings)


def unpack_requests(packed: PackedRequests) -> list[Request]:
    """Unpack requests. Their ids are their numbers."""
    bounds = packed.bounds.tolist()
    prompts = [tuple(packed.prompts[a:b].tolist()) for a, b in zip(bounds, bounds[1:], strict=False)]
    rows = zip(packed.keys.tolist(), *packed.columns.tolist(), strict=True)
    found = [
        Request(str(number), prompts[prompt], packed.samplings[sampling], key, generated, priority, bool(may_continue))
        for number, (key, prompt, sampling, generated, priority, may_continue) in enumerate(rows, packed.first)
    ]
    if packed.spans is None:
        return found
    spans = [tuple(PictureSpan(start, packed.pictures[k]) for start, k in prompt) for prompt in packed.spans]
    return [replace(one, pictures=spans[prompt]) for one, prompt in zip(found, packed.columns[0].tolist(), strict=True)]


def pack_completions(completions: Sequence[Completion]) -> PackedCompletions:
    """Pack completions of requests whose ids are numbers. There are few arrays: each costs the reader as much as many values."""
    rows = [(int(c.id), len(c.tokens), c.version, c.raw_logp is not None) for c in completions]
    raw = [c.raw_logp for c in completions if c.raw_logp is not None]
    return PackedCompletions(
        columns=np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy(),
        finish=[c.finish for c in completions],
        tokens=_concatenate([c.tokens for c in completions], np.int32),
        logp=_concatenate([c.logp for c in completions], np.float32),
        raw_logp=_concatenate(raw, np.float32) if raw else None,
        experts=[c.experts for c in completions] if any(c.experts is not None for c in completions) else None,
    )


def unpack_completions(packed: PackedCompletions, ids: Sequence[str]) -> list[Completion]:
    """Unpack completions, under the original ids of their requests."""
    tokens, logp = packed.tokens, packed.logp
    _, lengths, versions, has_raw = packed.columns
    bounds = _offsets(lengths).tolist()
    columns = zip(ids, packed.finish, versions.tolist(), bounds, bounds[1:], strict=False)
    found = [Completion(id, tokens[a:b], logp[a:b], finish, version) for id, finish, version, a, b in columns]
    if packed.raw_logp is not None:
        chosen = np.flatnonzero(has_raw)
        ends = _offsets(lengths[chosen]).tolist()
        for k, start, stop in zip(chosen.tolist(), ends, ends[1:], strict=False):
            found[k].raw_logp = packed.raw_logp[start:stop]
    for completion, experts in zip(found, packed.experts or (), strict=False):
        completion.experts = experts
    return found


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    bounds = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _concatenate(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype=dtype)
