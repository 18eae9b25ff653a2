"""Every preset on toys that a CPU can learn, three seeds each: what a reader may expect of the table of algorithms, and what not.

    python bench/learning.py [--presets grpo ppo ...] [--seeds 0 1 2] [--workers 2] [--budget SECONDS]
    python bench/learning.py --choose            # the common learning rate, on seeds that are not reported
    python bench/learning.py --report            # table, picture and page from the results there are

All policies of a toy and a seed begin with the same weights, which are made once and kept in `--folder`. A finished (preset, seed) is kept in
the results file; the same command continues where it ended. After `--budget` seconds no further run begins. Settings that differ between
presets are in `learning_presets.py`, each with its reason, common ones in `learning.yaml`; the toys are in `learning_toys.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import multiprocessing
import resource
import shutil
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, machine, table
from learning_presets import (
    CHOICE_PRESETS,
    CHOICE_RATES,
    CHOICE_SEEDS,
    OFFLINE_RATE,
    OFFLINE_UPDATES,
    OWN_CHOICES,
    ROWS,
    SAMPLES,
    SHARED,
    STARTS,
    TOYS,
    Row,
)
from learning_report import summaries, write_page, write_picture
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from burnish.algorithms.presets import PRESETS
from burnish.api.evaluation_call import evaluate
from burnish.config.loading import load
from burnish.config.model import NewModel
from burnish.config.schema import PreferConfig, SftConfig, TrainConfig
from burnish.data.tasks.sort_digits import SortDigits
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.tokenizer import EOS, PAD, Tokenizer
from burnish.models.weight_files import save_decoder
from burnish.run.metrics import read_metrics
from burnish.trainers import preference, sft
from burnish.trainers.rl_run import checked_run, execute

REPOSITORY = Path(__file__).parents[1]
BASE = Path(__file__).with_suffix(".yaml")
KEY = "validation/greedy/accuracy"
SEEDS = (0, 1, 2)
OFFLINE_SIZES = (
    f"updates={OFFLINE_UPDATES}",
    "batch_size=64",
    "max_tokens=32",
    f"optimizer={{lr: {OFFLINE_RATE}, betas: [0.9, 0.95], schedule: linear, final: 0.1}}",
)
OFFLINE_RUN = ("run.name=offline", "run.threads=1", "run.save_every=1000", "run.save=wait")
OFFLINE: dict[str, tuple[str, Any, Any]] = {
    "sft": ("sft", SftConfig, sft),
    "prefer": ("preference", PreferConfig, preference),
}
PAIR_PROBLEMS = 2000
STILL = ("training.steps=1", "training.optimizer.lr=1.0e-12", "training.mini_batches=1")
"""One step too small to change the weights: it measures a model on the same held-out rows as all others."""


class Job(NamedTuple):
    """One run: a preset, a seed, and overrides of a search."""

    preset: str
    seed: int
    more: tuple[str, ...] = ()


# --- one run ------------------------------------------------------------------------------------------------------------


def train(folder: Path, name: str, overrides: list[str]) -> list[list[float]]:
    """A run of RL; returns held-out accuracy as [step, accuracy] pairs."""
    places = [f"run.directory={folder}", f"run.name={name}", "model.device=cpu"]
    loaded = load(TrainConfig, BASE, [*places, *overrides])
    with redirect_stdout(io.StringIO()), checked_run(loaded.config, loaded.resolved, loaded.base, name) as (parts, run):
        if not execute(parts, run):
            raise RuntimeError(f"{folder / name}: the run stopped before its last step")
        return [[row["step"], row[KEY]] for row in read_metrics(run.directory.metrics) if KEY in row]


def from_model(path: Path) -> list[str]:
    return ["model.new=null", f"model.path={path}", "warm_start=null"]


def started(folder: Path, name: str, seed: int) -> Path:
    """The directory of a warm start, made if it is not there."""
    model, start = folder / f"start-{name}-{seed}", STARTS[name]
    if not model.is_dir():
        work = folder / f"start-{name}-{seed}-run"
        shutil.rmtree(work, ignore_errors=True)  # of a process that ended before it was complete
        data = start.data.replace("{seed}", str(seed))
        overrides = [f"warm_start.data=[{data}]", f"warm_start.updates={start.updates}", *start.overrides]
        if start.merges:
            overrides += ["model.new=null", f"model.path={untrained(folder, start.merges, seed)}"]
        train(work, "run", [*STILL, *overrides, f"seed={seed}", "rollout.prompts=4", "validation.limit=10"])
        (work / "run" / "warm_start").rename(model)
        shutil.rmtree(work)
    return model


def untrained(folder: Path, merges: tuple[str, ...], seed: int) -> Path:
    """The directory of the bench's decoder with random weights, and a tokenizer in which pairs of characters are one token."""
    path = folder / f"untrained-{'-'.join(merges)}-{seed}"
    if not path.is_dir():
        pieces = [PAD, EOS, *SortDigits.alphabet, *merges]
        pairs = [(pair[0], pair[1]) for pair in merges]
        backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
        backend.decoder = decoders.Fuse()
        tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS))
        decoder = Decoder(new_architecture(NewModel(**SHARED["model"]["new"]), tokenizer.vocab_size))
        initialise(decoder, seed)
        save_decoder(decoder, path, None, tokenizer.eos_ids, tokenizer.pad_id)
        tokenizer.save(path)
    return path


def teachers_of(row: Row) -> list[str]:
    """The warm starts whose names stand in braces in a row's overrides."""
    return [name for name in STARTS if any(f"{{{name}}}" in text for text in row.overrides)]


def with_teachers(overrides: list[str], paths: Mapping[str, Path]) -> list[str]:
    """Overrides with the directories of teachers in place of their names."""
    for name, path in paths.items():
        overrides = [text.replace(f"{{{name}}}", str(path)) for text in overrides]
    return overrides


def overrides_of(job: Job) -> list[str]:
    """All overrides of a run of RL, in the order in which they count: a later one wins."""
    row = ROWS[job.preset]
    ordered = [f"algorithm={job.preset}", *TOYS[row.toy].overrides, *row.overrides, *job.more]
    return list({text.partition("=")[0]: text for text in ordered}.values())


def offline_overrides(job: Job) -> list[str]:
    """The overrides of a run of `prefer` or `sft`, without its data and places."""
    row = ROWS[job.preset]
    section = OFFLINE[row.command][0]
    return [f"{section}.{text}" for text in (*OFFLINE_SIZES, *row.overrides, *job.more)]


def objective(job: Job) -> dict[str, Any]:
    """What a run optimises, with every preset and default resolved: the algorithm, or the section of `prefer` or `sft`."""
    row = ROWS[job.preset]
    if row.command == "train":
        own = with_teachers(overrides_of(job), {name: Path(name) for name in teachers_of(row)})
        loaded = load(TrainConfig, BASE, [*own, *from_model(Path("start"))])
        return loaded.config.algorithm.model_dump(mode="json")
    section, config_type, _ = OFFLINE[row.command]
    loaded = load(config_type, None, ["model.path=start", f"{section}.data=[{{path: rows}}]", *offline_overrides(job)])
    return getattr(loaded.config, section).model_dump(mode="json")


def own_pairs(folder: Path, start: Path, seed: int) -> Path:
    """Pairs of a warm start's own samples, made once: a right answer beside up to four wrong ones of the same train problem."""
    file = folder / f"pairs-{seed}.jsonl"
    if not file.is_file():
        task, work = SortDigits(seed), folder / f"pairs-{seed}-samples"
        shutil.rmtree(work, ignore_errors=True)
        rows = [task.row("train", index) for index in range(PAIR_PROBLEMS)]
        asked = [{"question": row.prompt, "answer": row.answer} for row in rows]
        with redirect_stdout(io.StringIO()):
            sampled = evaluate(start, asked, "exact", out=work, n=SAMPLES, temperature=1, max_tokens=10, seed=seed)
        right, wrong = dict[str, str](), dict[str, list[str]]()
        for row in sampled.completions:
            prompt, said = row["prompt"], row["completion"]
            if row["accuracy"] == 1:
                right[prompt] = said
            elif said.strip() and said not in wrong.setdefault(prompt, []):
                wrong[prompt].append(said)
        pairs = [{"prompt": p, "chosen": right[p], "rejected": said} for p in right for said in wrong.get(p, [])[:4]]
        temporary = file.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
        temporary.replace(file)
        shutil.rmtree(work)
    return file


def offline(job: Job, folder: Path, start: Path, data: dict[str, Any]) -> Path:
    """Train on a fixed data set; returns the directory of the model."""
    row = ROWS[job.preset]
    section, config_type, trainer = OFFLINE[row.command]
    overrides = [f"seed={job.seed}", f"model.path={start}", "model.device=cpu", f"run.directory={folder}", *OFFLINE_RUN]
    overrides += [f"{section}.data={json.dumps([data])}", *offline_overrides(job)]
    loaded = load(config_type, None, overrides)
    with redirect_stdout(io.StringIO()):
        outcome = trainer.execute(loaded.config, loaded.resolved, loaded.base, "offline")
    if outcome is None or not outcome.is_complete:
        raise RuntimeError(f"{job.preset}: the run of `burnish {row.command}` is not complete")
    return outcome.model


def learn(job: Job, folder: Path) -> dict[str, Any]:
    """One run from its warm start. A run that fails is a row too, with the error."""
    row, before_s = ROWS[job.preset], cpu_seconds()
    start = started(folder, TOYS[row.toy].start, job.seed)
    teachers = {name: started(folder, name, job.seed) for name in teachers_of(row)}
    data: dict[str, Any] = {"task": "sort_digits", "options": {"num": 2000, "clean": True}}
    if row.command == "prefer":
        data = {"path": str(own_pairs(folder, start, job.seed))}
    start_s, wall = cpu_seconds() - before_s, time.perf_counter()
    place = folder / f"{job.preset}-{job.seed}-{digest(job)}"
    shutil.rmtree(place, ignore_errors=True)
    found = {"preset": job.preset, "seed": job.seed, "toy": row.toy, "settings": digest(job), "more": list(job.more)}
    found["cpu"] = machine()["cpu"]  # the rows of a file may be from several machines
    try:
        if row.command == "train":
            own = with_teachers(overrides_of(job), teachers)
            curve = train(place, "run", [*own, *from_model(start), f"seed={job.seed}"])
        else:
            common = [*STILL, f"seed={job.seed}", "rollout.prompts=1", "algorithm=grpo"]
            before = train(place, "before", [*common, *from_model(start)])
            model = offline(job, place, start, data)
            after = train(place, "after", [*common, *from_model(model)])
            curve = [[0, before[0][1]], [OFFLINE_UPDATES, after[0][1]]]
        found |= {"before": curve[0][1], "after": curve[-1][1], "curve": curve}
    except Exception as error:  # noqa: BLE001 - one preset that fails must not end the others; the row and the page say so
        found["error"] = f"{type(error).__name__}: {error}"[:600]
        traceback.print_exc()
    shutil.rmtree(place, ignore_errors=True)
    times = {"cpu_s": round(cpu_seconds() - before_s - start_s, 2), "start_cpu_s": round(start_s, 2)}
    return found | times | {"wall_s": round(time.perf_counter() - wall, 2)}


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for, such as reward workers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def digest(job: Job) -> str:
    """A short hash of all settings of a run but its seed. A run whose settings have changed since is made again."""
    return digest_of_any_seed(job._replace(seed=0))


@cache
def digest_of_any_seed(job: Job) -> str:
    """The hash, with the algorithm slot by slot, so that a preset that changes makes its rows old.

    Options that are off are left out: a new option whose default is off leaves all rows as they are.
    """
    row = ROWS[job.preset]
    settings = [BASE.read_text(encoding="utf-8"), sorted(overrides_of(job)), row.command]
    settings += [without_off(asdict(STARTS[TOYS[row.toy].start])), without_off(objective(job))]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).replace(str(REPOSITORY), "").encode()).hexdigest()[:12]


def without_off(value: Any) -> Any:
    """A tree of settings without null, false, 0 and what is empty."""
    if isinstance(value, dict):
        pairs = {key: without_off(inner) for key, inner in value.items()}
        return {key: inner for key, inner in pairs.items() if inner not in (None, False, 0, "", [], (), {})}
    return [without_off(inner) for inner in value] if isinstance(value, list) else value


# --- all runs -----------------------------------------------------------------------------------------------------------


def current_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a results file that were made with the settings of today; others are made again."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return [row for row in rows if row["settings"] == digest(Job(row["preset"], row["seed"], tuple(row["more"])))]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the file so that a process killed at any moment leaves the old one or the new one."""
    order = {name: number for number, name in enumerate(PRESETS)}
    rows.sort(key=lambda row: (order[row["preset"]], row["seed"], row["more"]))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def run_jobs(jobs: list[Job], path: Path, folder: Path, workers: int, budget_s: float) -> None:
    """Run what is not in the results file yet, until the budget is spent."""
    rows = current_rows(path)
    done = {(row["preset"], row["seed"], row["settings"]) for row in rows if "error" not in row}
    waiting = [job for job in jobs if (job.preset, job.seed, digest(job)) not in done]
    print(f"{len(waiting)} of {len(jobs)} runs to do", flush=True)
    deadline, running = time.monotonic() + budget_s, dict[Future[dict[str, Any]], Job]()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        while waiting or running:
            while waiting and len(running) < workers and time.monotonic() < deadline:
                job = next_job(waiting, list(running.values()), folder)
                if job is None:
                    break
                waiting.remove(job)
                running[pool.submit(learn, job, folder)] = job
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, made = running.pop(future), future.result()
                key = job.preset, job.seed, list(job.more)
                rows = [row for row in rows if (row["preset"], row["seed"], row["more"]) != key] + [made]
                write_rows(path, rows)
                print(
                    table([made], ["preset", "seed", "before", "after", "cpu_s", "wall_s", "more", "error"]), flush=True
                )
    if waiting:
        print(f"the budget is spent: {len(waiting)} runs are left for the same command")


def next_job(waiting: list[Job], running: list[Job], folder: Path) -> Job | None:
    """The first job whose warm starts and pairs are there, or are not being made by a running job."""
    being_made = {name for job in running for name in made_once(job) if not (folder / name).exists()}
    return next((job for job in waiting if not being_made & made_once(job)), None)


def made_once(job: Job) -> set[str]:
    """Names of the warm starts and the file of pairs that a job shares with others."""
    row = ROWS[job.preset]
    names = {TOYS[row.toy].start, *teachers_of(row)}
    pairs = {f"pairs-{job.seed}.jsonl"} if row.command == "prefer" else set()
    return {f"start-{name}-{job.seed}" for name in names} | pairs


def chosen_jobs() -> list[Job]:
    settings = dict.fromkeys(CHOICE_PRESETS, tuple((f"training.optimizer.lr={rate}",) for rate in CHOICE_RATES))
    settings |= OWN_CHOICES
    return [Job(preset, seed, more) for preset in settings for seed in CHOICE_SEEDS for more in settings[preset]]


def choice_table(rows: list[dict[str, Any]]) -> str:
    """Accuracy after training by learning rate, and its mean."""
    lines = []
    for rate in CHOICE_RATES:
        found = [row for row in rows if row["more"] == [f"training.optimizer.lr={rate}"] and "after" in row]
        line: dict[str, Any] = {"lr": f"{rate:g}", "runs": len(found)}
        for preset in CHOICE_PRESETS:
            own = [row["after"] for row in found if row["preset"] == preset]
            line[preset] = sum(own) / len(own) if own else None
        line["mean"] = sum(row["after"] for row in found) / len(found) if found else None
        lines.append(line)
    return table(lines, ["lr", "runs", *CHOICE_PRESETS, "mean"])


def own_choice_table(rows: list[dict[str, Any]]) -> str:
    """Accuracy before and after training with the settings that were compared for single rows."""
    found = [
        row | {"setting": ", ".join(row["more"])} for row in rows if row["preset"] in OWN_CHOICES and "after" in row
    ]
    order = [(job.preset, list(job.more)) for job in chosen_jobs()]
    found.sort(key=lambda row: order.index((row["preset"], row["more"])))
    return table(found, ["preset", "setting", "before", "after"])


def choice_file(results: Path) -> Path:
    return results.with_name(f"{results.stem}-choice.json")


def report(results: Path, docs: Path) -> str:
    """Write page and picture from the results that are current; returns the table."""
    lines, chosen = summaries(current_rows(results)), choice_file(results)
    write_picture(docs / "learning.svg", lines)
    choices = current_rows(chosen)
    write_page(docs / "learning.md", lines, choice_table(choices), own_choice_table(choices))
    return table(lines, ["preset", "toy", "seeds", "before", "after", "low", "high", "steps_to_0.9", "cpu_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(PRESETS)
    parser.add_argument("--presets", nargs="+", default=names, choices=names, metavar="PRESET")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=2, help="runs side by side, each with one thread")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no further run begins")
    parser.add_argument("--choose", action="store_true", help="compare learning rates on other seeds")
    parser.add_argument("--report", action="store_true", help="run nothing; write table, picture and page")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "learning", help="where warm starts are kept"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "learning.json", help="the rows, finished ones are kept")
    parser.add_argument("--docs", type=Path, default=REPOSITORY / "docs", help="where learning.md and learning.svg go")
    args = parser.parse_args()
    # Seed by seed, so that a budget that is too small leaves every preset with the same number of seeds.
    jobs = [Job(preset, seed) for seed in args.seeds for preset in args.presets]
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.choose:
        chosen = choice_file(args.out)
        run_jobs(chosen_jobs(), chosen, args.folder.resolve(), args.workers, args.budget)
        print(choice_table(current_rows(chosen)))
        print(own_choice_table(current_rows(chosen)))
        return
    if not args.report:
        run_jobs(jobs, args.out, args.folder.resolve(), args.workers, args.budget)
    print(report(args.out, args.docs))


if __name__ == "__main__":
    main()
