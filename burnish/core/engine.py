"""The `Engine` protocol, which every sampler of tokens implements, with its requests and completions. All text is token ids.

A request carries its own random key, so its tokens do not depend on the other requests in the engine. Requests with
equal prompts share one prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from burnish.core.pictures import PictureSpan

CompletionFinish = Literal["stop", "length", "aborted"]
MIN_TEMPERATURE = 1e-5
"""Smallest temperature above 0. Logits divided by it are still finite in float32."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of one request are sampled and when it ends."""

    temperature: float = 1.0
    """0 is greedy decoding. Log-probs are then reported at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    """Tokens with less than this times the probability of the likeliest token are never sampled."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, value added to its logit), applied before temperature and truncation."""
    max_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()
    """The completion ends with, and includes, the first of these tokens."""
    stop: tuple[str, ...] = ()
    """The completion ends with, and includes, the token that completes one of these strings."""
    raw_logprobs: bool = False
    """Also report log-probs of the raw model: at temperature 1, without truncation or bias."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one completion."""

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingOptions
    key: int
    """Random key of this sample (`burnish.core.random_keys.sample_key`)."""
    generated: int = 0
    """Number of tokens of this sample that earlier requests generated (earlier turns, an aborted request).

    The next token takes its random number from this position of the key."""
    priority: int = 0
    """Waiting requests with a higher priority start first."""
    may_continue: bool = False
    """Whether a later request may continue this one. The engine then keeps its KV cache if it can."""
    opponent: int | None = None
    """Version of the earlier weights that answer it, in self-play against opponents; None for the policy."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images of the prompt, in order. Their placeholder tokens are among `tokens`."""


@dataclass(slots=True)
class Completion:
    """The result of a request."""

    id: str
    tokens: np.ndarray  # integers: the generated tokens, without the prompt
    logp: np.ndarray  # float32: log-prob of each token under the distribution it was sampled from
    finish: CompletionFinish
    version: int
    """Version of the weights that generated it."""
    raw_logp: np.ndarray | None = field(default=None, kw_only=True)
    """float32: log-probs of the raw model. None unless `raw_logprobs` was set."""
    experts: np.ndarray | None = field(default=None, kw_only=True)
    """int16 [prompt and generated tokens, layers, k]: the experts that computed each token (`core/routed_experts.py`). None unless recorded."""


class Engine(Protocol):
    """The methods of every inference engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises at once if one of them can never run."""

    def stream(self) -> Iterator[Completion]:
        """Yield completions as they finish, until no request is left. Requests may be submitted meanwhile."""

    def interrupt(self) -> None:
        """Make the current or next `stream` end after its current step, or steps, if a call of the engine takes several of a small model.

        A later `stream` continues the requests. May be called from another thread. A server uses it to handle other calls between two completions.
        """

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        """Stop requests. With `keep`, return their partial completions; otherwise discard them."""

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights.

        Without tensors, an engine that can reach the learner's weights uses those (shares, copies or fetches them), as `version`.
        """

    def sleep(self) -> None:
        """Release memory until `wake`."""

    def wake(self) -> None:
        """Prepare to sample again after `sleep`."""
