"""What IFEval's published tables have besides the accuracy: by instruction instead of by prompt, and by the loose check (Zhou et al. 2023, 2311.07911).

By prompt, an answer counts if it follows all instructions of its prompt; `accuracy` is this share, checked strictly. By instruction, the
share is over all instructions of all prompts, so a prompt with three counts three times. They are computed from the completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.evaluation.statistics import Estimate, mean_at_k, ratio_interval
from burnish.rewards.instruction_checks import INSTRUCTIONS, MODES, follows_instruction

Row = dict[str, Any]
Followed = dict[str, list[bool]]
"""By mode: whether each instruction of a prompt is followed."""


@dataclass(frozen=True)
class InstructionResult:
    """Shares by mode: `strict` and `loose`."""

    by_prompt: dict[str, Estimate]
    """Answers that follow all instructions of their prompt."""
    by_instruction: dict[str, Estimate]
    """Instructions that are followed."""
    num_instructions: int
    """In all prompts, each prompt once."""


def summarise_instructions(rows: Sequence[Row]) -> InstructionResult | None:
    """Summarise the rows whose expected answer is a list of IFEval's instructions; None without any. Failed samples are left out."""
    groups: dict[str, list[Followed]] = {}
    for row in rows:
        if row["accuracy"] is not None and (instructions := instructions_of(row["answer"])) is not None:
            groups.setdefault(row["id"], []).append(_followed(row, instructions))
    if not groups:
        return None
    by_prompt, by_instruction = {}, {}
    for mode in MODES:
        questions = [[one[mode] for one in samples] for samples in groups.values()]
        by_prompt[mode] = mean_at_k([[float(all(followed)) for followed in samples] for samples in questions])
        hits = [sum(map(sum, samples)) for samples in questions]
        by_instruction[mode] = ratio_interval(hits, [sum(map(len, samples)) for samples in questions])
    return InstructionResult(by_prompt, by_instruction, sum(len(samples[0]["strict"]) for samples in groups.values()))


def instructions_of(answer: str | None) -> list[dict[str, Any]] | None:
    """Return the instructions that an expected answer lists; None if it is something else."""
    if answer is None or not answer.startswith("["):
        return None
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    is_list = found and all(isinstance(one, dict) and one.get("id") in INSTRUCTIONS for one in found)
    return found if is_list else None


def _followed(row: Row, instructions: Sequence[dict[str, Any]]) -> Followed:
    if row["timed_out"]:  # the verifier has given up on the text, and would do so again
        return {mode: [False] * len(instructions) for mode in MODES}
    return {mode: [follows_instruction(row["completion"], one, mode) for one in instructions] for mode in MODES}


def instruction_estimates(found: InstructionResult) -> dict[str, Estimate]:
    """Return the four numbers of the published tables by their names."""
    return {f"prompt {mode}": found.by_prompt[mode] for mode in MODES} | {
        f"instruction {mode}": found.by_instruction[mode] for mode in MODES
    }


def instructions_json(found: InstructionResult) -> dict[str, Any]:
    """Return the numbers as plain values."""
    estimates = {
        name.replace(" ", "_"): {"value": one.mean, "low": one.low, "high": one.high}
        for name, one in instruction_estimates(found).items()
    }
    return estimates | {"num_instructions": found.num_instructions}
