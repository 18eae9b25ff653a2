"""The contract between whoever wants tokens and whoever samples them. Token ids in, token ids out.

A request carries its own random key, so its tokens do not depend on what else the engine is doing. Requests with
equal prompts share the work of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

CompletionFinish = Literal["stop", "length", "aborted"]


MIN_TEMPERATURE = 1e-5
"""Above 0: what logits are divided by must leave them finite in float32."""


@dataclass(frozen=True)
class SamplingOptions:
    """How the tokens of one request are drawn and when it ends."""

    temperature: float = 1.0
    """0 takes the most likely token; its log-prob is then reported under the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is no limit."""
    min_p: float = 0.0
    """Tokens less likely than this times the likeliest are not drawn."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit) before temperature and truncation."""
    max_tokens: int = 256
    stop_tokens: tuple[int, ...] = ()
    """A stop token is part of the completion."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings."""
    raw_logprobs: bool = False
    """Also report log-probs of the model itself: at temperature 1, without truncation or bias."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion wanted."""

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingOptions
    key: int
    """Random key of this sample (`burnish.core.random_keys.sample_key`)."""
    generated: int = 0
    """How many of this sample's tokens were drawn before (a later turn, a continued partial): noise goes on there."""
    priority: int = 0
    """Among those that wait, a higher number goes first."""
    goes_on: bool = False
    """Whether another request may continue this one: an engine keeps what it computed, where it can, and does not compute it again."""


@dataclass(slots=True)
class Completion:
    """What came of a request."""

    id: str
    tokens: np.ndarray  # integers, the new tokens only
    logp: np.ndarray  # float32, under the distribution each was sampled from
    finish: CompletionFinish
    version: int
    """Version of the weights that wrote it."""
    raw_logp: np.ndarray | None = field(default=None, kw_only=True)
    """float32, under the model itself, where the request asked for it."""


class Engine(Protocol):
    """What every engine can do."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; raises at once for one that can never run."""

    def stream(self) -> Iterator[Completion]:
        """Completions as they finish, until nothing is left; requests may be submitted meanwhile."""

    def interrupt(self) -> None:
        """Make `stream`, or the next one, end after the step it is in, whatever is left; a later `stream` goes on.

        May be called from another thread: it is how a server gets a word in between two completions.
        """

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        """Stop requests; with `keep` return what they have, else nothing of them remains."""

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights. An engine that reads the learner's own tensors takes an empty iterable and the version."""

    def sleep(self) -> None:
        """Give memory back until `wake`."""

    def wake(self) -> None:
        """Be ready to sample again."""
