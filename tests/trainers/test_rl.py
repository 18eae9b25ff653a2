"""One step of the loop on made-up rollouts: refills, metrics, and the notes when there is nothing to learn."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.algorithms.spec import Algorithm
from burnish.config.environment import Environment
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset
from burnish.config.rollout import Rollout
from burnish.config.schema import Training
from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory, TrajectoryFinish, chain_nodes, pack
from burnish.data.row import Row
from burnish.rollout.scoring import RolloutBatch
from burnish.rollout.sync_source import RolloutPlan
from burnish.run.metrics import read_metrics
from burnish.trainers import step_metrics
from burnish.trainers.context import StepResult
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.trainers.rl import collect_rollouts, learn
from burnish.trainers.state import initial_state
from burnish.training.learner import Update
from tests.trainers.tiny import TINY, run_of


class Model:
    """Stands where the learner and the reference stand: every written token has the same log-prob."""

    device = torch.device("cpu")
    is_policy = False
    model = torch.nn.Linear(1, 1)

    def __init__(self, logp: float) -> None:
        self.logp = logp
        self.calls: list[Any] = []

    def logprobs(self, batch: Batch) -> Tensor:
        return torch.where(batch.action_mask, self.logp, 0.0)

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        return {"logp": self.logprobs(batch)}

    def update(self, batch: Batch, *details: Any, columns: bool = True) -> Update:
        self.calls.append((batch, *details))
        return Update({"loss": 1.0}, self.logprobs(batch), None)

    def after_update(self, model: Any) -> None:
        self.calls.append("after_update")


def group(prompt: str, finish: TrajectoryFinish, rewards: tuple[float | None, ...]) -> list[Trajectory]:
    """Samples of one prompt: a prompt token and three written ones."""
    mask = np.array([False, True, True, True])
    nodes = chain_nodes(np.arange(4), mask, np.full(4, -0.5, np.float32) * mask, np.zeros(4, np.int32))
    return [Trajectory(prompt, 0, k, nodes, finish, "", reward, reward) for k, reward in enumerate(rewards)]


def rollouts(finish: TrajectoryFinish, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> RolloutBatch:
    return RolloutBatch([], group("p", finish, rewards), 0.0, 0.0)


class Source:
    """Gives what it was made with, one item a round."""

    def __init__(self, *rounds: RolloutBatch) -> None:
        self.rounds, self.asked = list(rounds), list[tuple[int, int, RolloutPlan]]()

    def next(self, step: int, plan: RolloutPlan, progress: Any, round: int = 0) -> RolloutBatch:
        self.asked.append((step, round, plan))
        return self.rounds[round]


def job(algorithm: dict[str, Any], notes: list[str], *rounds: RolloutBatch, prompts: int = 1, turns: int = 1) -> Any:
    chosen = Algorithm.model_validate(algorithm)
    display = SimpleNamespace(note=notes.append, phase=lambda text: None)
    config = SimpleNamespace(
        training=Training(),
        algorithm=chosen,
        rollout=Rollout(prompts=prompts, n=2, max_tokens=3),
        environment=Environment(max_turns=turns),
        seed=0,
    )
    return SimpleNamespace(
        config=config,
        roles=(),
        add_columns=(),
        run=SimpleNamespace(display=display),
        state=initial_state(chosen),
        pipeline=AlgorithmPipeline(chosen, num_updates=1),
        policy=SimpleNamespace(tokenizer=SimpleNamespace(eos_ids=(0,))),
        source=Source(*rounds),
        scored=SimpleNamespace(flush=lambda: None),
        learner=Model(-0.5),
        reference=Model(-0.75) if chosen.kl.reference.name != "none" else None,
        critic=None,
        process=None,
        imitation=None,
        while_scoring=None,
    )


def step_of(made: Any, step: int = 7) -> tuple[RolloutBatch, StepResult]:
    sampled, batch = collect_rollouts(cast(Any, made), step)
    return sampled, learn(cast(Any, made), step, batch) if batch is not None else StepResult()


def test_kl_in_the_reward_is_among_the_metrics() -> None:
    notes: list[str] = []
    algorithm = {"kl": {"reward": {"estimator": "k1", "coef": 0.1}, "reference": "frozen"}}
    sampled, learned = step_of(job(algorithm, notes, rollouts("stop")))
    values = step_metrics.training_metrics(sampled, learned, step_s=2.0)
    assert values["actor/kl_reward"] == pytest.approx(0.25)
    assert values["actor/kl_coef"] == 0.1
    assert values["actor/updates"] == 1
    assert values["mismatch/max"] == 0
    assert notes == []


def test_a_loss_with_its_own_temperature_reports_no_gap_to_the_engine() -> None:
    """SSD learns at another temperature than it samples at; a gap between them is no fault of the engine."""
    algorithm = {"ratio": "none", "clip": "none", "advantage": "none", "loss": {"name": "nll", "temperature": 1.0}}
    sampled, learned = step_of(job(algorithm, [], rollouts("stop")))
    values = step_metrics.training_metrics(sampled, learned, step_s=2.0)
    assert values["actor/updates"] == 1
    assert [name for name in values if name.startswith("mismatch/")] == []
    other = {**algorithm, "advantage": "grpo", "loss": {"name": "rec", "weight": "advantage", "temperature": 2.0}}
    _, learned = step_of(job(other, [], rollouts("stop")))  # the temperature of an exponential weight, not of log-probs
    assert "mean" in {name.rpartition("/")[2] for name in learned.mismatch.metrics}


@pytest.mark.parametrize(("shaping", "is_logged"), [([], False), (["signed"], True)])
def test_the_shaped_reward_is_logged_where_something_shapes(
    tmp_path: Path, shaping: list[str], is_logged: bool
) -> None:
    run = run_of(tmp_path, TINY, [f"algorithm.shaping={shaping}", "training.steps=1"])
    assert ["reward/shaped" in row for row in read_metrics(run / "metrics.jsonl")] == [is_logged]


@pytest.mark.parametrize(
    ("answer", "columns", "shown"),
    [
        ("7", {"solution": "long words, so 7"}, "7"),
        (7, {}, "7"),
        (None, {"solution": "\\boxed{7}", "level": 3}, "\\boxed{7}"),
        (None, {"ground_truth": {"numbers": [1, 2]}}, '{"numbers": [1, 2]}'),
        (None, {"level": 3}, ""),
    ],
)
def test_the_expected_answer_is_shown_from_the_column_that_has_it(answer: Any, columns: Any, shown: str) -> None:
    assert step_metrics.expected_answer(Row("r", "q", "rows", answer, columns)) == shown


@pytest.mark.parametrize(("finish", "identical"), [("stop", 1), ("length", 0)])
def test_pairs_are_counted_where_they_are_made(finish: TrajectoryFinish, identical: int) -> None:
    algorithm = algorithm_from_preset("online_dpo").model_dump() | {"filters": ["overlong", "pairs"]}
    sampled, learned = step_of(job(algorithm, [], rollouts(finish)))
    values = step_metrics.training_metrics(sampled, learned, step_s=2.0)
    assert (values["pairs/made"], values["pairs/ties"], values["pairs/identical"]) == (0, 0, identical)


@pytest.mark.parametrize(("turns", "left"), [(1, 0.0), (2, 1.0)])
def test_the_limit_of_a_length_is_that_of_all_turns(turns: int, left: float) -> None:
    """Three tokens are all that one completion may have, and half of what two may."""
    made = job({"shaping": ["soft_overlong"]}, [], rollouts("stop"), turns=turns)
    _, batch = collect_rollouts(cast(Any, made), 7)
    assert batch is not None
    assert batch.sequence["reward"].tolist() == [left, left - 1]


def test_a_moving_baseline_is_of_the_rewards_it_is_taken_off(tmp_path: Path) -> None:
    overrides = ["algorithm.advantage={name: reinforce, baseline: ema}", "algorithm.shaping=[signed]"]
    run = run_of(tmp_path, TINY, overrides)
    expected = None
    for row in read_metrics(run / "metrics.jsonl"):
        reward = row["reward/shaped"]
        assert reward == pytest.approx(2 * row["reward/mean"] - 1)
        expected = reward if expected is None else 0.9 * expected + 0.1 * reward
    (state,) = run.glob("checkpoints/step-*/trainer.json")
    assert json.loads(state.read_text())["reward_mean"] == pytest.approx(expected)


def test_the_reference_hears_of_every_update_that_was_made() -> None:
    made = job({"kl": {"loss": {"coef": 0.1}, "reference": "frozen"}}, [], rollouts("stop"))
    step_of(made)
    assert made.reference.calls == ["after_update"]


def test_a_step_whose_samples_were_all_filtered_out_makes_no_update_and_says_why() -> None:
    notes: list[str] = []
    sampled, learned = step_of(job({"filters": ["overlong"]}, notes, rollouts("length")))
    assert learned.updates == []
    assert len(notes) == 1
    assert "step 7: no update" in notes[0]
    assert "all 2 sequences" in notes[0]
    values = step_metrics.training_metrics(sampled, learned, step_s=2.0)
    assert (values["rollout/sequences_used"], values["actor/updates"]) == (0, 0)


@pytest.mark.parametrize("rewards", [(1.0, 1.0), (None, None)])
def test_a_step_without_signal_says_why(rewards: tuple[float | None, ...]) -> None:
    notes: list[str] = []
    _, learned = step_of(job({"filters": ["zero_signal"]}, notes, rollouts("stop", rewards)))
    assert learned.batch is None
    assert len(notes) == 1
    assert "step 7: no update" in notes[0]


# --- refill ------------------------------------------------------------------------------------------------------------

FIRST = RolloutBatch(
    [], [t for k in range(4) for t in group(f"a{k}", "stop", ((1, 1), (0, 0), (1, 0), (0, 1))[k])], 1.0, 0.5
)
SECOND = RolloutBatch([], [*group("b0", "stop", (1, 0)), *group("b1", "stop", (0, 1))], 2.0, 0.25)
DYNAMIC = {"filters": ["zero_signal"], "refill": {"rounds": 3}}


def test_groups_are_generated_until_enough_are_kept_and_the_surplus_is_dropped() -> None:
    """Dynamic sampling (DAPO): of four groups two differ; three are wanted, so one more round is asked for."""
    made = job(DYNAMIC, [], FIRST, SECOND, prompts=3)
    sampled, batch = collect_rollouts(made, 7)
    assert [(step, round) for step, round, _ in made.source.asked] == [(7, 0), (7, 1)]
    assert batch is not None
    assert batch.sequence["reward"].tolist() == [1, 0, 0, 1, 1, 0]
    assert len(sampled.trajectories) == 12
    assert (sampled.rollout_s, sampled.reward_s) == (3.0, 0.75)
    assert step_metrics.used_trajectory_ids(sampled, batch) == [
        "a2#0.0",
        "a2#0.1",
        "a3#0.0",
        "a3#0.1",
        "b0#0.0",
        "b0#0.1",
    ]


def test_enough_is_a_share_of_the_prompts() -> None:
    made = job({**DYNAMIC, "refill": {"rounds": 3, "enough": 0.5}}, [], FIRST, SECOND, prompts=4)
    collect_rollouts(made, 7)
    assert len(made.source.asked) == 1


def test_the_groups_that_are_wanted_are_those_of_the_roles_that_played() -> None:
    """An environment may have six roles, of which two play in each game: two groups a prompt are all that there can be."""
    games = [t for k in range(2) for t in group(f"g{k}", "stop", (1, 0, 0, 1))]
    for index, t in enumerate(games):
        t.metadata["role"] = ("propose", "propose", "solve#1", "solve#2")[index % 4]
    made = job(DYNAMIC, [], RolloutBatch([], games, 0.0, 0.0), prompts=2)
    made.roles = ("propose", "solve#1", "solve#2", "other", "more#1", "more#2")
    sampled, batch = collect_rollouts(made, 7)
    assert sampled.groups_per_draw == 2
    assert len(made.source.asked) == 1
    assert batch is not None
    assert len(set(batch.sequence["group_ids"].tolist())) == 4


def test_each_round_draws_a_multiple_of_the_prompts() -> None:
    made = job({**DYNAMIC, "refill": {"oversample": 4}}, [], FIRST, prompts=3)
    collect_rollouts(made, 7)
    assert made.source.asked[0][2].prompts == 12


@pytest.mark.parametrize(("short", "kept"), [("partial", 2), ("fill", 3)])
def test_missing_groups_are_done_without_or_made_up_for(short: str, kept: int) -> None:
    made = job({**DYNAMIC, "refill": {"rounds": 1, "oversample": 2, "short": short}}, [], FIRST, prompts=3)
    _, batch = collect_rollouts(made, 7)
    assert batch is not None
    assert batch.num_sequences == 2 * kept


def test_missing_groups_stop_the_run_where_asked() -> None:
    made = job({**DYNAMIC, "refill": {"rounds": 1, "oversample": 2, "short": "error"}}, [], FIRST, prompts=3)
    with pytest.raises(
        UserError, match=r"step 7: 1 rounds of generation gave 2 groups .* of 3 wanted; raise algorithm"
    ):
        collect_rollouts(made, 7)


def test_a_refill_without_a_group_filter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.refill replaces groups that a filter dropped"):
        Algorithm.model_validate({"filters": ["overlong"], "refill": {"rounds": 3}})


# --- rewards -----------------------------------------------------------------------------------------------------------


def test_an_accuracy_that_no_reward_gave_is_not_logged_as_zero() -> None:
    sampled = rollouts("stop")
    for trajectory in sampled.trajectories:
        trajectory.accuracy = None
    assert "reward/accuracy" not in step_metrics.reward_metrics(sampled)
    assert step_metrics.reward_metrics(sampled)["reward/mean"] == 0.5


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        (Environment(), 3),
        (Environment(max_turns=4), 12),
        (Environment(max_turns=4, max_tokens=10), 10),
        (Environment(max_turns=4, max_tokens=30), 12),
    ],
)
def test_length_shapers_and_the_horizon_count_the_same_tokens_of_an_episode(
    environment: Environment, limit: int
) -> None:
    """Three written tokens in a limit of `limit`: the penalty begins at its first token, the divisor is the limit."""
    shaping = (
        [{"name": "soft_overlong", "cache": limit}] if limit == 3 else [{"name": "soft_overlong", "cache": limit - 1}]
    )
    algorithm = {"aggregation": "seq-mean-token-sum-norm", "shaping": shaping}
    made = job(algorithm, [], rollouts("stop"))
    made.config.environment = environment
    _, batch = collect_rollouts(made, 7)
    assert batch is not None
    penalty = 1.0 if limit == 3 else 2 / (limit - 1)
    assert batch.sequence["reward"].tolist() == pytest.approx([1 - penalty, -penalty])
    learn(made, 7, batch)
    ((mini, *_),) = [call for call in made.learner.calls if call != "after_update"]
    assert mini.sequence["weight"].tolist() == [1 / 2 / limit] * 2


def test_the_dependence_on_prompts_is_measured_every_so_many_steps() -> None:
    found = []
    for every in (0, 2, 7):
        made = job({}, [], RolloutBatch([], group("a", "stop", (1.0, 0.0)), 0.0, 0.0))
        made.config.training = Training(collapse_every=every)
        found.append({name for name in step_of(made)[1].metrics if name.startswith("collapse/")})
    assert found == [set(), set(), {"collapse/reward_std", "collapse/repeated_answers"}]


def test_a_sample_of_two_sequences_counts_once_in_means_and_weights() -> None:
    """Rewards 1 (two sequences of three tokens) and 0 (one): the mean is 1/2, and the loss has two trajectories."""
    batch = pack(group("p", "stop", (1.0, 0.0))).select(torch.tensor([0, 0, 1]))
    made = job({"advantage": {"name": "grpo", "std": "none"}}, [])
    result = learn(made, 7, batch)
    assert (result.reward_mean, result.num_sampled) == (0.5, 2)
    ((mini, *_),) = [call for call in made.learner.calls if call != "after_update"]
    assert mini.sequence["advantages"].tolist() == [0.5, 0.5, -0.5]
    assert mini.sequence["weight"].tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6])
    assert mini.sequence["answer_ids"].tolist() == [0, 0, 1]
