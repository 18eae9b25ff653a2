"""SGLang servers as one engine.

Each request in flight is one call of `/generate` in its own thread, at most `max_rows` at a time, sent to the server with the
least work; the servers batch what they get. Calls do not stream: an aborted call is answered with the tokens so far, and the
format of streams differs between versions. A failed call is sent again, to another server if there is one.

Log-probs are those of the distribution that each token was drawn from, or `submit` refuses the request (`sglang_servers.py`
inspects what a server can do). A request's key becomes its `sampling_seed`, which a server honours only with
--enable-deterministic-inference. Every answer names the weights that wrote it. An answer of other weights than those sent, as of a
restarted server, is not used.

`/update_weights_from_disk` needs a folder that this process writes and the servers read: on one machine any folder (in memory,
such as /dev/shm, is fastest), else a shared file system. `/update_weights_from_tensor` would need SGLang's own serializer here.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.engine_common import check_requests, enqueue_by_priority
from burnish.inference.server_client import ServerError, write_weight_files
from burnish.inference.sglang.sglang_requests import ABORT_TIMEOUT_S, InFlightRequest, RequestSender
from burnish.inference.sglang.sglang_servers import (
    SGLANG,
    ServerPool,
    ServerState,
    SglangServerInfo,
    check_options,
    check_request,
    inspect_server,
    retry_while_unreachable,
    weight_label,
)

UPDATE_WEIGHTS = "/update_weights_from_disk"
FLUSH_TIMEOUT_S = 30.0
FLUSH_POLL_S = 0.2
ABORT_RETRY_S = 0.25
"""Seconds between two aborts. One that arrives before its request has no effect, so it is repeated."""
MEMORY_TIMEOUT_S = 60.0

EndedRequest = tuple[InFlightRequest, Completion | UserError]


class SglangEngine:
    """Samples from servers of one model. `decode` is for stop strings.

    `weights` yields the policy's tensors under Hugging Face's names. `load` sends them if it gets no tensors, and the first request
    waits until the servers have them.
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
        addresses = [SGLANG.check_url(url) for url in urls]
        self.vocab_size, self.max_rows, self.timeout_s = vocab_size, max_rows, timeout_s
        self.pool = ServerPool([inspect_server(url, vocab_size) for url in addresses])
        self.version = 0
        self._weights = weights
        self._changed = threading.Condition()
        self._sender = RequestSender(self.pool, self._changed, vocab_size, decode, timeout_s)
        self._name = uuid.uuid4().hex[:8]
        self._label: str | None = None
        self._folder: Path | None = None  # of the weights sent last
        if weights_dir is None:
            self._root = Path(tempfile.mkdtemp(prefix="burnish-weights-"))
            weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        else:
            self._root = Path(weights_dir).absolute()
        self._waiting: deque[Request] = deque()
        self._waiting_ids: set[str] = set()
        self._running: dict[str, InFlightRequest] = {}
        self._ready: deque[EndedRequest] = deque()
        self._interrupted = False
        self._asleep = False

    @property
    def servers(self) -> list[SglangServerInfo]:
        """The servers that are not lost."""
        return [server.info for server in self.pool.present]

    def check_options(self, options: SamplingOptions, who: str) -> None:
        """Raise for options with which a server would report the wrong log-probs."""
        check_options(options, self.servers, who)

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        with self._changed:
            check = partial(check_request, servers=self.servers, vocab_size=self.vocab_size)
            undelivered = {flight.request.id for flight, _ in self._ready}
            check_requests(requests, (self._waiting_ids, self._running, undelivered), check)
        if self._label is None and self._weights is not None:
            self.load(self.version, ())
        self.wake()
        with self._changed:
            enqueue_by_priority(self._waiting, requests)
            self._waiting_ids.update(request.id for request in requests)
            self._start()

    def stream(self) -> Iterator[Completion]:
        """Yield completions. A failed request raises once; the others continue in the next stream."""
        while (item := self._next()) is not None:
            if isinstance(item, UserError):
                raise item
            yield item

    def interrupt(self) -> None:
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        """Abort requests. One that a server does not answer in time is dropped, with the tokens it had sent before."""
        wanted = set(ids)
        with self._changed:
            if unknown := wanted - self._known():
                raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
            stopped = [InFlightRequest(r, self.version, None) for r in self._waiting if r.id in wanted]
            self._waiting = deque(r for r in self._waiting if r.id not in wanted)
            self._waiting_ids -= wanted
            running = [flight for name, flight in self._running.items() if name in wanted]
        for flight in running:
            flight.aborted.set()
        self._send_aborts(running)
        with self._changed:
            for flight in self._still_running(running):  # dropped: a later answer is ignored
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
            write_weight_files(folder, tensors)
            with ThreadPoolExecutor(len(self.pool.servers)) as workers:
                list(workers.map(lambda server: self._update(server, folder, label), self.pool.servers))
            self.pool.pick()  # raises if none is left
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._label, self.version = folder, label, version

    def sleep(self) -> None:
        """Free the KV caches of servers with --enable-memory-saver. Weights stay: released weights would be lost."""
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
        return self._waiting_ids | self._running.keys() | ended

    def _still_running(self, flights: list[InFlightRequest]) -> list[InFlightRequest]:
        return [flight for flight in flights if self._running.get(flight.request.id) is flight]

    def _check_idle(self, words: str) -> None:
        with self._changed:
            if num := len(self._running) + len(self._waiting):
                raise RuntimeError(words.format(num))

    def _start(self) -> None:
        """Start waiting requests up to `max_rows`. The caller holds the lock."""
        while self._waiting and len(self._running) < self.max_rows:
            request = self._waiting.popleft()
            self._waiting_ids.discard(request.id)
            flight = InFlightRequest(request, self.version, self._label)
            self._running[request.id] = flight
            threading.Thread(target=self._run, args=(flight,), name=f"sglang {request.id}", daemon=True).start()
        self._changed.notify_all()

    def _run(self, flight: InFlightRequest) -> None:
        name = flight.request.id
        try:
            end: Completion | UserError = self._sender.run(flight)
        except UserError as error:
            end = error
        except Exception as error:  # noqa: BLE001 (raised by `stream`)
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
                self._changed.wait()  # every request has a deadline
            if self._ready:
                return self._ready.popleft()[1]
            self._interrupted = False
            return None

    def _send_aborts(self, flights: list[InFlightRequest]) -> None:
        """Send aborts until all requests have ended, for at most `ABORT_TIMEOUT_S`."""
        deadline = time.monotonic() + ABORT_TIMEOUT_S
        while time.monotonic() < deadline:
            with self._changed:
                left = self._still_running(flights)
                sent = [flight.sent for flight in left if flight.sent is not None]
            if not left:
                return
            for server, rid in sent:
                if (rest := deadline - time.monotonic()) > 0:
                    self._sender.abort(server, rid, rest)
            with self._changed:
                self._changed.wait_for(lambda: not self._still_running(flights), ABORT_RETRY_S)

    # --- the servers -------------------------------------------------------------------------------------------------

    def _update(self, server: ServerState, folder: Path, label: str) -> None:
        """Send new weights to a server. A lost server is inspected first and may fail; a refusal of another one is an error."""
        info = server.info
        try:
            if server.is_lost:
                info = inspect_server(info.url, self.vocab_size)
            retry_while_unreachable(lambda: update_server(info.url, folder, label, self.timeout_s))
        except ServerError as error:
            with self._changed:
                server.last_error = error.reason
                self.pool.mark_lost(server)
        except UserError:
            if not server.is_lost:
                raise
        else:
            with self._changed:
                self.pool.mark_updated(server, info)

    def _memory(self, path: str) -> None:
        for info in self.servers:
            if info.can_sleep:
                SGLANG.call(info.url, path, MEMORY_TIMEOUT_S, {"tags": ["kv_cache"]})


def update_server(url: str, folder: Path, label: str, timeout_s: float) -> None:
    """Make a server read the weights in a folder. Afterwards it has them under the label, and an empty prefix cache."""
    body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    try:
        answer = SGLANG.call(url, UPDATE_WEIGHTS, timeout_s, body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise SGLANG.error("refused", url, UPDATE_WEIGHTS, f"no success: {answer}")
        flush_prefix_cache(url)
        found = weight_label(url)
    except ServerError as error:
        if error.kind == "refused":
            raise UserError(
                f"{error}; the server must be able to read {folder} (rollout.sglang.weights_dir), and serve the policy's model"
            ) from error
        raise
    if found != label:
        raise UserError(f"SGLang server {url} says that it has weights {found!r} after {label!r} were sent to it")


def flush_prefix_cache(url: str) -> None:
    """Empty a server's prefix cache. It refuses while a request runs, such as an aborted one."""
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while True:
        try:
            SGLANG.call(url, "/flush_cache", FLUSH_TIMEOUT_S, method="POST")
            return
        except ServerError as error:
            if error.kind != "refused" or time.monotonic() > deadline:
                raise
        time.sleep(FLUSH_POLL_S)
