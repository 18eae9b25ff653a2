"""`ScriptedEngine`: an engine whose answers a function writes, and what is needed to run real agents against it.

It samples one token for each character, so that its tokens are not those that the tokenizer gives for the text: an endpoint that tokenised answers
again would be found out. Log-probs and whatever the script takes from `Draw.number` depend on the request's random key alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burnish.config.data import Template
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.distributed.roles import recording_endpoint
from burnish.environments.registry import environment_of
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import RolloutRunner
from tests.environments.chat_templates import small_tokenizer

AGENTS = Path(__file__).parent / "agents"
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
TOKENIZER = small_tokenizer("qwen2.5")
SAMPLING = SamplingOptions(max_tokens=512, stop_tokens=tuple(TOKENIZER.eos_ids))


class Draw(NamedTuple):
    """What the script of an engine sees of a request."""

    text: str
    """The prompt with its control tokens."""
    number: int
    """A number from 0 to 999 by the request's random key."""


class Sampled(NamedTuple):
    """What the engine sampled for a request, in the form in which a trajectory has it."""

    context: tuple[int, ...]
    tokens: tuple[int, ...]
    logp: tuple[float, ...]


Script = Callable[[Draw], str]


class ScriptedEngine:
    """Answers every request with the text of a script and the end token. It remembers what it sampled, by episode."""

    def __init__(self, script: Script, tokenizer: Tokenizer = TOKENIZER) -> None:
        self.script, self.tokenizer = script, tokenizer
        self.drawn: dict[str, list[Sampled]] = {}
        self.num_drawn = 0
        self._characters: dict[str, list[int]] = {}
        self._queue: deque[Request] = deque()
        self._is_interrupted = False

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.extend(requests)

    def stream(self) -> Iterator[Completion]:
        while self._queue and not self._is_interrupted:
            yield self._completion(self._queue.popleft())
        self._is_interrupted = False

    def interrupt(self) -> None:
        self._is_interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        stopped = [request for request in self._queue if request.id in set(ids)]
        self._queue = deque(request for request in self._queue if request not in stopped)
        nothing = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        return [Completion(request.id, *nothing, "aborted", 0) for request in stopped] if keep else []

    def load(self, version: int, named_tensors: Any) -> None:
        raise NotImplementedError("a script has no weights")

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def _tokens_of(self, character: str) -> list[int]:
        if character not in self._characters:
            self._characters[character] = self.tokenizer.encode(character)
        return self._characters[character]

    def _completion(self, request: Request) -> Completion:
        draw = Draw(self.tokenizer.decode(list(request.tokens), skip_special=False), request.key % 1000)
        written = [token for character in self.script(draw) for token in self._tokens_of(character)]
        tokens = [*written, self.tokenizer.eos_ids[0]][: request.sampling.max_tokens]
        logp = [-1e-3 * (1 + fold(request.key, place) % 997) for place in range(len(tokens))]
        self.num_drawn += 1
        sampled = Sampled(request.tokens, tuple(tokens), tuple(np.array(logp, dtype=np.float32).tolist()))
        self.drawn.setdefault(request.id.rpartition("/")[0], []).append(sampled)
        finish: Any = "stop" if tokens[-1] == self.tokenizer.eos_ids[0] else "length"
        return Completion(request.id, np.array(tokens), np.array(logp, dtype=np.float32), finish, 0)


def recorded(trajectory: Trajectory) -> list[Sampled]:
    """What a trajectory says was sampled, and behind which tokens."""
    found, nodes = [], trajectory.nodes
    for node in nodes:
        if node.is_sampled:
            assert node.logp is not None
            context, at = list[int](), node.parent
            while at >= 0:
                context[:0] = nodes[at].tokens.tolist()
                at = nodes[at].parent
            found.append(Sampled(tuple(context), tuple(node.tokens.tolist()), tuple(node.logp.tolist())))
    return sorted(found)


def draws(rows: Sequence[dict[str, Any]]) -> list[PromptSample]:
    """One prompt for each row: `prompt`, `answer` and further columns. Its id has the row's `number`, or else its place."""
    found = []
    for place, row in enumerate(rows):
        index = row.get("number", place)
        extra = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
        given = Row(f"rows/{index}", row["prompt"], "rows", row.get("answer"), extra)
        text = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        found.append(PromptSample(Prompt(given, text, TOKENIZER.encode(text)), 0))
    return found


def runner_of(engine: ScriptedEngine, folder: Path, **settings: Any) -> RolloutRunner:
    """A runner of agents; `settings` are those of `environment:`."""
    config = EnvironmentConfig(**({"workers": 1, "retries": 0, "max_turns": 16} | settings))
    _, host = environment_of(config, engine.tokenizer, folder)
    endpoint = recording_endpoint(config, engine.tokenizer, Template())
    return RolloutRunner(
        engine, None, engine.tokenizer, 7, config.max_turns, 16384, host=host, retries=config.retries, endpoint=endpoint
    )


def played(
    engine: ScriptedEngine, folder: Path, rows: Sequence[dict[str, Any]], n: int = 1, **settings: Any
) -> dict[str, Trajectory]:
    """The trajectories of all rows by id, after everything that they started has ended."""
    runner = runner_of(engine, folder, **settings)
    try:
        return {t.id: t for t in runner.run(draws(rows), n, SAMPLING, "train")}
    finally:
        runner.close()


def tool_call(name: str, arguments: str) -> str:
    """A call as the model writes it, with the JSON text of its arguments."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
