"""Rollouts with images: each request has those of its context at their places, in every turn, and a branch keeps what it shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from burnish.core.engine import Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.trajectory import Trajectory, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.base import Done, SingleTurn, Turn
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.host import EnvironmentHost, EnvironmentKind
from burnish.environments.workers import ObjectSpec, ObjectWorkers
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.running_trajectory import PartialTurn, TokenPath
from burnish.rollout.scoring import from_arrays, to_arrays
from burnish.run.journal import Journal
from tests.inference.slow_engine import SlowEngine
from tests.seeing_tokenizer import seeing_tokenizer

TOKENIZER = Tokenizer.from_characters("0123456789>")
PAD = 12


def picture(value: int, columns: int = 2) -> Picture:
    return Picture(np.full((1, 4, 4 * columns, 3), value, dtype=np.uint8), (1, 1, columns))


def with_picture(value: int) -> tuple[tuple[int, ...], tuple[PictureSpan, ...]]:
    return (5, PAD, PAD, 6), (PictureSpan(1, picture(value)),)


class Recording(SlowEngine):
    """Remembers the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += requests
        for request in requests:
            self.rows[request.id] = request, [], []


class Boards:
    """The k-th observation is a picture of value k."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.seen = prompt, 0

    def start(self) -> Turn:
        return Turn(self.prompt.start, pictures=self.prompt.pictures)

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        self.seen += 1
        tokens, pictures = with_picture(self.seen)
        return Done(1.0) if self.seen == 3 else Turn(tokens, pictures=pictures)


def play(kind: Any, num_turns: int) -> tuple[Recording, list[Trajectory]]:
    engine = Recording()
    draws = []
    for number in (100, 101):  # two prompts with the same tokens
        tokens, pictures = with_picture(number)
        prompt = Prompt(Row(f"r{number}", "", "rows", "9"), "", list(tokens), pictures=pictures)
        draws.append(PromptSample(prompt, 0))
    runner = RolloutRunner(cast(Any, engine), kind, TOKENIZER, 7, num_turns)
    return engine, list(runner.run(draws, 2, SamplingOptions(max_tokens=4), "train"))


def test_every_turn_reads_all_images_so_far() -> None:
    engine, found = play(Boards, 5)
    assert len(found) == 4
    for request in engine.requests:
        turn = int(request.id.rpartition("/")[2])
        values = [int(span.picture.pixels.flat[0]) for span in request.pictures]
        assert values == [int(request.id[1:4]), *range(1, turn + 1)]
        for span in request.pictures:
            assert request.tokens[span.start : span.end] == (PAD, PAD)
    batch = pack(found)
    assert [len(spans) for spans in batch.picture_spans()] == [3, 3, 3, 3]
    assert len(batch.pictures) == 4, "two prompts and two boards, each once"


def test_a_prompt_with_images_is_one_object_for_its_samples_and_another_for_other_images() -> None:
    engine, found = play(lambda prompt: SingleTurn(prompt, TOKENIZER), 1)
    openings = {id(request.tokens): request.pictures[0].picture.key for request in engine.requests}
    assert len(engine.requests) == len(found) == 4
    assert len(openings) == len(set(openings.values())) == 2


def test_a_branch_forks_where_an_image_differs_though_the_tokens_are_equal() -> None:
    path = TokenPath()
    tokens, pictures = with_picture(0)
    path.open(tokens, pictures)
    turn = PartialTurn()
    turn.append([7], [-1.0], 0)
    path.append_turn(turn)
    same = TokenPath.copy(path)
    same.branch((*tokens, 7, 8), None, pictures)
    assert [node.parent for node in same.nodes] == [-1, 0, 1], "all that was read and written is kept"
    assert path.prompt_length() == len(tokens)
    path.branch((*tokens, 7, 8), None, with_picture(1)[1])
    assert path.nodes[-1].parent == -1
    assert [span.picture.pixels.flat[0] for span in path.pictures()] == [1]
    assert path.prompt_length() == 1, "the rewritten context leaves the prompt at its image"


BOARDS = """
import numpy as np
from burnish.environments.base import End, Environment, Observation


class Boards(Environment):
    takes_truncated = True

    async def start(self, episode):
        (self.first,) = episode.images
        return Observation()

    async def step(self, answer):
        if answer.turn == 2:
            return End(reward=float(self.first[0, 0, 0]))
        board = np.full((8, 16, 3), answer.turn, dtype=np.uint8)
        blocks = [{"type": "text", "text": "board"}, {"type": "image", "image": board}]
        return Observation(messages=({"role": "user", "content": blocks},))
"""


def test_observations_of_an_environment_in_a_worker_may_be_images(tmp_path: Path) -> None:
    (tmp_path / "boards.py").write_text(BOARDS)
    tokenizer, engine = seeing_tokenizer(), Recording()
    kind = EnvironmentKind(
        "boards", "worker", spec=ObjectSpec("boards.py:Boards", base=str(tmp_path)), takes_truncated=True
    )
    host = EnvironmentHost(kind, lambda: ObjectWorkers(num_workers=1))
    runner = RolloutRunner(cast(Any, engine), None, tokenizer, 7, 5, host=host, renderer=ChatRenderer(tokenizer))
    scene = np.full((8, 8, 3), 200, dtype=np.uint8)
    row = Row("r", [{"role": "user", "content": [{"type": "image", "image": scene}]}], "rows", None)
    draw = PromptSample(Prompt(row, "", []), 0)
    try:
        found = list(runner.run([draw], 2, SamplingOptions(max_tokens=4), "train"))
    finally:
        runner.close()
    assert [t.reward for t in found] == [200.0, 200.0]
    for t in found:
        (path,) = t.sequences
        assert [span.picture.pixels.flat[0] for span in path.pictures] == [200, 0, 1]
        for span in path.pictures:
            assert set(path.tokens[span.start : span.end].tolist()) == {tokenizer.image_processor.image_mark}
    assert len(pack(found).pictures) == 3
    journal = Journal(tmp_path / "journal")
    back = from_arrays(journal.attachment(journal.attach("completed-000001", to_arrays(found))) or {})
    for before, after in zip(found, back, strict=True):
        for one, other in zip(before.sequences[0].pictures, after.sequences[0].pictures, strict=True):
            assert one.start == other.start
            np.testing.assert_array_equal(one.picture.pixels, other.picture.pixels)
