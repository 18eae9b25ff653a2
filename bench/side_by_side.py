"""Runs benches on one GPU next to each other, as far as its memory goes, and keeps what each printed.

    python bench/side_by_side.py JOBS.yaml --out DIR [--gib 140] [--only NAME ...] [--set model=DIR data=DIR] [--seconds S] [--mps]

JOBS.yaml maps names to jobs (`bench/one_gpu.yaml` has those of docs/numbers.md that train or sample for minutes):

    base:   {command: "python bench/gsm8k_rows.py {model} --systems base", gib: 50}
    grpo:   {command: "...", gib: 55, after: [base], limit_s: 200}
    rates:  {command: "...", alone: true}

A job takes `gib` of the GPU; one that is `alone` measures time, so nothing runs beside it. Words in braces are those of `--set`; {out} is the folder.
Jobs start in the order of the file. One that does not fit yet lets later ones pass, but nothing passes a job that is alone.
A job whose `after` failed is not run. After `--seconds` no job is started, nor one whose `limit_s` would end later. Ctrl-C or SIGTERM ends them all.
`--mps` starts NVIDIA's Multi-Process Service for the jobs that are not alone: kernels of different jobs then run at the same time and not in turns.
`DIR/NAME.log` has the output of each and `DIR/state.json` the state of all, rewritten whenever it changes; a second call runs those that have not succeeded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

POLL_S = 0.5
WAITING, RUNNING, DONE, FAILED, SKIPPED = "waiting", "running", "done", "failed", "skipped"


@dataclass
class Job:
    """One command and its state."""

    name: str
    command: str
    gib: float = 0.0
    alone: bool = False
    after: list[str] = field(default_factory=list)
    limit_s: float | None = None
    """Seconds after which the job is ended and counts as failed."""
    state: str = WAITING
    seconds: float = 0.0
    note: str = ""


def read_jobs(path: Path, words: dict[str, str], only: list[str] | None) -> list[Job]:
    """The jobs of a file, in order, with `words` in their commands; only those named, if any are."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    jobs = []
    for name, entry in table.items():
        unknown = set(entry) - {"command", "gib", "alone", "after", "limit_s"}
        if unknown or "command" not in entry or ("gib" in entry) == bool(entry.get("alone")):
            raise SystemExit(
                f"{path}: the job {name} needs a command and one of `gib` and `alone`; unknown: {sorted(unknown)}"
            )
        if only is not None and name not in only:
            continue
        try:
            command = entry["command"].format(**words)
        except KeyError as missing:
            raise SystemExit(f"{path}: the job {name} needs --set {missing.args[0]}=...") from None
        jobs.append(Job(**{**entry, "name": name, "command": command}))
    strangers = set(only or ()) - {job.name for job in jobs}
    strangers |= {name for job in jobs for name in job.after} - set(table)
    if strangers:
        raise SystemExit(f"{path} has no job {', '.join(sorted(strangers))}; it has {', '.join(table)}")
    return jobs


@contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """The variables with which processes share the GPU by NVIDIA's Multi-Process Service, which runs for the block."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise SystemExit("--mps: there is no nvidia-cuda-mps-control on PATH; it comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:  # a short path: the daemon's sockets are in it
        shared = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        variables = {**os.environ, **shared}
        subprocess.run([control, "-d"], env=variables, check=True)
        try:
            yield shared
        finally:
            subprocess.run([control], input="quit\n", text=True, env=variables, check=False)


class Runner:
    """The jobs of one call, those that run, and the folder of what they print."""

    def __init__(
        self, jobs: list[Job], out: Path, gib: float, seconds: float | None, variables: dict[str, str]
    ) -> None:
        self.jobs, self.out, self.gib = jobs, out, gib
        self.variables = variables
        """Of jobs that are not alone."""
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        self.began, self.seconds = time.monotonic(), seconds
        self.is_stopping = False
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "state.json"
        saved = [Job(**row) for row in json.loads(self.path.read_text())] if self.path.is_file() else []
        names = {job.name for job in jobs}
        self.others = [job for job in saved if job.name not in names]
        """Jobs of earlier calls that this one was not asked for."""
        done = {job.name for job in saved if job.state == DONE}
        for job in jobs:
            if job.name in done:
                job.state, job.note = DONE, "in an earlier call"

    def save(self) -> None:
        """Write the state of all jobs, in one step."""
        temporary = self.out / "state.json.new"
        temporary.write_text(json.dumps([asdict(job) for job in [*self.others, *self.jobs]], indent=1) + "\n")
        temporary.replace(self.path)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.0f} s] {text}", flush=True)

    def run(self) -> int:
        """Run all jobs; returns how many did not succeed."""
        while self.running or self.may_start_any():
            self.end_finished()
            self.start_ready()
            if self.running:
                time.sleep(POLL_S)
        self.save()
        return sum(job.state != DONE for job in self.jobs)

    def may_start_any(self) -> bool:
        """Whether a waiting job can still start; those that cannot are marked as skipped."""
        for job in self.jobs:
            if job.state == WAITING and (reason := self.never(job)):
                self.mark(job, SKIPPED, reason)
        return any(job.state == WAITING for job in self.jobs)

    def never(self, job: Job) -> str:
        """Why a waiting job cannot start any more; empty if it can."""
        may_succeed = {other.name for other in self.jobs if other.state in (WAITING, RUNNING)} | self.done()
        lost = [name for name in job.after if name not in may_succeed]
        if lost:
            return f"{', '.join(lost)} did not succeed"
        if self.is_stopping:
            return "stopped"
        if job.gib > self.gib:
            return f"it takes {job.gib:g} GiB of {self.gib:g}"
        if self.seconds is not None and time.monotonic() - self.began + (job.limit_s or 0) > self.seconds:
            return "no time left"
        return ""

    def done(self) -> set[str]:
        """Names of the jobs that have succeeded, in this call or before."""
        return {job.name for job in [*self.others, *self.jobs] if job.state == DONE}

    def start_ready(self) -> None:
        """Start the jobs that may run beside those that do."""
        for job in self.jobs:
            if job.state != WAITING or not set(job.after) <= self.done() or self.never(job):
                continue
            now = [other for other in self.jobs if other.state == RUNNING]
            if any(other.alone for other in now) or (job.alone and now):
                return
            if sum(other.gib for other in now) + job.gib <= self.gib:
                self.start(job)

    def start(self, job: Job) -> None:
        with (self.out / f"{job.name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", job.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | ({} if job.alone else self.variables),
            )
        self.running[job.name] = process, time.monotonic()
        self.mark(job, RUNNING, "")

    def end_finished(self) -> None:
        for job in self.jobs:
            if job.name not in self.running:
                continue
            process, began = self.running[job.name]
            job.seconds = time.monotonic() - began
            if process.poll() is None and (self.is_stopping or (job.limit_s is not None and job.seconds > job.limit_s)):
                os.killpg(process.pid, signal.SIGKILL)
                job.note = "stopped" if self.is_stopping else f"ended after its limit of {job.limit_s:g} s"
                process.wait()
            if process.poll() is not None:
                del self.running[job.name]
                status = process.returncode
                self.mark(job, DONE if status == 0 else FAILED, job.note or (f"status {status}" if status else ""))

    def mark(self, job: Job, state: str, note: str) -> None:
        job.state, job.note = state, note
        self.save()
        self.say(
            f"{state:8} {job.name}{f' after {job.seconds:.0f} s' if job.seconds else ''}{f': {note}' if note else ''}"
        )

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Start nothing more, and end what runs."""
        self.is_stopping = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=140.0, help="memory of the GPU")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--set", nargs="+", default=[], metavar="word=text")
    parser.add_argument("--seconds", type=float, help="start nothing that may end later than this")
    parser.add_argument("--mps", action="store_true", help="let kernels of different jobs run at the same time")
    args = parser.parse_args()
    words = dict(text.split("=", 1) for text in args.set) | {"out": str(args.out)}
    jobs = read_jobs(args.jobs, words, args.only)
    with multi_process_service() if args.mps else nullcontext({}) as variables:
        runner = Runner(jobs, args.out, args.gib, args.seconds, variables)
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, runner.stop)
        failed = runner.run()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
