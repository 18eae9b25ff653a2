"""`SearchRunner` runs a strategy on many questions over one engine, and yields one trajectory for each question.

It has the interface of `RolloutRunner` that an evaluation uses, so completions are scored, saved and resumed like any other. All questions
are open at once: while one waits for its verifier, the engine decodes the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import TokenNode, Trajectory
from burnish.data.prompt_stream import PromptSample
from burnish.environments.dialogue import ChatRenderer
from burnish.evaluation.strategies.registry import StartStrategy
from burnish.evaluation.strategies.search import STREAM, Choice, Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_tree import SEARCH, STEP_TEXT, answer_trajectory, mean_logp
from burnish.evaluation.strategies.verifiers import Verifier
from burnish.models.tokenizer import Tokenizer

SCORE_BATCH = 64
"""Paths that wait for a local verifier while the engine is busy. More of them make its passes no faster."""
VERIFIER_WAIT_S = 0.2
"""How long the runner waits for a verifier while nothing is sampled."""
MAX_EMPTY_STREAMS = 3
"""How many streams in a row may end without a completion, which an interrupt that came late may cause."""


class SearchRunner:
    """Samples with a strategy. It keeps nothing between two calls of `run`."""

    host = None
    max_turns = 1
    roles: tuple[str, ...] = ()

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        start: StartStrategy,
        verifier: Verifier | None,
        kinds: Callable[[PromptSample], str],
        seed: int,
        budget: int | None = None,
        max_positions: int | None = None,
        chat: ChatRenderer | None = None,
        keep_trees: bool = False,
        on_step: Callable[[SearchProgram], None] | None = None,
        names: Mapping[str, str | None] | None = None,
    ) -> None:
        """`kinds` gives the verifier that says where an answer is in a completion. Without `verifier`, scores are mean log-probs.

        `budget` limits the tokens of one search. With `keep_trees`, trajectories have all nodes in their metadata. `on_step` is called
        whenever a search has changed. Every record of a search holds `names`: its strategy, verifier and delimiter of steps.
        """
        self.engine, self.tokenizer, self.start, self.verifier, self.kinds = engine, tokenizer, start, verifier, kinds
        self.seed, self.budget, self.max_positions, self.chat = seed, budget, max_positions, chat
        self.keep_trees, self.on_step, self.names = keep_trees, on_step, dict(names or {})
        self._programs: dict[str, SearchProgram] = {}
        self._num_opened = 0
        self._submitted: set[str] = set()
        """The ids of the requests that are in the engine."""
        self._draws: dict[str, tuple[PromptSample, int, float]] = {}

    def run(
        self,
        draws: Sequence[PromptSample],
        n: int,
        sampling: SamplingOptions,
        stream: str,
        done: Container[tuple[str, int]] = frozenset(),
    ) -> Iterator[Trajectory]:
        """Yield the chosen answer of `n` searches for each draw as they finish, except those of (prompt id, number) in `done`."""
        if stream != STREAM:
            raise ValueError(f"strategies sample in the stream {STREAM!r}, not in {stream!r}")
        try:
            for draw in draws:
                for number in range(n):
                    if self.is_sampled(draw, number, done):
                        continue
                    program = self._open(draw, number, sampling)
                    yield from self._step(program)
            yield from self._finish()
        finally:
            self.engine.abort(list(self._submitted), keep=False)
            self._submitted.clear()
            for program in self._programs.values():
                program.close()
            self._programs.clear()
            self._draws.clear()

    def is_sampled(self, draw: PromptSample, sample: int, done: Container[tuple[str, int]] = frozenset()) -> bool:
        """Whether the search is in `done`."""
        return (draw.prompt.row.id, sample) in done

    def episode_index(self, sample: int) -> int:
        """Return the index of a search among those of its question."""
        return sample

    def close(self) -> None:
        """Close the verifier."""
        if self.verifier is not None:
            self.verifier.close()

    def _open(self, draw: PromptSample, number: int, sampling: SamplingOptions) -> SearchProgram:
        prompt = draw.prompt
        question = Question(
            prompt.row.id,
            prompt.row.prompt,
            prompt.start,
            self.kinds(draw),
            prompt.row.data_source,
            draw.visit,
            prompt.pictures,
            self.chat,
        )
        search = Search(
            question,
            self.tokenizer,
            sampling,
            self.seed,
            number,
            self.budget,
            self.max_positions,
            log_scores=self.verifier is None,
            priority=-self._num_opened,  # earlier questions first, so that their answers are saved while later ones are searched
        )
        self._num_opened += 1
        program = SearchProgram(search, self.start(search))
        self._programs[search.name] = program
        self._draws[search.name] = draw, number, time.perf_counter()
        return program

    def _step(self, program: SearchProgram) -> Iterator[Trajectory]:
        """Submit what a program waits for; yield its trajectory if it has ended."""
        name = program.search.name
        while not program.is_done:
            if requests := program.requests():
                self.engine.submit(requests)
                self._submitted.update(request.id for request in requests)
            if self.verifier is None:
                if program.score_by(mean_logp):
                    continue
            elif scores := program.score_requests():
                self.verifier.submit(scores)
            break
        if self.on_step is not None:
            self.on_step(program)
        if program.is_done:
            del self._programs[name]
            yield self._trajectory(program, *self._draws.pop(name))

    def _finish(self) -> Iterator[Trajectory]:
        """Let all programs run to their ends."""
        num_empty = 0
        while self._programs:
            num_empty += 1
            for completion in self.engine.stream():
                num_empty = 0
                self._submitted.discard(completion.id)
                program = self._programs[completion.id.rpartition("/")[0]]
                program.take(completion)
                yield from self._step(program)
                if self._should_poll():
                    yield from self._take_scores(0.0)
            # The engine has nothing to do: every program waits for its verifier.
            if self.verifier is not None and self.verifier.pending:
                num_empty = 0
                yield from self._take_scores(VERIFIER_WAIT_S)
            if num_empty > MAX_EMPTY_STREAMS:
                raise RuntimeError(f"{len(self._programs)} searches wait for nothing")

    def _should_poll(self) -> bool:
        """Whether to look for scores while the engine is busy: always at other processes, and at local verifiers for many at once."""
        if self.verifier is None or not self.verifier.pending:
            return False
        return not self.verifier.is_local or self.verifier.pending >= SCORE_BATCH

    def _take_scores(self, timeout_s: float) -> Iterator[Trajectory]:
        assert self.verifier is not None
        for score in self.verifier.poll(timeout_s):
            program = self._programs[score.id.rpartition("/")[0]]
            program.take_score(score)
            yield from self._step(program)

    def _trajectory(self, program: SearchProgram, draw: PromptSample, number: int, started: float) -> Trajectory:
        search, row = program.search, draw.prompt.row.id
        found: dict[str, Any] = self.names | search_record(program) | {"wall_s": time.perf_counter() - started}
        if self.keep_trees:
            found["tree"] = tree_record(search, program.choice)
        if program.choice is None:
            nodes = [TokenNode(-1, np.asarray(search.root.tokens, dtype=np.int64))]
            cause = "" if program.score_error is None else f"; its first failure: {program.score_error}"
            trajectory = Trajectory(row, draw.visit, number, nodes, "error", "", error=f"{program.error}{cause}")
            trajectory.metadata = {"prompt_length": len(search.root.tokens), SEARCH: found}
            return trajectory
        chosen = program.choice.node
        return answer_trajectory(chosen, row, draw.visit, number, search.text(chosen), {SEARCH: found})


def search_record(program: SearchProgram) -> dict[str, Any]:
    """Return what a search cost and how it chose, as plain values."""
    cost, choice = program.search.cost, program.choice
    found: dict[str, Any] = {
        "tokens": cost.tokens,
        "requests": cost.requests,
        "context_tokens": cost.context_tokens,
        "verifier_calls": cost.scores,
        "verifier_failures": cost.failed_scores,
        "verifier_tokens": cost.score_tokens,
    }
    found |= {"answer_tokens": cost.whole_tokens / cost.whole_answers} if cost.whole_answers else {}
    if choice is not None:
        found |= {"votes": dict(choice.votes)} if choice.votes else {}
        found |= {"score": choice.node.score} if choice.node.score is not None else {}
        found = dict(choice.numbers) | found
    return found


def tree_record(search: Search, choice: Choice | None) -> list[dict[str, Any]]:
    """Return all nodes of a search as plain values: parent, text, tokens, how it ended, its score, and whether it was chosen.

    Where a special token ends steps, `step_text` is the text with the name of this token.
    """
    chosen = set() if choice is None else {node.index for node in choice.node.upwards()}
    return [
        {
            "node": node.index,
            "parent": None if node.parent is None else node.parent.index,
            "text": search.added_text(node),
            "tokens": len(node.tokens),
            "sampled": node.is_sampled,
            "end": node.end,
            "score": node.score,
            "chosen": node.index in chosen,
            **({} if search.step_token is None else {STEP_TEXT: search.text_with_steps(node)}),
            **node.notes,
        }
        for node in search.nodes
    ]
