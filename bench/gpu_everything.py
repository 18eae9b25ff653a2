"""Runs every command of burnish, shrunk but for real, on this machine's GPU, and prints what worked.

    python bench/gpu_everything.py [--model DIR] [--only train resume] [--work DIR] [--seconds 360]
    python bench/gpu_everything.py --tiny           # on a CPU, with the smallest sizes

The model is a small decoder made from nothing, which SFT teaches to sort digits first; `--model` is a real one. Each row runs a command in
a process of its own and checks its result: losses fall, merged weights are the mean, a killed run ends as an undisturbed one. A row says
`not here` with the reason where a library is missing. Rows are saved to bench/results/gpu_everything.json as they end. The same command
goes on after an interruption: rows that worked are not run again unless `--fresh` is given. It does not measure speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import on_this_gpu, save, table
from everything_job import Failed, Job, NotHere
from everything_rows import NEEDS, ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory (default: a small decoder from nothing)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, for a CPU")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="these rows, and those that they need")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_everything"), help="folder of runs and logs")
    parser.add_argument("--row-seconds", type=float, default=120.0, help="time limit of one command of a row")
    parser.add_argument("--seconds", type=float, default=900.0, help="no row is started after this time")
    parser.add_argument("--fresh", action="store_true", help="run rows again that worked before")
    args = parser.parse_args()
    is_gpu = torch.cuda.is_available() and not args.tiny
    args.work.mkdir(parents=True, exist_ok=True)
    job = Job(
        args.work.resolve(),
        None if args.model is None else args.model.resolve(),
        "cuda" if is_gpu else "cpu",
        "bfloat16" if is_gpu else "float32",
        args.tiny,
        args.row_seconds,
    )
    rows = run_rows(job, args)
    print(table(rows, ["row", "result", "seconds", "step_s", "shown"]))
    sys.exit(any(row["result"] == "failed" for row in rows))


def run_rows(job: Job, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the rows that are left, and save after each. A row whose input is missing fails and names it."""
    state = job.work / "rows.json"
    asked = {"model": str(job.model), "device": job.device, "tiny": job.is_tiny}
    saved = json.loads(state.read_text()) if state.is_file() and not args.fresh else {"asked": asked, "rows": {}}
    if saved["asked"] != asked:
        raise SystemExit(f"{job.work} has rows of other settings ({saved['asked']}): give --fresh, or another --work")
    done: dict[str, dict[str, Any]] = saved["rows"]
    started = time.monotonic()
    for name in wanted_rows(args.only):
        if name in done and done[name]["result"] == "ok" and (args.only is None or name not in args.only):
            continue
        if time.monotonic() - started > args.seconds:
            done[name] = {"row": name, "result": "no time", "shown": f"--seconds {args.seconds:.0f} were over"}
        else:
            done[name] = run_row(name, job)
        print(f"{name}: {done[name]['result']} {done[name]['shown']}", flush=True)
        state.write_text(json.dumps({"asked": asked, "rows": done}, indent=1))
        rows = [done[row] for row in ROWS if row in done]
        if args.only is None or len(rows) == len(ROWS):
            save(f"{on_this_gpu('gpu_everything')}{'' if job.device == 'cuda' else '-cpu'}", rows)
    return [done[row] for row in ROWS if row in done]


def wanted_rows(only: list[str] | None) -> list[str]:
    """The rows to run in their order: all, or some with the rows that they need."""
    if only is None:
        return list(ROWS)
    names = {*only, *(need for name in only for need in NEEDS.get(name, ("sft",)))}
    return [name for name in ROWS if name in names]


def run_row(name: str, job: Job) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        row = {"result": "ok", **ROWS[name](job)}
    except NotHere as reason:
        row = {"result": "not here", "shown": str(reason)}
    except Failed as reason:
        row = {"result": "failed", "shown": str(reason)}
    except Exception as error:  # noqa: BLE001  printed and counted: a mistake in one row must not hide the others
        traceback.print_exc()
        row = {"result": "failed", "shown": f"{type(error).__name__}: {error}"[:300]}
    return {"row": name, **row, "seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    main()
