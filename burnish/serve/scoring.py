"""Log-probs of given tokens and of their alternatives, by one forward pass over a sequence.

The engine returns the log-prob of the token it drew and of no other. A prompt's log-probs (`echo`) and the alternatives to a drawn token
(`top_logprobs`) are computed here, on the same weights. They agree with the engine's numbers to rounding: the sums of a pass over the whole
sequence are taken in another order, and a cache in 8 bits rounds what the engine reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from burnish.core.engine import SamplingOptions
from burnish.models.decoder import Decoder
from burnish.models.hf import TransformersPolicy
from burnish.rollout.native.sampler import add_bias, truncate

MAX_SCORED = 16384
"""Longest sequence that is scored: it takes one forward pass, whose memory is needed besides the engine's cache."""
ROWS = 256
"""Positions whose logits are in memory at once."""


@dataclass
class Scores:
    """Log-probs of consecutive tokens of a sequence."""

    logp: list[float] = field(default_factory=list)
    """Of the tokens themselves."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each place with their log-probs, the likeliest first; fewer where fewer may be drawn."""


@dataclass(frozen=True)
class Scorer:
    """Scores sequences. The engine samples from the same module, so only the engine's thread may call this."""

    module: Decoder | TransformersPolicy

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], first: int, num_top: int, options: SamplingOptions | None = None) -> Scores:
        """Score the tokens from `first` on: under the model itself, or under the distribution that `options` draw from."""
        device = next(self.module.parameters()).device
        packed = torch.tensor(tokens, device=device)
        found = Scores()
        start = first
        for logits in self._logits(packed, first):
            logp = _log_probs(logits, options)
            drawn = packed[start : start + len(logp)]
            found.logp += logp.gather(1, drawn[:, None])[:, 0].tolist()
            values, ids = logp.topk(min(num_top, logp.shape[1]))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            found.top += [[(i, x) for i, x in zip(*row, strict=True) if x != -torch.inf] for row in pairs]
            start += len(logp)
        return found

    def _logits(self, tokens: Tensor, first: int) -> Iterator[Tensor]:
        """Yield the logits of the positions from `first` on, in order, as [up to ROWS, vocab]."""
        if not isinstance(self.module, Decoder):
            yield from self.module.inner(input_ids=tokens[None], use_cache=False).logits[0, first - 1 : -1].split(ROWS)
            return
        offsets = torch.tensor([0, len(tokens)], device=tokens.device)
        hidden, _ = self.module.states(tokens, offsets, torch.arange(first - 1, len(tokens) - 1, device=tokens.device))
        for part in hidden.split(ROWS):
            yield self.module.logits(part)


def _log_probs(logits: Tensor, options: SamplingOptions | None) -> Tensor:
    """[n, vocab] in float32 at least; as the sampler computes them from the same logits."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if options is None:
        return logits.log_softmax(-1)
    if options.logit_bias:
        logits = add_bias(logits, [options.logit_bias] * len(logits))
    scale = options.temperature or 1.0  # greedy log-probs are untempered

    def column(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=logits.device)

    if options.top_k or options.top_p < 1 or options.min_p > 0:
        tails = column(options.top_k, torch.int64), column(options.top_p), column(options.min_p)
        logits = truncate(logits, column(scale), *tails)
    return (logits / scale).log_softmax(-1)
