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

from burnish.algorithms.advantages.spec import SpoChainAdvantage, SpoTreeAdvantage
from burnish.algorithms.spec import Algorithm
from burnish.config.data import Source
from burnish.config.loading import algorithm_from_preset
from burnish.config.placement import RayPlacement, describe_processes
from burnish.config.records import REQUIRED, ConfigKey, Plugin, Record, SchemaNode, Slot, choice_name, walk_keys
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig, Validation
from burnish.config.stages import StagesConfig

CONFIG_PAGE = Path(__file__).parents[2] / "docs" / "config.md"
CONFIG_INTRO = """\
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


def help_text(config_type: type[Record]) -> str:
    """Every key with its type, default and docstring, in the order of the schema, for a terminal."""
    lines: list[str] = []
    for key in walk_keys(config_type):
        if key.choice:
            continue
        if key.is_leaf:
            lines += [f"{key.path} ({_type_and_default(key)})", *_wrapped(key.doc)]
            continue
        named = f" (default {_default(key)})" if key.node.form != "record" else ""
        lines += ["", f"{key.path}: {_key_text(key)}{named}"]
        lines += _choices_text(key)
    return "\n".join(lines).lstrip("\n") + "\n"


def markdown(config_type: type[Record]) -> str:
    """The same as Markdown: a table a section, and one for each slot's choices."""
    parts: list[str] = []
    open_section: str | None = None
    for key in walk_keys(config_type):
        section = key.path.rpartition(".")[0]
        if key.choice:
            continue
        if not key.is_leaf:
            parts += [
                "",
                f"### {key.path}",
                "",
                f"{_key_text(key)} {_default_note(key)}".strip(),
                *_choices_markdown(key),
            ]
            open_section = None
            continue
        if section != open_section:
            parts += ["", "| key | value | default | |", "|---|---|---|---|"]
            open_section = section
        parts.append(f"| `{key.path}` | {_cell(key.node.expected)} | {_code(_default(key))} | {_cell(key.doc)} |")
    return "\n".join(parts).strip("\n") + "\n"


def count_keys(config_type: type[Record]) -> int:
    """How many keys there are to know outside the slots (the section `algorithm`): those that take a value, where a section
    that stands in several places, as a data source does, counts once.
    """
    keys = [k for k in walk_keys(config_type) if k.is_leaf and not k.choice and not k.path.startswith("algorithm.")]
    return len({(key.record, key.path.rpartition(".")[2]) for key in keys})


def config_page() -> str:
    """docs/config.md."""
    commands: dict[str, type[Record]] = {
        "train": TrainConfig,
        "sft": SftConfig,
        "prefer": PreferConfig,
        "reward-model": RewardModelConfig,
        "stages": StagesConfig,
    }
    return CONFIG_INTRO + "".join(
        f"\n## burnish {name}\n\n{markdown(config_type)}" for name, config_type in commands.items()
    )


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
        (
            "sequences a step",
            f"{sequences:,} ({rollout.prompts:,} prompts x {rollout.n:,} samples{_branching_text(config)})",
        ),
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
        rows.append(("processes", describe_processes(config.placement)))
    return rows


def _branching_text(config: TrainConfig) -> str:
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


def _type_and_default(key: ConfigKey) -> str:
    return f"{key.node.expected}; {'required' if key.default is REQUIRED else f'default {_default(key)}'}"


def _default(key: ConfigKey) -> str:
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


def _key_text(key: ConfigKey) -> str:
    return key.doc + (PRESET_NOTE if Algorithm in key.node.records else "")


def _default_note(key: ConfigKey) -> str:
    shown = _default(key)
    return (
        f"Default: {_code(shown)}."
        if key.node.form != "record" and shown
        else "Off unless given."
        if key.default is None
        else ""
    )


def _slot_records(node: SchemaNode) -> Iterable[type[Slot]]:
    place = node.item if node.item is not None else node
    return [r for r in place.records if issubclass(r, Slot)] if place.form == "choice" else []


def _options(record: type[Slot]) -> list[ConfigKey]:
    return list(walk_keys(record, choice=choice_name(record)))


def _choices_text(key: ConfigKey) -> list[str]:
    lines = []
    for record in _slot_records(key.node):
        lines.append(f"  {key.path} (name: {choice_name(record)}): {_doc(record)}")
        for option in _options(record):
            lines += [f"    {option.path} ({_type_and_default(option)})", *_wrapped(option.doc, 6)]
    return lines


def _choices_markdown(key: ConfigKey) -> list[str]:
    records = list(_slot_records(key.node))
    if not records:
        return []
    lines = ["", "| name | | option | value | default | |", "|---|---|---|---|---|---|"]
    for record in records:
        name = f"`{choice_name(record)}` | {_cell(_doc(record))}"
        lines += [
            f"| {name} | `{o.path}` | {_cell(o.node.expected)} | {_code(_default(o))} | {_cell(o.doc)} |"
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


# --- What is allowed but probably not meant: said once when a run starts, and by --dry-run.
#
# A combination that cannot do what it says is refused by the schema. Here is what does less than it seems to, or what a
# paper would do otherwise.

TOKEN_LEVEL_ADVANTAGES = ("gae", "otb")


def config_notes(config: TrainConfig) -> list[str]:
    """One line each."""
    return [
        *_notes_on_schedules(config),
        *_notes_on_algorithm(config),
        *_notes_on_staleness(config),
        *_notes_on_merged_adapters(config),
    ]


def _notes_on_schedules(config: TrainConfig) -> list[str]:
    """Schedules that begin after the last step."""
    algorithm, steps = config.algorithm, config.training.steps
    starts = {
        f"algorithm.shaping: {shaper.name} begins after warmup_steps": getattr(shaper, "warmup_steps", 0)
        for shaper in algorithm.shaping
    }
    starts["algorithm.curriculum begins after warmup_steps"] = getattr(algorithm.curriculum, "warmup_steps", 0)
    starts["algorithm.curriculum hard_only begins at start"] = getattr(algorithm.curriculum, "start", 1) - 1
    if algorithm.kl.reference.name in ("hard_sync", "iterate"):
        starts["algorithm.kl.reference is renewed after every"] = algorithm.kl.reference.every
    late = {text: start for text, start in starts.items() if start >= steps}
    return [f"{text}={start}, but training.steps={steps}: it never comes to that" for text, start in late.items()]


def _notes_on_algorithm(config: TrainConfig) -> list[str]:
    """Choices that cancel or double each other."""
    algorithm, training = config.algorithm, config.training
    found = []
    if algorithm.kl.loss.coef > 0 and algorithm.kl.reward.coef > 0:
        found.append(
            "algorithm.kl is both in the loss and in the reward: the policy pays twice for leaving the reference"
        )
    one_update = training.mini_batches * training.epochs == 1
    # A preset's own clip is part of what it is called; only one that was set by hand was meant to act.
    is_set = algorithm.clip != algorithm_from_preset(algorithm.preset).clip
    clipped = (
        is_set and not isinstance(algorithm.clip, Plugin) and algorithm.clip.name in ("ppo", "log_geo", "is_weight")
    )
    is_old = (
        config.rollout.source.name != "sync" and algorithm.correction.name == "bypass"
    ) or algorithm.replay is not None  # the ratio to older weights
    if one_update and algorithm.ratio.name != "none" and clipped and not is_old:
        found.append(
            "algorithm.clip has no effect with one update a batch: the policy that learns is the one that sampled, so its ratio is 1 and never "
            "reaches the clip; training.mini_batches or training.epochs above 1 would use it"
        )
    if algorithm.ratio.name == "sequence" and algorithm.advantage.name in TOKEN_LEVEL_ADVANTAGES:
        found.append(
            f"advantage {algorithm.advantage.name} differs between the tokens of a sequence, and ratio sequence spreads every "
            "token's gradient over all of them; seq_token keeps it with its token"
        )
    return found


def _notes_on_staleness(config: TrainConfig) -> list[str]:
    """Rollouts of older weights that are learnt from as if they were new."""
    source, correction = config.rollout.source, config.algorithm.correction
    oldest = getattr(source, "max_staleness", 1 if source.name == "ahead" else 0)
    paired = any(f.name == "pairs" for f in config.algorithm.filters)  # compares two answers, whoever wrote them
    if oldest == 0 or correction.acts or correction.name == "bypass" or paired:
        return []
    steps = "one step" if oldest == 1 else f"up to {oldest} steps"
    return [
        f"rollout.source={source.name} samples with weights {steps} old, and algorithm.correction={correction.name} does nothing about "
        "it: decoupled_token_is weighs every token by how likely it is now, bypass_ppo_clip takes the sampler's policy as the old one"
    ]


def _notes_on_merged_adapters(config: TrainConfig) -> list[str]:
    """Adapters that a server gets as changes of weights of a half type."""
    model, rollout = config.model, config.rollout
    on_sglang = rollout.engine == "sglang" and (model.lora is not None or model.adapter is not None)
    in_4_bits = model.lora is not None and model.lora.base != "dtype"
    on_vllm = rollout.vllm is not None and rollout.vllm.url is not None and in_4_bits
    if model.dtype != "bfloat16" or not (on_sglang or on_vllm):
        return []
    unless = " unless it computes in float32" if on_vllm else ""
    return [
        f"the {rollout.engine} server is sent weights with the adapters added in, in bfloat16{unless}: a small change vanishes in their rounding, "
        "and the sampler is not the policy that is trained (mismatch/); the native engine and vLLM in this process have the adapters beside the weights"
    ]


if __name__ == "__main__":
    CONFIG_PAGE.parent.mkdir(exist_ok=True)
    CONFIG_PAGE.write_text(config_page(), encoding="utf-8")
    print(f"wrote {CONFIG_PAGE.relative_to(CONFIG_PAGE.parents[1])}")
