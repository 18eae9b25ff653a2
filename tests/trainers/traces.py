"""Any algorithm, over three steps on the same rollouts: what each update saw and found, and which functions were called.

A tiny real model makes steps 399 to 401, two updates each: warm-ups are over, and a reference that is copied every 400
steps is copied in the middle. Same tokens, rewards and keys for all, so that what differs comes from the slots.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.advantages.advantage_functions import ADVANTAGES
from burnish.algorithms.filters.filter_functions import GROUP_FILTERS, RESAMPLERS, SAMPLE_FILTERS
from burnish.algorithms.losses.distillation_spec import DivergenceLoss
from burnish.algorithms.losses.loss_functions import LOSSES
from burnish.algorithms.losses.policy_loss import Loss
from burnish.algorithms.losses.ratios_and_clips import CLIPS, RATIOS
from burnish.algorithms.shaping.shapers import SHAPERS
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.environment import Environment
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import Optimizer
from burnish.config.rollout import Rollout
from burnish.config.schema import Training
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import role_key
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import ValueModel
from burnish.models.kernels.logprob import Divergence
from burnish.rollout.scoring import RolloutBatch
from burnish.trainers import rl
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.trainers.process_rewards import ProcessRewards
from burnish.trainers.state import initial_state
from burnish.training.auxiliary_models import Critic, ProcessRewardModel
from burnish.training.learner import Learner, Update
from burnish.training.reference import REFERENCES, Reference, make_reference

STEPS, EPOCHS, PROMPTS, MAX_TOKENS = (399, 400, 401), 2, 5, 8
BARE: dict[str, Any] = {"ratio": "none", "clip": "none"}
KL = {"loss": {"estimator": "k3", "coef": 0.001}, "reference": "frozen"}
OTHERS: dict[str, dict[str, Any]] = {
    "softmean": {"advantage": "softmean", "kl": KL},
    "seq_prod": {"ratio": "seq_prod", "kl": KL},
    "token-sum": {"aggregation": "token-sum", "kl": KL},
    "overlong": {"filters": ["overlong"], "kl": KL},
    "void_turns": {"filters": ["void_turns"], "kl": KL},
    "snr": {"filters": [{"name": "snr", "share": 0.5}], "kl": KL},
    "repetition": {"shaping": [{"name": "repetition", "ngram": 1}], "kl": KL},
    "information_gain": {"shaping": ["information_gain"], "advantage": "rebn", "kl": KL},
    "stop_properly": {"shaping": ["stop_properly"], "kl": KL},
    "iterate": {"kl": {**KL, "reference": {"name": "iterate", "every": 400}}},
    "prompt-mean": {"aggregation": "prompt-mean", "kl": KL},
    "linear_length": {"shaping": ["linear_length"], "kl": KL},
    "balance": {"filters": ["balance"], "kl": KL},
    "seq_error": {"filters": ["seq_error"], "kl": KL},
}
"""What no preset chooses, beside GRPO's other slots."""
TUNED: dict[str, dict[str, Any]] = {"clip_b": {"filters": [{"name": "clip_b", "mu": 0.5}]}}
"""Slots of presets with options that act on the few tokens of these rollouts."""
BATCHES = {
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "kto"), "pairs"),
    "spo_tree": "trees",
    **dict.fromkeys(("gigpo", "hgpo", "mt_grpo", "rebn", "bilevel_gae", "step_broadcast", "information_gain"), "turns"),
    "spo_chain": "segments",
}
"""Algorithms whose rollouts are not independent samples of a prompt."""

# --- the rollouts --------------------------------------------------------------------------------------------------------


@functools.cache
def rollouts(kind: str) -> Batch:
    """Six groups of three, one of them constant, with every column that any algorithm reads; or such a batch as pairs,
    as steps of episodes and edges of trees, or cut into segments.
    """
    generator = torch.Generator().manual_seed(5)

    def rand(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    num, written = 18, torch.randint(2, MAX_TOKENS, (18,), generator=generator)
    offsets = offsets_from_lengths(written + 1)
    size = int(offsets[-1])
    mask = torch.ones(size, dtype=torch.bool).index_fill(0, offsets[:-1], False)
    number, right = torch.arange(num), torch.tensor([1, 1, 1, *[1, 0, 0] * 2, *[0, 1, 1] * 3]).double()
    batch = Batch(
        tokens=torch.randint(4, (size,), generator=generator),
        offsets=offsets,
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "process_rewards": rand(size) - 0.5,
            "author_logp": -2 * rand(size),
            "behaviour_logp": torch.where(mask, -1.5, 0.0).double(),
            "segment_ids": torch.where(mask, torch.arange(size) - offsets[:-1].repeat_interleave(written + 1) > 2, -1),
        },
        sequence={
            "group_ids": number // 3,
            "trajectory_ids": number,
            "key": number * 977 + 7,
            "reward": right * (0.5 + 0.5 * (number > 2) * rand(num)),
            "accuracy": right,
            "truncated": number % 7 == 4,
            "void_turns": (number % 5 == 3).double(),
            "num_chars": number * 5 % 17,
            "num_lines": 1 + (number % 3 == 0).long(),
            "part/a": right,
            "part/b": rand(num),
            "greedy_reward": (number // 3 % 2).double(),
            "prompt_value": 0.1 + (number // 3).double() / 8,
            "budget": 2 + 6 * rand(num),
            "demonstration": number % 3 == 1,
            "role_ids": torch.tensor([role_key("solver" if k % 9 > 2 else "proposer") for k in range(num)]),
            "episode_ids": number // 2,
            "teacher_ids": torch.zeros_like(number),
        },
        ragged={"border_values": Ragged(rand(2 * num), torch.arange(0, 2 * num + 1, 2))},
    )
    if kind == "pairs":
        pairs = {"chosen": number % 2 == 0, "desirable": number % 2 == 0, "mismatched": number % 6 > 3}
        return batch.with_sequence(group_ids=number // 2, **pairs)
    if kind == "turns":
        spans = {
            "turn_start": 1 + torch.arange(2 * num) % 2,
            "turn_state": torch.arange(2 * num) % 3,
            "turn_reward": rand(2 * num),
            "answer_probability": rand(2 * num),
        }
        ragged = {name: Ragged(values, torch.arange(0, 2 * num + 1, 2)) for name, values in spans.items()}
        return replace(batch, ragged=ragged)
    if (
        kind == "trees"
    ):  # nodes with two answers, two and one, and an answer that ends early; the first token is an edge
        deep, first = (number % 6 < 5)[batch.sequence_ids].long(), (number % 2 == 0)[batch.sequence_ids]
        edge = torch.minimum(batch.positions - 1, deep)
        ids = torch.where(mask & (first | (edge == deep)), edge, -1)
        paths = [[100 + k // 2, k] if k % 6 < 5 else [k] for k in range(num)]
        lengths = torch.tensor([len(path) for path in paths])
        flat = torch.tensor([node for path in paths for node in path])
        nodes = {"nodes": Ragged(flat, offsets_from_lengths(lengths))}
        batch = batch.with_token(segment_ids=ids, loss_mask=ids >= 0).with_sequence(group_ids=number // 6)
        return replace(batch, ragged=nodes)
    return batch


# --- three steps -----------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What an algorithm did: every mini-batch with its loss and gradients, the last weights, the functions it called."""

    updates: list[tuple[Batch, float, Tensor]] = field(default_factory=list)
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))
    called: set[tuple[str, str]] = field(default_factory=set)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors.values()])


class Watched(Learner):
    """A learner that keeps what it was given and what it found."""

    def __init__(self, model: Decoder, trace: Trace) -> None:
        super().__init__(model, Optimizer(lr=0.01, clip_norm=1e9, eps=1e-4), 10, 1000)
        self.trace, self.gradient = trace, torch.zeros(0)
        step = self.optimizer.step

        def keeping(lr: float, number: int) -> None:
            self.gradient = flat(self.optimizer.gradients())
            step(lr, number)

        self.optimizer.step = keeping

    def update(self, batch: Batch, loss: Loss, lr_scale: float = 1.0, also: Any = None, columns: bool = True) -> Update:
        update = super().update(batch, loss, lr_scale, also, columns)
        assert update.skipped is None
        self.trace.updates.append((batch, update.stats["loss"], self.gradient))
        return update


@functools.cache
def model_of(seed: int) -> Decoder:
    model = Decoder(Architecture("qwen3", 4, 8, 1, 2, 1, 4, 12, 64, qkv_bias=True, qk_norm=True, tied=False))
    initialise(model.double(), seed, std=0.8)
    return model


def job_of(algorithm: Algorithm, trace: Trace) -> Any:
    """A job that trains a real model; nothing around it is real."""
    learner = Watched(copy.deepcopy(model_of(0)), trace)
    slot, reference, critic = algorithm.kl.reference, None, None
    if slot.has_weights:
        # The policy has left the weights it started from.
        is_policy = slot.name == "policy" or (slot.name == "iterate" and slot.every == 1)
        start = learner.model if is_policy else model_of(1)
        options = slot.model_dump(exclude={"name", "url", "served_model"})
        options |= {"paths": {"start": None}} if slot.name == "teachers" else {}
        reference = make_reference(slot.name, start, 1000, 1.0, **options)
        if isinstance(algorithm.loss, DivergenceLoss) and algorithm.loss.support != "sampled":
            loss = algorithm.loss
            reference.divergence = Divergence(loss.alpha, loss.support, loss.top, loss.rest)
            learner.reference = reference.distribution
    if algorithm.critic is not None:
        optimizer = Optimizer(lr=0.01, clip_norm=1e9)
        critic = Critic(ValueModel(model_of(0)), optimizer, 100, 1000, algorithm.critic.clip)
        torch.nn.init.normal_(critic.model.head, generator=torch.Generator().manual_seed(0))
    process = None
    if algorithm.process is not None:
        model, optimizer = copy.deepcopy(model_of(1)), Optimizer(lr=0.01, clip_norm=1e9)
        made = ProcessRewardModel(model, Reference(model_of(0), 1000, 1.0), optimizer, 100, 1000)
        process = ProcessRewards(made, algorithm.process)
    return SimpleNamespace(
        config=SimpleNamespace(
            training=Training(epochs=EPOCHS),
            algorithm=algorithm,
            rollout=Rollout(prompts=PROMPTS, max_tokens=MAX_TOKENS),
            environment=Environment(),
        ),
        run=SimpleNamespace(display=SimpleNamespace(phase=lambda text: None, note=pytest.fail)),
        state=initial_state(algorithm),
        roles=("proposer", "solver#1", "solver#2"),
        pipeline=AlgorithmPipeline(algorithm, num_updates=EPOCHS, has_demonstrations=True),
        learner=learner,
        reference=reference,
        critic=critic,
        process=process,
        learners=[learner],
        imitation=functools.partial(imitated, algorithm.auxiliary.sft or 1.0) if algorithm.auxiliary.imitates else None,
        source=SimpleNamespace(after_step=lambda *step: None, load=lambda version: None, pending_draws=list),
        stream=SimpleNamespace(observe=lambda trajectories: None, state=dict),
        while_scoring=None,
    )


def in_context(batch: Batch) -> Batch:
    """The rollouts with a longer prompt for the teacher. One sample in four has none."""
    num = batch.num_sequences
    prompts = Ragged(torch.arange(3 * num) % 4, torch.arange(0, 3 * num + 1, 3))
    taught = torch.arange(num) % 4 != 0
    return replace(batch, ragged={**batch.ragged, "teacher_prompt": prompts}).with_sequence(taught=taught)


def imitated(coef: float, number: int) -> Batch:
    """Answers to imitate in every update, with their weights."""
    batch = rollouts("").select(torch.arange(3))
    return batch.with_token(weight=coef * aggregation_weights(batch, "token-mean"))


def run(algorithm: Algorithm, kind: str, steps: tuple[int, ...] = STEPS) -> Trace:
    """The loop of `trainers/rl.py` on rollouts that are always the same."""
    trace = Trace()
    with counted(trace.called):
        job = job_of(algorithm, trace)
        trace.called |= {("ratio", job.pipeline.loss.ratio), ("loss", job.pipeline.loss.loss)}
        for step in steps:
            batch = rollouts(kind) if algorithm.kl.context.name == "prompt" else in_context(rollouts(kind))
            shaped = job.pipeline.shape(batch, step, MAX_TOKENS)
            learned = rl.learn(job, step, job.pipeline.select(shaped, PROMPTS))
            rl.after_step(job, step, RolloutBatch([], [], 0.0, 0.0), learned)
    assert len(trace.updates) == len(steps) * EPOCHS
    trace.weights = flat(dict(job.learner.model.named_parameters()))
    return trace


TABLES: dict[str, list[dict[str, Any]]] = {
    "advantage": [ADVANTAGES],
    "ratio": [RATIOS],
    "clip": [CLIPS],
    "loss": [LOSSES],
    "filters": [GROUP_FILTERS, SAMPLE_FILTERS, RESAMPLERS],
    "shaping": [SHAPERS],
    "reference": [REFERENCES],
}


@contextmanager
def counted(called: set[tuple[str, str]]) -> Iterator[None]:
    """Every function of the tables notes its slot and name when it is called."""

    def noting(slot: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            called.add((slot, name))
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for slot, tables in TABLES.items():
            for table in tables:
                for name, function in list(table.items()):
                    if function is not None:
                        patch.setitem(table, name, noting(slot, name, function))
        yield


@functools.cache
def algorithm_of(name: str) -> Algorithm:
    if name in OTHERS:
        return Algorithm.model_validate(OTHERS[name])
    return Algorithm.model_validate({**algorithm_from_preset(name).model_dump(), **TUNED.get(name, {})})


@functools.cache
def trace_of(name: str, kind: str = "") -> Trace:
    return run(algorithm_of(name), kind)
