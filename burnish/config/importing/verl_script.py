"""Finds verl's trainer in a launch script and reads its arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.importing.hydra_config import HydraConfig, apply_overrides, read_text, read_yaml_config
from burnish.config.importing.shell_script import Command, read_commands

TRAINER = re.compile(r"(?:.*[./])?(?:main(?:_(?!eval|gen)\w+)?|\w*sft_trainer\w*)(?:\.py)?")
"""Modules and files of verl's trainers and of those of its recipes; `main_eval` and `main_generation` train nothing."""


def read_launch_script(path: Path, environment: Mapping[str, str]) -> HydraConfig:
    """The config of the first training command of a script, merged over the YAML file that it names, if that can be found."""
    script = read_commands(read_text(path), str(path), dict(environment), str(path.parent))
    found = [(command, start) for command in script.commands if (start := _training_arguments(command)) is not None]
    if not found:
        raise UserError(
            f"{path}: no command runs verl's trainer (python3 -m verl.trainer.main_ppo key=value ...); give the script that does, or "
            "the YAML of the config"
        )
    command, start = found[0]
    notes = list(script.notes)
    if len(found) > 1:
        notes.append(f"line {command.line} is read; the script also trains in line {found[1][0].line}")
    options, overrides = _hydra_options(command.words[start:])
    base: dict[str, Any] = {}
    if options:
        base, note = _named_config(options, path, environment)
        notes += [note] if note else []
    config = apply_overrides(base, overrides)
    return HydraConfig(config.values, config.removed, [*notes, *config.notes])


def _training_arguments(command: Command) -> int | None:
    """Where the arguments of verl's trainer begin in a command, or None if it does not run it."""
    words = command.words
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words) and TRAINER.fullmatch(words[at + 1]):
            return at + 2
        if word.endswith(".py") and TRAINER.fullmatch(word):
            return at + 1
    return None


def _hydra_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Hydra's own options (`--config-name x`, `--config-path=y`), and the other words."""
    options, rest = dict[str, str](), list[str]()
    names = {"--config-name": "name", "-cn": "name", "--config-path": "path", "-cp": "path", "--config-dir": "path"}
    at = 0
    while at < len(words):
        option, equals, value = words[at].partition("=")
        if option in names:
            at += 0 if equals else 1
            options[names[option]] = value if equals else words[at] if at < len(words) else ""
        else:
            rest.append(words[at])
        at += 1
    return options, rest


def _named_config(options: dict[str, str], script: Path, environment: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """The YAML that --config-path and --config-name name, and a note if it is not here."""
    name = options.get("name", "ppo_trainer").removesuffix(".yaml")
    if re.fullmatch(r"(ppo_(\w+_)?|sft_)trainer(_engine)?", name):  # verl's own, whose defaults are known here
        return {}, ""
    folder = Path(options.get("path", "."))
    for root in (Path(), script.parent, *script.parent.parents):
        if (file := root / folder / f"{name}.yaml").is_file():
            return read_yaml_config(file, environment), ""
    return (
        {},
        f"--config-name={name}: {folder / name}.yaml is not here, so its keys are missing: import it by itself, or run this beside it",
    )
