"""Verifiers that a server was started with (`--verifier`): rewards that need no answer, for the searches of all clients.

Each works in a thread of its own, because the machinery of rewards is used from one thread. Searches await their scores on the event
loop.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.plugins import is_plugin
from burnish.config.records import Record
from burnish.evaluation.strategies.spec import LIKELIHOOD, ORACLE, SELF_CERTAINTY, Verifier, VerifierPart
from burnish.evaluation.strategies.verifiers import RewardVerifier, keyless_verifier, step_delimiter
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest

POLL_S = 0.01
"""How long the thread waits for scores before it looks for new requests."""
CLOSE_S = 30


class VerifierSection(Record):
    """The value of one `--verifier`."""

    verifier: Verifier
    """Name, or a section with name and options."""


def read_verifiers(given: Sequence[str]) -> dict[str, VerifierPart]:
    """Return the verifiers of the command line by the names that clients use: a function is named without its file."""
    found: dict[str, VerifierPart] = {}
    for text in given:
        part = load(VerifierSection, None, [f"verifier={text}"]).config.verifier
        if part.name in (LIKELIHOOD, SELF_CERTAINTY):
            raise UserError(f"--verifier {part.name}: a server has it without this option")
        if part.name in (ORACLE, "task"):
            raise UserError(f"--verifier {part.name}: it reads columns of a row, and requests have none")
        name = part.name.rpartition(":")[2] if is_plugin(part.name) else part.name
        if name in (*found, LIKELIHOOD, SELF_CERTAINTY):
            raise UserError(
                f"--verifier {text}: there are two verifiers named {name}, so clients could not tell them apart"
            )
        found[name] = part
    return found


def load_verifiers(
    parts: dict[str, VerifierPart], tokenizer: Tokenizer, log: Callable[[str], None]
) -> dict[str, ServerVerifier]:
    """Load the verifiers and start their threads. Close them after use. `log` gets why a score failed."""
    found: dict[str, ServerVerifier] = {}
    try:
        for name, part in parts.items():
            verifier = keyless_verifier(part, Reward(), tokenizer, Path.cwd())
            found[name] = ServerVerifier(name, verifier, log, step_delimiter(part, Path.cwd()))
    except BaseException:
        for one in found.values():
            one.close()
        raise
    return found


@dataclass(eq=False)
class _Batch:
    """Requests of one call of `score`."""

    requests: Sequence[ScoreRequest]
    deliver: Callable[[list[Score] | Exception], None]
    scores: dict[str, Score] = field(default_factory=dict)


class ServerVerifier:
    """A reward as a verifier of searches, in a thread of its own."""

    def __init__(
        self, name: str, verifier: RewardVerifier, log: Callable[[str], None], delimiter: str | None = None
    ) -> None:
        self.name, self.delimiter, self._verifier, self._log = name, delimiter, verifier, log
        self._inbox: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._waiting: dict[str, _Batch] = {}
        """The batch of each request that is being scored, by the request's id."""
        self._thread = threading.Thread(target=self._run, name=f"verifier {name}", daemon=True)
        self._thread.start()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the scores of all requests, whose ids are those of no other request."""
        event_loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Score]] = event_loop.create_future()

        def end(result: list[Score] | Exception) -> None:
            if future.done():  # the client disconnected
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def deliver(result: list[Score] | Exception) -> None:
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(end, result)

        self._inbox.put(_Batch(requests, deliver))
        return await future

    def close(self) -> None:
        """End the thread, and release processes and models."""
        self._inbox.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while self._read_inbox():
                try:
                    scores = self._verifier.poll(POLL_S)
                except Exception as error:  # noqa: BLE001 (all searches that wait get it)
                    self._fail(error)
                else:
                    self._take(scores)
        finally:
            self._verifier.close()

    def _read_inbox(self) -> bool:
        """Submit all new requests, waiting for some if none is being scored. Returns whether to go on."""
        while True:
            try:
                batch = self._inbox.get(block=not self._waiting)
            except queue.Empty:
                return True
            if batch is None:
                return False
            try:
                self._verifier.submit(batch.requests)
            except Exception as error:  # noqa: BLE001 (the search that asked gets it)
                batch.deliver(error)
            else:
                self._waiting.update((request.id, batch) for request in batch.requests)

    def _take(self, scores: Sequence[Score]) -> None:
        for score in scores:
            batch = self._waiting.pop(score.id)
            batch.scores[score.id] = score
            if len(batch.scores) == len(batch.requests):
                failed = [one.error for one in batch.scores.values() if one.error is not None]
                if failed:  # the client is not told: it may quote the verifier's code
                    self._log(
                        f"verifier {self.name}: {len(failed)} of {len(batch.scores)} scores failed; first: {failed[0]}"
                    )
                batch.deliver([batch.scores[request.id] for request in batch.requests])

    def _fail(self, error: Exception) -> None:
        batches = {id(batch): batch for batch in self._waiting.values()}
        self._waiting.clear()
        for batch in batches.values():
            batch.deliver(error)
