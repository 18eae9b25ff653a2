"""A speed-run: the accuracy on a test set that a training reaches in a given time, from the start of its process.

python bench/time_to_reward.py gsm8k MODEL --measure --seeds 0 1 2          the chosen recipe on the test set, at the marks of the task
python bench/time_to_reward.py gsm8k MODEL --choose --seconds 100           settings of time_to_reward.yaml on held-back training questions
python bench/time_to_reward.py gsm8k MODEL --entry 'python mine.py {model} {train} {out} {seed} {seconds}' --name mine
python bench/time_to_reward.py gsm8k MODEL --base                           the model before any training
python bench/time_to_reward.py --collect ROWS.json ... ; python bench/time_to_reward.py --page

The rules, equal for all systems:

1. The task is a model, a file of training questions and a test set (`TASKS`). Training sees the model and the training file only. Settings are
   chosen on the training file: `--choose` trains on its first questions and measures on the last ones, which that training never sees.
2. The clock starts with the process and includes its imports, reading the data and loading the weights. Compiled kernels and file pages may be
   warm from an earlier run. Anything that a model computed from the questions (scores, filters, answers) is made on the clock.
3. The clock stops when the weights are final. Measuring them is off the clock, and so is writing them down for it. A training that is
   measured at several marks is one run: the clock stands still while a mark is measured, and the training then continues unchanged.
4. The score is the greedy accuracy on the whole test set with the task's prompt, token limit and verifier, one answer a question. An answer that
   cannot be scored is wrong. The row has Wilson's 95% interval, the seed and the seconds. A claim is the mean of three seeds.
5. An entry is a command that leaves a Hugging Face directory in {out} and ends. Its seconds are those until it ends, or `seconds` in the file
   {out}/time_to_reward.json, which it may write to leave out the writing of the directory. `burnish eval` measures the directory.

`--tiny` does all of it in seconds on a CPU with a model of its own and made-up questions, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from common import RESULTS, machine, on_this_gpu, table
from timed_training import Job

HERE, DOCS = Path(__file__).parent, Path(__file__).parents[1] / "docs"
RECIPES = HERE.parent / "recipes"
GRID = HERE / "time_to_reward.yaml"
PAGE = DOCS / "time-to-reward.md"
BURNISH = [sys.executable, "-m", "burnish.cli.main"]
Rows = list[dict[str, Any]]
EARLY_SHARE = 0.6
"""`--choose` also measures at this share of its seconds: two measurements are less noisy than one."""


@dataclass(frozen=True)
class Task:
    """What is trained and how it is measured."""

    recipe: str
    marks: tuple[float, ...]
    """Seconds at which `--measure` measures."""
    train: str
    test: str
    """Files in the data folder."""
    shapes: tuple[str, str]
    """How the rows of the two files are read; empty for plain rows."""
    num_held_back: int
    """Last rows of the training file that `--choose` measures on."""
    grade: tuple[str, ...]
    """Options of `burnish eval` for an entry, besides the directory; {test} is the test file."""
    targets: str


TASKS = {
    "gsm8k": Task(
        "gsm8k_fast", (100, 400), "gsm8k_train.jsonl", "gsm8k_test.jsonl", ("gsm8k", "gsm8k"), 1500,
        ("gsm8k", "--data-dir", "{data}", "--max-tokens", "1024"), "70% at 100 s, 74% at 400 s",
    ),
    "math500": Task(
        "math_fast", (300,), "math_train_rllm.json", "math500.jsonl", ("math", "math500"), 700,
        ("math500", "--data-dir", "{data}", "--max-tokens", "2048"), "6 points more than the base at 300 s",
    ),
    "sums": Task(
        "smollm2_sums", (240, 480), "sums_train.jsonl", "sums_test.jsonl", ("", ""), 300,
        ("{test}", "--reward", "number", "--max-tokens", "32"), "80% at 480 s, on two CPU cores",
    ),
}  # fmt: skip
SUMS_PROMPT = "What is {a} + {b}? Answer with the number only."
NUM_SUMS_TEST, NUM_SUMS_DRAWN = 300, 10_000
"""Test sums, and draws of training sums, each of which is written once."""
WITHOUT_VALIDATION = ["validation.every=0", "validation.before=false", "validation.limit=null", "run.keep_best=true"]
WITHOUT_VALIDATION += ["run.save_every=1000000"]
"""What measures and saves is the clock's process, at the marks."""
TINY = ["model.dtype=float32", "model.device=cpu", "rollout.prompts=4", "rollout.n=4", "rollout.max_tokens=8"]
TINY += ["reward.workers=1", "data.max_prompt_tokens=1000", "validation.modes={greedy: {max_tokens: 8}}"]


# --- Data -------------------------------------------------------------------------------------------------------------------


def read_rows_of(path: Path) -> Rows:
    """The raw rows of a json or jsonl file."""
    text = path.read_text(encoding="utf-8")
    return list(json.loads(text)) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_usable(source: Path, shape: str, target: Path) -> Path:
    """Write the rows of a published training file that have an answer; MATH's has four without one."""
    from burnish.data.published_datasets import SHAPES
    from burnish.data.published_example import UnusableRow

    usable = []
    for row in read_rows_of(source):
        try:
            SHAPES[shape].read(row)
        except UnusableRow as reason:
            print(f"{source.name}: a row is left out, {reason}")
        else:
            usable.append(row)
    return write_rows(target, usable)


def make_sums(folder: Path) -> None:
    """The files of the task sums: training sums, each once, and the test sums that the recipe validates on with seed 0."""
    from burnish.data.tasks.arithmetic import Addition

    task = Addition(0, 2, 2, SUMS_PROMPT)
    drawn = {row.prompt: row.answer for row in (task.row("train", k) for k in range(NUM_SUMS_DRAWN))}
    write_rows(folder / "sums_train.jsonl", ({"question": q, "answer": a} for q, a in drawn.items()))
    test = [task.row("test", k) for k in range(NUM_SUMS_TEST)]
    write_rows(folder / "sums_test.jsonl", ({"question": row.prompt, "answer": row.answer} for row in test))


def make_tiny(folder: Path) -> Path:
    """Made-up files of every task, and a model of characters."""
    from agents_gpu import tiny_model

    sums = [(a, b) for a in range(2, 14) for b in range(3, 8)]
    gsm8k = [{"question": f"What is {a} + {b}?", "answer": f"It is {a + b}.\n#### {a + b}"} for a, b in sums]
    problems = [{"problem": row["question"], "answer": str(a + b)} for row, (a, b) in zip(gsm8k, sums, strict=True)]
    write_rows(folder / "gsm8k_train.jsonl", gsm8k[:40])
    write_rows(folder / "gsm8k_test.jsonl", gsm8k[40:])
    (folder / "math_train_rllm.json").write_text(json.dumps(problems[:40]))
    write_rows(folder / "math500.jsonl", problems[40:])
    return tiny_model(folder / "tiny")


def training_file(task: Task, data: Path, work: Path) -> Path:
    """The training file of a run: its usable rows, as they are published."""
    source, shape = data / task.train, task.shapes[0]
    return write_usable(source, shape, work / f"{source.stem}_usable.jsonl") if shape else source


def data_overrides(task: Task, data: Path, work: Path, chooses: bool, num_held_back: int) -> list[str]:
    """The sources of a run. If it `chooses`, the last rows of the training file take the place of the test set."""
    train_path = training_file(task, data, work)
    train: dict[str, Any] = {"path": str(train_path)}
    test: dict[str, Any] = {"path": str(data / task.test)}
    for source, shape in zip((train, test), task.shapes, strict=True):
        source |= {"shape": shape} if shape else {}
    if chooses:
        rows = read_rows_of(train_path)
        if len(rows) < 2 * num_held_back:
            raise SystemExit(f"{train_path} has {len(rows)} rows, too few to hold back {num_held_back}")
        held_back = write_rows(work / f"{Path(task.train).stem}_held_back.jsonl", rows[-num_held_back:])
        test = {**train, "path": str(held_back)}
        train = {**train, "limit": len(rows) - num_held_back}
    # Lists take the place of the recipe's sources; a single one would be merged with them.
    return [f"data.train={json.dumps([train])}", f"data.validation={json.dumps([test])}"]


# --- Runs -------------------------------------------------------------------------------------------------------------------


class Bench:
    """The runs of one call, and the file of their rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.task = args, TASKS[args.task]
        self.work = args.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.data: Path = self.work if args.tiny or args.task == "sums" else args.data.resolve()
        if args.task == "sums":
            make_sums(self.work)
        self.model = str(make_tiny(self.work) if args.tiny else args.model.resolve())
        self.num_held_back = 10 if args.tiny else self.task.num_held_back
        usual = self.work / "rows.json" if args.tiny else RESULTS / f"{on_this_gpu('time_to_reward')}.json"
        self.out: Path = args.out or usual
        self.num_failed = 0

    def jobs(self, names: dict[str, list[str]], seeds: list[int], marks: list[float], kind: str) -> list[Job]:
        """A job for each seed of each named list of overrides."""
        chooses = kind == "choose"
        sources = data_overrides(self.task, self.data, self.work, chooses, self.num_held_back)
        made = []
        for seed in seeds:
            for name, overrides in names.items():
                run = f"{self.args.task}-{kind}-{name}-{seed}-{time.time_ns()}"
                own = [f"model.path={self.model}", f"seed={seed}", f"run.directory={self.work}", f"run.name={run}"]
                given = [
                    *WITHOUT_VALIDATION,
                    *overrides,
                    *self.args.set,
                    *(TINY if self.args.tiny else []),
                    *sources,
                    *own,
                ]
                recipe = str(RECIPES / f"{self.task.recipe}.yaml")
                facts = {"kind": kind, "overrides": [*overrides, *self.args.set], "together": self.args.together}
                system, rows_file = " ".join([name, *self.args.set]), str(self.work / f"{run}-rows.json")
                made.append(Job(self.args.task, system, seed, recipe, given, marks, rows_file, 0.0, facts))
        return made

    def run(self, jobs: list[Job]) -> None:
        """Run the jobs, `--together` at a time, and save the rows of each as it ends."""
        waiting, running = list(jobs), list[tuple[Job, subprocess.Popen[bytes]]]()
        while waiting or running:
            while waiting and len(running) < self.args.together:
                running.append(self.start(waiting.pop(0)))
            time.sleep(0.2)
            for job, process in list(running):
                if process.poll() is not None:
                    running.remove((job, process))
                    self.save(job, process.returncode)

    def start(self, job: Job) -> tuple[Job, subprocess.Popen[bytes]]:
        """Start the process of a job. Its clock starts here."""
        print(f"--- {job.task}, {job.system}, seed {job.seed}: {', '.join(map(str, job.marks))} s", flush=True)
        file, job.started = Path(job.rows_file).with_suffix(".job"), time.time()
        file.write_text(json.dumps(asdict(job)))
        return job, subprocess.Popen([sys.executable, str(HERE / "timed_training.py"), str(file)], env=with_burnish())

    def save(self, job: Job, status: int) -> None:
        """Add the rows that a job has written. A job that failed keeps those of its earlier marks."""
        if status:
            self.num_failed += 1
            print(f"{job.system}, seed {job.seed}: ended with status {status}", flush=True)
        file = Path(job.rows_file)
        if file.exists():
            merge(self.out, machine(), json.loads(file.read_text()))

    def entry(self, seed: int, seconds: float) -> None:
        """Run another system's command, and measure what it leaves."""
        out = self.work / f"{self.args.task}-{self.args.name}-{seed}-{int(time.time())}"
        words = {"model": self.model, "train": str(training_file(self.task, self.data, self.work)), "out": str(out)}
        command = shlex.split(self.args.entry.format(**words, seed=seed, seconds=seconds))
        print(f"--- {self.args.task}, {self.args.name}, seed {seed}: {shlex.join(command)}", flush=True)
        started = time.time()
        subprocess.run(command, check=True)
        wall_s = time.time() - started
        said = out / "time_to_reward.json"
        own_s = json.loads(said.read_text())["seconds"] if said.exists() else wall_s
        if not 0 < own_s <= wall_s:
            raise SystemExit(f"{said} says {own_s} seconds, but the command took {wall_s:.1f}")
        words |= {"data": str(self.data), "test": str(self.data / self.task.test)}
        options = [word.format(**words) for word in self.task.grade] + (["--max-tokens", "8"] if self.args.tiny else [])
        graded = self.work / f"{out.name}-eval"
        subprocess.run([*BURNISH, "eval", str(out), *options, "--out", str(graded)], check=True, env=with_burnish())
        found = json.loads(next(path for path in graded.glob("*.json") if path.stem != "results").read_text())
        row = {"task": self.args.task, "system": self.args.name, "seed": seed, "kind": "entry", "mark_s": seconds}
        row |= {"seconds": own_s, "wall_s": wall_s, "command": self.args.entry} | graded_facts(found)
        merge(self.out, machine(), [row])


def with_burnish() -> dict[str, str]:
    """The environment of a process that imports the burnish of this checkout."""
    return os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def graded_facts(found: dict[str, Any]) -> dict[str, Any]:
    """What a row takes from the result of `burnish eval`. An answer that could not be scored is wrong."""
    from burnish.evaluation.statistics import wilson_interval

    questions, scored = found["num_prompts"], found["num_prompts"] - found["failed"]
    interval = wilson_interval(found["accuracy"] * scored / questions, questions)
    return {"accuracy": interval.mean, "ci": [interval.low, interval.high], "questions": questions}


# --- Rows and the page ------------------------------------------------------------------------------------------------------


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Rows with one key are one measurement: the newest stays."""
    return tuple(row.get(name) for name in ("task", "kind", "system", "seed", "mark_s"))


def merge(path: Path, made_on: dict[str, Any], rows: Rows) -> None:
    """Add rows to a file of results, in place of those with the same key."""
    saved: Rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    new = {row_key(row) for row in rows}
    together = sorted([*(row for row in saved if row_key(row) not in new), *rows], key=lambda row: str(row_key(row)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": made_on, "rows": together}, indent=1) + "\n")


def mark_text(row: dict[str, Any]) -> str:
    low, high = row["ci"]
    return f"{100 * row['accuracy']:.1f}% [{100 * low:.1f}, {100 * high:.1f}] after {row['seconds']:.0f} s"


def measured_table(rows: Rows) -> list[str]:
    """The lines of measured systems: one for each task, mark and system, with every seed and the mean."""
    lines = ["| task, at | system | seeds | mean | aim |", "|---|---|---|---|---|"]
    groups: dict[tuple[str, float, str], Rows] = {}
    for row in rows:
        if row["kind"] in ("measure", "entry", "base"):
            groups.setdefault((row["task"], row["mark_s"], row["system"]), []).append(row)
    for (task, mark, system), found in sorted(
        groups.items(), key=lambda item: (list(TASKS).index(item[0][0]), *item[0][1:])
    ):
        seeds = "; ".join(f"{row['seed']}: {mark_text(row)}" for row in sorted(found, key=lambda row: row["seed"]))
        at, aim = (f"{task}, {mark:g} s", TASKS[task].targets) if mark else (f"{task}, before", "")
        lines.append(f"| {at} | {system} | {seeds} | {100 * fmean(row['accuracy'] for row in found):.1f}% | {aim} |")
    return lines


def choice_table(rows: Rows) -> list[str]:
    """The lines of settings measured on held-back training questions: accuracy at each mark, and what a step took."""
    lines = [
        "| task | settings | accuracy on held-back questions | steps | a step | set |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, int], Rows] = {}
    for row in rows:
        if row["kind"] == "choose":
            groups.setdefault((row["task"], row["system"], row["seed"]), []).append(row)
    for (task, system, seed), found in groups.items():
        found = sorted(found, key=lambda row: row["mark_s"])
        last, marks = found[-1], "; ".join(map(mark_text, found))
        step = "" if last["step_s"] is None else f"{last['step_s']:.1f} s"
        shared = f", {last['together']} at once" if last["together"] > 1 else ""
        name = system if seed == 0 else f"{system}, seed {seed}"
        given = ", ".join(f"`{text}`" for text in last["overrides"]) or "the recipe"
        lines.append(f"| {task} | {name} | {marks}{shared} | {last['steps']} | {step} | {given} |")
    return lines


def write_page(files: Iterable[Path], page: Path) -> None:
    """Put the tables between their marks in the page."""
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    text = page.read_text()
    for name, lines in (("measured", measured_table(rows)), ("choices", choice_table(rows))):
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        shown = lines if len(lines) > 2 else ["Nothing has been measured yet."]
        text = before + begin + "\n".join(shown) + "\n" + end + rest.split(end, 1)[1]
    page.write_text(text)
    print(f"written {page}, {len(rows)} rows")


# --- The command ------------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("task", nargs="?", choices=list(TASKS))
    add("model", type=Path, nargs="?", help="a Hugging Face directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true", help="the recipe of the task on its test set")
    what.add_argument("--choose", action="store_true", help="settings of the grid on held-back training questions")
    what.add_argument(
        "--entry", metavar="COMMAND", help="another system; {model} {train} {out} {seed} {seconds} are filled in"
    )
    what.add_argument("--base", action="store_true", help="the model before any training, on the test set")
    what.add_argument(
        "--collect",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="add the rows of these files to --out (default: the results of their machine)",
    )
    what.add_argument("--page", action="store_true", help="rewrite the tables of docs/time-to-reward.md")
    add(
        "--data",
        type=Path,
        default=Path("data"),
        help="folder of the published files (gsm8k_train.jsonl, math500.jsonl, ...)",
    )
    add("--work", type=Path, default=Path("runs/time_to_reward"), help="folder for runs and files on the way")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--seconds", type=float, nargs="+", help="the marks (default: of the task; with --choose its first mark)")
    add("--only", nargs="+", metavar="NAME", help="settings of the grid (default: all)")
    add(
        "--together", type=int, default=1, help="runs at once; their seconds are not comparable with those of one alone"
    )
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="key=value",
        help="further settings of every training; they are part of its name in the table",
    )
    add("--name", default="entry", help="the system of --entry in the table")
    add("--out", type=Path, help="file of the rows (default: bench/results/time_to_reward[-gpu].json)")
    add("--tiny", action="store_true")
    args = parser.parse_args()
    if not (args.collect or args.page) and (args.task is None or (args.model is None and not args.tiny)):
        parser.error("give a task and a model directory")
    if args.together > 1 and not args.choose:
        parser.error("--together shares the machine, so it is for --choose only")
    return args


def main() -> None:
    args = parse()
    if args.page:
        return write_page(sorted(RESULTS.glob("time_to_reward*.json")), PAGE)
    if args.collect:
        for file in args.collect:
            found = json.loads(file.read_text())
            gpu = found["machine"]["gpu"]
            name = "time_to_reward" if gpu is None else f"time_to_reward-{gpu.split()[-1].lower()}"
            merge(args.out or RESULTS / f"{name}.json", found["machine"], found["rows"])
        return None
    bench = Bench(args)
    if args.entry:
        for seed in args.seeds:
            bench.entry(seed, max(args.seconds or bench.task.marks))
    elif args.choose:
        seconds = max(args.seconds or bench.task.marks[:1])
        grid = yaml.safe_load(GRID.read_text())[args.task]
        if unknown := set(args.only or ()) - set(grid):
            raise SystemExit(
                f"{GRID.name} has no {', '.join(sorted(unknown))} for {args.task}; it has {', '.join(grid)}"
            )
        names = {name: overrides for name, overrides in grid.items() if not args.only or name in args.only}
        bench.run(bench.jobs(names, args.seeds, [EARLY_SHARE * seconds, seconds], "choose"))
    elif args.base:
        bench.run(bench.jobs({"base": []}, [0], [0.0], "base"))
    else:
        bench.run(bench.jobs({"burnish": []}, args.seeds, sorted(args.seconds or bench.task.marks), "measure"))
    if bench.out.is_file():
        rows = [row for row in json.loads(bench.out.read_text())["rows"] if row["task"] == args.task]
        print(table(rows, ["kind", "system", "seed", "mark_s", "seconds", "accuracy", "steps", "ready_s", "step_s"]))
        print(f"saved {bench.out}")
    sys.exit(1 if bench.num_failed else 0)


if __name__ == "__main__":
    main()
