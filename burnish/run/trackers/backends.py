"""What each tracker's package is told: the config at the start, numbers a step, tables of samples, and the report at the end.

The classes have the names of their config sections (`burnish.config.trackers`). They run in the tracker's own process, where they may raise
and block. The packages are imported here only.
"""

from __future__ import annotations

import netrc
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from burnish.run.samples import read_table

Values = dict[str, Any]
SAMPLE_COLUMNS = (
    "step",
    "kind",
    "group",
    "sample",
    "prompt",
    "completion",
    "answer",
    "reward",
    "accuracy",
    "advantage",
    "length",
    "finish",
)
"""Columns of a table of samples that trackers get. The columns with a value for each token stay in the parquet file."""
MAX_PARAMS, MAX_PARAM_LENGTH = 100, 500
"""MLflow takes so many parameters a call; longer values are cut, config.yaml has them whole."""


@dataclass
class TrackedRun:
    """The run that a tracker follows."""

    path: Path
    config: dict[str, Any]
    id: str
    """The tracker's id of the run; empty at the first start, when the backend sets it."""
    last_step: int
    """The last step that the tracker got before this start; -1 for a new run."""
    note: Callable[[str], None]
    """Prints a line in the log of the run."""

    def make_id(self) -> str:
        """The id, made if the run has none yet."""
        self.id = self.id or uuid.uuid4().hex[:16]
        return self.id


class Backend:
    """A tracker. A subclass begins the tracker's run in `__init__` and sets `where`."""

    skips_sent_steps = False
    """Whether steps that are repeated after a resume are left out, because the tracker would show them twice."""

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        self.run, self.options = run, options
        self.sample_rows: int = options["sample_rows"]
        self.where = ""
        """Where a person finds the run, for the last line about the tracker."""

    def log(self, step: int, values: Values) -> None:
        """Take the metrics of one step."""
        raise NotImplementedError

    def table(self, step: int, kind: str, path: Path) -> None:
        """Take some rows of a table of samples."""
        raise NotImplementedError

    def report(self, path: Path) -> None:
        """Take the HTML report."""
        raise NotImplementedError

    def close(self, is_failed: bool) -> None:
        """Send everything that is still buffered."""
        raise NotImplementedError

    def rows(self, path: Path) -> list[list[Any]]:
        """At most `sample_rows` rows of a table of samples, spread over it, with `SAMPLE_COLUMNS`."""
        rows = read_table(path)
        every = max(1, len(rows) // max(1, self.sample_rows))
        return [[row[name] for name in SAMPLE_COLUMNS] for row in rows[::every][: self.sample_rows]]


def numbers(values: Values) -> dict[str, float]:
    """The values that are numbers."""
    return {name: float(value) for name, value in values.items() if not isinstance(value, str)}


def flat_config(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a config with their values. Lists stay values."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def markdown_table(rows: list[list[Any]]) -> str:
    """Rows as a table that TensorBoard draws."""

    def cell(value: Any) -> str:
        return "" if value is None else str(value).replace("|", "\\|").replace("\n", "<br>")

    lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


class TensorBoard(Backend):
    """Event files, written by TensorBoard's own writer, without torch and tensorflow. A table is a text; the report is its path."""

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        super().__init__(run, options)
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        folder = run.path / "tensorboard"
        self._writer = EventFileWriter(str(folder))
        self._last_step, self._has_session = max(run.last_step, 0), False
        self.where = f"tensorboard --logdir {folder}"
        if run.last_step < 0:
            self._add_text(
                "config", 0, "".join(f"    {line}\n" for line in (run.path / "config.yaml").read_text().splitlines())
            )

    def log(self, step: int, values: Values) -> None:
        self._begin_session(step)
        points = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in numbers(values).items()]
        self._add(step, points)
        self._last_step = step

    def _begin_session(self, step: int) -> None:
        """A session start makes TensorBoard drop the points of this and later steps that were written before a kill."""
        if not self._has_session:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, session_log=start))
            self._has_session = True

    def _add(self, step: int, points: list[Any]) -> None:
        summary = self._summary.Summary(value=points)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def _add_text(self, name: str, step: int, text: str) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=f"{name}/text_summary",
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()]),
        )
        self._add(step, [value])

    def table(self, step: int, kind: str, path: Path) -> None:
        self._begin_session(step)
        self._add_text(f"samples/{kind}", step, markdown_table(self.rows(path)))

    def report(self, path: Path) -> None:
        self._add_text("report", self._last_step, f"[{path}](file://{path})")

    def close(self, is_failed: bool) -> None:
        self._writer.close()


class Wandb(Backend):
    """Weights & Biases. Without a key it works offline, so that it never prompts and never waits."""

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        super().__init__(run, options)
        import wandb

        self._wandb = wandb
        mode = options["mode"] or os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
        self._run = wandb.init(
            project=options["project"],
            entity=options["entity"],
            group=options["group"],
            tags=options["tags"],
            name=run.path.name,
            id=run.make_id(),
            resume="allow",
            dir=str(run.path),
            config=run.config,
            mode=mode,
            settings=wandb.Settings(console="off"),
        )
        # Our own step as the axis: wandb's only grows, and steps after the last checkpoint are repeated when a run resumes.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if mode == "offline":
            self.where = f"wandb sync {run.path / 'wandb'}/offline-run-*-{run.id}"
            run.note(f"offline; `{self.where}` sends it later")
        else:
            self.where = str(self._run.url)

    def log(self, step: int, values: Values) -> None:
        self._run.log({**values, "step": step})

    def table(self, step: int, kind: str, path: Path) -> None:
        table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=self.rows(path), allow_mixed_types=True)
        self._run.log({f"samples/{kind}": table, "step": step})

    def report(self, path: Path) -> None:
        self._run.log({"report": self._wandb.Html(path.read_text(encoding="utf-8"), inject=False)})
        self._run.save(str(path), base_path=str(self.run.path), policy="now")

    def close(self, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))


def has_wandb_key() -> bool:
    """Whether wandb has a key of an account: in WANDB_API_KEY, or in netrc, where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Mlflow(Backend):
    """MLflow, through its client, so that a run has an id of its own and no state of the process."""

    skips_sent_steps = True

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        super().__init__(run, options)
        uri = options["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or (run.path.parent / "mlflow").as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for a database otherwise
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient(tracking_uri=uri)
        self.where = f"mlflow ui --backend-store-uri {uri}"
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(options["experiment"])
        number = experiment.experiment_id if experiment else self._client.create_experiment(options["experiment"])
        run.id = self._client.create_run(number, run_name=run.path.name, tags=options["tags"]).info.run_id
        parameters = [Param(key, str(value)[:MAX_PARAM_LENGTH]) for key, value in flat_config(run.config)]
        for at in range(0, len(parameters), MAX_PARAMS):
            self._client.log_batch(run.id, params=parameters[at : at + MAX_PARAMS])
        self._client.log_artifact(run.id, str(run.path / "config.yaml"))

    def log(self, step: int, values: Values) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(mlflow_name(name), value, now, step) for name, value in numbers(values).items()]
        self._client.log_batch(self.run.id, metrics=metrics)

    def table(self, step: int, kind: str, path: Path) -> None:
        table = {"columns": list(SAMPLE_COLUMNS), "data": self.rows(path)}
        self._client.log_dict(self.run.id, table, f"samples/{path.stem}.json")

    def report(self, path: Path) -> None:
        self._client.log_artifact(self.run.id, str(path))

    def close(self, is_failed: bool) -> None:
        self._client.set_terminated(self.run.id, "FAILED" if is_failed else "FINISHED")


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it. A name is a file in its store, so `a/b` cannot be beside `a/b/c`: only the first slash stays."""
    first, slash, rest = name.partition("/")
    return re.sub(r"[^\w\-. :/]", "_", first + slash + rest.replace("/", "."))


class SwanLab(Backend):
    """SwanLab. A start of a resumed run is a folder of its own with the same id."""

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        super().__init__(run, options)
        import swanlab

        self._swanlab, self._last_step = swanlab, max(run.last_step, 0)
        folder = run.path / "swanlab"
        folder.mkdir(exist_ok=True)
        mode = options["mode"] or os.environ.get("SWANLAB_MODE") or "local"
        swanlab.init(
            project=options["project"],
            workspace=options["workspace"],
            group=options["group"],
            tags=options["tags"],
            name=run.path.name,
            id=run.make_id(),
            resume="allow",
            log_dir=str(folder),
            config=run.config,
            mode=mode,
        )
        self.where = f"swanlab {'sync' if mode == 'offline' else 'watch'} {folder}" if mode != "online" else "online"

    def log(self, step: int, values: Values) -> None:
        self._swanlab.log(numbers(values), step=step)
        self._last_step = step

    def table(self, step: int, kind: str, path: Path) -> None:
        table = self._swanlab.echarts.Table()
        table.add(list(SAMPLE_COLUMNS), self.rows(path))
        self._swanlab.log({f"samples/{kind}": table}, step=step)

    def report(self, path: Path) -> None:
        self._swanlab.log({"report": self._swanlab.Html(path.read_text(encoding="utf-8"))}, step=self._last_step)
        self._swanlab.save(str(path))

    def close(self, is_failed: bool) -> None:
        if is_failed:
            self._swanlab.finish(
                state="crashed", error="the run ended before its last step; it goes on when it is resumed"
            )
        else:
            self._swanlab.finish()


class Trackio(Backend):
    """trackio. It knows a run by its name alone, so the name has a part that is the run's own."""

    skips_sent_steps = True

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        super().__init__(run, options)
        os.environ.setdefault("TRACKIO_DIR", str(run.path.parent / "trackio"))  # read when the package is imported
        import trackio

        self._trackio = trackio
        trackio.init(
            project=options["project"],
            name=f"{run.path.name}-{run.make_id()[:6]}",
            group=options["group"],
            space_id=options["space"],
            config=dict(flat_config(run.config)),
            resume="allow",
            embed=False,
        )
        self.where = f"TRACKIO_DIR={os.environ['TRACKIO_DIR']} trackio show --project {options['project']}"

    def log(self, step: int, values: Values) -> None:
        self._trackio.log(numbers(values), step=step)

    def table(self, step: int, kind: str, path: Path) -> None:
        rows = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in self.rows(path)]
        self._trackio.log({f"samples/{kind}": self._trackio.Table(data=rows)}, step=step)

    def report(self, path: Path) -> None:
        self._trackio.log_artifact(str(path), name=f"{self.run.path.name}-report", type="report")

    def close(self, is_failed: bool) -> None:
        self._trackio.finish()
