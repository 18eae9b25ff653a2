"""Runs of a second or two whose processes are killed and stopped at random moments: do they end as if nothing had happened?

    python -m tests.distributed.chaos [--runs 1000] [--victims driver,reward,...] [--first-seed 0] [--save FILE]

Every run is `burnish train` with its supervisor. A seed picks a step and a moment in it; then the victim gets SIGKILL or SIGSTOP.
The run must end with status 0, its journal must show every sample used exactly once, and weights, optimizer and metrics must be
those of the undisturbed run, bit for bit in float64 (with environments in exact mode). (Of an asynchronous one: as many samples in each step.) A line for each run says
how it went, the table at the end counts; the exit status is 1 if one run did not. `--save` adds the counts to a file, after every run.

A run that ended because Ray itself did not start, as on a machine that is too busy, says nothing of burnish: it is made again. If it
never starts, but does where nothing is disturbed, it is burnish that leaves no room for it; else it counts as not judged, and the
exit status is 2 where no run of a victim was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.supervisor.processes import descendants
from tests.distributed.chaos_runs import STEPS, Runner, open_runner

RAY = ("placement=ray", "placement.timeout_s=60")  # a busy machine may take half of it to start a process
POOLS = (
    'placement.pools={"policy":{"places":1},"checks":{"places":1}}',
    'placement.roles={"actor":"policy","rollout":"policy","reward":"checks"}',
)
ASYNC = ("rollout.source=async",)
AHEAD = (*RAY, "rollout.source=ahead", "placement.layout=split")
PLAYS = (
    'environment={"name":"plays.py:Plays","max_turns":2,"workers":2,"deadline_s":1.5,"retries":3}',
    "rollout.exact=true",  # which samples are decoded together depends on when environments reply
    "model.dtype=float32",
)
VICTIMS: dict[str, tuple[str, ...]] = {
    "driver": (),
    "reward": (),
    "environment": PLAYS,
    "environment_driver": PLAYS,
    "rollout": (*RAY, "placement.engines=2"),
    "trainer": (*RAY, "placement.workers=2"),
    "ray_driver": RAY,
    "ray_reward": (*RAY, *POOLS),
    "ahead_driver": AHEAD,
    "ahead_rollout": AHEAD,
    "async_driver": ASYNC,
    "async_reward": ASYNC,
    "async_rollout": (*RAY, *ASYNC, "placement.layout=split"),
    "async_trainer": (*RAY, *ASYNC, "placement.layout=split"),
}
"""The overrides under which there is such a process."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
NO_RAY = "Ray did not start"
"""What a run says of that (`distributed/ray_cluster.py`)."""
FAILURE_METRICS = ("environment/worker_died", "environment/step_timed_out", "environment/retries")
"""They tell of the disturbance itself: an episode whose process was killed starts again."""
ATTEMPTS = 3


# --- one run and what came of it --------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What no disturbance may change."""

    metrics: list[dict[str, Any]]
    weights: dict[str, bytes]
    used: list[tuple[int, list[str]]]


def result(folder: Path) -> Result:
    """Of a complete run."""
    run = folder / "runs" / "run"
    metrics = [
        {k: v for k, v in row.items() if not k.startswith((*MACHINE_PREFIXES, *FAILURE_METRICS))}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    weights = {
        f"{file.name}/{name}": tensor.tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    events = [json.loads(line) for line in (run / "journal" / "events.jsonl").read_text().splitlines()]
    resumed = [(i, e["step"]) for i, e in enumerate(events) if e["event"] == "resumed"]
    used = [
        (e["step"], e["ids"])
        for i, e in enumerate(events)
        if e["event"] == "used" and not any(i < k and e["step"] > step for k, step in resumed)
    ]
    return Result(metrics, weights, used)


def undisturbed(runner: Runner, folder: Path, overrides: tuple[str, ...]) -> Result:
    """What a run gives that nobody disturbs."""
    for attempt in range(ATTEMPTS):
        place = folder.with_name(f"{folder.name}-{attempt}")
        code = runner.wait(runner.start(place, overrides))
        if code == 0:
            return result(place)
        if not lacks_ray(place):
            break
    raise RuntimeError(f"an undisturbed run ends with status {code}: {output(place)}")


def lacks_ray(folder: Path) -> bool:
    """Whether Ray did not start in a run."""
    return NO_RAY in output(folder)


def output(folder: Path) -> str:
    return (folder / "output.txt").read_text(errors="replace")[-3000:]


class Disturbed(NamedTuple):
    """A run that was disturbed."""

    was_hit: bool
    code: int
    seconds: float
    problems: list[str]
    is_judged: bool = True
    """Whether it says anything: not where there was no Ray."""

    def __str__(self) -> str:
        hit = "hit" if self.was_hit else "over before it could be hit"
        ended = "; ".join(self.problems) or ("as undisturbed" if self.is_judged else f"not judged: {NO_RAY}")
        return f"{hit}, {ended}, {self.seconds:.1f} s"


def disturbed(runner: Runner, folder: Path, victim: str, number: int, seed: int, expected: Result) -> Disturbed:
    """The same as `disturb_once`, made again where Ray did not start. The last attempt is in the folder, others beside it."""
    for attempt in range(ATTEMPTS):
        found = disturb_once(runner, folder, victim, number, seed, expected)
        if found.code == 0 or not lacks_ray(folder):
            return found
        folder.rename(folder.with_name(f"{folder.name}-attempt-{attempt}"))
    try:
        undisturbed(runner, folder.with_name(f"{folder.name}-control"), VICTIMS[victim])
    except RuntimeError as error:
        if NO_RAY not in str(error):
            raise
        return found._replace(problems=[], is_judged=False)
    reason = f"{NO_RAY} {ATTEMPTS} times, though it does where nothing is disturbed"
    return found._replace(problems=[reason, *found.problems])


def disturb_once(runner: Runner, folder: Path, victim: str, number: int, seed: int, expected: Result) -> Disturbed:
    """A run in which a victim gets a signal, at a moment that the seed picks."""
    rng = random.Random(f"{victim}-{number}-{seed}")
    step, delay_s = rng.randrange(STEPS - 1), rng.uniform(0, 0.15)
    started = time.monotonic()
    pid = runner.start(folder, VICTIMS[victim])
    was_hit = strike(pid, folder, victim, number, step, delay_s, rng)
    code = runner.wait(pid)
    problems = [] if code == 0 else [f"status {code}: {output(folder)}"]
    if code == 0:
        found = result(folder)
        ids = [id for _, some in found.used for id in some]
        problems += ["a sample was used twice"] if len(set(ids)) < len(ids) else []
        problems += compared(found, expected, is_sync=not set(ASYNC) <= set(VICTIMS[victim]))
    return Disturbed(was_hit, code, time.monotonic() - started, problems)


def compared(found: Result, expected: Result, is_sync: bool) -> list[str]:
    """What differs. Which groups a step gets is a matter of moments where sampling never stops; how many samples it gets is not."""
    if is_sync:
        return [f"other {part}" for part in Result._fields if getattr(found, part) != getattr(expected, part)]
    counts = [[(step, len(ids)) for step, ids in one.used] for one in (found, expected)]
    return [] if counts[0] == counts[1] else [f"other numbers of samples: {counts[0]} instead of {counts[1]}"]


def strike(pid: int, folder: Path, victim: str, number: int, step: int, delay_s: float, rng: random.Random) -> bool:
    """Wait for the step, then for the moment in it; then the signal. False if the run was over before."""
    journal = folder / "runs" / "run" / "journal" / "events.jsonl"
    while is_alive(pid):
        if step == 0 or (journal.exists() and done(journal.read_text()) >= step):
            break
        time.sleep(0.002)
    time.sleep(delay_s)
    while is_alive(pid):
        if found := find(pid, victim):
            try:
                os.kill(rng.choice(found), number)
            except ProcessLookupError:
                continue
            return True
        time.sleep(0.002)
    return False


def done(journal: str) -> int:
    """The last step that a journal tells of."""
    steps = [line for line in journal.splitlines() if '"event":"step"' in line and line.endswith("}")]
    return int(json.loads(steps[-1])["step"]) if steps else 0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def find(supervisor: int, victim: str) -> list[int]:
    """The processes of that kind."""
    below = descendants(supervisor)
    if victim.endswith("driver"):
        return below[:1]
    if victim in ("reward", "async_reward"):
        return [pid for pid in below if "burnish.rewards.worker" in _link(pid, "cmdline")]
    if victim == "environment":
        return [pid for pid in below if "burnish.environments.worker_process" in _link(pid, "cmdline")]
    group = {"rollout": "rollout", "trainer": "actor", "reward": "reward"}[victim.rpartition("_")[2]]
    theirs = [pid for pid in below if f"/workers/{group}-" in _link(pid, "fd/1")]
    return [pid for pid in theirs if "burnish.rewards.worker" not in _link(pid, "cmdline")]  # which a worker started


def _link(pid: int, what: str) -> str:
    path = Path(f"/proc/{pid}/{what}")
    try:
        return os.readlink(path) if what.startswith("fd/") else path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


# --- many of them -----------------------------------------------------------------------------------------------------------


Counts = dict[tuple[str, int], list[Disturbed]]
"""The runs by victim and signal."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="FILE")
    args = parser.parse_args()
    kinds = [(victim, number) for victim in args.victims.split(",") for number in SIGNALS]
    counts: Counts = {kind: [] for kind in kinds}
    before = json.loads(args.save.read_text())["rows"] if args.save is not None and args.save.exists() else []
    with open_runner() as runner, tempfile.TemporaryDirectory() as temporary:
        expected: dict[tuple[str, ...], Result] = {}
        for k in range(args.runs):
            victim, number = kinds[k % len(kinds)]
            folder, where = Path(temporary) / str(k), VICTIMS[victim]
            if where not in expected:
                expected[where] = undisturbed(runner, Path(temporary) / f"undisturbed-{len(expected)}", where)
            seed = args.first_seed + k // len(kinds)
            found = disturbed(runner, folder, victim, number, seed, expected[where])
            counts[victim, number].append(found)
            name = f"{victim} {signal.Signals(number).name} seed {seed}"
            print(f"{k + 1} of {args.runs}: {name}: {found}", flush=True)
            if args.save is not None:
                save(args.save, before + rows_of(counts, args.first_seed))
            for made in Path(temporary).glob(f"{k}*"):
                shutil.rmtree(made)
    return told(counts)


def rows_of(counts: Counts, first_seed: int) -> list[dict[str, Any]]:
    """What came of the runs of each kind."""
    return [
        {
            "work": f"{victim} {signal.Signals(number).name}",
            "system": "burnish",
            "seed": first_seed,
            "runs": len(runs),
            "hit": sum(run.was_hit for run in runs),
            "as_undisturbed": sum(run.is_judged and not run.problems for run in runs),
            "not_judged": sum(not run.is_judged and not run.problems for run in runs),
            "wall_s": round(sum(run.seconds for run in runs) / len(runs), 1),
        }
        for (victim, number), runs in counts.items()
        if runs
    ]


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write them as benchmarks do."""
    from bench.common import machine

    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def told(counts: Counts) -> int:
    """Print the table; the exit status."""
    print(
        f"{'victim':<20}{'signal':<10}{'runs':>6}{'hit':>6}{'as undisturbed':>16}{'not judged':>12}{'seconds a run':>15}"
    )
    for row in rows_of(counts, 0):
        victim, name = row["work"].split()
        numbers = (
            f"{row['runs']:>6}{row['hit']:>6}{row['as_undisturbed']:>16}{row['not_judged']:>12}{row['wall_s']:>15}"
        )
        print(f"{victim:<20}{name:<10}{numbers}", flush=True)
    if any(run.problems for runs in counts.values() for run in runs):
        return 1
    return 2 if any(runs and not any(run.is_judged for run in runs) for runs in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
