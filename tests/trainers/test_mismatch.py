"""The worst tokens of a step, where engine and trainer disagree most: which they are, their text, and their table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.spec import Algorithm
from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.scoring import RolloutBatch
from burnish.run.metrics import read_metrics
from burnish.run.samples import WORST_TOKEN_COLUMNS
from burnish.run.samples import read_worst_tokens as read_worst
from burnish.trainers import step_metrics
from burnish.trainers.mismatch import (
    NUM_WORST_TOKENS,
    TOKENS_AFTER,
    TOKENS_BEFORE,
    GapReport,
    WorstToken,
    acts_before_advantages,
    apply_correction,
    gap_report,
)
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.training.learner import Update
from tests.trainers.tiny import TINY, run_of

ALPHABET = "abcdefghijklmnopqrstuvwxyz"  # ids from 2
TURNS = "qqabtttcd"  # a question, two tokens of the model, a tool's answer, two tokens of the model
WROTE = [c not in "qt" for c in TURNS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters(ALPHABET)


def trajectory(prompt: str, sample: int, engine: list[float], tokenizer: Tokenizer) -> Trajectory:
    """Two turns of a dialogue, with these log-probs of its four written tokens."""
    mask = np.array(WROTE)
    logp = np.zeros(len(TURNS), np.float32)
    logp[mask] = engine
    tokens = np.array(tokenizer.encode(TURNS))
    nodes = chain_nodes(tokens, mask, logp, np.where(mask, 0, -1).astype(np.int32))
    return Trajectory(prompt, 3, sample, nodes, "stop", "", float(sample), None)


def rollouts(*engine: list[float], tokenizer: Tokenizer) -> RolloutBatch:
    failed = trajectory("other", 0, [-1.0] * 4, tokenizer)
    failed.reward = None  # not in the batch: the trajectories of the batch are counted without it
    made = [trajectory("p", k, logp, tokenizer) for k, logp in enumerate(engine)]
    return RolloutBatch([], [failed, *made], 0.0, 0.0)


def batch_of(scored: RolloutBatch, trainer: float = -1.0) -> Batch:
    batch = pack(scored.usable)
    return batch.with_token(old_logp=torch.where(batch.action_mask, trainer, 0.0))


def reported(batch: Batch, correction: Any = "none") -> GapReport:
    """The report of a batch whose `old_logp` is known, with what a correction does to it."""
    slot = Algorithm.model_validate({"preset": "grpo", "correction": correction}).correction
    whole = apply_correction(batch, slot, None).batch if acts_before_advantages(slot) else batch
    left = torch.zeros(whole.num_sequences).index_add(0, whole.sequence_ids, whole.loss_mask.float()) > 0
    return gap_report(whole, whole.select(left.nonzero().squeeze(1)), None, slot, 0)


def test_a_dialogue_shows_only_what_the_model_wrote(tokenizer: Tokenizer) -> None:
    scored = rollouts([-1.0, -1.5, -1.0, -3.0], [-1.0, -1.0, -0.75, -1.0], tokenizer=tokenizer)
    batch = batch_of(scored)
    rows = step_metrics.worst_token_rows(scored, reported(batch).worst, tokenizer)
    assert [(r["sample"], r["position"], r["text"], r["gap"]) for r in rows] == [
        (0, 3, "d", 2.0),
        (0, 1, "b", 0.5),
        (1, 2, "c", -0.25),
    ]
    assert rows[1] == {
        "group": "p#3",
        "sample": 0,
        "position": 1,
        "token": tokenizer.encode("b")[0],
        "before": "qqa",
        "text": "b",
        "after": "tttcd",
        "behaviour_logp": -1.5,
        "trainer_logp": -1.0,
        "gap": 0.5,
        "weight": None,
    }
    assert ["step", *rows[1]] == list(WORST_TOKEN_COLUMNS)
    assert reported(batch).metrics["mismatch/by_position/0/tokens"] == 2
    assert "mismatch/by_position/7/tokens" not in reported(batch).metrics


def test_what_a_correction_rejected_is_shown_with_weight_0(tokenizer: Tokenizer) -> None:
    batch = batch_of(rollouts([-1.0, -1.0, -1.0, -4.0], [-1.0, -1.5, -1.0, -1.0], tokenizer=tokenizer))
    rejecting = {"name": "decoupled", "weights": "token", "threshold": 1.5, "reject": {"seq_max_k2": 1.0}}
    found = reported(batch, rejecting)
    assert [(w.trajectory, w.gap, w.weight) for w in found.worst] == [(0, 3.0, 0.0), (1, 0.5, 1.5)]
    assert found.metrics["mismatch/max"] == pytest.approx(0.5), "the gap of what is still in the loss"
    assert found.metrics["mismatch/by_position/3/abs"] == pytest.approx(1.5), "the gap of all that was written"


def test_a_token_to_which_a_side_gave_no_probability_has_numbers_all_the_same(tokenizer: Tokenizer) -> None:
    batch = batch_of(rollouts([-1.0, float("-inf"), -1.0, -1.0], tokenizer=tokenizer))
    (only,) = reported(batch).worst
    assert (only.engine, only.trainer, only.gap) == (-300.0, -1.0, 299.0)


def test_a_batch_that_was_rejected_whole_still_shows_why(tokenizer: Tokenizer) -> None:
    batch = batch_of(rollouts([-4.0] * 4, tokenizer=tokenizer))
    found = reported(batch, {"name": "decoupled", "reject": {"seq_max_k2": 1.0}})
    assert [(w.position, w.weight) for w in found.worst] == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0)]
    assert "mismatch/mean" not in found.metrics


def test_where_the_update_alone_has_log_probs_the_tokens_in_the_loss_are_shown(tokenizer: Tokenizer) -> None:
    batch = pack(rollouts([-1.0, -3.0, -2.0, -1.0], tokenizer=tokenizer).usable)
    mask = batch.loss_mask.clone()
    mask[3] = False  # the "b"
    batch = batch.with_token(loss_mask=mask)
    update = Update({}, torch.where(mask, -1.0, 0.0), None)
    pipeline = AlgorithmPipeline(
        Algorithm.model_validate({"preset": "grpo", "kl": {"reference": "none"}}), num_updates=1
    )
    (only,) = pipeline.mismatch(batch, batch, [update], 0).worst
    assert (only.position, only.gap) == (2, 1.0)
    assert pipeline.mismatch(batch, batch, [update, update], 0) == GapReport(), "no log-probs before the first update"


def test_no_more_than_a_few_are_kept_and_their_surroundings_are_short() -> None:
    num = 200
    nodes = chain_nodes(np.arange(num), np.arange(num) > 0, -np.arange(num, dtype=np.float32), np.zeros(num, np.int32))
    batch = batch_of(RolloutBatch([], [Trajectory("p", 0, 0, nodes, "stop", "", 1.0)], 0.0, 0.0), trainer=0.0)
    worst = reported(batch).worst
    assert [w.token for w in worst] == list(range(num - 1, num - 1 - NUM_WORST_TOKENS, -1))
    assert (worst[0].before, worst[0].after) == (list(range(num - 1 - TOKENS_BEFORE, num - 1)), [])
    assert worst[7].after == list(range(num - NUM_WORST_TOKENS + 1, num))
    assert TOKENS_AFTER >= NUM_WORST_TOKENS


class Bytes:
    """Decodes numbers as bytes, like a byte-level tokenizer."""

    def decode(self, tokens: list[int], skip_special: bool = True) -> str:
        assert not skip_special, "an end token is a token like any other"
        return bytes(tokens).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("place", "shown"),
    [(0, ("", "a", "éb")), (1, ("a", "\ufffd", "éb")), (2, ("a", "é", "b")), (3, ("aé", "b", ""))],
)
def test_a_character_of_several_tokens_is_the_last_ones_text(place: int, shown: tuple[str, str, str]) -> None:
    tokens = list("aéb".encode())
    worst = WorstToken(0, 0, tokens[place], tokens[:place], tokens[place + 1 :], -1.0, -2.0, -1.0, None)
    nodes = chain_nodes(np.array([0]), np.array([True]), np.zeros(1, np.float32), np.zeros(1, np.int32))
    scored = RolloutBatch([], [Trajectory("p", 0, 0, nodes, "stop", "", 1.0)], 0.0, 0.0)
    (row,) = step_metrics.worst_token_rows(scored, [worst], Bytes())
    assert (row["before"], row["text"], row["after"]) == shown


# --- whole runs --------------------------------------------------------------------------------------------------------


def test_every_step_of_a_run_leaves_its_worst_tokens_and_profiles(tmp_path: Path, warm: Path) -> None:
    fault = "rollout.mismatch={name: temperature, factor: 1.5, wrong: reported}"
    run = run_of(tmp_path / "run", TINY, ["model.new=null", f"model.path={warm}", fault])
    found = read_worst(run / "samples" / "worst_tokens.jsonl")
    steps = {row["step"]: row for row in read_metrics(run / "metrics.jsonl")}
    assert sorted({row["step"] for row in found}) == [1, 2, 3, 4]
    for step in steps:
        rows = [row for row in found if row["step"] == step]
        assert 1 <= len(rows) <= NUM_WORST_TOKENS
        gaps = [abs(row["gap"]) for row in rows]
        assert gaps == sorted(gaps, reverse=True)
        assert gaps[0] == pytest.approx(steps[step]["mismatch/max"])
        assert all(row["gap"] == row["trainer_logp"] - row["behaviour_logp"] for row in rows)
        counts = [v for name, v in steps[step].items() if name.startswith("mismatch/by_p") and name.endswith("/tokens")]
        assert sum(counts) == 2 * steps[step]["rollout/tokens_used"], "each token once in either profile"


def test_a_step_that_trains_on_nothing_leaves_no_worst_token(tmp_path: Path) -> None:
    always = "def reward(prompts, completions, **columns):\n    return [1.0 for _ in completions]\n"
    (tmp_path / "reward.py").write_text(always)
    overrides = [f"reward.parts={tmp_path / 'reward.py'}:reward", "algorithm.filters=[zero_signal]", "training.steps=2"]
    run = run_of(tmp_path / "run", TINY, overrides)
    assert not (run / "samples" / "worst_tokens.jsonl").exists()
    assert not any(name.startswith("mismatch/") for row in read_metrics(run / "metrics.jsonl") for name in row)
