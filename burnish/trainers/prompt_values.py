"""The value pass of A*-PO: before training, the optimal value of each training prompt, from samples of the initial policy.

The rewards of the samples are kept in prompt_values.jsonl of the run, one line a prompt, written as the pass goes on. A run that is
killed in the pass or later reads them from there and samples only what is missing. The pass runs before a checkpoint is loaded, so it
always samples from the weights that training began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from burnish.algorithms.advantages.offline_values import optimal_value
from burnish.algorithms.advantages.spec import OfflineValueAdvantage
from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.rollout.scoring import rollout_and_score
from burnish.rollout.validation import sampling_options
from burnish.run.durable_files import append_durably, truncate
from burnish.run.run import Run

if TYPE_CHECKING:
    from burnish.trainers.assembly import RunParts

VALUES_FILE = "prompt_values.jsonl"
MIN_CHUNK = 16
"""Prompts that are sampled together, at least."""
Rewards = dict[str, list[float]]
"""The rewards of each prompt's samples, by the id of its row."""


def prepare_prompt_values(parts: RunParts, run: Run) -> None:
    """Give the prompt stream the value of every prompt, and leave out the prompts that no sample solved.

    Does nothing unless the advantage is offline_value. The policy must have the weights that training begins with.
    """
    advantage = parts.config.algorithm.advantage
    if not isinstance(advantage, OfflineValueAdvantage):
        return
    path, prompts = run.directory.path / VALUES_FILE, parts.stream.prompts()
    rewards = read_rewards(path, advantage.samples)
    missing = [prompt for prompt in prompts if prompt.row.id not in rewards]
    if missing:
        rewards |= dict(_sample_rewards(parts, run, missing, advantage.samples, path))
    values = solved_values({p.row.id: rewards[p.row.id] for p in prompts}, advantage.beta)
    if not values:
        raise UserError(
            f"not one of {len(prompts)} prompts was solved in {advantage.samples} samples of the initial policy, so there is nothing to learn "
            "from: use easier prompts, more algorithm.advantage.samples, or a warm_start"
        )
    parts.stream.use_values(values)
    run.display.note(
        f"{len(prompts) - len(values)} of {len(prompts)} prompts were never solved in {advantage.samples} samples and are left out; the "
        f"mean value of the others is {fmean(values.values()):.3f}"
    )


def solved_values(rewards: Mapping[str, Sequence[float]], beta: float) -> dict[str, float]:
    """V* of each prompt with a reward above 0."""
    return {name: optimal_value(found, beta) for name, found in rewards.items() if any(r > 0 for r in found)}


def read_rewards(path: Path, samples: int) -> Rewards:
    """The rewards of an earlier pass with as many samples; a line that a kill cut off is removed from the file."""
    if not path.is_file():
        return {}
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        truncate(path, complete)
    found: Rewards = {}
    for number, line in enumerate(data[:complete].splitlines(), 1):
        try:
            row = json.loads(line)
            if row["samples"] == samples:
                found[row["id"]] = [float(reward) for reward in row["rewards"]]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}): delete the file, and the run samples the values again"
            ) from error
    return found


def _sample_rewards(
    parts: RunParts, run: Run, prompts: Sequence[Prompt], samples: int, path: Path
) -> Iterator[tuple[str, list[float]]]:
    """Sample and score answers of the initial policy, chunk after chunk, and append the rewards of each chunk to the file."""
    config = parts.config
    rollout = config.rollout.at(1)
    sampling = sampling_options(rollout, parts.policy.tokenizer.eos_ids)
    run.display.note(f"value pass: {samples} samples of each of {len(prompts)} prompts")
    chunk_size = max(MIN_CHUNK, rollout.prompts * rollout.n // samples)
    num_failed = num_done = 0
    for start in range(0, len(prompts), chunk_size):
        chunk = prompts[start : start + chunk_size]
        title = f"value pass, prompts {num_done + 1} to {num_done + len(chunk)} of {len(prompts)}"
        draws = [PromptSample(prompt, 0, step=1) for prompt in chunk]
        progress = partial(run.display.phase, of=title)
        rollouts = rollout_and_score(parts.runner, parts.rewards, draws, samples, sampling, "baseline", progress)
        found: Rewards = {prompt.row.id: [] for prompt in chunk}
        for t in rollouts.trajectories:
            if t.reward is not None:
                found[t.prompt_id].append(t.reward)
        num_failed += len(rollouts.failed)
        num_done += len(chunk)
        if num_failed == num_done * samples:
            raise UserError(
                f"value pass: not one of {num_failed} samples could be scored; fix the reward and run the same command again. First: "
                f"{rollouts.failed[0].error}"
            )
        lines = [json.dumps({"id": name, "samples": samples, "rewards": values}) for name, values in found.items()]
        append_durably(path, "".join(line + "\n" for line in lines).encode())
        yield from found.items()
    if num_failed:
        run.display.note(f"value pass: {num_failed} samples could not be scored and do not count")
