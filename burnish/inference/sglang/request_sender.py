"""A request on its way: sent, sent again when something fails, continued where a server left off, until its deadline."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, CompletionFinish, Request, SamplingOptions
from burnish.inference.sglang.sglang_requests import (
    GENERATE,
    GenerateResult,
    ServerError,
    call,
    generate_body,
    is_truncated,
    needs_scoring,
    read_generation,
    read_scores,
    scoring_body,
)
from burnish.inference.sglang.sglang_servers import SglangServerInfo

# --- The servers an engine has: which one gets the next request, which ones are lost.

LOST_AFTER_S = 3.0
"""A server that cannot be reached for so long is lost: a moment's refusal is none."""
RECONNECT_S = 0.25

logger = logging.getLogger(__name__)


def retry_while_unreachable(action: Callable[[], None]) -> None:
    """Do it, again while the server is out of reach and not lost."""
    deadline = time.monotonic() + LOST_AFTER_S
    while True:
        try:
            action()
            return
        except ServerError as error:
            if error.kind != "unreachable" or time.monotonic() > deadline:
                raise
        time.sleep(RECONNECT_S)


@dataclass
class ServerState:
    """A server and how it is doing."""

    facts: SglangServerInfo
    num_requests: int = 0
    down_since: float | None = None
    is_lost: bool = False
    last: str = ""
    """What went wrong last."""


class ServerPool:
    """The places of an engine. The caller holds its lock."""

    def __init__(self, servers: Sequence[SglangServerInfo]) -> None:
        self.places = [ServerState(facts) for facts in servers]

    @property
    def present(self) -> list[ServerState]:
        """Those that are not lost."""
        return [place for place in self.places if not place.is_lost]

    def pick(self, avoid: ServerState | None = None) -> ServerState:
        """The one with least work, and not `avoid` where there is another; a server that just failed comes last."""
        if not self.present:
            told = "; ".join(f"{p.facts.url}: {p.last}" for p in self.places)
            raise UserError(f"no SGLang server is left ({told}); look at its log, start it again, and resume the run")
        return min(self.present, key=lambda p: (p is avoid, p.down_since is not None, p.num_requests))

    def went_well(self, place: ServerState) -> None:
        """It answered."""
        place.down_since = None

    def went_wrong(self, place: ServerState, error: ServerError) -> None:
        """It did not; one that has been out of reach for long enough is lost."""
        place.last = error.what
        if error.kind != "unreachable":
            return
        now = time.monotonic()
        if place.down_since is None:
            place.down_since = now
        elif now - place.down_since > LOST_AFTER_S:
            self.lose(place)

    def lose(self, place: ServerState) -> None:
        """Use it no more, until it has been sent new weights."""
        if not place.is_lost:
            place.is_lost = True
            logger.warning(
                "SGLang server %s is lost (%s); %d others go on", place.facts.url, place.last, len(self.present)
            )

    def found(self, place: ServerState, facts: SglangServerInfo) -> None:
        """A lost one is back."""
        place.facts, place.is_lost, place.down_since = facts, False, None


MAX_TRIES = 4
"""How often a call may fail on servers that can be reached."""
RETRY_WAIT_S = 0.25
"""Before the second try; each wait is twice the one before, at most `LONGEST_WAIT_S`."""
MAX_RETRY_WAIT_S = 2.0
ABORT_TIMEOUT_S = 20.0
"""How long a server may take to answer what was aborted."""


Result = TypeVar("Result", GenerateResult, list[float])


@dataclass(eq=False)
class InFlightRequest:
    """What is known of a request in flight."""

    request: Request
    version: int
    label: str | None
    """Of the weights that may write it; None while the servers have those they started with."""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] | None = None
    """Where they were asked for, and are not those of `logp`."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set when it is aborted."""
    sent: tuple[ServerState, str] | None = None
    """Where it is now, under which name."""

    def completion(self, finish: CompletionFinish) -> Completion:
        """What it has."""
        tokens, logp = np.array(self.tokens, dtype=np.int64), np.array(self.logp, dtype=np.float32)
        raw = None
        if self.raw_logp is not None:
            raw = np.array(self.raw_logp, dtype=np.float32)
        elif self.request.sampling.raw_logprobs:  # unknown, where the tokens were never scored
            raw = np.full_like(logp, np.nan) if needs_scoring(self.request.sampling) else logp.copy()
        return Completion(self.request.id, tokens, logp, finish, self.version, raw_logp=raw)


class RequestSender:
    """Brings flights to their end. `lock` guards the pool and where flights are."""

    def __init__(
        self,
        pool: ServerPool,
        lock: threading.Condition,
        vocab_size: int,
        decode: Callable[[list[int]], str],
        timeout_s: float,
    ) -> None:
        self.pool, self.lock, self.vocab_size, self.decode, self.timeout_s = pool, lock, vocab_size, decode, timeout_s

    def run(self, flight: InFlightRequest) -> Completion:
        """A request to its end, in as many calls as it takes; the error that names server and request where there is none."""
        request, deadline, idle = flight.request, time.monotonic() + self.timeout_s, 0
        finish: CompletionFinish | None = None
        with_mask = is_truncated(request.sampling)
        while finish is None and not flight.stopped.is_set():
            piece = self._ask(
                flight,
                lambda rid: generate_body(request, flight.tokens, rid, self.vocab_size, with_mask),
                lambda url, answer: read_generation(url, answer, with_mask),
                deadline,
            )
            if piece is None:
                break
            flight.tokens += piece.tokens
            flight.logp += piece.logp
            finish = self._finish(flight, piece)
            idle += not piece.tokens
            if finish is None and idle >= MAX_TRIES:
                raise UserError(f"request {request.id}: SGLang servers abort it again and again")
        if flight.tokens and needs_scoring(request.sampling):
            flight.raw_logp = self._ask(
                flight, lambda rid: scoring_body(request, flight.tokens, rid), read_scores, deadline, is_stoppable=False
            )
        return flight.completion(finish or "aborted")

    def abort(self, place: ServerState, rid: str, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """Tell a server to stop a call; the call itself says whether it did."""
        try:
            call(place.facts.url, "/abort_request", timeout_s, {"rid": rid})
        except ServerError as error:
            place.last = error.what

    def _ask(
        self,
        flight: InFlightRequest,
        body: Callable[[str], dict[str, Any]],
        read: Callable[[str, Any], tuple[Result, str | None]],
        deadline: float,
        is_stoppable: bool = True,
    ) -> Result | None:
        """One call of `/generate` by whichever server can; None where the flight was stopped between two tries."""
        failed, wait = 0, RETRY_WAIT_S
        avoid: ServerState | None = None
        while not (is_stoppable and flight.stopped.is_set()):
            # Names are all of one length: a server aborts every request whose name begins like the one it is given.
            rid = uuid.uuid4().hex
            with self.lock:
                place = self.pool.pick(avoid)
                place.num_requests += 1
                flight.sent = (place, rid) if is_stoppable else None
            try:
                return self._call(flight, place, rid, body(rid), read, deadline)
            except ServerError as error:
                with self.lock:
                    self.pool.went_wrong(place, error)
                avoid = place
                failed += error.kind != "unreachable"  # one that is out of reach is asked until it is lost
                if error.kind in ("refused", "late") or failed >= MAX_TRIES or time.monotonic() + wait > deadline:
                    tried = f" (tried {failed} times)" if failed > 1 else ""
                    raise UserError(f"request {flight.request.id}: {error}{tried}") from error
            flight.stopped.wait(wait)
            wait = min(2 * wait, MAX_RETRY_WAIT_S)
        return None

    def _call(
        self,
        flight: InFlightRequest,
        place: ServerState,
        rid: str,
        body: dict[str, Any],
        read: Callable[[str, Any], tuple[Result, str | None]],
        deadline: float,
    ) -> Result:
        url = place.facts.url
        try:
            answer = call(url, GENERATE, max(0.001, deadline - time.monotonic()), body)
            result, weights = read(url, answer)
        except ServerError as error:
            if error.kind == "late":
                self.abort(place, rid)
            raise
        finally:
            with self.lock:
                place.num_requests -= 1
                flight.sent = None
        with self.lock:
            self.pool.went_well(place)
            if flight.label is not None and weights != flight.label:
                place.last = f"it has weights {weights!r} where {flight.label!r} were handed over: it was restarted, or updated by another"
                self.pool.lose(place)
                raise ServerError("unreachable", url, GENERATE, place.last)
        return result

    def _finish(self, flight: InFlightRequest, piece: GenerateResult) -> CompletionFinish | None:
        """How a request ended with this piece; None where it has to go on."""
        options, tokens = flight.request.sampling, flight.tokens
        if tokens and (tokens[-1] in options.stop_tokens or self._hits_stop(options, tokens)):
            return "stop"  # also at the limit, where a server says `length`
        if len(tokens) >= options.max_tokens:
            return "length"
        if piece.reason == "length":
            raise UserError(
                f"request {flight.request.id}: SGLang server {piece.url} ended it after {len(tokens)} of {options.max_tokens} tokens; "
                "start it with a larger --context-length, or a larger --mem-fraction-static if its cache is smaller than that"
            )
        if piece.reason == "abort" and flight.stopped.is_set():
            return "aborted"
        return None  # aborted by somebody else, or at an end token of the model that the request does not name

    def _hits_stop(self, options: SamplingOptions, tokens: list[int]) -> bool:
        if not options.stop:
            return False
        tail = max(len(s.encode()) for s in options.stop) + 8  # tokens that the string and those without text can span
        text = self.decode(tokens[-tail:])
        return any(s in text for s in options.stop)
