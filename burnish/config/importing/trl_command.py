"""Reads command lines of TRL's own scripts (`trl dpo --beta 0.1 ...`, `accelerate launch .../grpo.py ...`) and their YAML configs.

The arguments are written as the Python script that TRL's script amounts to, which `trl_script` then reads. Nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.config.importing.hydra_config import override_value, read_text
from burnish.config.importing.shell_script import read_commands
from burnish.config.yaml_text import parse_yaml

KINDS = {name.lower(): name for name in ("GRPO", "RLOO", "DPO", "KTO", "ORPO", "CPO", "SFT")} | {"reward": "Reward"}
SCRIPT_FILE = re.compile(rf"(?:[^=]*/)?({'|'.join(KINDS)})(?:_\w+)?\.py")
RENAMED = {
    "model": "model_name_or_path",
    "train_dataset": "dataset_name",
    "eval_dataset": "dataset_test_split",
    "peft_config": "use_peft",
    "quantization_config": "load_in_4bit",
}
"""Arguments of a trainer, and the option of the command that they come from."""
LORA_OPTIONS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "use_rslora": "use_rslora",
}
LORA_DEFAULTS = {"lora_r": 16, "lora_alpha": 32}
OTHER_OPTIONS = (
    "model_name_or_path",
    "use_peft",
    "load_in_4bit",
    "use_bnb_nested_quant",
    "dataset_name",
    "dataset_config",
)
DATA_OPTIONS = ("dataset_train_split", "dataset_test_split", "reward_funcs", "reward_model_name_or_path")
TRL_REWARD_NAMES = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)


class TrlCommand(NamedTuple):
    """A command as a Python script, the processes that it starts, and notes."""

    text: str
    processes: int
    notes: list[str]


def read_trl_command(path: Path, environment: Mapping[str, str], kind: str | None) -> TrlCommand:
    """The first TRL command of a shell script, or a YAML config of the trainer `kind`."""
    if path.suffix in (".yaml", ".yml"):
        if kind not in KINDS:
            raise UserError(
                f"{path}: a YAML of TRL does not name its trainer: give --trainer {' or --trainer '.join(KINDS)}"
            )
        return TrlCommand(as_python(KINDS[kind], _read_yaml(path)), 1, [])
    script = read_commands(read_text(path), str(path), dict(environment), str(path.parent))
    for command in script.commands:
        words = command.words
        for at, word in enumerate(words):
            match = SCRIPT_FILE.fullmatch(word)
            named = word == "trl" and at + 1 < len(words) and words[at + 1] in KINDS
            if match is None and not named:
                continue
            options = parse_options(words[at + (2 if named else 1) :])
            launched = parse_options(words[:at])
            notes = list(script.notes)
            config = options.pop("config", None)
            if config is not None:
                file = next((p for p in (Path(str(config)), path.parent / str(config)) if p.is_file()), None)
                notes += [] if file else [f"--config {config} is not here, so its keys are missing"]
                options = {**(_read_yaml(file) if file else {}), **options}
            processes = launched.get("num_processes", options.pop("num_processes", 1))
            name = KINDS[words[at + 1] if named else match[1]]  # type: ignore[index]
            return TrlCommand(as_python(name, options), processes if isinstance(processes, int) else 1, notes)
    raise UserError(
        f"{path}: no command runs TRL (trl {'|'.join(KINDS)} ..., or one of its scripts); give the script that does"
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `option: value` lines of TRL")
    return tree


def parse_options(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name a b` (a list), `--name` (true) and `--no_name` (false) as a dictionary."""
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            if name.startswith("no_") and not equals:  # transformers' way to switch a flag off
                options[name.removeprefix("no_")], name = False, ""
            else:
                options[name] = override_value(text) if equals else True
        elif name:
            value, before = override_value(word), options[name]
            options[name] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    return options


def as_python(name: str, options: dict[str, Any]) -> str:
    """The script that TRL's own script of this trainer amounts to with these options."""
    imports, rewards = list[str](), list[str]()
    given = options.get("reward_funcs") or []
    for reward in given if isinstance(given, list) else [given]:
        module, _, function = str(reward).rpartition(".")
        if str(reward) in TRL_REWARD_NAMES:
            module = "trl.rewards"
        imports.append(f"from {module or 'unknown_rewards'} import {function or reward}")
        is_made = function == "get_soft_overlong_punishment"
        rewards.append(f"{function}(max_completion_len=1280, soft_punish_cache=256)" if is_made else function)
    if options.get("reward_model_name_or_path"):
        rewards.insert(0, repr(options["reward_model_name_or_path"]))
    moved = (*OTHER_OPTIONS, *DATA_OPTIONS, *LORA_OPTIONS)
    config = {key: value for key, value in options.items() if key not in moved}
    arguments = [f"args={name}Config(**{config!r})"]
    if "model_name_or_path" in options:
        arguments.append(f"model={options['model_name_or_path']!r}")
    if "dataset_name" in options:
        for key, split, default in (
            ("train_dataset", "dataset_train_split", "train"),
            ("eval_dataset", "dataset_test_split", "test"),
        ):
            if key == "train_dataset" or options.get("eval_strategy", "no") != "no":
                arguments.append(
                    f"{key}=load_dataset({options['dataset_name']!r}, split={options.get(split, default)!r})"
                )
    if rewards:
        arguments.append(f"reward_funcs=[{', '.join(rewards)}]")
    if options.get("use_peft"):
        lora = {LORA_OPTIONS[key]: value for key, value in (LORA_DEFAULTS | options).items() if key in LORA_OPTIONS}
        arguments.append(f"peft_config=LoraConfig(**{lora!r})")
    if options.get("load_in_4bit"):
        double = bool(options.get("use_bnb_nested_quant"))
        arguments.append(
            f"quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant={double})"
        )
    return "\n".join([*imports, f"{name}Trainer({', '.join(arguments)})"]) + "\n"
