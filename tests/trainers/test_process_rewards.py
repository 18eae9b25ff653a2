"""Process rewards: the worked example of PRIME, the order of learning and rewarding, and the metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import Optimizer
from burnish.config.model import ProcessModel as Settings
from burnish.core.batch import Batch
from burnish.core.trajectory import TokenNode, Trajectory, chain_nodes, pack
from burnish.rollout.scoring import RolloutBatch
from burnish.run.metrics import read_metrics
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from burnish.trainers.process_rewards import ProcessRewards
from burnish.training.auxiliary_models import ProcessRewardModel
from burnish.training.reference import Reference
from tests.trainers.tiny import TINY, run_of

Q = [[0.4, -0.2, 0.6, 0.2], [-0.3, 0.1], [0.2, 0.5, -0.4], [-0.6, 0.1, 0.2, 0.3]]
RIGHT = [1.0, 0.0, 0.0, 1.0]
PLAIN = [0.716667, 0.696667, 0.706667, 0.676667, -0.688333, -0.6675]
PLAIN += [-0.659167, -0.666667, -0.689167, 0.65, 0.684167, 0.683333, 0.6775]
CE = 0.68761


class Table(nn.Module):
    """A model that gives every token a log-prob of its own, whatever stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.logp = nn.Parameter(-2 - torch.arange(14, dtype=torch.float64) / 7)

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        *rest: Any,
        shared_prefix: Any = None,
    ) -> tuple[Tensor, None]:
        return self.logp[tokens[wanted]] / temperature, None


def trajectories(accuracies: list[float | None] | None = None) -> list[Trajectory]:
    """The four answers of the worked example behind a prompt of one token; every written token is another."""
    found, first = [], 1
    for sample, (ratios, right) in enumerate(zip(Q, RIGHT if accuracies is None else accuracies, strict=True)):
        size = len(ratios)
        written = np.array([False] + [True] * size)
        tokens = np.array([0, *range(first, first + size)])
        nodes = chain_nodes(tokens, written, np.zeros(size + 1, np.float32), np.where(written, 0, -1))
        found.append(Trajectory("p", 0, sample, nodes, "stop", "", reward=RIGHT[sample], accuracy=right))
        first += size
    return found


def rewards(**settings: Any) -> ProcessRewards:
    """A process reward model whose log-ratio to its start is the example's q."""
    settings = {"optimizer": Optimizer(lr=0.1), "update": "after", **settings}
    model = Table()
    start = Reference(model, 100, 1.0)
    with torch.no_grad():
        model.logp[1:] += torch.tensor([q for row in Q for q in row], dtype=torch.float64)
    made = ProcessRewardModel(model, start, settings["optimizer"], 100, 100)
    return ProcessRewards(made, Settings(**settings))


def prepared(process: ProcessRewards, batch: Batch | None = None, **advantage: Any) -> tuple[Batch, StepContext]:
    options = {"process_coef": 1.0, "outcome_coef": 1.0, "norm": "none", **advantage}
    algorithm = algorithm_from_preset("prime")
    slot = algorithm.advantage.model_copy(update=options)
    pipeline = AlgorithmPipeline(algorithm.model_copy(update={"advantage": slot}), num_updates=1)
    batch = pack(trajectories()) if batch is None else batch
    batch = pipeline.select(pipeline.shape(batch, 1, 8), 1)
    context = StepContext(cast(Any, None), process=process)
    return pipeline.prepare(batch, context), context


def written(batch: Batch, name: str) -> list[float]:
    return cast(list[float], batch.token[name][batch.action_mask].tolist())


# --- the worked example ------------------------------------------------------------------------------------------------


def test_the_worked_example_from_trajectories_to_advantages() -> None:
    batch, context = prepared(rewards(), whiten=False)
    assert written(batch, "process_rewards") == pytest.approx([0.05 * q for row in Q for q in row], abs=1e-12)
    assert context.metrics["process/loss"] == pytest.approx(CE, abs=1e-5)
    assert written(batch, "advantages") == pytest.approx(PLAIN, abs=1e-6)
    assert batch.token["advantages"][~batch.action_mask].tolist() == [0.0] * 4
    assert context.notes == []


def test_the_worked_example_whitened_and_normalised() -> None:
    batch, _ = prepared(rewards())
    assert written(batch, "advantages")[:4] == pytest.approx([0.803139, 0.77412, 0.788629, 0.745101], abs=1e-6)
    outcome = [2 / 3 if right else -2 / 3 for right, row in zip(RIGHT, Q, strict=True) for _ in row]
    dense = [a - b for a, b in zip(PLAIN, outcome, strict=True)]
    batch, _ = prepared(rewards(), norm="batch", whiten=False)
    divided = [d / (0.05 + 1e-6) + o for d, o in zip(dense, outcome, strict=True)]
    assert written(batch, "advantages") == pytest.approx(divided, abs=1e-4)


def test_it_learns_before_it_rewards_unless_told_otherwise() -> None:
    assert algorithm_from_preset("prime").process == Settings()
    assert Settings().update == "before"
    late, early = rewards(), rewards(update="before")
    (one, its), (other, its_too) = prepared(late), prepared(early)
    assert its.metrics == its_too.metrics  # the same loss and accuracy, of the model before it learnt
    rewarded = [written(batch, "process_rewards") for batch in (one, other)]
    assert rewarded[0] == pytest.approx([0.05 * q for row in Q for q in row])
    # Right answers are worth more now, wrong ones less: every token moved by Adam's first step, whose size is lr.
    moved = [0.05 * (q + (0.1 if right else -0.1)) for right, row in zip(RIGHT, Q, strict=True) for q in row]
    assert rewarded[1] == pytest.approx(moved, abs=1e-6)


# --- what is logged, and what is left out --------------------------------------------------------------------------------


def test_accuracy_is_that_of_answers_before_they_were_learnt() -> None:
    _, context = prepared(rewards(update="before", optimizer=Optimizer(lr=5.0)))
    stats = context.metrics
    # Q is 1.0, -0.2, 0.3, 0.0 for right, wrong, wrong, right: three signs are known, and one of them is wrong.
    assert stats["process/accuracy"] == pytest.approx(2.5 / 4)
    # Pairs of a right and a wrong one: the first is ahead of both, the last of one.
    assert stats["process/ranking"] == pytest.approx(3 / 4)
    assert stats["process/share_right"] == 0.5
    process = rewards(update="before", optimizer=Optimizer(lr=5.0))
    prepared(process)
    assert prepared(process)[1].metrics["process/accuracy"] == 1.0


def test_answers_nobody_judged_are_rewarded_and_not_learnt() -> None:
    some = pack(trajectories([1.0, None, 0.0, 1.0]))
    process = rewards()
    before = cast(Table, process.model.learner.model).logp.detach().clone()
    found = process(some)
    moved = cast(Table, process.model.learner.model).logp.detach() - before
    assert (moved != 0).tolist() == [False] + [True] * 4 + [False] * 2 + [True] * 7
    scores = [0.05 * sum(row) for row in Q]
    losses = [math.log1p(math.exp(-scores[0])), math.log1p(math.exp(scores[2])), math.log1p(math.exp(-scores[3]))]
    assert found.metrics["process/loss"] == pytest.approx(sum(losses) / 3)
    assert found.rewards[some.action_mask].tolist() == pytest.approx([0.05 * q for row in Q for q in row])
    unjudged = process(pack(trajectories([None] * 4)))
    assert unjudged.metrics == {}
    assert "no answer of the batch was judged" in unjudged.notes[0]


def test_answers_that_come_back_are_rewarded_and_not_learnt_again() -> None:
    answers = trajectories()
    for number, answer in enumerate(answers):
        answer.metadata["use"] = float(number == 1)
    process = rewards()
    before = cast(Table, process.model.learner.model).logp.detach().clone()
    batch = pack(answers)
    found = process(batch)
    moved = cast(Table, process.model.learner.model).logp.detach() - before
    assert (moved != 0).tolist() == [False] + [True] * 4 + [False] * 2 + [True] * 7
    assert found.rewards[batch.action_mask].tolist() == pytest.approx([0.05 * q for row in Q for q in row])


def test_the_sequences_of_one_answer_are_judged_together() -> None:
    def roots(nodes: list[TokenNode], before: int) -> list[TokenNode]:
        return [replace(node, parent=node.parent + before if node.parent >= 0 else -1) for node in nodes]

    first, second, third, fourth = trajectories()
    both = Trajectory("p", 0, 0, [*first.nodes, *roots(third.nodes, 2)], "stop", "", reward=1.0, accuracy=1.0)
    found = rewards()(pack([both, second, fourth]))
    scores = [0.05 * (sum(Q[0]) + sum(Q[2])), 0.05 * sum(Q[1]), 0.05 * sum(Q[3])]
    losses = [math.log1p(math.exp(-scores[0])), math.log1p(math.exp(scores[1])), math.log1p(math.exp(-scores[2]))]
    assert found.metrics["process/loss"] == pytest.approx(sum(losses) / 3)


def test_each_mini_batch_is_an_update_and_a_group_is_never_split() -> None:
    answers = trajectories()
    for k, answer in enumerate(answers):
        answer.prompt_id = "pq"[k // 2]
    process = rewards(mini_batches=3)
    process(pack(answers))
    assert process.model.learner.updates == 2


def test_held_out_answers_are_judged_and_teach_nothing() -> None:
    process = rewards()
    before = cast(Table, process.model.learner.model).logp.detach().clone()
    values = process.held_out_metrics(RolloutBatch([], trajectories(), 0.0, 0.0))
    assert values == {"process_accuracy": pytest.approx(2.5 / 4), "process_ranking": pytest.approx(3 / 4)}
    assert torch.equal(cast(Table, process.model.learner.model).logp.detach(), before)
    assert process.held_out_metrics(RolloutBatch([], trajectories([None] * 4), 0.0, 0.0)) == {}


# --- runs ----------------------------------------------------------------------------------------------------------------

PRIME = ["algorithm={preset: prime, filters: [], refill: {oversample: 1, short: partial}}"]
PRIME += ["algorithm.process.optimizer.lr=0.01", "model.new=null"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k.startswith(("process/", "actor/loss"))} for row in read_metrics(folder)]


def test_before_the_first_update_the_model_says_nothing(tmp_path: Path, warm: Path) -> None:
    first = rows(run_of(tmp_path / "run", TINY, [*PRIME, f"model.path={warm}"]) / "metrics.jsonl")[0]
    assert first["process/accuracy"] == 0.5
    assert first["process/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_path_of_its_own_is_where_the_model_starts(tmp_path: Path, warm: Path) -> None:
    policy = warm.parent / "checkpoints" / "step-000001"  # the policy and the model are not the same
    own = [f"model.path={policy}", f"algorithm.process.path={warm}"]
    found = rows(run_of(tmp_path / "own", TINY, [*PRIME, *own]) / "metrics.jsonl")
    assert found[0]["process/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found != rows(run_of(tmp_path / "same", TINY, [*PRIME, own[0]]) / "metrics.jsonl")


def test_a_model_with_another_tokenizer_is_refused(tmp_path: Path, warm: Path) -> None:
    other = run_of(
        tmp_path / "other", TINY.replace("sort_digits", "addition"), ["training.steps=1", "data.train.0.options={}"]
    )
    path = other / "checkpoints" / "step-000001"
    with pytest.raises(UserError, match="has another tokenizer than the policy"):
        run_of(tmp_path / "run", TINY, [*PRIME, f"model.path={warm}", f"algorithm.process.path={path}"])


def test_with_adapters_both_models_stand_on_the_same_frozen_weights(tmp_path: Path, warm: Path) -> None:
    lora = [*PRIME, f"model.path={warm}", "model.lora={rank: 2, alpha: 4}", "training.steps=3"]
    folder = run_of(tmp_path / "run", TINY, lora)
    found = rows(folder / "metrics.jsonl")
    assert found[0]["process/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(found[-1]["process/loss"] - math.log(2)) > 1e-3
    saved = folder / "checkpoints" / "step-000003" / "process" / "model.safetensors"
    assert saved.stat().st_size < (warm / "model.safetensors").stat().st_size / 2


@pytest.mark.parametrize("source", ["ahead", "{name: async, max_staleness: 1}"])
def test_it_learns_from_rollouts_of_any_source(source: str, tmp_path: Path, warm: Path) -> None:
    found = rows(
        run_of(tmp_path / "run", TINY, [*PRIME, f"model.path={warm}", f"rollout.source={source}"]) / "metrics.jsonl"
    )
    assert len({row["process/loss"] for row in found}) == len(found) == 4
