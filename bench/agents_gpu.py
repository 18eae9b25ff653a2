"""Agents with a real model on one GPU: board games, GSM8K with a Python tool, and questions that need a search.

python bench/agents_gpu.py MODEL --state FOLDER [--work frozen_lake games gsm8k search] [--budget 480]
                           [--data DIR] [--search-data DIR] [--unsafe] [--tiny]

- frozen_lake: trains three variants (`LAKES`) for `--seconds` each, measures them on train boards that no variant trains on, goes on with the
  best one, and measures it on the 512 test boards.
- games: GiGPO and, as control, PPO on Sokoban and FrozenLake for the same time.
- gsm8k: GRPO with and without the Python tool, with the same number of tokens for an answer.
- search: Search-R1's tags on questions of one to three hops, and the same questions closed-book.

Training ends after a number of seconds, not steps, by an interrupt that saves the last step. Everything that was measured is in
FOLDER/state.json and the runs are beside it: the same command goes on after `--budget` seconds or a kill. `--tiny` makes a model of its own and
takes seconds on a CPU, to see that everything works. `search` needs bm25s and the files of `burnish data prepare search`.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import on_this_gpu, save, table

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
    f"training.steps={NEVER}",
    "run.save_every=20",
    "run.keep_last=1",
    "run.samples_every=20",
]
GAME_UPDATES = [
    "rollout={prompts: 16, n: 8, max_tokens: 200, max_rows: 256}",
    "training.mini_batches=2",
    "training.token_budget=32768",
    "training.optimizer={lr: 3.0e-6}",
]
GIGPO = ["algorithm=gigpo", "algorithm.kl={loss: {coef: 0}, reference: none}"]
EXPLORES = ["algorithm.clip={low: 0.2, high: 0.28}", "algorithm.entropy={coef: 0.001}"]
"""What RAGEN-2 sets against a collapse of the entropy."""
COORDINATES = "observation: grid_coord, success_rate: 1.0"
LAKES: dict[str, list[str]] = {
    # The settings under which Sokoban learned, with coordinates in place of the bare grid (whose columns a tokenizer merges), clip-higher and an entropy bonus.
    "coordinates": [*GIGPO, *EXPLORES, *GAME_UPDATES],
    # One action a turn: every decision is a turn with a state and a return of its own, so GiGPO's anchors compare single moves.
    "one_action": [
        *GIGPO,
        *EXPLORES,
        *GAME_UPDATES,
        "rollout.max_tokens=100",
        "environment.max_turns=10",
        f"environment.options={{{COORDINATES}, max_turns: 10, max_actions: 10, max_actions_per_turn: 1}}",
    ],
    # Larger groups of fewer boards, of which those with the largest reward spread count; one smaller update held to the base by a KL term.
    "snr_and_kl": [
        "algorithm=gigpo",
        "algorithm.advantage.normalise=std",
        "algorithm.kl={loss: {estimator: k3, coef: 0.001}, reference: frozen}",
        "algorithm.filters=[{name: snr, share: 0.9}]",
        "algorithm.entropy={coef: 0.001}",
        *GAME_UPDATES,
        "rollout={prompts: 8, n: 16, max_tokens: 200, max_rows: 256}",
        "training.mini_batches=1",
        "training.optimizer={lr: 2.0e-6}",
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
    "reward={parts: math, workers: 8}",
    "data.max_prompt_tokens=512",
    "training.mini_batches=4",
    "training.token_budget=32768",
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
        given += [f"run.name={job.name}", *(TINY if self.args.tiny else [])]
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
            if not any(out.glob("*.json")):
                subprocess.run([*command, *test.options, *test.overrides], check=True)
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

    def scaled(self, seconds: float) -> float:
        return self.args.tiny_seconds if self.args.tiny else seconds

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


def frozen_lake(bench: Bench) -> None:
    """Three variants for a while, then the best of them on held-back train boards for longer."""
    found, facts, seconds = {}, {"work": "frozen_lake"}, bench.scaled(bench.args.seconds)
    for name, overrides in LAKES.items():
        tests = {"held_back": game_test(bench, "frozen_lake", overrides, is_held_back=True)}
        job = Job(f"lake_{name}", "ragen_frozen_lake", overrides, tests, seconds, facts)
        found[name] = bench.run(job)["held_back_after"]
    best = max(found, key=lambda name: found[name])
    print(f"held-back train boards solved: {found}; going on with {best}", flush=True)
    tests = {"solved": game_test(bench, "frozen_lake", LAKES[best])}
    job = Job(f"lake_{best}", "ragen_frozen_lake", LAKES[best], tests, 4 * seconds)
    bench.run(job)["published"] = PUBLISHED["frozen_lake"]
    bench.write()


def games(bench: Bench) -> None:
    """GiGPO and PPO on both games for the same time."""
    seconds = bench.scaled(2 * bench.args.seconds)
    for game in PUBLISHED:
        for system, overrides in (("gigpo", [*GIGPO, *EXPLORES, *GAME_UPDATES]), ("ppo", PPO)):
            facts = {"work": game, "system": system, "published": PUBLISHED[game]}
            tests = {"solved": game_test(bench, game, overrides)}
            bench.run(Job(f"{game}_{system}", f"ragen_{game}", overrides, tests, seconds, facts))


def gsm8k(bench: Bench) -> None:
    """With and without the tool, with the same tokens for an answer."""
    for split in ("train", "test"):
        out = bench.folder / f"gsm8k_{split}.parquet"
        if not out.exists():
            source = bench.args.data / f"gsm8k_{split}.jsonl"
            subprocess.run([*BURNISH, "data", "prepare", "gsm8k", str(source), str(out)], check=True)
    sandbox = ", options: {sandbox: unsafe}" if bench.args.unsafe else ""
    data = [bench.train_file(bench.folder / "gsm8k_train.parquet")]
    tool = [f"environment.tools=[{{name: python{sandbox}}}]", f"environment.max_tokens={TOKENS + 256}"]
    size = "rollout={{prompts: 64, n: 8, max_tokens: {}, max_rows: 512}}"
    plain = [*NO_ENVIRONMENT, "data.template.system='Solve it step by step. Put the final answer in \\boxed{}.'"]
    filters, seconds = "algorithm.filters=[void_turns]", bench.scaled(2 * bench.args.seconds)
    for name, overrides, tokens in (
        ("with_python", [*tool, filters, size.format(TOKENS // 2)], TOKENS // 2),
        ("without", [*plain, size.format(TOKENS)], TOKENS),
    ):
        own = [o for o in overrides if o.startswith(("environment", "data.template"))]
        options = ["--max-tokens", str(tokens), "--reward", "math", *bench.limit(1319)]
        test = Test(str(bench.folder / "gsm8k_test.parquet"), options, recipe_text("torl", own))
        facts, given = {"work": "gsm8k", "system": name}, [*MATH, *data, *overrides]
        bench.run(Job(f"gsm8k_{name}", "torl", given, {"solved": test}, seconds, facts))


def search(bench: Bench) -> None:
    """Base and trained with the tool, and both without it."""
    folder = bench.args.search_data.resolve()
    tools = f"environment.tools=[{{name: search, options: {{corpus: {folder / 'corpus.jsonl'}, top_k: 3}}}}]"
    overrides = [
        bench.train_file(folder / "train.jsonl"),
        tools,
        "rollout={prompts: 64, n: 8, max_tokens: 400, max_rows: 512}",
        "training.token_budget=32768",
        "training.optimizer={lr: 2.0e-6, warmup: 5}",
        "algorithm.kl={loss: {coef: 0}, reference: none}",
    ]
    options = ["--max-tokens", "400", "--reward", "search_r1", *bench.limit(500)]
    data = str(folder / "test.jsonl")
    tests = {
        "solved": Test(data, options, recipe_text("search_r1", [tools])),
        "closed_book": Test(data, options, [*NO_ENVIRONMENT, f"data.template.system={json.dumps(CLOSED_BOOK)}"]),
    }
    job = Job("search", "search_r1", overrides, tests, bench.scaled(4 * bench.args.seconds), {"work": "search"})
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


WORK = {"frozen_lake": frozen_lake, "games": games, "gsm8k": gsm8k, "search": search}


def tiny_model(folder: Path) -> Path:
    """A decoder of characters with a chat template, made from nothing."""
    if not folder.exists():
        from burnish.config.model import Model, NewModel
        from burnish.models.policy import load_policy

        folder.mkdir()
        spans = ((9, 11), (32, 127), (0xA0, 0x370), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x20A0, 0x20C0), (0x2190, 0x2300))  # fmt: skip
        alphabet = "".join(chr(code) for first, end in spans for code in range(first, end))
        new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=8192)
        load_policy(Model(new=new, device="cpu"), None, alphabet, seed=1).save(folder)
        file = folder / "tokenizer_config.json"
        template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="a Hugging Face directory")
    add("--state", type=Path, required=True, help="folder of the runs and of what was measured")
    add("--work", nargs="+", default=list(WORK), choices=list(WORK))
    add("--seconds", type=float, default=180.0, help="training of a lake; others take two or four times as long")
    add("--budget", type=float, default=480.0, help="seconds after which this call ends")
    add("--data", type=Path, default=Path("data"), help="folder of gsm8k_train.jsonl and gsm8k_test.jsonl")
    add("--search-data", type=Path, default=Path("data/search"), help="folder of `burnish data prepare search`")
    add("--unsafe", action="store_true", help="run programs without a sandbox, where there are no namespaces")
    add("--tiny", action="store_true", help="a tiny model of its own, for seconds on a CPU")
    add("--tiny-seconds", type=float, default=20.0)
    args = parser.parse_args()
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
    if is_complete:
        print(f"saved {save(on_this_gpu('agents_gpu'), rows, bench.folder / 'agents_gpu.json' if args.tiny else None)}")
    else:
        print("the budget of this call is spent: the same command goes on")


if __name__ == "__main__":
    main()
