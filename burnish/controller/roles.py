"""Builds the roles of a run from its config: the policy, the learner and the reference on its weights, the critic, the
engine, the driver that runs environments against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from burnish.config.errors import UserError
from burnish.config.schema import Model, Rollout, Source, TrainConfig
from burnish.core.engine import Engine
from burnish.data.tasks.registry import make_task
from burnish.environments.base import environment_factory
from burnish.models.decoder import Decoder
from burnish.models.exact import exact_logprobs
from burnish.models.hf import TransformersPolicy
from burnish.models.policy import PolicyModel, load_policy
from burnish.models.value import ValueModel
from burnish.rollout.driver import Driver
from burnish.rollout.mismatch import MismatchEngine
from burnish.rollout.native.engine import NativeEngine
from burnish.rollout.native.paged import PagedEngine
from burnish.rollout.transformers_engine import TransformersEngine
from burnish.training.critic import Critic
from burnish.training.learner import Learner
from burnish.training.reference import Reference, make_reference


def find_directory(path: str, base: Path | None) -> Path:
    """A model directory, relative to the recipe's folder or to the working directory."""
    candidates = [Path(path)] if base is None else [base / path, Path(path)]
    found = next((c for c in candidates if c.is_dir()), None)
    if found is None:
        raise UserError(f"model directory {path} does not exist (looked at {', '.join(str(c) for c in candidates)})")
    return found


def alphabet_of(sources: list[Source], seed: int) -> str | None:
    """The characters a generated task is written in, for the tokenizer of a new model."""
    tasks = [make_task(s.task, s.options, seed) for s in sources if s.task is not None]
    alphabets = [t.alphabet for t in tasks]
    if not alphabets or any(a is None for a in alphabets):
        return None
    return "".join(dict.fromkeys("".join(a for a in alphabets if a is not None)))


def build_policy(config: Model, sources: list[Source], seed: int, base: Path | None) -> PolicyModel:
    """The policy a run starts from: a model directory, or a new decoder."""
    path = find_directory(config.path, base) if config.path is not None else None
    return load_policy(config, path, alphabet_of(sources, seed), seed)


def build_engine(policy: PolicyModel, rollout: Rollout, listener: Callable[[str, int], None] | None = None) -> Engine:
    """The engine that samples from the policy's own tensors, or with a fault from others."""
    if rollout.mismatch is None:
        return _engine(policy, rollout, listener)

    def make(module: nn.Module) -> Engine:
        assert isinstance(module, Decoder | TransformersPolicy), "a copy of the policy's own module"
        return _engine(replace(policy, module=module), rollout, listener)

    return MismatchEngine(make, policy.module, rollout.mismatch, policy.tokenizer)


def _engine(policy: PolicyModel, rollout: Rollout, listener: Callable[[str, int], None] | None) -> Engine:
    native = isinstance(policy.module, Decoder)
    kind = rollout.engine if rollout.engine != "auto" else ("native" if native else "transformers")
    if kind == "native":
        if not isinstance(policy.module, Decoder):
            raise UserError("rollout.engine=native needs the native decoder; this model runs through transformers")
        weight = policy.module.embedding.weight
        if rollout.exact and weight.dtype == torch.float64:
            raise UserError(
                "rollout.exact: the engine reports log-probs in float32; set model.dtype=float32 or bfloat16"
            )
        if rollout.exact or weight.is_cuda:
            if rollout.exact:
                policy.module.exact = partial(exact_logprobs, policy.module)
            decode = policy.tokenizer.decode
            return PagedEngine(policy.module, rollout.max_rows, decode, listener, exact=rollout.exact)
        # On a CPU a dense cache is faster: its attention needs no gathering of pages.
        return NativeEngine(policy.module, rollout.max_rows, policy.tokenizer.decode, listener)
    if rollout.exact:
        raise UserError("rollout.exact needs the native decoder; this model runs through transformers")
    if isinstance(policy.module, Decoder):
        raise UserError(
            "rollout.engine=transformers needs model.backend=transformers, so that both use the same weights"
        )
    return TransformersEngine(policy.module, rollout.max_rows, policy.tokenizer.decode, policy.tokenizer.pad_id)


def build_learner(config: TrainConfig, policy: PolicyModel) -> Learner:
    """The learner of the actor; its schedule ends with the last step."""
    training, critic = config.training, config.algorithm.critic
    steps = training.steps - (critic.warmup_steps if critic is not None else 0)  # those the policy is trained in
    total = steps * training.mini_batches * training.epochs
    return Learner(policy.module, training.optimizer, total, training.token_budget, config.rollout.temperature)


def build_reference(config: TrainConfig, policy: PolicyModel) -> Reference | None:
    """The reference, or None where nothing asks for one; call it before the policy's weights move."""
    slot = config.algorithm.kl.reference
    if slot.name == "none":
        return None
    options = slot.model_dump(exclude={"name"})
    return make_reference(slot.name, policy.module, config.training.token_budget, config.rollout.temperature, **options)


def build_critic(config: TrainConfig, policy: PolicyModel) -> Critic | None:
    """The critic, its backbone a copy of the policy as it is now, or None where no advantage uses values."""
    critic, training = config.algorithm.critic, config.training
    if critic is None:
        return None
    total = training.steps * training.mini_batches * training.epochs * critic.updates
    return Critic(ValueModel(policy.module), critic.optimizer, total, training.token_budget, critic.clip)


def build_driver(config: TrainConfig, policy: PolicyModel, engine: Engine, base: Path | None) -> Driver:
    """The driver of the configured environment."""
    factory = environment_factory(config.environment, policy.tokenizer, base)
    return Driver(engine, factory, policy.tokenizer, config.seed, config.environment.max_turns, policy.max_positions)
