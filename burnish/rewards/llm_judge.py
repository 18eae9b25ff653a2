"""The LLM judge: a language model reads an answer and scores it (a generative reward model).

It asks an endpoint or an engine for one or more votes per sample, from threads of its own. A vote that cannot be parsed is prompt for again
with another seed. The score is the median of the parsed votes (Kimi k1.5, 2501.12599). A sample without a parsed vote scores 0 and counts
in `parse_fail`. If the endpoint does not answer, the scorer has failed and the sample has no reward.

With parser `pair` the judge compares the answer with the row's expected answer, in both orders. A vote is the share of the two that prefer the
answer, so a judge that always names the same position gives every answer 0.5.
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
from burnish.rewards.judge_endpoint import (
    JudgeBackend,
    JudgeCache,
    JudgeEndpoint,
    JudgeFailed,
    JudgeReply,
    RateLimit,
    cache_key,
)
from burnish.rewards.judge_options import PAIR, JudgeOptions, defuse_control_tokens, median_vote
from burnish.rewards.score_types import PartResult, ScoreRequest, require_answer
from burnish.rewards.worker_pool import CallOutcome, OutcomeQueue, ScoringCall

MAX_DETAIL_CHARS = 2000
MIN_RETRY_TEMPERATURE = 0.7
"""The lowest temperature when a vote is prompt for again. At temperature 0 the answer would be the same."""
CLOSE_TIMEOUT_S = 1.0
"""How long `close` waits for a thread in the middle of a call. The thread ends with the process."""


class Judge:
    """Threads that judge samples. Outcomes are put into the given queue, in any order."""

    def __init__(self, options: JudgeOptions, outcomes: OutcomeQueue, base: Path | None = None) -> None:
        self.options, self._outcomes = options, outcomes
        self.counters = {"judge_calls": 0, "judge_retried": 0, "judge_cached": 0, "judge_parse_fail": 0}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._cache = None if options.cache is None else JudgeCache((base or Path()) / options.cache)
        self._backend: JudgeBackend | None = None if options.url is None else self._endpoint(options, options.url)
        self._calls: queue.SimpleQueue[ScoringCall | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def _endpoint(self, options: JudgeOptions, url: str) -> JudgeEndpoint:
        key = None if options.key is None else os.environ[options.key]
        limit = RateLimit(options.per_minute)
        return JudgeEndpoint(url, key, options.call_s, options.retries, options.backoff_s, limit, self._closing.wait)

    def set_backend(self, backend: JudgeBackend) -> None:
        """Set what answers in place of an endpoint. It is closed with the judge, or when it is replaced."""
        if self._backend is not None:
            self._backend.close()
        self._backend = backend

    def submit(self, calls: Sequence[ScoringCall]) -> None:
        """Queue samples; return at once."""
        if self._backend is None:
            raise RuntimeError("the judge is a model directory, but no engine was attached for it")
        for call in calls:
            self._calls.put(call)
        for number in range(len(self._threads), min(self.options.concurrency, len(self._threads) + len(calls))):
            thread = threading.Thread(target=self._run, name=f"burnish-judge-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop. Unfinished samples get no outcome."""
        self._closing.set()
        if self._backend is not None:
            self._backend.close()
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
            except BaseException:  # noqa: BLE001 - reported with the sample and counted; the thread continues
                outcome = CallOutcome(call, error=traceback.format_exc())
            self._outcomes.put(outcome)

    def judge(self, request: ScoreRequest) -> PartResult:
        """The score of one sample; JudgeFailed if the endpoint gives no answer."""
        options, deadline = self.options, time.monotonic() + self.options.deadline_s
        if options.shows_expected:
            require_answer(request.answer)
        expected = "" if request.answer is None else str(request.answer)
        prompt, answer = prompt_as_text(request.prompt), request.completion
        if options.url is not None:  # servers may parse control tokens in text; our own tokenizer does not
            prompt, answer, expected = map(defuse_control_tokens, (prompt, answer, expected))
        questions = options.questions(prompt, answer, expected)
        answers, votes, num_unparsed, num_consistent = list[JudgeReply](), list[float](), 0, 0
        for vote in range(options.votes):
            values = list[float]()
            for order, question in enumerate(questions):
                for attempt in range(options.parse_retries + 1):
                    answers.append(self._answer(question, vote, attempt, deadline))
                    value = options.parse(answers[-1].text, order)
                    if value is not None:
                        values.append(value)
                        break
                    num_unparsed += 1
            if len(values) == len(questions):  # a pair that was read in one order only would favour a position
                votes.append(sum(values) / len(values))
                num_consistent += len(set(values)) == 1
        numbers = {"parse_fail": float(not votes), "unread": float(num_unparsed)}
        transcript = "\n---\n".join(answer.text for answer in answers)[-MAX_DETAIL_CHARS:]
        counts = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
        cost = sum(counts) if len(counts) == len(answers) else None
        if not votes:
            self._count("judge_parse_fail")
            accuracy = 0.0 if options.parser in ("verdict", PAIR) else None
            return PartResult(0.0, accuracy, numbers, transcript, num_tokens=cost)
        if options.parser == PAIR:
            numbers["consistent"] = num_consistent / len(votes)
        value, disagreement = median_vote(votes)
        # A score is graded, so it gives no accuracy. A tied vote (0.5) does not count as correct.
        accuracy = float(value > 0.5) if options.parser in ("verdict", PAIR) else None
        return PartResult(value, accuracy, numbers | {"disagreement": disagreement}, transcript, num_tokens=cost)

    def _answer(self, question: str, vote: int, attempt: int, deadline: float) -> JudgeReply:
        """The judge's answer, from the cache, where it costs no tokens, if it was given before. Every vote and attempt is an entry."""
        options, backend = self.options, self._backend
        assert backend is not None, "checked when samples are submitted"
        body: dict[str, Any] = {
            **({"model": options.model} if options.model is not None else {}),
            "messages": [{"role": "user", "content": question}],
            "temperature": options.temperature if attempt == 0 else max(options.temperature, MIN_RETRY_TEMPERATURE),
            "max_tokens": options.max_tokens,
            "seed": vote * (options.parse_retries + 1) + attempt,
        }
        key = cache_key({"url": backend.address, **body})
        cached = None if self._cache is None else self._cache.get(key)
        if cached is not None:
            self._count("judge_cached")
            return JudgeReply(cached, 0)
        reply = backend.ask(body, deadline)
        self._count("judge_calls")
        self._count("judge_retried", reply.num_retries)
        if self._cache is not None:
            self._cache.put(key, reply.text)
        return reply

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counters[name] += number
