"""Rollouts with images: each request has those of its context at their places, in every turn, and a branch keeps what it shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from burnish.core.engine import Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.trajectory import Trajectory, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.base import Done, SingleTurn, Turn
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.running_trajectory import PartialTurn, TokenPath
from tests.inference.slow_engine import SlowEngine

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
