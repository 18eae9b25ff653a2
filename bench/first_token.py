"""Time from the start of a process to its first token, with empty caches and again after that.

    python bench/first_token.py                   # on a GPU: the 1.5B shape, random weights, no tokenizer
    python bench/first_token.py --model DIR       # a model directory, with its tokenizer, as `burnish sample` starts it

Each measurement is a new process. The first finds neither compiled kernels nor Python's bytecode; the second finds what the
first has cached. Files that the system has read before are in its memory for both. Prints where the seconds go: a row is the time
after the row before it.

With `--model` the rows in parentheses lie inside `load_s`. "in a row" loads weights, kernels and tokenizer one after the other;
otherwise threads load weights and kernels beside the tokenizer, as burnish does. `cpu_s` is the processor time of the process until
its first token, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any


def since_start() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


class InARow:
    """Stands for the threads of `load_policy`: each piece of work is done when it is submitted."""

    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> InARow:
        return self

    def __exit__(self, *args: object) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done


class Marks:
    """The parts of a start, each from the end of the one before."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.last = 0.0

    def end(self, name: str) -> None:
        now = since_start()
        self.row[name], self.last = now - self.last, now

    def timed(self, owner: Any, function: str, name: str) -> None:
        """Measure the calls of a function as a row in parentheses."""
        inner = getattr(owner, function)

        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self.row[name] = time.perf_counter() - started

        setattr(owner, function, call)


def random_child() -> dict[str, Any]:
    """This process up to its first token, with random weights on a GPU."""
    marks = Marks()
    marks.end("python_s")
    import torch

    marks.end("import_torch_s")
    import triton  # noqa: F401
    from rollout import WORKS, random_model, requests_of

    from burnish.inference.native.paged_engine import PagedEngine

    marks.end("import_rest_s")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    marks.end("context_s")
    model = random_model("1.5B")
    torch.cuda.synchronize()
    marks.end("weights_s")
    heard: list[float] = []
    engine = PagedEngine(model, max_rows=256)
    engine.listener = lambda name, token: heard.append(since_start()) if not heard else None
    engine.submit(requests_of(WORKS["R1"], model.arch.vocab_size, "first"))
    marks.end("cache_and_compile_s")
    compiled = marks.last
    tokens = sum(len(completion.tokens) for completion in engine.stream())
    row = marks.row | {"prefill_and_capture_s": heard[0] - compiled, "capture_s": engine.stats.capture_s}
    row |= {"graphs": engine.stats.graphs, "modules": len(sys.modules), "dynamo": "torch._dynamo" in sys.modules}
    return {"first_token_s": heard[0], "all_s": since_start(), "tokens": tokens} | row


def model_child(directory: Path, in_a_row: bool) -> dict[str, Any]:
    """This process up to the first token of a model directory, by the functions of `burnish sample`."""
    marks = Marks()
    marks.end("python_s")
    import torch

    marks.end("import_torch_s")
    from burnish.cli.sample import check_policy
    from burnish.config.model import Model
    from burnish.config.rollout import Rollout
    from burnish.core.engine import Request, SamplingOptions
    from burnish.distributed.engine_builder import build_engine
    from burnish.models import policy as policies

    marks.end("import_rest_s")
    has_gpu = torch.cuda.is_available()
    if in_a_row:
        # No option loads the parts one after another, so the bench replaces the threads.
        policies.ThreadPoolExecutor = InARow  # type: ignore[misc, assignment]
    for name, shown in (("load_decoder", "(weights_s)"), ("_load_tokenizer", "(tokenizer_s)")):
        marks.timed(policies, name, shown)
    marks.timed(policies, "prepare_c_kernels", "(c_kernels_s)")
    policy = policies.load_policy(Model(dtype="bfloat16" if has_gpu else "float32"), directory, None, 0)
    marks.end("load_s")
    tokens = tuple(policy.tokenizer.encode("What is 2 + 2?", special=True))
    check_policy(policy, tokens)
    marks.end("check_s")
    heard: list[float] = []
    engine = build_engine(policy, Rollout(max_rows=1), lambda name, token: heard.append(since_start()))
    engine.submit([Request("first", tokens, SamplingOptions(max_tokens=8), 0)])
    marks.end("engine_s")
    for _ in engine.stream():
        break
    marks.row["first_s"] = heard[0] - marks.last
    return {"first_token_s": heard[0], "cpu_s": time.process_time()} | marks.row | {"modules": len(sys.modules)}


def starts(more: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """A first start and a second one, as rows."""
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        places = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX")
        known = {**os.environ, **{name: f"{kept}/{name.lower()}" for name in places}}
        known.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in ("first token, first start", "first token, second start"):
            command = [sys.executable, __file__, "--child", *more]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known)
            work = name + (", in a row" if "--in-a-row" in more else "")
            rows.append({"work": work, "system": "burnish", **json.loads(done.stdout.splitlines()[-1])})
    return rows


def breakdown(rows: list[dict[str, Any]]) -> str:
    """A line for each part."""
    names = [name for name in rows[0] if name not in ("work", "system")]
    values = ["  ".join(f"{float(row[name]):10.2f}" for row in rows) for name in names]
    return "\n".join(f"{name:<24}{value}" for name, value in zip(names, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help="be the process that is measured; prints a line of JSON")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--in-a-row", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(random_child() if args.model is None else model_child(args.model, args.in_a_row)))
        return
    if args.model is None:
        print(breakdown(starts()))
        return
    rows = [row for more in ((), ("--in-a-row",)) for row in starts(("--model", str(args.model), *more))]
    from common import on_this_gpu, save  # imports torch, which the measured processes do by themselves

    print(" " * 24 + "  ".join(f"{row['work'].removeprefix('first token, '):>10}" for row in rows))
    print(breakdown(rows))
    print(f"saved {save(on_this_gpu('first_token'), rows)}")


if __name__ == "__main__":
    main()
