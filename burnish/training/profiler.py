"""Profiles one step, and summarises its trace: time by kind of work and phase, idle gaps, and peak memory.

The summary is made from the events of a Chrome trace, so that a stored trace can be read again. With a GPU the time is that of its
kernels, each attributed to the operator that launched it. Without one it is the operators' own time. The rest of a step is idle:
the device waited for Python or for another process.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from burnish.config.errors import UserError
from burnish.run.durable_files import atomic_write

Event = dict[str, Any]

PHASES = ("rollout", "forward", "backward", "optimizer", "communication", "other")
KINDS = ("matmul", "attention", "norm and activation", "head", "optimizer", "communication", "copies", "rest")
ENCLOSING_KINDS = (
    ("head", re.compile(r"HeadLogprob|_logprob_rows|_logit_gradients")),
    ("communication", re.compile(r"c10d::|nccl|gloo", re.IGNORECASE)),
    ("attention", re.compile(r"attention|attn|flash|fmha|bmm|(?<!log_)softmax|_combine_splits$", re.IGNORECASE)),
    ("norm and activation", re.compile(r"RmsNorm|Swiglu|Rotate|silu|_add_norm|_rotate_store|_swiglu")),
)
"""Kinds that everything inside such an operator belongs to, by patterns of torch's and our kernels' names (`models/kernels`)."""
OWN_KINDS = (
    ("matmul", re.compile(r"gemm|gemv|nvjet|cutlass|xmma|matmul|linear|(::|add)mm\b", re.IGNORECASE)),
    ("copies", re.compile(r"mem(cpy|set)|copy|index|gather|scatter|cat|clone|fill|zero|embedding", re.IGNORECASE)),
)
"""Kinds of an operator by its own name."""
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CATEGORIES = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
MIN_GAP_US = 20.0
MAX_TOP, MAX_GAPS, MAX_NAME_CHARS = 15, 5, 72


@dataclass(frozen=True)
class Work:
    """An operator's own time, or a kernel."""

    name: str
    kind: str
    start: float
    """Launch time, which decides the phase."""
    took: float


@dataclass
class TraceSummary:
    """Totals of a trace, in seconds."""

    on_gpu: bool
    total_s: float
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds by kind and phase."""
    idle_s: float = 0.0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(start, length) of the longest gaps without work."""
    num_gaps: int = 0
    top: list[tuple[str, str, int, float]] = field(default_factory=list)
    """Name, kind, calls and seconds of what took most time."""
    peaks: dict[str, float] = field(default_factory=dict)
    """Peak GiB allocated by torch, by phase."""


def summarise_trace(events: Iterable[Event]) -> TraceSummary:
    """Total the events of a trace."""
    events = list(events)
    whole = [e for e in events if e.get("ph") == "X" and e.get("cat") in HOST_CATEGORIES + DEVICE_CATEGORIES]
    host = [e for e in whole if e["cat"] in HOST_CATEGORIES]
    device = [e for e in whole if e["cat"] in DEVICE_CATEGORIES]
    begin = min((e["ts"] for e in whole), default=0.0)
    end = max((e["ts"] + e["dur"] for e in whole), default=0.0)
    phase_at = phase_lookup(e for e in host if e["cat"] == "user_annotation")
    works = device_work(host, device) if device else host_work(host)
    summary = TraceSummary(bool(device), (end - begin) / 1e6)
    calls: dict[tuple[str, str], list[float]] = {}
    for work in works:
        phase = phase_at(work.start)
        kind = phase if phase in ("optimizer", "communication") else work.kind
        summary.seconds[kind, phase] = summary.seconds.get((kind, phase), 0.0) + work.took / 1e6
        calls.setdefault((work.name, kind), []).append(work.took / 1e6)
    ranked = sorted(calls.items(), key=lambda item: -sum(item[1]))
    summary.top = [(name, kind, len(times), sum(times)) for (name, kind), times in ranked[:MAX_TOP]]
    busy = device or [e for e in host if e["cat"] == "cpu_op"]
    found = idle_gaps([(e["ts"], e["ts"] + e["dur"]) for e in busy], begin, end)
    summary.idle_s = sum(length for _, length in found) / 1e6
    long = [(start, length) for start, length in found if length >= MIN_GAP_US]
    summary.num_gaps = len(long)
    longest = sorted(long, key=lambda gap: -gap[1])[:MAX_GAPS]
    summary.gaps = [((start - begin) / 1e6, length / 1e6) for start, length in longest]
    summary.peaks = memory_peaks(events, phase_at, bool(device))
    return summary


def phase_lookup(annotations: Iterable[Event]) -> Callable[[float], str]:
    """A function that gives the phase at a time: the innermost phase mark around it."""
    spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in annotations if e["name"] in PHASES]
    spans.sort(key=lambda span: (span[0], -span[1]))
    borders = sorted({moment for start, end, _ in spans for moment in (start, end)})
    names = ["other"] * (len(borders) + 1)
    for start, end, name in spans:  # spans are sorted, so an inner one overwrites the outer one
        for k in range(bisect.bisect_right(borders, start), bisect.bisect_right(borders, end)):
            names[k] = name
    return lambda moment: names[bisect.bisect_right(borders, moment)]


def idle_gaps(intervals: Sequence[tuple[float, float]], begin: float, end: float) -> list[tuple[float, float]]:
    """(start, length) of the gaps that the intervals leave between `begin` and `end`."""
    found, reached = [], begin
    for start, stop in sorted(intervals):
        if start > reached:
            found.append((reached, start - reached))
        reached = max(reached, stop)
    return [*found, (reached, end - reached)] if end > reached else found


def host_work(host: Sequence[Event]) -> list[Work]:
    """Every operator with its own time, without that of the operators it called."""
    nodes = event_tree(host)
    own = [e["dur"] for e in nodes.events]
    for event, parent in zip(nodes.events, nodes.parents, strict=True):
        if parent is not None:
            own[parent] -= event["dur"]
    return [
        Work(e["name"], kind_of(e["name"], inside), e["ts"], took)
        for e, inside, took in zip(nodes.events, nodes.inside, own, strict=True)
        if e["cat"] == "cpu_op"
    ]


def device_work(host: Sequence[Event], device: Sequence[Event]) -> list[Work]:
    """Every kernel and copy; the operator that launched it decides its kind."""
    nodes = event_tree(host)
    launched: dict[int, float] = {e["args"]["correlation"]: e["ts"] for e in host if "correlation" in e.get("args", {})}
    inside_of = {
        e["args"]["External id"]: inside or own_kind(e["name"])
        for e, inside in zip(nodes.events, nodes.inside, strict=True)
        if "External id" in e.get("args", {})
    }
    works = []
    for e in device:
        args = e.get("args", {})
        kind = inside_of.get(args.get("External id")) or kind_of(e["name"], None)
        works.append(Work(e["name"], kind, float(launched.get(args.get("correlation")) or e["ts"]), e["dur"]))
    return works


@dataclass
class EventTree:
    """Host events in order, the index of each event's parent, and the kind of the innermost classified event around or at it."""

    events: list[Event]
    parents: list[int | None]
    inside: list[str | None]


def event_tree(host: Sequence[Event]) -> EventTree:
    """The call tree of each thread: an event's parent is the last event that has not ended."""
    order = sorted(host, key=lambda e: (str(e["pid"]), str(e["tid"]), e["ts"], -e["dur"]))
    nodes = EventTree(order, [], [])
    stack: list[int] = []
    for k, e in enumerate(order):
        while stack and not _contains(order[stack[-1]], e):
            stack.pop()
        parent = stack[-1] if stack else None
        nodes.parents.append(parent)
        around = nodes.inside[parent] if parent is not None else None
        is_phase = e["cat"] == "user_annotation"
        nodes.inside.append(around or (None if is_phase else _first_match(ENCLOSING_KINDS, e["name"])))
        stack.append(k)
    return nodes


def _contains(outer: Event, inner: Event) -> bool:
    same = outer["pid"] == inner["pid"] and outer["tid"] == inner["tid"]
    return same and bool(inner["ts"] < outer["ts"] + outer["dur"])


def kind_of(name: str, inside: str | None) -> str:
    """The kind of work of an operator or kernel."""
    return inside or _first_match(ENCLOSING_KINDS, name) or own_kind(name) or "rest"


def own_kind(name: str) -> str | None:
    """The kind of an operator by its name alone."""
    return _first_match(OWN_KINDS, name)


def _first_match(rules: Iterable[tuple[str, re.Pattern[str]]], name: str) -> str | None:
    return next((kind for kind, pattern in rules if pattern.search(name)), None)


def memory_peaks(events: Iterable[Event], phase_at: Callable[[float], str], on_gpu: bool) -> dict[str, float]:
    """Peak memory allocated by torch in each phase; on a CPU, above what was allocated when the profile began."""
    peaks: dict[str, float] = {}
    for e in events:
        if e.get("name") == "[memory]" and (e["args"]["Device Type"] == 1) == on_gpu:
            phase = phase_at(e["ts"])
            peaks[phase] = max(peaks.get(phase, 0.0), e["args"]["Total Allocated"] / 2**30)
    return peaks


def render_summary(summary: TraceSummary, title: str) -> str:
    """The summary as text."""
    device = "GPU" if summary.on_gpu else "CPU"
    shown = [p for p in PHASES if any(phase == p for _, phase in summary.seconds)]
    head = f"{'kind':<20}" + "".join(f"{phase:>15}" for phase in shown) + f"{'all':>12}{'share':>8}"
    lines = [f"{title}: {summary.total_s:.3f} s", "", f"{device} time by kind of work and phase, in milliseconds", head]
    for kind in KINDS:
        row = [summary.seconds.get((kind, phase), 0.0) for phase in shown]
        if any(row):
            lines.append(
                f"{kind:<20}" + "".join(f"{1e3 * s:>15.2f}" for s in row) + _total_cells(sum(row), summary.total_s)
            )
    idle = "idle (no kernel)" if summary.on_gpu else "outside operators"
    lines.append(f"{idle:<20}" + " " * 15 * len(shown) + _total_cells(summary.idle_s, summary.total_s))
    lines += ["", f"{summary.num_gaps} gaps of {MIN_GAP_US:.0f} microseconds or more; the longest:"]
    lines += [f"  {1e3 * length:10.2f} ms at {1e3 * start:10.2f} ms" for start, length in summary.gaps]
    lines += ["", f"what took most {device} time", f"{'ms':>10}{'calls':>9}  {'kind':<20} name"]
    lines += [
        f"{1e3 * took:>10.2f}{calls:>9}  {kind:<20} {name[:MAX_NAME_CHARS]}" for name, kind, calls, took in summary.top
    ]
    above = "" if summary.on_gpu else ", above what there was at the start"
    lines += ["", f"most memory allocated by torch in each phase (GiB){above}"]
    lines += [f"  {phase:<15}{summary.peaks[phase]:>10.3f}" for phase in PHASES if phase in summary.peaks]
    return "\n".join(lines) + "\n"


def _total_cells(seconds: float, total: float) -> str:
    return f"{1e3 * seconds:>12.2f}{seconds / total if total else 0.0:>8.1%}"


# --- Recording a step --------------------------------------------------------------------------------------------------

TRACE_FILE, SUMMARY_FILE = "trace.json.gz", "profile.txt"
NEXT_STEP = 0
"""Instead of a step's number: the second step from now, since the first one includes one-time initialisation."""


def step_to_profile(asked: int | None, done: int, total: int) -> int | None:
    """The number of the step to record in a run that has done `done` of `total` steps; None unless a step was requested."""
    if asked is None:
        return None
    if asked == NEXT_STEP:
        return min(done + 2, total)
    if asked > total:
        raise UserError(f"--profile {asked}, but the run has only {total} steps")
    if asked <= done:
        raise UserError(f"--profile {asked}, but the run has made {done} steps already: choose a later one")
    return asked


@contextmanager
def profiled(folder: Path, title: str, note: Callable[[str], None]) -> Iterator[None]:
    """Record what runs inside, then write `trace.json.gz` (for Perfetto or chrome://tracing) and `profile.txt` to the folder."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, profile_memory=True) as recorded:
        yield
        if on_gpu:
            torch.cuda.synchronize()  # include kernels that were launched inside
    recorded.export_chrome_trace(str(folder / TRACE_FILE))
    atomic_write(folder / SUMMARY_FILE, render_summary(summarise_trace(read_trace(folder / TRACE_FILE)), title))
    note(f"{title} was profiled: {folder / SUMMARY_FILE}; open {folder / TRACE_FILE} in ui.perfetto.dev")


def read_trace(path: Path) -> list[dict[str, object]]:
    """The events of a stored trace."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        events: list[dict[str, object]] = json.load(file)["traceEvents"]
    return events
