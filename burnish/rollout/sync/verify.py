"""Whether an engine has the weights it was sent: by version, by the bits of every tensor, and by what it samples.

Checksums are of the engine's parameters after they were written, so they also find what a faulty copy did. The probe is a
fixed prompt that the engine continues greedily: its log-probs must be those the trainer gives the same tokens, or the engine
samples with something else than its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.core.keys import fold
from burnish.rollout.sync.buckets import Publication

PROBE_TOKENS, PROBE_NEW = 8, 4
TOLERANCE = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""How far the log-probs of two ways to compute them may be apart, by the type of the weights."""


class SyncError(UserError):
    """An engine does not have the weights it was sent."""


@dataclass(frozen=True)
class Report:
    """What an engine says after it took weights."""

    version: int
    digest: int
    """Of the checksums of its parameters, as they are now."""
    tokens: tuple[int, ...]
    """How it continued the probe."""
    logp: np.ndarray  # float32


def probe(vocab_size: int, max_positions: int | None) -> Request:
    """A prompt that every engine of a run is asked; its tokens depend on the vocabulary alone."""
    length = PROBE_TOKENS if max_positions is None else max(1, min(PROBE_TOKENS, max_positions - PROBE_NEW - 1))
    tokens = tuple(fold("probe", k) % vocab_size for k in range(length))
    return Request("probe", tokens, SamplingOptions(temperature=0.0, max_tokens=PROBE_NEW), key=0)


def check_version(engine: int, sent: Publication, report: Report | None) -> Report:
    """The report; raises if there is none, or the engine has another version than was published."""
    if report is not None and report.version == sent.version:
        return report
    names = list(sent.checksums)
    old = f"tensor {names[0]} and {len(names) - 1} more there are old" if names else "nothing is new in it"
    if report is None:
        raise SyncError(f"engine {engine} was not sent version {sent.version} of the weights: {old}")
    raise SyncError(
        f"engine {engine} has version {report.version} of the weights, and {sent.version} was published: {old}"
    )


def wrong_tensors(engine: int, sent: Publication, found: Mapping[str, int]) -> SyncError:
    """The error for an engine whose tensors have these checksums and not those that were published."""
    wanted = sent.checksums
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    extra = sorted(found.keys() - wanted.keys())
    name, count = (wrong or extra or ["none"])[0], len(wrong or extra)
    why = "is not what the trainer has" if wrong else "was never sent"
    return SyncError(
        f"engine {engine}, version {sent.version}: tensor {name} {why} ({count} of {len(found)} tensors); the run stops before "
        "anything it samples is used"
    )


def until_parted(report: Report, tokens: Sequence[int], expected: Sequence[float]) -> tuple[Report, Sequence[float]]:
    """A report, and log-probs of another continuation, up to the first token that is not the same."""
    pairs = enumerate(zip(report.tokens, tokens, strict=False))
    stop = next((k + 1 for k, (one, other) in pairs if one != other), len(tokens))
    return replace(report, tokens=report.tokens[:stop], logp=report.logp[:stop]), expected[:stop]


def check_probe(engine: int, report: Report, expected: Sequence[float], dtype: str) -> None:
    """Raise if what an engine samples with is not what the trainer computes with."""
    gaps = np.abs(report.logp.astype(np.float64) - np.asarray(expected, dtype=np.float64))
    if len(expected) != len(report.logp) or not (gaps <= TOLERANCE[dtype]).all():
        worst = int(gaps.argmax()) if len(gaps) else 0
        raise SyncError(
            f"engine {engine}, version {report.version}: token {worst + 1} of the probe has log-prob {report.logp[worst]:.5f} there and "
            f"{expected[worst]:.5f} at the trainer, though all tensors are the same: the engine samples with something else"
        )
