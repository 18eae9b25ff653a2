"""The configuration in words: `--help`, the plan of `--dry-run`, and docs/config.md (`python -m burnish.config.explain`).

All of it is read off the schema, so a key cannot exist without being documented, nor the other way round.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from burnish.config.algorithm import Algorithm
from burnish.config.data import Source
from burnish.config.placement import RayPlacement, processes
from burnish.config.preference import PreferConfig
from burnish.config.reward_model import RewardModelConfig
from burnish.config.schema import SftConfig, TrainConfig, Validation
from burnish.config.shape import REQUIRED, Key, Shape, label, walk
from burnish.config.slots import Record, Slot
from burnish.config.slots.advantages import SpoChainAdvantage, SpoTreeAdvantage
from burnish.config.stages import StagesConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
INTRO = """\
# Configuration

Written by `python -m burnish.config.explain` from the schema in `burnish/config/`; a test compares the two.

A recipe is a YAML file of these keys, and every key can be set on the command line, where the value is YAML too:

    burnish train recipes/sort_digits.yaml seed=1 rollout.n=16 algorithm.clip.high=0.28 data.train.0.limit=1000

- `<i>` is an index into a list, `<name>` a name of your own. A list of one may be written without the list.
- `algorithm: dr_grpo` names a preset (`burnish algorithms` prints the table). Its slots can be overridden one by one; giving a
  slot another name drops the options of the old choice. A bare word for a slot is its name: `advantage: reinforce`.
- `extends: other.yaml` at the top of a file starts from another recipe, found relative to the file. Sections merge; lists are replaced.
- Relative paths of models, data and plug-ins are tried from the recipe's folder first, then from the working directory.
- An unknown key is an error that names the nearest known one.
"""

PRESET_NOTE = (
    " Defaults below are the slots' own; the preset sets some of them (`burnish algorithms grpo` prints which)."
)


def help_text(kind: type[Record]) -> str:
    """Every key with its type, default and docstring, in the order of the schema, for a terminal."""
    lines: list[str] = []
    for key in walk(kind):
        if key.choice:
            continue
        if key.is_leaf:
            lines += [f"{key.path} ({_type_and_default(key)})", *_wrapped(key.doc)]
            continue
        named = f" (default {_default(key)})" if key.shape.form != "record" else ""
        lines += ["", f"{key.path}: {_sentence(key)}{named}"]
        lines += _choices_text(key)
    return "\n".join(lines).lstrip("\n") + "\n"


def markdown(kind: type[Record]) -> str:
    """The same as Markdown: a table a section, and one for each slot's choices."""
    parts: list[str] = []
    open_section: str | None = None
    for key in walk(kind):
        section = key.path.rpartition(".")[0]
        if key.choice:
            continue
        if not key.is_leaf:
            parts += [
                "",
                f"### {key.path}",
                "",
                f"{_sentence(key)} {_default_note(key)}".strip(),
                *_choices_markdown(key),
            ]
            open_section = None
            continue
        if section != open_section:
            parts += ["", "| key | value | default | |", "|---|---|---|---|"]
            open_section = section
        parts.append(f"| `{key.path}` | {_cell(key.shape.expected)} | {_code(_default(key))} | {_cell(key.doc)} |")
    return "\n".join(parts).strip("\n") + "\n"


def count_keys(kind: type[Record]) -> int:
    """How many keys there are to know outside the slots (the section `algorithm`): those that take a value, where a section
    that stands in several places, as a data source does, counts once.
    """
    keys = [k for k in walk(kind) if k.is_leaf and not k.choice and not k.path.startswith("algorithm.")]
    return len({(key.record, key.path.rpartition(".")[2]) for key in keys})


def page() -> str:
    """docs/config.md."""
    commands: dict[str, type[Record]] = {
        "train": TrainConfig,
        "sft": SftConfig,
        "prefer": PreferConfig,
        "reward-model": RewardModelConfig,
        "stages": StagesConfig,
    }
    return INTRO + "".join(f"\n## burnish {name}\n\n{markdown(kind)}" for name, kind in commands.items())


def plan_text(config: TrainConfig | SftConfig | PreferConfig | RewardModelConfig) -> str:
    """What a run will do, from the configuration alone; token counts are upper bounds, reached by the longest sequences."""
    if isinstance(config, SftConfig):
        rows = _sft_plan(config.sft.updates, config.sft.batch_size, config.sft.max_tokens, "training")
    elif isinstance(config, PreferConfig):
        rows = _preference_plan(config)
    elif isinstance(config, RewardModelConfig):
        stage = config.reward_model
        rows = [_pairs_plan(stage.updates, stage.batch_size, stage.max_tokens, "pairs")]
    else:
        rows = _train_plan(config)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows) + "\n"


def _train_plan(config: TrainConfig) -> list[tuple[str, str]]:
    rollout, training = config.rollout, config.training
    sequences = rollout.prompts * rollout.n * prod(getattr(config.algorithm.advantage, "branches", ()))
    written = sequences * rollout.max_tokens * config.environment.max_turns
    read = sequences * config.data.max_prompt_tokens
    besides = " besides those of continued answers" if isinstance(config.algorithm.advantage, SpoChainAdvantage) else ""
    updates = training.mini_batches * training.epochs
    rows = []
    if config.warm_start is not None:
        stage = config.warm_start
        rows += _sft_plan(stage.updates, stage.batch_size, stage.max_tokens, "warm start")
    rows += [
        ("sequences a step", f"{sequences:,} ({rollout.prompts:,} prompts x {rollout.n:,} samples{_branches(config)})"),
        ("tokens a step", f"at most {written:,} sampled{besides}, {written + read:,} trained on with their prompts"),
        ("updates a step", f"{updates:,} (mini_batches {training.mini_batches:,} x epochs {training.epochs:,})"),
        (
            "steps",
            f"{training.steps:,}, so {training.steps * sequences:,} sequences and {training.steps * updates:,} updates",
        ),
        ("validation", _validation_plan(config.validation, config.data.validation, training.steps)),
    ]
    if (replay := config.algorithm.replay) is not None:
        back, each = math.ceil(replay.share * rollout.prompts), (written + read) // rollout.prompts
        held = f"at most {replay.capacity * each:,} tokens in memory and in a checkpoint"
        rows.append(("replay", f"up to {back:,} earlier groups a step, {back * each:,} more tokens trained on; {held}"))
    if isinstance(config.placement, RayPlacement):
        rows.append(("processes", processes(config.placement)))
    return rows


def _branches(config: TrainConfig) -> str:
    """What makes more of the samples than they are."""
    advantage = config.algorithm.advantage
    if isinstance(advantage, SpoTreeAdvantage):
        widths = "".join(f" x {number:,}" for number in advantage.branches)
        return f"{widths} continued every {advantage.segment:,} tokens"
    if isinstance(advantage, SpoChainAdvantage):
        return f", and {advantage.rollouts:,} continued from each border of their segments"
    return ""


def _sft_plan(updates: int, batch_size: int, max_tokens: int, name: str) -> list[tuple[str, str]]:
    tokens = f"at most {batch_size * max_tokens:,} tokens"
    return [
        (name, f"{updates:,} updates of {batch_size:,} sequences ({tokens}), {updates * batch_size:,} sequences in all")
    ]


def _preference_plan(config: PreferConfig) -> list[tuple[str, str]]:
    stage = config.preference
    what = "labelled answers" if stage.loss.name == "kto" else "pairs"
    rows = [_pairs_plan(stage.updates, stage.batch_size, stage.max_tokens, what)]
    if "reference" in stage.loss.needs:
        once = "computed once before training, kept in the run directory"
        rows.append(("reference", once if stage.reference == "cached" else "asked in every update"))
    measured = f"every {stage.held_out_every:,} updates, before" if stage.held_out_every else "before"
    held_out = f"{measured} and after" if stage.held_out else "none (preference.held_out is empty)"
    return [*rows, ("held out", held_out)]


def _pairs_plan(updates: int, batch_size: int, max_tokens: int, what: str) -> tuple[str, str]:
    tokens = f"at most {2 * batch_size * max_tokens:,} tokens"
    return (
        "training",
        f"{updates:,} updates of {batch_size:,} {what} ({tokens}), {updates * batch_size:,} {what} in all",
    )


def _validation_plan(validation: Validation, sources: list[Source], steps: int) -> str:
    if not sources:
        return "none (data.validation is empty)"
    times = {steps} | ({0} if validation.before else set())
    if validation.every:
        times |= set(range(validation.every, steps + 1, validation.every))
    samples = sum(mode.n for mode in validation.modes.values())
    modes = ", ".join(validation.modes)
    limits = [source.limit for source in sources]
    known = None if None in limits else sum(limit for limit in limits if limit is not None)
    most = min((n for n in (validation.limit, known) if n is not None), default=None)
    size = "every held-out prompt" if most is None else f"at most {most:,} prompts"
    total = "" if most is None else f" = {most * samples:,} sequences"
    return f"{size} x {samples:,} samples ({modes}){total}, {len(times):,} times"


# --- pieces of text ------------------------------------------------------------------------------------------------------


def _type_and_default(key: Key) -> str:
    return f"{key.shape.expected}; {'required' if key.default is REQUIRED else f'default {_default(key)}'}"


def _default(key: Key) -> str:
    return "" if key.default is REQUIRED else _value(key.default)


def _value(value: Any) -> str:
    if isinstance(value, Record):
        return str(getattr(value, "name", type(value).__name__))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(value)}}}"
    return repr(value) if value == "" or "{" in str(value) else str(value)


def _sentence(key: Key) -> str:
    return key.doc + (PRESET_NOTE if Algorithm in key.shape.records else "")


def _default_note(key: Key) -> str:
    shown = _default(key)
    return (
        f"Default: {_code(shown)}."
        if key.shape.form != "record" and shown
        else "Off unless given."
        if key.default is None
        else ""
    )


def _slot_records(shape: Shape) -> Iterable[type[Slot]]:
    place = shape.item if shape.item is not None else shape
    return [r for r in place.records if issubclass(r, Slot)] if place.form == "choice" else []


def _options(record: type[Slot]) -> list[Key]:
    return list(walk(record, choice=label(record)))


def _choices_text(key: Key) -> list[str]:
    lines = []
    for record in _slot_records(key.shape):
        lines.append(f"  {key.path} (name: {label(record)}): {_doc(record)}")
        for option in _options(record):
            lines += [f"    {option.path} ({_type_and_default(option)})", *_wrapped(option.doc, 6)]
    return lines


def _choices_markdown(key: Key) -> list[str]:
    records = list(_slot_records(key.shape))
    if not records:
        return []
    lines = ["", "| name | | option | value | default | |", "|---|---|---|---|---|---|"]
    for record in records:
        name = f"`{label(record)}` | {_cell(_doc(record))}"
        lines += [
            f"| {name} | `{o.path}` | {_cell(o.shape.expected)} | {_code(_default(o))} | {_cell(o.doc)} |"
            for o in _options(record)
        ] or [f"| {name} | | | | |"]
    return lines


def _doc(record: type[Record]) -> str:
    return (record.__doc__ or "").strip().splitlines()[0]


def _wrapped(text: str, indent: int = 4) -> list[str]:
    pad = " " * indent
    return textwrap.wrap(text, width=116, initial_indent=pad, subsequent_indent=pad)


def _code(text: str) -> str:
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[1])}")
