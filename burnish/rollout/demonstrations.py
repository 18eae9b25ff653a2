"""Demonstrations as trajectories: they join the samples of their prompt and are scored like them, and no engine is asked.

Their tokens count as actions, so that they are in the loss and in the statistics of their group; no version of the policy wrote
them. Their log-prob under whoever did is 0 where nobody knows it: LUFFY (2504.14945) takes the author to be sure.
"""

from __future__ import annotations

import numpy as np

from burnish.core.trajectory import NO_LOGP, OFF_POLICY, TokenSequence, Trajectory
from burnish.data.prompts import Draw
from burnish.data.traces import TracedTokens, Traces
from burnish.models.tokenizer import Tokenizer


class Demonstrations:
    """Up to `each` of them for every draw. A prompt that has more shows others each time it is drawn."""

    def __init__(self, traces: Traces, each: int, tokenizer: Tokenizer) -> None:
        self.traces, self.each, self.tokenizer = traces, each, tokenizer

    def __call__(self, draw: Draw, first: int) -> list[Trajectory]:
        """Those of a draw, numbered as samples from `first` on."""
        found = self.traces.of(draw.prompt.row)
        chosen = [found[(draw.visit * self.each + k) % len(found)] for k in range(min(self.each, len(found)))]
        return [self._trajectory(draw, first + k, traced) for k, traced in enumerate(chosen)]

    def _trajectory(self, draw: Draw, sample: int, traced: TracedTokens) -> Trajectory:
        tokens, start = traced.tokens, traced.num_prompt
        written = np.arange(len(tokens)) >= start
        logp = np.zeros(len(tokens), dtype=np.float32)
        if traced.logp is not None:
            logp[start:] = traced.logp
        return Trajectory(
            prompt_id=draw.prompt.row.id,
            visit=draw.visit,
            sample=sample,
            sequences=[TokenSequence(tokens, written, logp, np.full(len(tokens), -1, dtype=np.int32))],
            finish="stop",
            completion=self.tokenizer.decode(tokens[start:].tolist()),
            metadata={"prompt_length": start, OFF_POLICY: True} | ({NO_LOGP: True} if traced.logp is None else {}),
        )
