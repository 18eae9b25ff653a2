"""Rollouts by SGLang servers, behind the engine's protocol.

Each request in flight is one HTTP call of `/generate` in a thread of its own, at most `max_rows` at once, dealt to the server
with least work; the servers batch what they are sent. Calls do not stream: an aborted one is answered with what it has, and a
stream's format differs from version to version. What fails is sent again, to another server where there is one.

Contract: log-probs are those of the distribution each token was drawn from, or the request is refused by `submit`
(`check.py` finds out what a server can do). A request's key becomes its `sampling_seed`, which a server honours only with
--enable-deterministic-inference. Every answer says which weights wrote it: one of other weights than those handed over (a
server that was restarted) is not used.
"""

from __future__ import annotations

import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.sglang.request_sender import (
    ABORT_TIMEOUT_S,
    InFlightRequest,
    RequestSender,
    ServerPool,
    ServerState,
    retry_while_unreachable,
)
from burnish.inference.sglang.sglang_requests import ServerError, call, check_url
from burnish.inference.sglang.sglang_servers import (
    SglangServerInfo,
    check_options,
    check_request,
    inspect_server,
    remove,
    update_server,
    write_weights,
)

ABORT_RETRY_S = 0.25
"""An abort that overtakes its request is not heard, so it is said again."""
MEMORY_TIMEOUT_S = 60.0

EndedRequest = tuple[InFlightRequest, Completion | UserError]


class SglangEngine:
    """Servers of one model. `decode` finds a stop string that a completion's last token made.

    `weights` gives the policy's tensors under Hugging Face's names: `load` takes them where it is handed none, and the first
    request waits until the servers have them, whatever they were started with.
    """

    def __init__(
        self,
        urls: Sequence[str],
        vocab_size: int,
        max_rows: int,
        decode: Callable[[list[int]], str],
        timeout_s: float = 1800.0,
        weights_dir: str | None = None,
        weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        addresses = [check_url(url) for url in urls]
        self.vocab_size, self.max_rows, self.timeout_s = vocab_size, max_rows, timeout_s
        self.pool = ServerPool([inspect_server(url, vocab_size) for url in addresses])
        self.version = 0
        self._weights = weights
        self._changed = threading.Condition()
        self._sender = RequestSender(self.pool, self._changed, vocab_size, decode, timeout_s)
        self._name = uuid.uuid4().hex[:8]
        self._label: str | None = None
        self._folder: Path | None = None  # of the weights handed over last
        if weights_dir is None:
            self._root = Path(tempfile.mkdtemp(prefix="burnish-weights-"))
            weakref.finalize(self, remove, self._root)
        else:
            self._root = Path(weights_dir).absolute()
        self._waiting: deque[Request] = deque()
        self._running: dict[str, InFlightRequest] = {}
        self._ready: deque[EndedRequest] = deque()
        self._interrupted = False
        self._asleep = False

    @property
    def servers(self) -> list[SglangServerInfo]:
        """Those that are not lost."""
        return [place.facts for place in self.pool.present]

    def check_options(self, options: SamplingOptions, who: str) -> None:
        """Raise for options of which a server would report the wrong log-probs."""
        check_options(options, self.servers, who)

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        with self._changed:
            known = self._known()
            for request in requests:
                if request.id in known:
                    raise ValueError(f"request {request.id} is already running")
                known.add(request.id)
                check_request(request, self.servers, self.vocab_size)
        if self._label is None and self._weights is not None:
            self.load(self.version, ())
        self.wake()
        with self._changed:
            self._waiting = deque(sorted([*self._waiting, *requests], key=lambda r: -r.priority))
            self._start()

    def stream(self) -> Iterator[Completion]:
        """A request that failed for good raises, once; the others go on in the next stream."""
        while (item := self._next()) is not None:
            if isinstance(item, UserError):
                raise item
            yield item

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        """What a server does not answer in time is given up, with the tokens it had sent before."""
        wanted = set(ids)
        with self._changed:
            if unknown := wanted - self._known():
                raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
            stopped = [InFlightRequest(r, self.version, None) for r in self._waiting if r.id in wanted]
            self._waiting = deque(r for r in self._waiting if r.id not in wanted)
            flights = [flight for name, flight in self._running.items() if name in wanted]
        for flight in flights:
            flight.stopped.set()
        self._say_abort(flights)
        with self._changed:
            for flight in self._left(flights):  # given up: whatever comes of it is not heard
                del self._running[flight.request.id]
                stopped.append(flight)
            ended = [item for item in self._ready if item[0].request.id in wanted]
            self._ready = deque(item for item in self._ready if item[0].request.id not in wanted)
            self._start()
        kept = [end if isinstance(end, Completion) else flight.completion("aborted") for flight, end in ended]
        return [*kept, *(flight.completion("aborted") for flight in stopped)] if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._check_idle("new weights while {} rows are running: finish or abort them first")
        given = iter(named_tensors)
        first = next(given, None)
        tensors = chain([first], given) if first is not None else self._weights() if self._weights is not None else ()
        label = f"{self._name}-{version}"
        folder = self._root / f"burnish-{label}-{uuid.uuid4().hex[:4]}"
        try:
            write_weights(folder, tensors)
            with ThreadPoolExecutor(len(self.pool.places)) as workers:
                list(workers.map(lambda place: self._update(place, folder, label), self.pool.places))
            self.pool.pick()  # raises where none is left
        except BaseException:
            remove(folder)
            raise
        if self._folder is not None:
            remove(self._folder)
        self._folder, self._label, self.version = folder, label, version

    def sleep(self) -> None:
        """The memory of the caches, of servers that run with --enable-memory-saver. Weights stay: what is released is lost."""
        self._check_idle("the engine cannot sleep with {} requests unfinished")
        self._memory("/release_memory_occupation")
        self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._memory("/resume_memory_occupation")
            self._asleep = False

    # --- requests in flight ------------------------------------------------------------------------------------------

    def _known(self) -> set[str]:
        ended = {flight.request.id for flight, _ in self._ready}
        return {r.id for r in self._waiting} | self._running.keys() | ended

    def _left(self, flights: list[InFlightRequest]) -> list[InFlightRequest]:
        return [flight for flight in flights if self._running.get(flight.request.id) is flight]

    def _check_idle(self, words: str) -> None:
        with self._changed:
            if num := len(self._running) + len(self._waiting):
                raise RuntimeError(words.format(num))

    def _start(self) -> None:
        """Send what waits while there is room. Call it with the lock."""
        while self._waiting and len(self._running) < self.max_rows:
            request = self._waiting.popleft()
            flight = InFlightRequest(request, self.version, self._label)
            self._running[request.id] = flight
            threading.Thread(target=self._fly, args=(flight,), name=f"sglang {request.id}", daemon=True).start()
        self._changed.notify_all()

    def _fly(self, flight: InFlightRequest) -> None:
        name = flight.request.id
        try:
            end: Completion | UserError = self._sender.run(flight)
        except UserError as error:
            end = error
        except Exception as error:  # noqa: BLE001 (whoever streams hears of it; a thread has nobody else to tell)
            end = UserError(f"request {name}: {type(error).__name__}: {error}")
            end.__cause__ = error
        with self._changed:
            if self._running.get(name) is flight:
                del self._running[name]
                self._ready.append((flight, end))
            self._start()

    def _next(self) -> Completion | UserError | None:
        with self._changed:
            while not self._ready and (self._running or self._waiting) and not self._interrupted:
                self._changed.wait()  # every flight has a deadline
            if self._ready:
                return self._ready.popleft()[1]
            self._interrupted = False
            return None

    def _say_abort(self, flights: list[InFlightRequest]) -> None:
        """Until all have ended, or for so long as a server may take."""
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        while time.monotonic() < deadline:
            with self._changed:
                left = self._left(flights)
                sent = [flight.sent for flight in left if flight.sent is not None]
            if not left:
                return
            for place, rid in sent:
                if (rest := deadline - time.monotonic()) > 0:
                    self._sender.abort(place, rid, rest)
            with self._changed:
                self._changed.wait_for(lambda: not self._left(flights), ABORT_RETRY_S)

    # --- the servers -------------------------------------------------------------------------------------------------

    def _update(self, place: ServerState, folder: Path, label: str) -> None:
        """New weights to a server. One that was lost is looked at again first; what another refuses is the user's to mend."""
        facts = place.facts
        try:
            if place.is_lost:
                facts = inspect_server(facts.url, self.vocab_size)
            retry_while_unreachable(lambda: update_server(facts.url, folder, label, self.timeout_s))
        except UserError:
            if not place.is_lost:
                raise
        except ServerError as error:
            with self._changed:
                place.last = error.what
                self.pool.lose(place)
        else:
            with self._changed:
                self.pool.found(place, facts)

    def _memory(self, path: str) -> None:
        for facts in self.servers:
            if facts.can_sleep:
                try:
                    call(facts.url, path, MEMORY_TIMEOUT_S, {"tags": ["kv_cache"]})
                except ServerError as error:
                    raise UserError(str(error)) from error
