"""Made-up rollouts of several shapes, and what the learner sees of an algorithm on them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.spec import Algorithm
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import role_key
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from burnish.trainers.process_rewards import ProcessRewardResult

ROLES = ("proposer", "solver#1", "solver#2")


def make_batch() -> Batch:
    """Three mixed groups, one of one sample, one constant; one truncated sample; far from the old policy."""
    lengths = [3, 4, 2, 5, 3, 2, 4, 3]
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)])
    size = mask.numel()

    def numbers(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    old = -0.2 - 3 * torch.rand(size, generator=generator, dtype=torch.float64)
    return Batch(
        tokens=torch.tensor([k % 3 for n in lengths for k in range(n + 1)]),
        offsets=offsets_from_lengths(torch.tensor(lengths) + 1),
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "new": old + numbers(),
            "old": old,
            "ref": old + numbers(0.3),
            "entropy": torch.rand(size, generator=generator, dtype=torch.float64),
            "sum_p2": torch.rand(size, generator=generator, dtype=torch.float64),
            "critic": numbers(),
            "process_rewards": numbers(),
            "author_logp": old + numbers(0.5),
            "behaviour_logp": old + numbers(0.5),
            "identity": torch.arange(size),
            "observed": torch.where(mask, 0, (~mask).cumsum(0) % 3 + 1).to(torch.int8),
        },
        sequence={
            "group_ids": torch.tensor([0, 0, 1, 1, 1, 2, 3, 3]),
            "trajectory_ids": torch.arange(8),
            "key": torch.arange(8) * 977 + 7,
            "reward": torch.tensor([1, 0, 0.3, 0.8, -1, 0.5, 1, 1], dtype=torch.float64),
            "accuracy": torch.tensor([1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.float64),
            "truncated": torch.tensor([False, True, False, False, False, False, False, False]),
            "void_turns": torch.tensor([0, 0, 0, 2, 0, 0, 0, 0], dtype=torch.float64),
            "num_chars": torch.tensor([12, 3, 0, 30, 9, 11, 8, 40]),
            "num_lines": torch.tensor([1, 1, 1, 2, 2, 1, 1, 1]),
            "part/a": torch.tensor([1, 0, 0, 1, 0, 1, 0, 1], dtype=torch.float64),
            "part/b": torch.tensor([0.2, 0.9, 0.4, 0.1, 0.7, 0.3, 0.6, 0.5], dtype=torch.float64),
            "greedy_reward": torch.tensor([1, 1, 0.5, 0.5, 0.5, 0, 0, 0], dtype=torch.float64),
            "prompt_value": torch.tensor([0.6, 0.6, 0.5, 0.5, 0.5, 0.2, 0.9, 0.9], dtype=torch.float64),
            "budget": torch.tensor([2, 9, 2, 3, 4, 5, 3, 8], dtype=torch.float64),
            "demonstration": torch.tensor([True, False, False, True, False, False, False, True]),
            "role_ids": torch.tensor([role_key(name) for name in ("proposer", "proposer", *["solver"] * 6)]),
            "episode_ids": torch.tensor([0, 1, 0, 0, 1, 1, 2, 2]),
        },
    )


def make_pairs() -> Batch:
    """Pairs of a chosen and a rejected answer; for KTO good, bad and mismatched ones."""
    batch = make_batch()
    chosen = torch.tensor([True, False] * 4)
    return batch.with_sequence(
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        chosen=chosen,
        desirable=chosen,
        mismatched=torch.tensor([False] * 5 + [True] * 3),
    )


def make_trees() -> Batch:
    """Two trees of answers: the first token is one edge, the other tokens another; the first answer with an edge trains it."""
    batch = make_batch()
    paths = [[1, 11], [1, 12], [2, 21], [2, 22], [2, 23], [3, 31], [3, 32], [4]]
    first = torch.tensor([True, False, True, False, False, True, False, True])[batch.sequence_ids]
    deep = torch.tensor([len(path) - 1 for path in paths])[batch.sequence_ids]
    edge = torch.minimum(batch.positions - 1, deep)
    ids = torch.where(batch.action_mask & (first | (edge == deep)), edge, -1)
    lengths = torch.tensor([len(path) for path in paths])
    nodes = Ragged(torch.tensor([node for path in paths for node in path]), offsets_from_lengths(lengths))
    batch = batch.with_token(segment_ids=ids, loss_mask=ids >= 0)
    batch = batch.with_sequence(
        group_ids=torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
        reward=torch.tensor([1, 0, 0, 0.5, 1, 1, 1, 0.5], dtype=torch.float64),
    )
    return Batch(batch.tokens, batch.offsets, batch.token, batch.sequence, {"nodes": nodes})


def make_turns() -> Batch:
    """Every answer in two turns that begin in states which come again."""
    batch = make_batch()
    states = torch.tensor([5, 6, 5, 5, 5, 7, 5, 7, 7, 5, 5, 6, 5, 7, 7, 5])
    columns = {
        "turn_start": torch.tensor([1, 2] * 8),
        "turn_state": states,
        "turn_reward": (torch.arange(16) % 3).double() / 4,
        "answer_probability": (torch.arange(16) % 5).double() / 5,
    }
    ragged = {name: Ragged(values, torch.arange(0, 17, 2)) for name, values in columns.items()}
    return Batch(batch.tokens, batch.offsets, batch.token, batch.sequence, ragged)


def make_segments() -> Batch:
    """Every answer cut before its second token, with a value at each border."""
    batch = make_batch()
    ids = torch.where(batch.action_mask, (batch.positions > 1).long(), -1)
    values = torch.linspace(0, 1, 16, dtype=torch.float64) ** 2
    borders = Ragged(values, torch.arange(0, 17, 2))
    batch = batch.with_token(segment_ids=ids)
    return Batch(batch.tokens, batch.offsets, batch.token, batch.sequence, {"border_values": borders})


BATCHES = {"pairs": make_pairs, "trees": make_trees, "segments": make_segments, "turns": make_turns}


class Scorer:
    """In place of learner, reference and critic: their outputs are columns of the batch."""

    is_policy = False

    def __init__(self, column: str) -> None:
        self.column = column

    def logprobs(self, batch: Batch) -> Tensor:
        return batch.token[self.column]

    values = logprobs

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        return {"logp": batch.token[self.column], **{name: batch.token[name] for name in needs}}


def process_of(batch: Batch) -> ProcessRewardResult:
    """Stands where the process reward model stands."""
    return ProcessRewardResult(batch.token["process_rewards"], {}, [])


def seen_by_the_learner(algorithm: Algorithm, batch: Batch | None = None, max_tokens: int = 7) -> list[float]:
    """Loss, gradients, weights, advantages and masks of one batch, in a row; rounded below what an option may do."""
    batch = make_batch() if batch is None else batch
    pipeline = AlgorithmPipeline(algorithm, num_updates=2, has_demonstrations=True)
    reference = cast(Any, Scorer("ref")) if algorithm.kl.reference.name != "none" else None
    critic = cast(Any, Scorer("critic")) if algorithm.critic is not None else None
    batch = pipeline.select(pipeline.shape(batch, 1, max_tokens), 4)
    context = StepContext(cast(Any, Scorer("old")), reference, critic, cast(Any, process_of), roles=ROLES)
    batch = pipeline.prepare(batch, context)
    (mini,) = mini_batches(pipeline.trim(batch, context), algorithm, 1, 1, max_tokens)
    mask = mini.loss_mask
    logp, entropy = (mini.token[k][mask].clone().requires_grad_() for k in ("new", "entropy"))
    view = loss_view(mini, logp, entropy)
    loss, _ = pipeline.loss(view)
    gradients = torch.autograd.grad(loss, [logp, entropy], allow_unused=True, materialize_grads=True)
    parts = [loss.detach().reshape(1), *gradients, view.column("weight"), view.column("advantages")]
    parts += [
        mini.token[k].double() for k in ("identity", "returns", "nll_weight", "observation_weight") if k in mini.token
    ]
    return [round(x, 9) for part in parts for x in part.tolist()]


def algorithm_of(base: dict[str, Any]) -> Algorithm:
    return Algorithm.model_validate({k: v for k, v in base.items() if k != "batch"})


def seen(base: dict[str, Any]) -> list[float]:
    """What the learner sees of an algorithm given as a tree; `batch` names the rollouts it is made for."""
    make = BATCHES.get(base.get("batch", ""), make_batch)
    return seen_by_the_learner(algorithm_of(base), make())
