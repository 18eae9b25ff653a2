"""Episodes in the table of samples: who said what, on which branch, with which values, and what went wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from burnish.algorithms.spec import Algorithm
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.trajectory import TokenNode, Trajectory, TurnSpan, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.scoring import RolloutBatch
from burnish.run.picture_files import picture_mark
from burnish.run.run import Run
from burnish.run.samples import EventExamplesFile, read_samples, write_samples
from burnish.trainers.context import StepResult
from burnish.trainers.episode_rows import episode_entries, record_new_events, turns_json
from burnish.trainers.minibatches import in_whole_batch, mini_batches
from burnish.trainers.step_metrics import sample_rows


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


def episode(tokenizer: Tokenizer, *parts: tuple[int, str, bool], sample: int = 0, **fields: Any) -> Trajectory:
    """An episode of (parent, text, sampled); the log-probs of a sampled node are minus its index."""
    nodes, turns = [], []
    for index, (parent, text, is_sampled) in enumerate(parts):
        node = TokenNode(parent, np.array(tokenizer.encode(text), dtype=np.int64))
        if is_sampled:
            node.logp = np.full(len(node.tokens), -float(index), np.float32)
            node.version = np.zeros(len(node.tokens), np.int32)
            turns.append(TurnSpan(index, f"s{index}", 0.25 * index))
        nodes.append(node)
    return Trajectory("rows/7", 0, sample, nodes, "stop", "", 1.0, turns=turns, **fields)


BRANCHED = (
    (-1, "1>", False),
    (0, "22", True),
    (1, "3", False),
    (2, "4", False),
    (3, "5", True),
    (1, "6", False),
    (5, "7", True),
    (0, "8", True),
    (-1, "9>", False),
    (8, "0", True),
)


def test_entries_are_in_order_with_the_beginning_of_each_branch(tokenizer: Tokenizer) -> None:
    assert episode_entries(episode(tokenizer, *BRANCHED), tokenizer) == [
        {"who": "model", "text": "22", "reward": 0.25, "state": "s1"},
        {"who": "environment", "text": "34"},
        {"who": "model", "text": "5", "reward": 1.0, "state": "s4"},
        {"who": "environment", "text": "6", "branch": 2, "after": 1},
        {"who": "model", "text": "7", "reward": 1.5, "state": "s6"},
        {"who": "model", "text": "8", "reward": 1.75, "state": "s7", "branch": 3, "after": 0},
        {"who": "environment", "text": "9>", "branch": 4, "after": None},
        {"who": "model", "text": "0", "reward": 2.25, "state": "s9"},
    ]


def test_a_plain_answer_has_no_entries_and_a_turn_keeps_its_control_tokens(tokenizer: Tokenizer) -> None:
    plain = episode(tokenizer, (-1, "1>", False), (0, "2", True))
    plain.turns = [TurnSpan(1)]
    assert turns_json(plain, tokenizer) is None
    ended = episode(tokenizer, (-1, "1>", False), (0, "2", True))
    pad = tokenizer.pad_id
    ended.nodes[1].tokens = np.array([pad, *ended.nodes[1].tokens, tokenizer.eos_ids[0]])
    expected = tokenizer.decode([pad], skip_special=False) + "2"
    assert [one["text"] for one in json.loads(turns_json(ended, tokenizer) or "[]")] == [expected]


def test_a_row_has_the_values_of_all_branches_and_the_episode(tokenizer: Tokenizer, tmp_path: Path) -> None:
    events = [{"kind": "tool_raised", "what": "search", "message": "no index", "traceback": "line 7"}]
    metadata = {"events": events, "role": "white", "last_words": "lost"}
    one = episode(tokenizer, *BRANCHED, metadata=metadata)
    draw = PromptSample(Prompt(Row("rows/7", "1>", "rows", "9"), "1>", tokenizer.encode("1>")), 0)
    batch = pack([one])
    assert batch.num_sequences == 4
    advantages = torch.arange(len(batch.tokens), dtype=torch.float64)
    batch = batch.with_token(advantages=advantages).select(torch.tensor([0, 1, 3]))  # a filter removed the third branch
    batch = batch.with_token(
        loss_mask=batch.loss_mask & (batch.tokens != tokenizer.encode("5")[0])
    )  # rejection took a token
    entropy = torch.where(batch.loss_mask, 0.5, torch.nan)
    result = StepResult(batch, trainer_logp=-torch.ones(len(batch.tokens)), entropy=entropy)
    rollouts = RolloutBatch([draw], [one], 0.0, 0.0)
    (row,) = sample_rows(rollouts, result, tokenizer)
    assert row["pieces"] == list("225780")
    assert row["logp"] == [-1, -1, -4, -6, -7, -9]
    kept = advantages[pack([one]).action_mask].tolist()
    assert row["advantages"] == [*kept[:4], None, kept[5]]
    assert row["gap"] == [0, 0, 3, 5, None, 8]
    assert row["mask"] == [1, 1, 0, 1, 0, 1]
    assert row["entropy"] == [0.5, 0.5, None, 0.5, None, 0.5]
    nothing = batch.select(torch.tensor([], dtype=torch.int64))
    assert sample_rows(rollouts, StepResult(nothing), tokenizer)[0]["mask"] == [0] * 6, "a filter took it all"
    assert sample_rows(rollouts, StepResult(), tokenizer)[0]["mask"] is None, "a validation has no loss"
    assert row["advantage"] == pytest.approx((sum(kept) - kept[2] - kept[4]) / 4)
    assert (row["group"], row["length"]) == ("rows/7#0/white", 6)
    write_samples(tmp_path, 1, "train", [row])
    (again,) = read_samples(tmp_path)
    assert (again["role"], again["last_words"], json.loads(again["events"])) == ("white", "lost", events)
    assert json.loads(again["turns"]) == episode_entries(one, tokenizer)


def test_a_kind_of_event_is_told_once_in_a_run(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def failing(sample: int, *kinds: str) -> Trajectory:
        events = [
            {"kind": kind, "what": "search", "message": f"{kind} {sample}", "traceback": "x" * 5000} for kind in kinds
        ]
        return episode(tokenizer, (-1, "1>", False), sample=sample, metadata={"events": events})

    notes: list[str] = []
    path = tmp_path / "events.jsonl"
    run = cast(Run, SimpleNamespace(events=EventExamplesFile(path), display=SimpleNamespace(note=notes.append)))
    record_new_events(run, 1, [failing(0), failing(1, "tool_raised", "tool_raised"), failing(2, "tool_raised")])
    record_new_events(run, 2, [failing(3, "tool_raised", "step_failed")])
    record_new_events(run, 3, [failing(4, "tool_raised")])
    assert [note.partition(" (")[0] for note in notes] == [
        "step 1: tool_raised in the environment, 3 times; first in rows/7#0.1, search: tool_raised 1",
        "step 2: step_failed in the environment, 1 times; first in rows/7#0.3, search: step_failed 3",
    ]
    rows = EventExamplesFile(path).read()
    assert [(row["step"], row["sample"], row["kind"]) for row in rows] == [
        (1, "rows/7#0.1", "tool_raised"),
        (2, "rows/7#0.3", "step_failed"),
    ]
    assert {len(row["traceback"]) for row in rows} == {4000}


def test_a_column_of_the_first_mini_batch_has_its_place_in_the_whole_batch(tokenizer: Tokenizer) -> None:
    samples = [episode(tokenizer, (-1, "1>", False), (0, "23", True), sample=k) for k in range(4)]
    for k, sample in enumerate(samples):
        sample.visit = 1 - k % 2  # two groups, interleaved
    batch = pack(samples)
    first = next(iter(mini_batches(batch, Algorithm(), 2, 1, horizon=8)))
    column = torch.arange(first.num_tokens, dtype=torch.float32)
    whole = in_whole_batch(column, batch, 2)
    assert whole[~whole.isnan()].tolist() == column.tolist()
    assert torch.equal(batch.tokens[~whole.isnan()], first.tokens)
    assert in_whole_batch(torch.zeros(batch.num_tokens), batch, 1).tolist() == [0] * batch.num_tokens


def test_images_are_marks_in_prompt_and_turns_and_named_once(tokenizer: Tokenizer) -> None:
    board = Picture(np.zeros((1, 4, 8, 3), dtype=np.uint8), (1, 1, 2))
    one = episode(tokenizer, (-1, "1>", False), (0, "22", True), (1, "399>", False), (2, "5", True))
    one.nodes[0].tokens = np.array([*tokenizer.encode("1"), 0, 0, *tokenizer.encode(">")])
    one.nodes[0].pictures = (PictureSpan(1, board),)
    one.nodes[2].pictures = (PictureSpan(1, board),)
    prompt = Prompt(
        Row("rows/7", "1>", "rows", None), "1>", one.nodes[0].tokens.tolist(), pictures=one.nodes[0].pictures
    )
    (row,) = sample_rows(RolloutBatch([PromptSample(prompt, 0)], [one], 0.0, 0.0), StepResult(), tokenizer)
    assert row["prompt"] == f"1{picture_mark(board.key)}>"
    assert [entry["text"] for entry in json.loads(row["turns"])] == ["22", f"3{picture_mark(board.key)}>", "5"]
    assert row["pictures"] == [board]
