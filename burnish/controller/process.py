"""Builds the process reward model of a run: a second language model, with its frozen start."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from burnish.config.errors import UserError
from burnish.config.schema import TrainConfig
from burnish.controller.roles import find_directory
from burnish.models.activations import set_activations
from burnish.models.compiled import compile_layers
from burnish.models.policy import AnyPolicy, PolicyModel, load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.training.parallel.distribute import distribute
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.process import ProcessModel, twin_of
from burnish.training.reference import Reference


def check_process(config: TrainConfig, policy: AnyPolicy, base: Path | None) -> None:
    """Refuse a process reward model that could not read the policy's tokens."""
    process = config.algorithm.process
    if process is None or process.path is None:
        return
    directory = find_directory(process.path, base)
    if not Tokenizer.load(directory).means_the_same_as(policy.tokenizer):
        raise UserError(
            f"algorithm.process.path={process.path} has another tokenizer than the policy, whose tokens it is to reward one by one"
        )


def build_process(
    config: TrainConfig, policy: PolicyModel, base: Path | None, ranks: Ranks = SOLO
) -> ProcessModel | None:
    """The process reward model, a copy of the policy as it is now or a model of its own, or None where no advantage uses one.

    Call it before the policy's weights move, or are divided. Where the policy has adapters this has some of its own.
    """
    process, training = config.algorithm.process, config.training
    if process is None:
        return None
    model = _model(config, process.path, policy, base)
    start = Reference(model, training.token_budget, 1.0, ranks)
    set_activations(model, training.activations)
    if training.compile:
        compile_layers(model)
    distribute(model, ranks, config.parallel.offload)
    total, budget = training.steps * process.mini_batches, training.token_budget
    return ProcessModel(model, start, process.optimizer, total, budget, training.share_prompts, ranks)


def _model(config: TrainConfig, path: str | None, policy: PolicyModel, base: Path | None) -> nn.Module:
    if path is None:
        return twin_of(policy.module)
    where = str(next(policy.module.parameters()).device)
    own = config.model.model_copy(update={"adapter": None, "lora": policy.lora, "device": where})
    return load_policy(own, find_directory(path, base), None, config.seed).module
