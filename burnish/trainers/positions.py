"""Whether every model that reads a sequence is made for its length: the policy, a teacher, a process reward model.

Past its last position a model still computes, on angles it has never seen, and nobody would be told.
"""

from __future__ import annotations

from pathlib import Path

from burnish.config.errors import UserError
from burnish.config.schema import TrainConfig
from burnish.controller.roles import find_directory
from burnish.data.prompts import Prompt
from burnish.models.adapters import base_of, is_adapter
from burnish.models.architecture import positions_of


def check_positions(
    config: TrainConfig, positions: int | None, longest: int, held_out: list[Prompt], model: str = "the model"
) -> int:
    """Whether every prompt leaves room for a completion: the engine would only find out in the middle of a run. Returns the
    tokens of the longest."""
    longest_held_out = max((len(prompt.tokens) for prompt in held_out), default=0)
    wanted = [("rollout", max(stage.max_tokens for stage in config.rollout.all_stages()), longest)]
    if held_out:
        modes = config.validation.modes.items()
        wanted += [(f"validation.modes.{name}", mode.max_tokens, longest_held_out) for name, mode in modes]
    for where, max_tokens, prompt in wanted:
        if positions is not None and prompt + max_tokens > positions:
            raise UserError(
                f"the longest prompt has {prompt} tokens, and {where}.max_tokens={max_tokens} more make {prompt + max_tokens}, "
                f"but {model} is made for {positions} positions; lower {where}.max_tokens or data.max_prompt_tokens"
            )
        most = config.environment.max_tokens
        if most is not None and prompt + max_tokens > most:
            raise UserError(
                f"the longest prompt has {prompt} tokens, and {where}.max_tokens={max_tokens} more make {prompt + max_tokens}, but "
                f"environment.max_tokens={most} is for all turns together; raise it, or lower {where}.max_tokens"
            )
    return max(prompt + max_tokens for _, max_tokens, prompt in wanted)


def check_readers(
    config: TrainConfig, base: Path | None, longest: int, held_out: list[Prompt], most: int | None
) -> None:
    """The same of the models that read what the policy wrote; `most` are the tokens that several turns may come to.

    A teacher reads what is trained on, a process reward model the answers to held-out prompts too.
    """
    process, turns = config.algorithm.process, config.environment.max_turns
    readers = [
        ("algorithm.kl.reference.path", getattr(config.algorithm.kl.reference, "path", None), []),
        ("algorithm.process.path", None if process is None else process.path, held_out),
    ]
    for key, path, prompts in readers:
        if path is None:
            continue
        directory = find_directory(path, base)
        positions = positions_of(base_of(directory) if is_adapter(directory) else directory)
        check_positions(config, positions, longest, prompts, f"{key}={path}")
        if positions is not None and most is not None and turns > 1 and most > positions:
            raise UserError(
                f"the {turns} turns of a trajectory may come to {most} tokens, but {key}={path} is made for {positions} positions; "
                f"set environment.max_tokens={positions} or less"
            )
