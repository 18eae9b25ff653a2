"""Splitting a trajectory into branches changes no number: advantages, weights, loss and gradients of every sampled token.

The property is checked for every preset and for every value of every option in the tables of `option_moves.py`.
Left out are methods whose rollouts are no trajectories of turns (trees, segments, pairs), and the random draws of Clip-Cov,
which depend on a token's position in its sequence.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from burnish.algorithms.batch_columns import (
    first_sequences,
    per_sequence,
    per_trajectory,
    place_rewards,
    sequence_rewards,
    trajectory_lengths,
    trajectory_offsets,
    turns_of,
)
from burnish.algorithms.filters.filter_functions import loss_mask_from_plugin
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import ids_from_offsets
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from burnish.training.learner import Learner
from tests.algorithms.branches import branched, episodes, without_turns
from tests.algorithms.functions_with_defaults import grpo
from tests.algorithms.learners_view import ROLES, Scorer, algorithm_of, process_of
from tests.algorithms.option_moves import CHOICES, MOVES
from tests.algorithms.test_records_and_functions import moved
from tests.trainers.traces import flat, model_of

MAX_TOKENS = 12
NO_TURNS = {"spo_chain", "spo_tree", "dpo", "ipo", "simpo", "orpo", "kto", "online_dpo", "sdpo", "sdft", "opsd", "gold"}
"""Presets whose rollouts are segments, trees or pairs, or single answers behind the teacher's own prompt."""


def seen(algorithm: Algorithm, batch: Batch) -> dict[str, Tensor]:
    """What the learner sees at each sampled token, by its index in the batch of whole trajectories; and the loss."""
    pipeline = AlgorithmPipeline(algorithm, num_updates=2, has_demonstrations=True)
    reference = cast(Any, Scorer("ref")) if algorithm.kl.reference.name != "none" else None
    critic = cast(Any, Scorer("critic")) if algorithm.critic is not None else None
    batch = pipeline.select(pipeline.shape(batch, 1, MAX_TOKENS), 4)
    context = StepContext(cast(Any, Scorer("old")), reference, critic, cast(Any, process_of), roles=ROLES)
    whole = pipeline.prepare(batch, context)
    (mini,) = mini_batches(pipeline.trim(whole, context), algorithm, 1, 1, MAX_TOKENS)
    mask, view = mini.loss_mask, loss_view(mini)
    logp, entropy = (mini.token[k][mask].clone().requires_grad_() for k in ("new", "entropy"))
    loss, metrics = pipeline.loss(loss_view(mini, logp, entropy))
    gradients = torch.autograd.grad(loss, [logp, entropy], allow_unused=True, materialize_grads=True)
    found = {"identity": mini.token["identity"][mask], "weight": view.column("weight")}
    found |= {"advantages": view.column("advantages"), "loss": loss.detach(), "slope": gradients[0]}
    found |= {"entropy slope": gradients[1], **{name: value.detach() for name, value in metrics.items()}}
    names = ("returns", "nll_weight", "token_rewards", "rollout_weight")
    found |= {name: mini.token[name][mask] for name in names if name in mini.token}
    numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in context.metrics.items()}
    return found | numbers


def assert_same(algorithm: Algorithm, whole: Batch, cut: Batch, left_out: tuple[str, ...] = ()) -> None:
    expected, got = seen(algorithm, whole), seen(algorithm, cut)
    assert expected.keys() == got.keys()
    for name in expected:
        if name not in left_out:
            torch.testing.assert_close(
                got[name], expected[name], atol=1e-9, rtol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


DRAWN = ("loss", "slope", "pg_clipfrac")
"""What a random choice of tokens by key and position changes."""
KINDS = {"turns": lambda batch: batch, "": without_turns}


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in NO_TURNS])
def test_branches_change_no_number_of_a_preset(name: str) -> None:
    algorithm = algorithm_from_preset(name)
    left_out = DRAWN if algorithm.clip.name == "clip_cov" else ()
    whole = episodes(1)
    if name == "grpo_passk":  # refuses a group of one
        whole = whole.select((whole.sequence["group_ids"] != 2).nonzero().squeeze(1))
    if name == "max_rl":  # refuses negative rewards
        whole = whole.with_sequence(reward=whole.sequence["reward"].abs())
    cut = branched(whole, 1)
    for kind, of_kind in KINDS.items():
        if kind or not algorithm.needs("states"):
            assert_same(algorithm, of_kind(whole), of_kind(cut), left_out)


BASES: dict[str, dict[str, Any]] = {
    f"{slot}: {name}": base for slot, choices in CHOICES.items() for name, base in choices.items()
}
BASES |= {
    f"{key}={value}": moved(base, path, value)
    for key, moves in MOVES.items()
    for base, path, values in moves
    for value in values
}
DEFINED = {
    key: base
    for key, base in BASES.items()
    if base.get("batch", "turns") == "turns" and "pairs" not in key and not key.startswith("SpoTree")
}


@pytest.mark.parametrize("slot", sorted({key.split(".")[0].split(":")[0] for key in DEFINED}))
def test_branches_change_no_number_for_any_value_of_an_option(slot: str) -> None:
    whole = episodes(3)
    cut = branched(whole, 3)
    assert cut.num_sequences > whole.num_sequences + 5
    for key, base in DEFINED.items():
        if key.split(".")[0].split(":")[0] != slot:
            continue
        algorithm = algorithm_of(base)
        kind = KINDS[base.get("batch", "")]
        assert_same(algorithm, kind(whole), kind(cut), DRAWN if algorithm.clip.name == "clip_cov" else ())


def test_pairs_of_branched_trajectories_are_refused() -> None:
    with pytest.raises(UserError, match="a sample of this environment is several sequences"):
        seen(algorithm_of(BASES["filters: pairs"]), without_turns(branched(episodes(1), 1)))


@pytest.mark.parametrize("clip", [{"name": "ppo", "low": 3e-3, "high": 4e-3}, {"name": "log_geo"}])
@pytest.mark.parametrize("budget", [25, 100, 10_000])
def test_a_learner_computes_the_gradient_of_whole_trajectories(budget: int, clip: dict[str, Any]) -> None:
    """A branch repeats the tokens before it, so a model gives its tokens the log-probs of the uncut trajectory."""
    algorithm = Algorithm.model_validate({"ratio": "sequence", "clip": clip})
    gradients = []
    for batch in (episodes(1), branched(episodes(1), 1)):
        old = torch.where(batch.action_mask, batch.token["old"], 0.0)
        prepared = AlgorithmPipeline(algorithm, num_updates=2).prepare(
            without_turns(batch), StepContext(cast(Any, Scorer("old")))
        )
        (mini,) = mini_batches(prepared.with_token(old_logp=old), algorithm, 1, 1, MAX_TOKENS)
        learner = Learner(copy.deepcopy(model_of(0)), Optimizer(lr=1.0), 1, budget)
        loss = AlgorithmPipeline(algorithm, num_updates=2).loss
        total, _, _ = learner._accumulate(mini, loss)
        gradients.append(torch.cat([torch.tensor([total]), flat(learner.optimizer.gradients())]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-9, rtol=1e-9)


# --- columns ---------------------------------------------------------------------------------------------------------------


def two_branches() -> Batch:
    """Trajectory 0 has branches of 2 and 1 action tokens, trajectory 1 one sequence of 1."""
    mask = torch.tensor([False, True, True, False, False, True, False, True])
    return Batch(
        torch.arange(8),
        torch.tensor([0, 3, 6, 8]),
        {"action_mask": mask, "loss_mask": mask},
        {
            "trajectory_ids": torch.tensor([4, 4, 7]),
            "group_ids": torch.tensor([0, 0, 0]),
            "reward": torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64),
        },
    )


def test_the_outcome_of_a_trajectory_stands_once_on_its_last_action_token() -> None:
    batch = two_branches()
    assert place_rewards(batch).tolist() == [0, 0, 0, 0, 0, 1.0, 0, 0.5]
    assert sequence_rewards(batch.with_token(token_rewards=place_rewards(batch))).tolist() == [1.0, 1.0, 0.5]
    assert trajectory_lengths(batch).tolist() == [3, 3, 1]


def test_turns_without_a_column_are_runs_of_action_tokens() -> None:
    turns = turns_of(two_branches())
    assert turns.turn_of_token.tolist() == [0, 0, 1, 2]
    assert turns.sequence_of_turn.tolist() == [0, 1, 2]
    assert turns.last.tolist() == [2, 5, 7]


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_an_aggregation_takes_the_branches_as_one_sequence(mode: str, weights: list[float]) -> None:
    batch = two_branches()
    assert aggregation_weights(batch, mode, 10)[batch.action_mask].tolist() == pytest.approx(weights)


def test_columns_of_sequences_and_of_trajectories() -> None:
    batch = two_branches()
    first = first_sequences(batch)
    assert first is not None
    assert first.tolist() == [0, 2]
    assert trajectory_offsets(batch).tolist() == [0, 6, 8]
    of_trajectories = per_trajectory(batch, torch.tensor([5, 5, 6]))
    assert of_trajectories.tolist() == [5, 6]
    assert per_sequence(batch, of_trajectories).tolist() == [5, 5, 6]
    assert ids_from_offsets(trajectory_offsets(batch)).tolist() == [0] * 6 + [1] * 2


def test_branches_that_are_not_next_to_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="must be next to each other"):
        place_rewards(two_branches().select(torch.tensor([0, 2, 1])))


def test_every_draw_of_a_resampler_is_an_answer_of_its_own() -> None:
    algorithm = Algorithm.model_validate({"filters": [{"name": "pf_ppo", "mode": "best"}]})
    whole, cut = (seen(algorithm, without_turns(b)) for b in (episodes(1), branched(episodes(1), 1)))
    assert whole["identity"].unique().numel() < whole["identity"].numel()  # some trajectory is drawn more than once
    torch.testing.assert_close(cut["weight"], whole["weight"])


def test_a_role_has_its_own_baseline() -> None:
    """Groups are of a prompt, a visit and a role, so the statistics of one role leave the other out."""
    batch = two_branches().with_sequence(trajectory_ids=torch.arange(3), group_ids=torch.tensor([0, 1, 1]))
    assert grpo(batch, std="none").tolist() == [1.0, 0.25, -0.25]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]), ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25])],
)
def test_the_mean_of_a_group_counts_samples_and_not_their_conversations(
    rewards: list[float], expected: list[float]
) -> None:
    """The worked example of ALGORITHMS-2026.md N5.5: samples of three, two, two and one conversation."""
    counts = torch.tensor([3, 2, 2, 1])
    mask = torch.ones(8, dtype=torch.bool)
    batch = Batch(torch.arange(8), torch.arange(9), {"action_mask": mask, "loss_mask": mask})
    batch = batch.with_sequence(
        group_ids=torch.zeros(8, dtype=torch.int64),
        trajectory_ids=torch.arange(4).repeat_interleave(counts),
        reward=torch.tensor(rewards, dtype=torch.float64).repeat_interleave(counts),
    )
    assert grpo(batch, std="none").tolist() == torch.tensor(expected).repeat_interleave(counts).tolist()


# --- plug-ins --------------------------------------------------------------------------------------------------------------


def test_a_plug_in_that_treats_branches_of_one_trajectory_differently_is_refused() -> None:
    batch = two_branches()
    whole = torch.tensor([True, True, False])
    assert loss_mask_from_plugin(whole, batch, "f").tolist() == (batch.loss_mask & (torch.arange(8) < 6)).tolist()
    with pytest.raises(UserError, match="filter f keeps some sequences of a trajectory and drops others"):
        loss_mask_from_plugin(torch.tensor([True, False, True]), batch, "f")


def test_a_shaper_that_pays_branches_differently_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def by_length(batch, step):\n    return batch.lengths.double()\n")
    algorithm = Algorithm.model_validate({"shaping": [f"{tmp_path}/mine.py:by_length"]})
    pipeline = AlgorithmPipeline(algorithm, num_updates=1)
    assert pipeline.shape(episodes(1), 1, MAX_TOKENS).sequence["reward"].tolist() == episodes(1).lengths.tolist()
    with pytest.raises(UserError, match="different rewards for sequences of one trajectory"):
        pipeline.shape(branched(episodes(1), 1), 1, MAX_TOKENS)
