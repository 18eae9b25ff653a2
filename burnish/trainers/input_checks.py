"""Checks of a run's inputs: its rows, sequence lengths against model positions, and whether models changed before a resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.environment import SINGLE_TURN
from burnish.config.errors import UserError, did_you_mean
from burnish.config.model_ids import model_directory
from burnish.config.requirements import AnyConfig, model_directories, plugin_files
from burnish.config.rollout import Opponents
from burnish.config.schema import TrainConfig
from burnish.core.trajectory import role_name
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.data.row_formats import NO_TOOL_ENVIRONMENT, read_rows, refuse_tools, source_name
from burnish.environments.registry import never_tells_success
from burnish.models.architecture import max_positions_of
from burnish.models.compatibility import digest_parts, model_digest
from burnish.models.lora.peft_files import base_model_of, is_adapter
from burnish.models.policy import find_directory
from burnish.rewards.scoring import Rewards
from burnish.run.checkpoint.snapshot import Checksums, are_checksums, file_checksum, first_difference
from burnish.run.durable_files import atomic_write

InputDigests = dict[str, dict[str, Any]]
"""Digests of models, weights and plug-ins, as written to `INPUTS_FILE`."""
INPUTS_FILE = "inputs.json"
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
NUM_CHECKSUM_THREADS = 8
MANY_REPEATS = 20
"""Repeats of each row above which a run warns that it can memorise the rows."""


@dataclass
class RowCache:
    """The rows of a run's files and plug-ins, so that each is read only once."""

    sizes: list[int | None] = field(default_factory=list)
    """Number of rows of each source of `data.train`; None for a task without end."""
    _rows: dict[int, list[Row]] = field(default_factory=dict)
    """By the `id()` of the source in the config."""

    def read(self, source: Source, base: Path | None) -> list[Row]:
        """Read the rows of a source and keep them until `take`."""
        self._rows[id(source)] = read_rows(source, base)
        return self._rows[id(source)]

    def take(self, source: Source, base: Path | None) -> list[Row]:
        """The rows of a source, removed from the cache."""
        return self._rows.pop(id(source)) if id(source) in self._rows else read_rows(source, base)


def check_players(config: TrainConfig, roles: Sequence[str]) -> None:
    """Refuse a greedy baseline and values of prompts for a game of several players."""
    if roles and (valued := ", ".join(config.algorithm.needs("prompt_values"))):
        raise UserError(
            f"{valued} estimates one value of each prompt, but environment {config.environment.name} has the players {' and '.join(roles)}, "
            "whose values differ: use grpo or rloo"
        )
    if roles and (needs_greedy := ", ".join(config.algorithm.needs("greedy"))):
        raise UserError(
            f"{needs_greedy} compares each sample with the greedy answer to its prompt, but environment {config.environment.name} has the "
            f"players {' and '.join(roles)}, and a greedy game may end before one of them has a turn: use grpo or rloo"
        )


def check_opponents(config: TrainConfig, players: Sequence[str]) -> None:
    """Refuse opponents for an environment without several players."""
    if isinstance(config.rollout.opponents, Opponents) and len(players) < 2:
        raise UserError(
            f"rollout.opponents play the other roles of a game, but environment {config.environment.name} has no other: use a game of "
            "several players (tic_tac_toe_self_play, kuhn_poker, or your own class with `roles`), or leave rollout.opponents out"
        )


def check_roles(config: TrainConfig, players: Sequence[str]) -> None:
    """Refuse an advantage that compares roles if the environment has none, or none of that name."""
    advantage, name = config.algorithm.advantage, config.environment.name
    if config.algorithm.needs("roles") and not players:
        raise UserError(
            f"advantage {advantage.name} has a baseline for each role, but environment {name} has no roles: use a game of several players "
            "(tic_tac_toe_self_play, kuhn_poker, propose_sum, absolute_zero, or your own class with `roles`), or another advantage, such as "
            "reinforce_plus_plus"
        )
    roles = list(dict.fromkeys(map(role_name, players)))
    for role in getattr(advantage, "episode_roles", ()):
        if role not in roles:
            raise UserError(
                f"algorithm.advantage.episode_roles names {role!r}, which is no role of environment {name}{did_you_mean(role, roles)} "
                f"(has: {', '.join(roles)})"
            )


def check_success_is_told(config: TrainConfig, base: Path | None) -> None:
    """Refuse an algorithm that must know which episodes are correct, if the environment never says so."""
    needs = [
        *config.algorithm.needs("accuracy"),
        *(["positive_nll"] if config.algorithm.auxiliary.positive_nll else []),
    ]
    if needs and never_tells_success(config.environment, base):
        other = ", and give zero_signal metric: reward" if "zero_signal" in needs else ""
        raise UserError(
            f"{', '.join(needs)} must know which episodes are correct, but environment {config.environment.name} gives rewards and never says "
            f"so: leave out what needs it{other}; or choose an algorithm that compares rewards, such as grpo; or, in an environment of your own, give "
            "End.success or set correct_at"
        )


def check_void_turns_are_told(config: TrainConfig, is_told: bool) -> None:
    """Refuse the filter of void turns if the environment does not count them."""
    if config.algorithm.needs("void_turns") and not is_told:
        raise UserError(
            f"filter void_turns drops trajectories in which a turn has neither a call nor a final answer, but environment "
            f"{config.environment.name} does not count such turns: use tools, tags, retool, torl, search_r1 or research, or set "
            "tells_void_turns in your own environment"
        )


def check_observations_are_told(config: TrainConfig, is_on_tokens: bool) -> None:
    """Refuse the NLL of observations if the environment gives tokens, which do not say what is the body of a message."""
    if config.algorithm.auxiliary.observations is not None and is_on_tokens:
        raise UserError(
            f"algorithm.auxiliary.observations must know which tokens are what the environment said, but environment {config.environment.name} "
            "works on tokens: use an environment on messages (burnish.environments.base.Environment), or set "
            "algorithm.auxiliary.observations=null"
        )


def read_checked_rows(config: TrainConfig, base: Path | None, rewards: Rewards) -> RowCache:
    """Read all rows of files and plug-ins. Raises for a row that the run could not score or would read only in part."""
    found = RowCache()
    for section, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for index, source in enumerate(sources):
            size = source.limit
            if source.task is None:
                rows = found.read(source, base)
                size = len(rows)
                place = f".{index}" if len(sources) > 1 else ""
                check_rows(config, rows, rewards, f"data.{section}{place}.answer_key=")
            if section == "train":
                found.sizes.append(size)
    return found


def check_rows(config: TrainConfig, rows: list[Row], rewards: Rewards, answer_key: str) -> None:
    """Raise for a row that its reward cannot score or that asks for tools. Only `single_turn` is checked: others may provide both."""
    if config.environment.name != SINGLE_TURN:
        return
    for row in rows:
        refuse_tools(row.extra, row.place, NO_TOOL_ENVIRONMENT)
    rewards.check(rows, answer_key)


# --- How often rows repeat -----------------------------------------------------------------------------------------------


def row_repeats_text(config: TrainConfig, sizes: list[int | None]) -> list[str]:
    """How often a run draws each row, one line per finite source."""
    return [line for line, _ in _row_repeats(config, sizes)]


def often_repeated_rows(config: TrainConfig, sizes: list[int | None]) -> list[str]:
    """The lines of sources whose rows a run draws so often that it can memorise them."""
    return [line for line, times in _row_repeats(config, sizes) if times > MANY_REPEATS]


def _row_repeats(config: TrainConfig, sizes: list[int | None]) -> list[tuple[str, float]]:
    steps, rollout = config.training.steps, config.rollout
    prompts_per_step = (
        [rollout.at(step).prompts for step in range(1, steps + 1)] if rollout.stages else [rollout.prompts] * steps
    )
    draws = sum(prompts_per_step)
    weights = [source.weight for source in config.data.train]
    found = []
    for source, weight, size in zip(config.data.train, weights, sizes, strict=True):
        if size is None:
            continue
        share = draws * weight / sum(weights)
        times = share / size
        text = f"data: {source_name(source)} has {size:,} rows; {steps:,} steps draw {share:,.0f} prompts of it"
        if times >= 1:
            epoch = steps / times
            text += f", each row {_times_text(times)} (an epoch is {epoch:,.1f} steps)"
        else:
            text += f", {times:.0%} of the rows"
        found.append((text, times))
    return found


def _times_text(times: float) -> str:
    return "once" if times == 1 else f"{times:,.0f} times" if times >= 10 else f"{times:,.1f} times"


# --- Sequence lengths -----------------------------------------------------------------------------------------------------


def check_positions(
    config: TrainConfig, positions: int | None, longest: int, held_out: list[Prompt], model: str = "the model"
) -> int:
    """Raise if a prompt with its completion exceeds the model's positions or `environment.max_tokens`.

    Past its last position a model computes silently on untrained position embeddings. Returns the tokens of the longest sequence.
    """
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


def check_reader_positions(
    config: TrainConfig, base: Path | None, longest: int, held_out: list[Prompt], most: int | None
) -> None:
    """`check_positions` for models that read the policy's answers. `most` is the token limit of a multi-turn trajectory.

    A teacher reads training samples; a process reward model also reads answers to held-out prompts.
    """
    process, turns = config.algorithm.process, config.environment.max_turns
    reference = config.algorithm.kl.reference
    several = getattr(reference, "directories", {})
    counts_anew = (
        config.algorithm.loss.name == "gold"
    )  # it has tokens of its own, and rows that do not fit are not taught
    readers = [
        ("algorithm.kl.reference.path", None if counts_anew else getattr(reference, "path", None), []),
        *((f"algorithm.kl.reference.paths.{name}", path, []) for name, path in several.items()),
        ("algorithm.process.path", None if process is None else process.path, held_out),
    ]
    for key, path, prompts in readers:
        if path is None:
            continue
        directory = find_directory(path, base, with_weights=False)
        positions = max_positions_of(base_model_of(directory) if is_adapter(directory) else directory)
        check_positions(config, positions, longest, prompts, f"{key}={path}")
        if positions is not None and most is not None and turns > 1 and most > positions:
            raise UserError(
                f"the {turns} turns of a trajectory may come to {most} tokens, but {key}={path} is made for {positions} positions; "
                f"set environment.max_tokens={positions} or less"
            )


# --- Digests of models and plug-ins ---------------------------------------------------------------------------------------
#
# A resumed run reads a frozen reference, or the base of adapters, again from its directory, and a reward from its file. Changed weights
# would make it another run, so they are refused. Changed code may be intended, so it gets a note.


def record_inputs(
    folder: Path, config: AnyConfig, resolved: dict[str, Any], base: Path, forget: Callable[[], None] = lambda: None
) -> list[str]:
    """Write the digests of models and plug-ins. Returns notes on changed code since the last start; raises for changed models.

    `forget` is called if code other than rewards changed: the journal's rollouts were sampled by a policy that the old code trained.
    Recorded scores stay as they are.
    """
    path, names = folder / INPUTS_FILE, dict(model_directories(config))
    models = {key: found for key, name in names.items() if (found := model_directory(name, base)) is not None}
    before, now = _read_digests(path), input_digests(models, resolved, base)
    for key in models:
        changed = None if before is None else model_difference(before, now, key)
        if changed is not None:
            raise UserError(
                f"cannot resume: the model of {key}={names[key]} is not the one this run began with ({changed}); put that back, or start "
                "a new run"
            )
    old = now["plugins"] if before is None else before["plugins"]
    changed_files = [name for name, found in now["plugins"].items() if old.get(name, found) != found]
    training = plugin_files({k: v for k, v in resolved.items() if k != "reward"}, base)
    if training.keys() & set(changed_files):
        forget()
    atomic_write(
        path, json.dumps(now, indent=1) + "\n"
    )  # last: a run that is killed before this line detects the change again when it resumes
    notes = [f"{name} has changed since the run began: from here on the new code counts" for name in changed_files]
    if before is None and any((folder / "checkpoints").glob("step-*")):
        notes.append(
            f"{path} is missing: models and plug-ins are taken as they are now, whether they have changed is not known"
        )
    return notes


def input_digests(models: dict[str, Path], resolved: dict[str, Any], base: Path) -> InputDigests:
    """Digests and weight checksums of the model directories by config key, and digests of the plug-in files by name.

    Missing files are skipped: other checks report them.
    """
    return {
        "models": {key: model_digest(model) for key, model in models.items()},
        "weights": {key: weight_checksums(model) for key, model in models.items()},
        "plugins": {name: digest_parts([file.read_bytes()]) for name, file in plugin_files(resolved, base).items()},
    }


def model_difference(before: InputDigests, now: InputDigests, key: str) -> str | None:
    """How the model of a key differs from the recorded one, or None."""
    changed = first_difference(now["weights"][key], before["weights"].get(key, {}))
    if changed is None and before["models"].get(key, "") not in ("", now["models"][key]):
        changed = "its config or tokenizer has changed"
    return changed


def weight_checksums(model: Path) -> Checksums:
    """Size and CRC-32 of every weight file. A digest of sampled bytes would miss a single changed bit."""
    files = sorted({file for pattern in WEIGHT_PATTERNS for file in model.glob(pattern)})
    with ThreadPoolExecutor(NUM_CHECKSUM_THREADS) as pool:
        return dict(zip((file.name for file in files), pool.map(file_checksum, files), strict=True))


def _read_digests(path: Path) -> InputDigests | None:
    """The recorded digests; None without a file."""
    if not path.is_file():
        return None
    try:
        found = {"weights": {}, **json.loads(path.read_text())}
        for part in ("models", "plugins", "weights"):
            if not isinstance(found[part], dict):
                raise ValueError(f"{part!r} has no keys")
        for key, sums in found["weights"].items():
            if not are_checksums(sums):
                raise ValueError(f"'weights' of {key}: a size or a checksum is missing")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): it records which models and plug-ins the run began with; restore it from a copy, or delete it "
            "to go on with them as they are now"
        ) from error
    return found
