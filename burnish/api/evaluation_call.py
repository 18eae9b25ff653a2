"""`burnish.evaluate`: the command `burnish eval` as a function."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.api.python_inputs import INPUTS_FOLDER, PythonInputs
from burnish.api.run_handle import Run, Table
from burnish.cli import eval as eval_command
from burnish.config.errors import UserError, did_you_mean
from burnish.evaluation.completions import read_completions
from burnish.evaluation.output_paths import find_output_paths
from burnish.evaluation.settings import EvalConfig

OPTIONS = {
    "n": "sampling.n",
    "temperature": "sampling.temperature",
    "max_tokens": "sampling.max_tokens",
    "limit": "limit",
    "seed": "seed",
}
"""Arguments with a name of their own, by the key that they set."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: `metrics` such as accuracy and pass@k with their intervals, and every completion."""

    metrics: dict[str, Any]
    completions: Table
    directory: Path
    """The folder with both, which `burnish eval --compare` reads."""

    def __repr__(self) -> str:
        return f"Evaluation({len(self.completions)} completions, {str(self.directory)!r})"


def evaluate(
    model: str | Path | Run,
    data: Any,
    reward: Any = None,
    *,
    out: str | Path | None = None,
    force: bool = False,
    **settings: Any,
) -> Evaluation:
    """Sample and score completions, as `burnish eval` does. An evaluation that was interrupted goes on; a complete one is read again.

    model: a model directory or a `Run` (its best checkpoint). data: a benchmark's name, `task:NAME`, a file, a list of rows or a `Dataset`.
    reward: as of `burnish.train`; the first part says what is correct. Without it a run's own reward is used, or the task's.
    out: the folder of the results, `eval-<model>` without it. force: evaluate again.
    settings: n, temperature, max_tokens, limit, seed, and other keys of `burnish eval`: `environment={...}`, `**{"sampling.top_p": 0.9}`.
    """
    if not isinstance(model, (str, Path, Run)):
        raise UserError(
            f"model is a {type(model).__name__}; expected a directory or a Run (a Policy is given as the directory that its save returns)"
        )
    path = Path(model.directory if isinstance(model, Run) else model)
    parser = argparse.ArgumentParser()
    eval_command.add_arguments(parser)
    args = parser.parse_args([], argparse.Namespace(is_command=False))
    args.out, args.force = None if out is None else Path(out), force
    folder = find_output_paths(args.out, path, ["rows"])[0].completions.parent
    inputs = PythonInputs(f"{folder}/{INPUTS_FOLDER}")
    name = str(data) if isinstance(data, (str, Path)) else inputs.rows(data, "rows")
    if reward is not None:
        args.reward = inputs.section(list(reward) if isinstance(reward, (list, tuple)) else [reward])
    args.words = [str(path), name, *_overrides(inputs.section(settings))]
    paths = find_output_paths(args.out, path, [name])[0]
    inputs.keep(folder)
    if eval_command.run(args):
        raise UserError(f"no completion of {name} could be scored; {paths.completions} has the reasons")
    metrics = json.loads(paths.result.read_text(encoding="utf-8"))
    return Evaluation(metrics, Table(read_completions(paths.completions)), folder)


def _overrides(settings: Mapping[str, Any]) -> list[str]:
    """The settings as overrides of the command line."""
    found = []
    for key, value in settings.items():
        if key not in OPTIONS and key not in EvalConfig.model_fields and "." not in key:
            known = [*OPTIONS, *EvalConfig.model_fields, "out", "force"]
            raise UserError(
                f"burnish.evaluate has no argument {key!r}{did_you_mean(key, known)} (has: {', '.join(dict.fromkeys(known))})"
            )
        try:
            found.append(f"{OPTIONS.get(key, key)}={json.dumps(value)}")
        except (TypeError, ValueError) as error:
            raise UserError(f"{key}: {value!r:.100} cannot be written as JSON ({error})") from error
    return found
