"""Time from the start of a process to its first token, with empty caches and again after that.

python bench/first_token.py

The 1.5B shape with random weights in bfloat16, 256 requests of 128 tokens. Each measurement is a new process. The first
finds neither compiled kernels nor Python's bytecode; the second finds what the first has cached. Files that the system
has read before are in its memory for both. Prints where the seconds go.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def since_start() -> float:
    """Seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def child() -> dict[str, Any]:
    """This process up to its first token, and what each part of it took."""
    marks = [("python_s", since_start())]
    import torch

    marks.append(("import_torch_s", since_start()))
    import triton  # noqa: F401
    from rollout import WORKS, random_model, requests_of

    from burnish.inference.native.paged_engine import PagedEngine

    marks.append(("import_rest_s", since_start()))
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    marks.append(("context_s", since_start()))
    model = random_model("1.5B")
    torch.cuda.synchronize()
    marks.append(("weights_s", since_start()))
    heard: list[float] = []
    engine = PagedEngine(model, max_rows=256)
    engine.listener = lambda name, token: heard.append(since_start()) if not heard else None
    engine.submit(requests_of(WORKS["R1"], model.arch.vocab_size, "first"))
    marks.append(("cache_and_compile_s", since_start()))
    tokens = sum(len(completion.tokens) for completion in engine.stream())
    ends = [0.0, *(end for _, end in marks)]
    row: dict[str, Any] = {name: end - ends[k] for k, (name, end) in enumerate(marks)}
    row |= {"prefill_and_capture_s": heard[0] - ends[-1], "capture_s": engine.stats.capture_s}
    row |= {"graphs": engine.stats.graphs, "modules": len(sys.modules), "dynamo": "torch._dynamo" in sys.modules}
    return {"first_token_s": heard[0], "all_s": since_start(), "tokens": tokens} | row


def starts() -> list[dict[str, Any]]:
    """A first start and a second one, as rows."""
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        places = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX")
        known = {**os.environ, **{name: f"{kept}/{name.lower()}" for name in places}}
        known.pop("PYTHONDONTWRITEBYTECODE", None)
        for name in ("first token, first start", "first token, second start"):
            command = [sys.executable, __file__, "--child"]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=known)
            rows.append({"work": name, "system": "burnish", **json.loads(done.stdout.splitlines()[-1])})
    return rows


def breakdown(rows: list[dict[str, Any]]) -> str:
    """A line for each part."""
    names = [name for name in rows[0] if name not in ("work", "system")]
    values = ["  ".join(f"{float(row[name]):10.2f}" for row in rows) for name in names]
    return "\n".join(f"{name:<24}{value}" for name, value in zip(names, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help="be the process that is measured; prints a line of JSON")
    if parser.parse_args().child:
        print(json.dumps(child()))
        return
    print(breakdown(starts()))


if __name__ == "__main__":
    main()
