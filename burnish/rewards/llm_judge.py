"""The judge: asks for every sample's votes from threads of its own, and tells the outcomes as they come.

The rules, after Kimi k1.5 (2501.12599) where it has one: a vote that cannot be read is asked again, with another seed; a sample
none of whose votes can be read scores 0 and counts in `parse_fail`; the score is the median of the votes that can. An
endpoint that does not answer is a failure of the scorer: the sample has no reward, and the step says so.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.data.template import prompt_as_text
from burnish.rewards.judge_endpoint import JudgeBackend, JudgeCache, JudgeEndpoint, JudgeFailed, RateLimit, cache_key
from burnish.rewards.judge_options import JudgeOptions, defuse_control_tokens, fill_template, median_vote, parse_score
from burnish.rewards.score_types import PartResult, ScoreRequest, require_answer
from burnish.rewards.worker import ScoringCall
from burnish.rewards.worker_pool import CallOutcome, OutcomeQueue

MAX_DETAIL_CHARS = 2000
MIN_RETRY_TEMPERATURE = 0.7
"""At least, where an answer that could not be read is asked for again: at 0 it would be the same one."""
CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for a thread that is in the middle of a call: it dies with the process."""


class Judge:
    """Threads that judge samples; outcomes go to the queue it is given, in any order."""

    def __init__(self, options: JudgeOptions, outcomes: OutcomeQueue, base: Path | None = None) -> None:
        self.options, self._outcomes = options, outcomes
        self.counters = {"judge_calls": 0, "judge_retried": 0, "judge_cached": 0, "judge_parse_fail": 0}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._cache = None if options.cache is None else JudgeCache((base or Path()) / options.cache)
        self._asker: JudgeBackend | None = None if options.url is None else self._endpoint(options, options.url)
        self._calls: queue.SimpleQueue[ScoringCall | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def _endpoint(self, options: JudgeOptions, url: str) -> JudgeEndpoint:
        key = None if options.key is None else os.environ[options.key]
        limit = RateLimit(options.per_minute)
        return JudgeEndpoint(url, key, options.call_s, options.retries, options.backoff_s, limit, self._closing.wait)

    def hand_in(self, asker: JudgeBackend) -> None:
        """Take who answers, where that is no endpoint; it is closed with the judge, or when another one comes."""
        if self._asker is not None:
            self._asker.close()
        self._asker = asker

    def submit(self, calls: Sequence[ScoringCall]) -> None:
        """Queue samples; returns at once."""
        if self._asker is None:
            raise RuntimeError("the judge is a model directory, and nobody handed in who answers for it")
        for call in calls:
            self._calls.put(call)
        for number in range(len(self._threads), min(self.options.concurrency, len(self._threads) + len(calls))):
            thread = threading.Thread(target=self._run, name=f"burnish-judge-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop; samples without an outcome never get one."""
        self._closing.set()
        if self._asker is not None:
            self._asker.close()
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        if self._cache is not None and not any(thread.is_alive() for thread in self._threads):
            self._cache.close()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._closing.is_set():
            try:
                requests: list[ScoreRequest] = pickle.loads(call.payload)
                outcome = CallOutcome(call, [self.judge(request) for request in requests])
            except JudgeFailed as error:
                outcome = CallOutcome(call, error=f"the judge gave no verdict: {error}")
            except BaseException:  # noqa: BLE001 - told with the sample, and counted; the thread goes on
                outcome = CallOutcome(call, error=traceback.format_exc())
            self._outcomes.put(outcome)

    def judge(self, request: ScoreRequest) -> PartResult:
        """The verdict on one sample; JudgeFailed where the endpoint gives none."""
        options, deadline = self.options, time.monotonic() + self.options.deadline_s
        if options.shows_expected:
            require_answer(request.answer)
        expected = "" if request.answer is None else str(request.answer)
        asked, answer = prompt_as_text(request.prompt), request.completion
        if options.url is not None:  # a model directory is asked through our own tokenizer, which takes text as text
            asked, answer, expected = map(defuse_control_tokens, (asked, answer, expected))
        question = fill_template(options.template, asked, answer, expected)
        seen, votes, num_unread = list[str](), list[float](), 0
        for vote in range(options.votes):
            for attempt in range(options.parse_retries + 1):
                text = self._answer(question, vote, attempt, deadline)
                seen.append(text)
                value = parse_score(text, options.parser, options.low, options.high)
                if value is not None:
                    votes.append(value)
                    break
                num_unread += 1
        numbers = {"parse_fail": float(not votes), "unread": float(num_unread)}
        said = "\n---\n".join(seen)[-MAX_DETAIL_CHARS:]
        if not votes:
            self._count("judge_parse_fail")
            return PartResult(0.0, 0.0 if options.parser == "verdict" else None, numbers, said)
        value, disagreement = median_vote(votes)
        accuracy = (
            float(value > 0.5) if options.parser == "verdict" else None
        )  # a score is graded, and an even vote is no yes
        return PartResult(value, accuracy, numbers | {"disagreement": disagreement}, said)

    def _answer(self, question: str, vote: int, attempt: int, deadline: float) -> str:
        """What the judge says to the question, from the cache where it has said it; each vote and attempt is its own."""
        options, asker = self.options, self._asker
        assert asker is not None, "checked when samples are submitted"
        body: dict[str, Any] = {
            **({"model": options.model} if options.model is not None else {}),
            "messages": [{"role": "user", "content": question}],
            "temperature": options.temperature if attempt == 0 else max(options.temperature, MIN_RETRY_TEMPERATURE),
            "max_tokens": options.max_tokens,
            "seed": vote * (options.parse_retries + 1) + attempt,
        }
        key = cache_key({"url": asker.address, **body})
        kept = None if self._cache is None else self._cache.get(key)
        if kept is not None:
            self._count("judge_cached")
            return kept
        text, retried = asker.ask(body, deadline)
        self._count("judge_calls")
        self._count("judge_retried", retried)
        if self._cache is not None:
            self._cache.put(key, text)
        return text

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counters[name] += number


# --- A language model that reads an answer and gives a verdict: a generative reward model behind an endpoint or an engine.
