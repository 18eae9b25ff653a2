"""`Run`: a run directory as an object, while it trains or afterwards. Its values are read from the files at each access."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.api.execution import CONFIGS, Callback, execute, listen, with_settings
from burnish.config.errors import UserError, did_you_mean
from burnish.config.loading import load_tree
from burnish.config.yaml_text import parse_yaml
from burnish.run.checkpoint.checkpoints import Checkpoint, Checkpoints
from burnish.run.metrics import read_metrics
from burnish.run.run import run_status
from burnish.run.run_directory import RunDirectory
from burnish.run.samples import read_samples

if TYPE_CHECKING:
    import pandas

    from burnish.api.loop_policy import Policy


MAX_SHOWN_COLUMNS = 8


class Table(list[dict[str, Any]]):
    """Rows as dictionaries. A row has the columns that it has: metrics of a validation are in some steps only."""

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """The values of a column, of the rows that have it."""
        if self and name not in self.columns:
            raise UserError(f"no column {name!r}{did_you_mean(name, self.columns)} (has: {', '.join(self.columns)})")
        return [row[name] for row in self if name in row]

    def to_pandas(self) -> pandas.DataFrame:
        """A `pandas.DataFrame` of the rows."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame.from_records(list(self))

    def __repr__(self) -> str:
        columns = self.columns
        shown = ", ".join(columns[:MAX_SHOWN_COLUMNS]) + (", ..." if len(columns) > MAX_SHOWN_COLUMNS else "")
        return f"Table({len(self)} rows, {len(columns)} columns: {shown})"


class Run:
    """A run of `burnish train`, `sft`, `prefer` or `reward-model`, from Python or from the command line."""

    def __init__(self, directory: str | Path) -> None:
        self._files = RunDirectory.open(Path(directory))

    @property
    def directory(self) -> Path:
        """The run directory (docs/runs.md)."""
        return self._files.path

    @property
    def name(self) -> str:
        return self._files.name

    @property
    def status(self) -> str:
        """`complete`, `stopped` (by Ctrl-C or by the callback), `running`, or `interrupted` by an error or a kill."""
        return run_status(self._files)

    @property
    def config(self) -> dict[str, Any]:
        """The whole config, with all defaults."""
        return dict(parse_yaml(self._files.config.read_text(encoding="utf-8"), str(self._files.config)))

    @property
    def metrics(self) -> Table:
        """One row per step. A row of step 0 is the validation before the first step."""
        return Table(read_metrics(self._files.metrics))

    @property
    def samples(self) -> Table:
        """The saved samples with prompt, completion, reward, advantage and tokens (`run.samples_every` says how often)."""
        return Table(read_samples(self._files.samples))

    @property
    def checkpoint(self) -> Path:
        """The directory of the last checkpoint, which any program that reads Hugging Face directories can load."""
        return self._existing(self._checkpoints.latest()).path

    @property
    def best_checkpoint(self) -> Path:
        """The directory of the checkpoint with the best held-out score; the last one if none has a score."""
        return self._existing(self._checkpoints.best() or self._checkpoints.latest()).path

    @cached_property
    def model(self) -> Policy:
        """The policy of the last checkpoint. It is loaded once; `Policy.load(run.best_checkpoint)` loads another."""
        from burnish.api.loop_policy import Policy

        config = self.config
        if "reward_model" in config:
            raise UserError(
                f"{self.directory} trained a reward model, which cannot sample: use it as a reward, "
                'burnish.reward("model", path=run.checkpoint)'
            )
        template = config.get("template") or config.get("data", {}).get("template")
        return Policy.load(self.checkpoint, template=template, seed=config["seed"])

    @property
    def report(self) -> Path:
        """The HTML report. It is written now unless the run has one of all its steps."""
        from burnish.report.html_report import write_report

        report, metrics = self._files.report, self._files.metrics
        is_current = report.exists() and metrics.exists() and report.stat().st_mtime >= metrics.stat().st_mtime
        return report if is_current else write_report(self.directory)

    def resume(self, callback: Callback | None = None, **settings: Any) -> Run:
        """Continue the run to its end in this process, as the same call or command would. A complete run stays as it is.

        `settings` are keys of the config that a resumed run may change (docs/runs.md), such as `training={"steps": 200}` or `steps=200`.
        """
        tree = self.config
        section = next(name for name in CONFIGS if name in tree)
        tree["run"] |= {"name": self.name, "directory": str(self.directory.parent)}
        tree = with_settings(tree, section, settings, "Run.resume")
        loaded = load_tree(CONFIGS[section], tree, None)._replace(base=self.directory.resolve())
        self.__dict__.pop("model", None)  # it is loaded again from the next checkpoint
        execute(loaded, fresh=False, on_open=lambda run: listen(run, callback))
        return self

    def __repr__(self) -> str:
        metrics = self.metrics
        return f"Run({str(self.directory)!r}, {self.status}, step {metrics[-1]['step'] if metrics else 0})"

    @property
    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self._files.checkpoints, keep_last=1, of="model")

    def _existing(self, checkpoint: Checkpoint | None) -> Checkpoint:
        if checkpoint is None:
            raise UserError(f"{self.directory} has no checkpoint yet: the first one comes after run.save_every steps")
        return checkpoint
