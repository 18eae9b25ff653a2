"""The data of the page: one interface for the live page and for report.html.

`RunData` makes the JSON of one run from the files in its directory. The live server answers requests with it
(`live_server.py`), and report.html embeds what it returns (`html_report.py`). The page asks for these paths:

    runs                        every run: its name, state, step, phase, main numbers, and a stamp per file that changes with it; the ids
                                of the measurements of test-time scaling, whose pages are scaling/ID
    runs/ID                     the overview of a run: headline numbers, health, events, worst tokens, measurements in its folder, notes
    runs/ID/metrics/PART        the curves, PART is main or other; with `since` only lines of metrics.jsonl from that number on
    runs/ID/config              the config as text and as dotted keys, and earlier configs of the run
    runs/ID/scored              the rollouts that were scored last, while a step is being sampled (live page only)
    runs/ID/samples             the index of samples; with `since` only groups from that number on
    runs/ID/texts/BLOCK         texts of a block of samples; with `generation` refused if the samples have other numbers by now
    runs/ID/tokens/BLOCK        values of their tokens
    runs/ID/search              samples that contain some words (live page only; report.html searches in the browser)
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from burnish.report.curves import main_charts, other_charts, thinned_points
from burnish.report.live_samples import TABLES_AT_ONCE, ChangedTable, LiveSamples
from burnish.report.mismatch_charts import is_profile, profile_charts
from burnish.report.run_files import LogTail, MetricsTail, Series, WorstTokensTail
from burnish.report.run_status import file_stamp, run_status
from burnish.report.scaling_files import scaling_section, scalings_stamp
from burnish.run.checkpoint.checkpoints import Checkpoint, Checkpoints, best_of
from burnish.run.display import format_duration
from burnish.run.metrics import HELD_OUT_FIGURES
from burnish.run.run_directory import RunDirectory, earlier_configs, flatten_keys
from burnish.run.samples import EventExamplesFile
from burnish.run.supervisor.liveness import HEARTBEAT_FILE

MAX_POINTS = {"main": 2000, "other": 400}
"""Points per line of each part that the page gets. It draws fewer, and uses the others when a user zooms in."""
FIRST_GROUPS, GROUPS_AT_ONCE = 400, 4000
"""Groups of samples in the first answer, which is shown at once, and in each later one: some hundred kilobytes."""
MAX_GENERATION = 10**9
"""Upper bound of the number with which the generations of samples begin."""
FIRST_TABLES = 16
"""Tables to index before the first answer."""


class RunData:
    """The data of one run. Locks make calls exclusive, because the server's threads share this object.

    Samples have a lock of their own, so that they need not wait for a long metrics.jsonl.
    """

    def __init__(self, run_id: str, path: Path) -> None:
        self.id, self.directory = run_id, RunDirectory(path)
        self.metrics_tail = MetricsTail(self.directory.metrics)
        self.log_tail = LogTail(self.directory.log)
        self.worst_tail = WorstTokensTail(self.directory.worst_tokens)
        # A page that stays open while the server is started again must not take the new numbers of samples for the old ones.
        self.live_samples = LiveSamples(self.directory.samples, generation=secrets.randbelow(MAX_GENERATION) + 1)
        self._status: dict[str, Any] = {}
        self._status_files: list[str] = []
        self.lock, self.samples_lock = threading.Lock(), threading.Lock()

    def summary(self) -> dict[str, Any]:
        """Return the line of the run in the list of runs."""
        run = self.directory
        files = {
            "metrics": run.metrics,
            "log": run.log,
            "samples": run.samples,
            "config": run.config,
            "worst": run.worst_tokens,
            "scored": run.scored,
        }
        stamps = {name: file_stamp(path) for name, path in files.items()} | {"scalings": scalings_stamp(run.path)}
        state = [*stamps.values(), file_stamp(run.journal / "events.jsonl"), file_stamp(run.path / HEARTBEAT_FILE)]
        # A folder may hold hundreds of runs that ended long ago. They are not read again with every look at the list.
        if self._status.get("state") in (None, "running") or state != self._status_files:
            self._status, self._status_files = run_status(run), state
        return {"id": self.id, "name": run.path.resolve().name, **self._status, "stamps": stamps}

    def last_change(self) -> float:
        """Return when metrics.jsonl was written last; 0 if there is none."""
        path = self.directory.metrics
        return path.stat().st_mtime if path.exists() else 0.0

    def overview(self) -> dict[str, Any]:
        """Return everything about the run that is neither a curve nor a sample."""
        with self.lock:
            self.metrics_tail.update()
            self.log_tail.update()
            self.worst_tail.update()
            series = self.metrics_tail.series
            best = best_of(Checkpoints(self.directory.checkpoints, keep_last=1, report=_ignore).all())
            scalings, unreadable = scaling_section(self.directory.path)
            return {
                "id": self.id,
                "name": self.directory.path.resolve().name,
                "headline": headline_boxes(series, self.metrics_tail.last_row.get("step", 0), best),
                "health": {"items": self.log_tail.health_items(), "total": self.log_tail.num_health},
                "breakdown": held_out_breakdown(series),
                "memory": memory_figures(series),
                "profiles": profile_charts(series),
                "worst_tokens": self.worst_tail.rows(),
                "events": episode_problems(self.directory.events, series),
                "scalings": scalings,
                "notes": {"lines": list(self.log_tail.notes), "total": self.log_tail.num_notes},
                "damaged": [
                    *damaged_lines(self.metrics_tail),
                    *list(self.live_samples.unreadable.values()),
                    *unreadable,
                ],
            }

    def metrics(self, part: str, since: int = 0, generation: int = 0) -> dict[str, Any]:
        """Return the charts of a part, and the points of their lines from line `since` of metrics.jsonl on.

        If the file was replaced since the given generation, all points are returned.
        """
        with self.lock:
            tail = self.metrics_tail
            tail.update()
            first = since if generation == tail.generation else 0
            charts = main_charts(tail.series)
            if part == "other":
                charts = [chart for chart in other_charts(tail.series, charts) if not is_profile(chart.title)]
            names = [name for chart in charts for name in chart.names]
            step = tail.step_of_row(first)
            points = {name: thinned_points(tail.series[name], MAX_POINTS[part], step) for name in names}
            return {
                "generation": tail.generation,
                "since": first,
                "rows": tail.num_rows,
                "charts": [{"title": chart.title, "names": chart.names} for chart in charts],
                "series": {name: line for name, line in points.items() if line},
            }

    def config(self) -> dict[str, Any]:
        """Return the config as text and as dotted keys with their values as text, and earlier configs of the run likewise."""
        earlier = [{"name": path.name, "keys": config_keys(path)} for path in earlier_configs(self.directory.path)]
        path = self.directory.config
        return {"text": path.read_text(errors="replace"), "keys": config_keys(path), "earlier": earlier}

    def samples(self, since: int = 0, generation: int = 0) -> dict[str, Any]:
        """Index further tables, and return the groups of samples from `since` on, with the number of tables still to index."""
        with self.samples_lock:
            live = self.live_samples
            live.update(TABLES_AT_ONCE if live.blocks else FIRST_TABLES)
            first = since if generation == live.generation else 0
            return {
                "generation": live.generation,
                "since": first,
                "waiting": live.num_waiting,
                "num_groups": len(live.index.groups["first"]),
                "left_out": "",
                **live.index.since(first, GROUPS_AT_ONCE if first else FIRST_GROUPS),
            }

    def scored(self) -> dict[str, Any]:
        """Return the rollouts that were scored last, newest first; none if the run does not train."""
        try:
            rollouts = json.loads(self.directory.scored.read_bytes())["rollouts"]
        except (FileNotFoundError, ValueError, LookupError):  # none yet, or left by a loss of power
            rollouts = []
        return {"rollouts": rollouts[::-1]}

    def block(self, kind: str, number: int, generation: int | None = None) -> bytes:
        """Return a block of texts (JSON) or tokens (bytes).

        If the samples have other numbers than in the given generation, or there is no such block any more, raise `ChangedTable`.
        """
        with self.samples_lock:
            live = self.live_samples
            if generation not in (None, live.generation) or number >= len(live.blocks):
                raise ChangedTable(f"the samples of {self.id} were numbered anew")
            return live.texts(number) if kind == "texts" else live.tokens(number)

    def search(self, words: str, first: int, last: int) -> dict[str, Any]:
        """Return the samples in some blocks that contain the words."""
        with self.samples_lock:
            return {
                "generation": self.live_samples.generation,
                "found": self.live_samples.search(words, first, last),
            }


def headline_boxes(series: Mapping[str, Series], step: int, best: Checkpoint | None = None) -> list[list[str]]:
    """Return the headline as [label, value, hint]: held-out figures, best checkpoint, reward, steps and time."""
    boxes = []
    for mode, figure in held_out_figures_of(series).items():
        line = series[f"validation/{mode}/{figure}"]
        before, after = line.values[0], line.values[-1]
        label = f"{HELD_OUT_FIGURES[figure]}, {mode}"
        if len(line.values) == 1:
            boxes.append([label, f"{after:.3f}", f"at step {line.steps[0]}"])
        else:
            boxes.append([label, f"{before:.3f} → {after:.3f}", f"step {line.steps[0]} → step {line.steps[-1]}"])
    if best is not None:
        boxes.append(["best checkpoint", f"step {best.step}", f"by {best.score_text}"])
    if rewards := series.get("reward/mean"):
        boxes.append(["mean reward", f"{rewards.values[0]:.3f} → {rewards.values[-1]:.3f}", "first step → last step"])
    boxes.append(["steps", f"{step:,}", ""])
    if times := series.get("time/step_s"):
        total = sum(times.values)
        boxes.append(["time in steps", format_duration(total), f"{total / len(times.values):.2f} s a step"])
    return boxes


def held_out_figures_of(series: Mapping[str, Series]) -> dict[str, str]:
    """Return the figure of each validation mode: accuracy, or mean reward if the mode's last validation has no accuracy."""
    last: dict[str, dict[str, int]] = {}
    for name, line in series.items():
        match = re.fullmatch(r"validation/([^/]+)/([^/]+)", name)
        if match and match[2] in HELD_OUT_FIGURES:
            last.setdefault(match[1], {})[match[2]] = line.steps[-1]
    return {
        mode: next(f for f in HELD_OUT_FIGURES if steps.get(f) == max(steps.values())) for mode, steps in last.items()
    }


def held_out_breakdown(series: Mapping[str, Series]) -> dict[str, Any] | None:
    """Return the held-out figure by a column of the validation rows, before and after; None if the run has none."""
    figures, rows = held_out_figures_of(series), []
    for name, line in series.items():
        match = re.fullmatch(r"validation/([^/]+)/([^/]+)/(.+)", name)
        if match and figures.get(match[1]) == match[2]:
            first, last = (f"{line.values[k]:.3f} (step {line.steps[k]})" for k in (0, -1))
            rows.append([match[1], match[3], first, last])
    if not rows:
        return None
    title = " and ".join(dict.fromkeys(HELD_OUT_FIGURES[figure].capitalize() for figure in figures.values()))
    return {"title": f"{title} by part", "rows": rows}


def memory_figures(series: Mapping[str, Series]) -> list[list[Any]]:
    """Return the metrics of memory in GiB as [name, last value, largest value]."""
    return [
        [name, line.values[-1], max(line.values)]
        for name, line in sorted(series.items())
        if re.fullmatch(r"memory/[^/]+_gib|controller/resident_gib", name)
    ]


def episode_problems(path: Path, series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return what went wrong in episodes: each kind with its number in all metrics and its first example."""
    found = []
    for event in EventExamplesFile(path).read():
        name = f"environment/{event['kind']}"
        number = sum(sum(line.values) for key, line in series.items() if key == name or key.endswith(f"/{name}"))
        found.append({**event, "number": number})
    return found


def damaged_lines(metrics: MetricsTail) -> list[str]:
    """Return a sentence about lines of metrics.jsonl that cannot be read."""
    if not metrics.damaged:
        return []
    listed = ", ".join(map(str, metrics.damaged[:10])) + (" ..." if len(metrics.damaged) > 10 else "")
    return [f"metrics.jsonl: {len(metrics.damaged)} lines cannot be read and are left out of the curves: {listed}"]


def config_keys(path: Path) -> dict[str, str]:
    """Return the dotted keys of a config with their values as text. A file that is no YAML has none; its text is shown."""
    try:
        tree = yaml.safe_load(path.read_text(errors="replace"))
    except yaml.YAMLError:
        return {}
    return {key: repr(value) for key, value in flatten_keys(tree).items()}


def _ignore(text: str) -> None:
    """A damaged checkpoint is reported by the commands that use it."""
