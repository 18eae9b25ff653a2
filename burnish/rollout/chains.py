"""Answers cut into segments, and the values of the states between them (SPO-chain, 2505.23564).

A sample is cut where the policy was unsure (`algorithms/advantages/splits.py`). From every border answers are continued and scored
like any other; their mean reward is the border's value. Samples that have a beginning in common share the answers continued from
it. The random keys of those follow from the state, the tokens of the answer so far, and their number: not from the sample that came
there, nor from who else did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from burnish.algorithms.advantages import cutpoints
from burnish.core.batch import Batch
from burnish.core.branches import BORDER_VALUES, BORDERS
from burnish.core.engine import SamplingOptions
from burnish.core.keys import fold, sample_key
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Draw
from burnish.rollout.flight import Flight

STATES, STATE = "border_states", "state"
"""In the metadata: of a sample the names of the states before its segments, of an answer the state it was continued from."""
FIRST = -2
"""The sample index of the first answer continued for a value; the next ones count down, so that none is a sample's or the greedy one's."""


@dataclass(frozen=True)
class Chain:
    """How answers are cut and valued."""

    below: float
    """Tokens that were sampled with a smaller probability are cut points."""
    every: int
    """A segment begins with every so-manieth of them."""
    rollouts: int
    """Answers continued from each border."""


@dataclass(frozen=True)
class Beginning:
    """The first tokens of an answer, to be continued."""

    draw: Draw
    sample: int
    tokens: tuple[int, ...]
    key: int
    state: str


def cut(samples: Sequence[Trajectory], chain: Chain) -> None:
    """Write into each sample where its segments start and which states are before them."""
    sequences = [sample.sequences[-1] for sample in samples]
    columns = {
        name: torch.from_numpy(np.concatenate([getattr(s, name) for s in sequences]))
        for name in ("tokens", "action_mask", "behaviour_logp")
    }
    offsets = offsets_from_lengths(torch.tensor([len(s.tokens) for s in sequences]))
    _, starts = cutpoints(Batch(columns.pop("tokens"), offsets, columns), chain.below, chain.every)
    bounds, firsts = starts.offsets.tolist(), offsets.tolist()
    for k, sample in enumerate(samples):
        places = [place - firsts[k] for place in starts.values[bounds[k] : bounds[k + 1]].tolist()]
        sample.metadata |= {BORDERS: places, STATES: _states(sample, places)}


def _states(sample: Trajectory, places: Sequence[int]) -> list[str]:
    """A name for the answer up to each of the places, equal for equal tokens."""
    tokens, at, digest = sample.sequences[-1].tokens, sample.metadata["prompt_length"], hashlib.blake2b(digest_size=8)
    names = []
    for place in places:
        digest.update(tokens[at:place].astype("<i8").tobytes())
        names.append(digest.copy().hexdigest())
        at = place
    return names


def beginnings(samples: Sequence[Trajectory], draws: Sequence[Draw], chain: Chain, seed: int) -> list[Beginning]:
    """What is to be continued for the values of all borders of the samples, every state of a prompt once."""
    of_draw = {(draw.prompt.row.id, draw.visit): draw for draw in draws}
    found: list[Beginning] = []
    seen: dict[tuple[str, int], dict[str, None]] = {}
    for sample in samples:
        name = sample.prompt_id, sample.visit
        known, prompt = seen.setdefault(name, {}), sample.metadata["prompt_length"]
        for place, state in zip(sample.metadata[BORDERS], sample.metadata[STATES], strict=True):
            if state in known:
                continue
            number, known[state] = FIRST - chain.rollouts * len(known), None
            tokens = tuple(sample.sequences[-1].tokens[prompt:place].tolist())
            for k in range(chain.rollouts):
                key = fold(sample_key(seed, "baseline", *name, k), int(state, 16))
                found.append(Beginning(of_draw[name], number - k, tokens, key, state))
    return found


class ContinuedFlight(Flight):
    """Answers on their way whose first tokens are given."""

    def add_beginning(self, beginning: Beginning, sampling: SamplingOptions) -> None:
        """An answer that goes on from there, set aside; `sampling` is that of a whole answer."""
        failed = self.add(beginning.draw, beginning.sample, sampling, "baseline")
        assert failed is None, "the environment has started for the sample already"
        one = self.aside[-1]
        one.key = beginning.key
        one.append(beginning.tokens)  # as context: what this answer adds is counted, not what it begins with
        one.drawn = one.partial = len(beginning.tokens)


def share_values(samples: Sequence[Trajectory], continued: Sequence[Trajectory]) -> None:
    """Write the values of its borders into each sample: the mean rewards of the answers continued from there.

    Where none of a border's could be scored the sample cannot be judged, and counts as failed too.
    """
    rewards: dict[tuple[str, int, str], list[float]] = {}
    for answer in continued:
        of_state = rewards.setdefault((answer.prompt_id, answer.visit, answer.metadata[STATE]), [])
        if answer.reward is not None:
            of_state.append(answer.reward)
    for sample in samples:
        found = [rewards[sample.prompt_id, sample.visit, state] for state in sample.metadata[STATES]]
        if all(found):
            sample.metadata[BORDER_VALUES] = [sum(values) / len(values) for values in found]
        elif sample.reward is not None:
            failed = next(t for t in continued if t.reward is None)
            sample.reward = sample.accuracy = None
            sample.error = f"not one answer continued from one of its borders could be scored: {failed.error}"
