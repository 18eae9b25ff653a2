"""Agents with a real model on one GPU: board games, GSM8K with tools and with an agent of its own, and questions that need a search.

python bench/agents_gpu.py MODEL --state FOLDER [--work NAME ...] [--seconds 480] [--budget 480]
                           [--data DIR] [--search-data DIR] [--unsafe] [--set key=value ...] [--tiny]

- lakes: trains variants of FrozenLake (`LAKES`) for a part of `--seconds` and measures them on train boards that no variant trains on.
- frozen_lake, sokoban: GiGPO, for FrozenLake with the variant that `lakes` found best (or `--lake`), measured on the 512 test boards.
- frozen_lake_ppo, sokoban_ppo: PPO for the same time, as control.
- gsm8k_python, gsm8k_plain: GRPO with and without the Python tool, with the same number of tokens for an answer.
- gsm8k_agent: a program with the openai client and a calculator of its own, trained through the recording endpoint.
- search: Search-R1's tags on questions of one to three hops, and the same questions closed-book.

Training ends after a number of seconds, not steps, by an interrupt that saves the last step. Everything that was measured is in
FOLDER/state.json and the runs are beside it: the same command goes on after `--budget` seconds or a kill. A result replaces that of the same
run in bench/results. `--tiny` makes a model of its own and takes seconds on a CPU, to see that everything works. `search` needs bm25s and the
files of `burnish data prepare search`, `gsm8k_agent` the extra `[agents]`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, on_this_gpu, save, table, tiny_chat_model

from burnish.run.durable_files import atomic_write
from burnish.run.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"
BURNISH = [sys.executable, "-m", "burnish.cli.main"]
PUBLISHED = {"sokoban": 0.170, "frozen_lake": 0.365}
"""RAGEN-2 (2604.06268), Qwen2.5-1.5B, PPO, 400 steps; measured there."""
KILL_AFTER_S = 120.0
"""How long a training may take to save and end after its interrupt."""
MIN_TRAIN_S = 60.0
"""A training is not started for less."""
NEVER = 1_000_000
"""A number of steps that no run reaches. The learning rate is constant, so the length of a run has no effect on it."""
COMMON = [
    "data.validation=[]",
    "validation.every=0",
    "validation.limit=null",
    "validation.by=null",
    "run.keep_best=true",
    f"training.steps={NEVER}",
    "run.save_every=1000",  # 20 GiB each; the interrupt saves one
    "run.keep_last=1",
    "run.samples_every=20",
]
GAME_UPDATES = [
    "rollout={prompts: 32, n: 8, max_tokens: 128, max_rows: 256}",
    "training.mini_batches=2",
    "training.token_budget=16384",
    "training.optimizer={lr: 3.0e-6}",
]
"""Many boards a step: no direction is better than another on average, so few boards teach a favourite direction, and the entropy collapses."""
GIGPO = ["algorithm=gigpo", "algorithm.kl={loss: {coef: 0}, reference: none}"]
EXPLORES = ["algorithm.clip={low: 0.2, high: 0.28}", "algorithm.entropy={coef: 0.001}"]
"""What RAGEN-2 sets against a collapse of the entropy."""
COORDINATES = "observation: grid_coord, success_rate: 1.0"
LAKES: dict[str, list[str]] = {
    # Five turns of at most two actions, as in the recipe.
    "two_actions": [*GIGPO, *EXPLORES, *GAME_UPDATES],
    # One action a turn: every decision is a turn with a state and a return of its own, so GiGPO's anchors compare single moves.
    "one_action": [
        *GIGPO,
        *EXPLORES,
        *GAME_UPDATES,
        "environment.max_turns=10",
        f"environment.options={{{COORDINATES}, max_turns: 10, max_actions: 10, max_actions_per_turn: 1}}",
    ],
    # The groups with the largest reward spread count, and a KL term holds the policy to the base.
    "snr_and_kl": [
        "algorithm=gigpo",
        "algorithm.advantage.normalise=std",
        "algorithm.kl={loss: {estimator: k3, coef: 0.001}, reference: frozen}",
        "algorithm.filters=[{name: snr, share: 0.9}]",
        "algorithm.entropy={coef: 0.001}",
        *GAME_UPDATES,
    ],
}
"""Overrides on recipes/ragen_frozen_lake.yaml."""
PPO = [*GAME_UPDATES, "training.mini_batches=4", "training.optimizer={lr: 1.0e-6}"]
"""Overrides on RAGEN's recipes, whose algorithm is PPO: the same episodes as GiGPO's, with the recipes' own updates."""
HELD_BACK_SEED = 7
"""Train boards of this seed are drawn from other seeds than those of training (seed 0)."""
TOKENS = 1024
"""Tokens of an answer in GSM8K, with the output of programs."""
MATH = [
    "reward={parts: number, workers: 8}",
    "data.max_prompt_tokens=512",
    "training.mini_batches=4",
    "training.token_budget=16384",
    "training.optimizer={lr: 2.0e-6}",
]
CLOSED_BOOK = (
    "Answer the question of the user. First think inside <think> and </think>. Then write the answer inside <answer> and </answer>, as short as "
    "possible and without explanation."
)
TINY = ["model.dtype=float32", "model.device=cpu", "rollout.prompts=4", "rollout.n=4", "rollout.max_tokens=24"]
TINY += ["reward.workers=1", "data.max_prompt_tokens=4000"]
"""Overrides of `--tiny`."""
NO_ENVIRONMENT = ["environment.name=single_turn", "environment.max_turns=1", "environment.max_tokens=null"]
NO_ENVIRONMENT += ["environment.tools=[]", "environment.options={}"]


@dataclass(frozen=True)
class Job:
    """A training, and what is measured before and after it."""

    name: str
    recipe: str
    overrides: list[str]
    tests: dict[str, Test]
    """By the name of the measurement."""
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Test:
    """A call of `burnish eval`."""

    data: str
    options: list[str]
    overrides: list[str] = field(default_factory=list)


class OutOfBudget(Exception):
    """The time of this call is spent; the next one goes on."""


class Bench:
    """Runs jobs and keeps what they gave in a file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.state.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model = str(tiny_model(self.folder / "tiny") if args.tiny else args.model.resolve())
        self.file = self.folder / "state.json"
        self.state: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.until = time.monotonic() + args.budget

    def run(self, job: Job) -> dict[str, Any]:
        """Measure the base, train for the job's seconds, measure again. Returns the row of the job."""
        row = self.state.setdefault(job.name, {"run": job.name, **job.facts, "trained_s": 0.0})
        for name, test in job.tests.items():
            out = self.folder / f"eval-base-{zlib.crc32(repr(test).encode()):08x}"  # jobs may share it
            self.measure(row, f"{name}_before", test, self.model, out)
        while row["trained_s"] < job.seconds:
            self.train(row, job, job.seconds - row["trained_s"])
        for name, test in job.tests.items():
            done = f"{name}_after_{job.seconds:.0f}s"
            out = self.folder / f"eval-{job.name}-{name}-{job.seconds:.0f}"
            row[f"{name}_after"] = self.measure(row, done, test, str(self.folder / job.name), out)
        self.write()
        return row

    def train(self, row: dict[str, Any], job: Job, seconds: float) -> None:
        """Train for some seconds, or what the budget leaves of them, from where the run was stopped."""
        possible = self.left() - KILL_AFTER_S / 2
        if possible < min(MIN_TRAIN_S, seconds):
            raise OutOfBudget
        seconds = min(seconds, possible)
        given = [*COMMON, *job.overrides, f"model.path={self.model}", f"run.directory={self.folder}"]
        given += [f"run.name={job.name}", *self.args.set, *(TINY if self.args.tiny else [])]
        if self.args.tiny and not set(NO_ENVIRONMENT) <= set(given):
            given.append("environment.max_tokens=8000")  # its tokens are characters
        command = [*BURNISH, "train", str(RECIPES / f"{job.recipe}.yaml"), *given]
        print(f"--- {job.name}: training for {seconds:.0f} s", flush=True)
        started = time.perf_counter()
        process = subprocess.Popen(command)
        try:
            status = process.wait(seconds)
            raise RuntimeError(f"{job.name}: training ended by itself with status {status}: {' '.join(command)}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:  # its last checkpoint stays
            process.kill()
            process.wait()
        metrics = read_metrics(self.folder / job.name / "metrics.jsonl")
        if not metrics:
            raise RuntimeError(f"{job.name}: no step ended in {seconds:.0f} s; raise --seconds")
        row["trained_s"] += time.perf_counter() - started
        row["steps"] = metrics[-1]["step"]
        for short, key in (("reward", "reward/mean"), ("entropy", "actor/entropy"), ("tokens", "rollout/tokens")):
            row[short] = metrics[-1].get(key)
        self.write()

    def measure(self, row: dict[str, Any], name: str, test: Test, model: str, out: Path) -> float:
        """Return the accuracy of a test, measured once."""
        if name not in row:
            if self.left() < 0:
                raise OutOfBudget
            command = [*BURNISH, "eval", model, test.data, "--out", str(out)]
            if not (any(out.glob("*.json")) and any(out.glob("*.jsonl"))):
                subprocess.run([*command, "--max-rows", "256", *test.options, *test.overrides], check=True)
            found = json.loads(next(out.glob("*.json")).read_text())
            row[name] = found["accuracy"]
            row[f"{name}_completions"] = str(next(out.glob("*.jsonl")).relative_to(self.folder))
            self.write()
        return float(row[name])

    def right(self, row: dict[str, Any], name: str) -> set[str]:
        """Return the ids of the rows that a test answered correctly."""
        lines = (self.folder / row[f"{name}_completions"]).read_text().splitlines()
        return {found["id"] for found in map(json.loads, lines) if found["accuracy"] == 1}

    def left(self) -> float:
        return self.until - time.monotonic()

    def write(self) -> None:
        atomic_write(self.file, json.dumps(self.state, indent=1) + "\n")

    def train_file(self, path: Path) -> str:
        return f"data.train={{path: {path}, limit: {64 if self.args.tiny else NEVER}}}"

    def limit(self, number: int) -> list[str]:
        return ["--limit", str(4 if self.args.tiny else number)]


# --- The work ---------------------------------------------------------------------------------------------------------------


def game_test(bench: Bench, game: str, overrides: list[str], is_held_back: bool = False) -> Test:
    """Boards at temperature 0.5, as RAGEN-2 measures, in the environment of the job: test boards, or train boards of another seed."""
    usual = "observation: grid_coord" if game == "sokoban" else COORDINATES
    shown = {"environment.max_turns": "5", "environment.options": f"{{{usual}}}", "environment.max_tokens": "3600"}
    given = dict(text.split("=", 1) for text in overrides)
    settings = [f"{key}={given.get(key, value)}" for key, value in shown.items()]
    settings += ["data.source.split=train"] if is_held_back else []
    options = ["--temperature", "0.5", "--max-tokens", given.get("rollout.max_tokens", "200"), "--environment", game]
    options += ["--seed", str(HELD_BACK_SEED if is_held_back else 0), *bench.limit(512)]
    return Test(f"task:{game}", options, settings)


def lakes(bench: Bench) -> None:
    """Train the variants of FrozenLake for a while, and measure each on held-back train boards."""
    for name, overrides in LAKES.items():
        tests = {"held_back": game_test(bench, "frozen_lake", overrides, is_held_back=True)}
        bench.run(Job(f"lake_{name}", "ragen_frozen_lake", overrides, tests, bench.args.seconds / 3, {"work": "lakes"}))


def frozen_lake(bench: Bench) -> None:
    """The best variant of FrozenLake, or the one that was asked for."""
    found = {name: bench.state.get(f"lake_{name}", {}).get("held_back_after", -1.0) for name in LAKES}
    best = bench.args.lake or max(found, key=lambda name: found[name])
    facts = {"work": "frozen_lake", "system": f"GiGPO, {best}", "published": PUBLISHED["frozen_lake"]}
    tests = {"solved": game_test(bench, "frozen_lake", LAKES[best])}
    bench.run(Job("frozen_lake", "ragen_frozen_lake", LAKES[best], tests, bench.args.seconds, facts))


def game(name: str, system: str, overrides: list[str]) -> Callable[[Bench], None]:
    """A game with an algorithm, on the 512 test boards."""

    def run(bench: Bench) -> None:
        facts = {"work": name, "system": system, "published": PUBLISHED[name]}
        tests = {"solved": game_test(bench, name, overrides)}
        job_name = f"{name}_{system.lower()}"
        bench.run(Job(job_name, f"ragen_{name}", overrides, tests, bench.args.seconds, facts))

    return run


def gsm8k_files(bench: Bench) -> dict[str, Path]:
    """The questions of GSM8K as parquet, by split."""
    files = {split: bench.folder / f"gsm8k_{split}.parquet" for split in ("train", "test")}
    for split, out in files.items():
        if not out.exists():
            source = bench.args.data / f"gsm8k_{split}.jsonl"
            subprocess.run([*BURNISH, "data", "prepare", "gsm8k", str(source), str(out)], check=True)
    return files


def gsm8k_python(bench: Bench) -> None:
    """GSM8K with the Python tool: at most half of the tokens in a turn, and all of them with the programs' output."""
    sandbox = ", options: {sandbox: unsafe}" if bench.args.unsafe else ""
    tool = [f"environment.tools=[{{name: python{sandbox}}}]", f"environment.max_tokens={TOKENS + 256}"]
    gsm8k(bench, "with the Python tool", [*tool, "algorithm.filters=[void_turns]"], TOKENS // 2)


def gsm8k_plain(bench: Bench) -> None:
    """GSM8K without the tool, with as many tokens for an answer."""
    plain = [*NO_ENVIRONMENT, "data.template.system='Solve it step by step. Put the final answer in \\boxed{}.'"]
    gsm8k(bench, "plain", plain, TOKENS)


def gsm8k(bench: Bench, system: str, overrides: list[str], tokens: int) -> None:
    files = gsm8k_files(bench)
    own = [o for o in overrides if o.startswith(("environment", "data.template"))]
    options = ["--max-tokens", str(tokens), "--reward", "number", *bench.limit(1319)]
    test = Test(str(files["test"]), options, recipe_text("torl", own))
    size = f"rollout={{prompts: 64, n: 8, max_tokens: {tokens}, max_rows: 512}}"
    given = [*MATH, bench.train_file(files["train"]), *overrides, size]
    name = "gsm8k_plain" if system == "plain" else "gsm8k_python"
    bench.run(Job(name, "torl", given, {"solved": test}, bench.args.seconds, {"work": "gsm8k", "system": system}))


def gsm8k_agent(bench: Bench) -> None:
    """The agent of recipes/gsm8k_agent.yaml, greedy, before and after."""
    files = gsm8k_files(bench)
    agent = json.dumps({"agent": f"{RECIPES / 'gsm8k_agent.py'}:run"})
    options = ["--max-tokens", "384", "--reward", "number", "--environment", agent, *bench.limit(1319)]
    calls = ["environment.call_format=hermes"] if bench.args.tiny else []  # a real model's template says it
    test = Test(str(files["test"]), options, ["environment.max_turns=6", "environment.max_tokens=2048", *calls])
    given = [bench.train_file(files["train"]), "training.token_budget=16384", "training.optimizer={lr: 3.0e-6}", *calls]
    facts = {"work": "gsm8k", "system": "agent with the openai client"}
    bench.run(Job("gsm8k_agent", "gsm8k_agent", given, {"solved": test}, bench.args.seconds, facts))


def search(bench: Bench) -> None:
    """Base and trained with the tool, and both without it."""
    folder = bench.args.search_data.resolve()
    tools = f"environment.tools=[{{name: search, options: {{corpus: {folder / 'corpus.jsonl'}, top_k: 3}}}}]"
    overrides = [
        bench.train_file(folder / "train.jsonl"),
        tools,
        "rollout={prompts: 32, n: 8, max_tokens: 300, max_rows: 256}",
        "training.token_budget=16384",
        "training.optimizer={lr: 3.0e-6, warmup: 5}",
        "algorithm.kl={loss: {coef: 0}, reference: none}",
    ]
    options = ["--max-tokens", "300", "--reward", "search_r1", *bench.limit(500)]
    data = str(folder / "test.jsonl")
    tests = {
        "solved": Test(data, options, recipe_text("search_r1", [tools])),
        "closed_book": Test(data, options, [*NO_ENVIRONMENT, f"data.template.system={json.dumps(CLOSED_BOOK)}"]),
    }
    job = Job("search", "search_r1", overrides, tests, bench.args.seconds, {"work": "search"})
    row = bench.run(job)
    with_tool = bench.right(row, f"solved_after_{job.seconds:.0f}s")
    alone = bench.right(row, f"closed_book_after_{job.seconds:.0f}s")
    row["needs_tool"] = len(with_tool - alone) / len(with_tool) if with_tool else None
    bench.write()


def recipe_text(recipe: str, overrides: list[str]) -> list[str]:
    """The environment and the system message of a recipe as overrides, for the evaluation of a model that has no run yet."""
    import yaml

    tree = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    given = [f"environment={json.dumps(tree['environment'])}", f"data.template={json.dumps(tree['data']['template'])}"]
    return [*given, *overrides]


WORK: dict[str, Callable[[Bench], None]] = {
    "lakes": lakes,
    "frozen_lake": frozen_lake,
    "frozen_lake_ppo": game("frozen_lake", "PPO", PPO),
    "sokoban": game("sokoban", "GiGPO", [*GIGPO, *EXPLORES, *GAME_UPDATES]),
    "sokoban_ppo": game("sokoban", "PPO", PPO),
    "gsm8k_python": gsm8k_python,
    "gsm8k_plain": gsm8k_plain,
    "gsm8k_agent": gsm8k_agent,
    "search": search,
}


def tiny_model(folder: Path) -> Path:
    """A decoder of characters with a chat template, made from nothing."""
    spans = ((9, 11), (32, 127), (0xA0, 0x370), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x20A0, 0x20C0), (0x2190, 0x2300))  # fmt: skip
    alphabet = "".join(chr(code) for first, end in spans for code in range(first, end))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    return tiny_chat_model(folder, alphabet, template, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="a Hugging Face directory")
    add("--state", type=Path, required=True, help="folder of the runs and of what was measured")
    add("--work", nargs="+", default=list(WORK), choices=list(WORK))
    add("--seconds", type=float, help="training of each work (default 480; 20 with --tiny)")
    add("--budget", type=float, default=480.0, help="seconds after which this call ends")
    add("--lake", choices=list(LAKES), help="variant of frozen_lake (default: the best one of lakes)")
    add("--set", nargs="+", default=[], metavar="key=value", help="further settings of every training")
    add("--data", type=Path, default=Path("data"), help="folder of gsm8k_train.jsonl and gsm8k_test.jsonl")
    add("--search-data", type=Path, default=Path("data/search"), help="folder of `burnish data prepare search`")
    add("--unsafe", action="store_true", help="run programs without a sandbox, where there are no namespaces")
    add("--tiny", action="store_true", help="a tiny model of its own, for seconds on a CPU")
    args = parser.parse_args()
    args.seconds = args.seconds or (20.0 if args.tiny else 480.0)
    if args.model is None and not args.tiny:
        parser.error("give a model directory, or --tiny")
    bench = Bench(args)
    is_complete = True
    try:
        for name in args.work:
            WORK[name](bench)
    except OutOfBudget:
        is_complete = False
    rows = [{k: v for k, v in row.items() if not k.endswith("_completions")} for row in bench.state.values()]
    columns = [
        "run",
        "system",
        "steps",
        "trained_s",
        "entropy",
        "held_back_before",
        "held_back_after",
        "solved_before",
        "solved_after",
    ]
    print(table(rows, [*columns, "closed_book_before", "closed_book_after", "needs_tool", "published"]))
    if args.tiny:
        print(f"saved {save('agents_gpu', rows, bench.folder / 'agents_gpu.json')}")
    else:
        print(f"saved {save_runs(on_this_gpu('agents_gpu'), rows)}")
    if not is_complete:
        print("the budget of this call is spent: the same command goes on")


def save_runs(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write the rows, and keep those of other runs."""
    file = RESULTS / f"{name}.json"
    known = json.loads(file.read_text())["rows"] if file.exists() else []
    replaced = {row["run"] for row in rows}
    return save(name, [*(row for row in known if row["run"] not in replaced), *rows])


if __name__ == "__main__":
    main()
