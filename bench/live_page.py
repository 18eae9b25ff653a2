"""The live page and report.html of a long run: how soon they are there, how smoothly the list of samples scrolls, how long a search takes.

    python bench/live_page.py [--steps 5000] [--samples 100000] [--keep FOLDER]

It makes a run with that many steps (100 metrics each) and samples (64 a table, 120 tokens each), serves it with `burnish view` and
drives the page in headless Chromium without a GPU. Times of the page are those of the browser's own clock since navigation began.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import save, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from burnish.report.html_report import write_report
from burnish.run.samples import write_samples
from tests.report.browser import Browser, find

TABLE, GROUP, TOKENS, METRICS = 64, 8, 120, 100
FRAMES = 300
SCROLL = """
new Promise((resolve) => {
  const box = byId("list"), times = [];
  let before = null;
  const next = (now) => {
    if (before !== null) times.push(now - before);
    before = now;
    box.scrollTop += STEP;
    if (times.length === FRAMES) resolve(times); else requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
})
"""
"""Scrolls the list by STEP pixels a frame, and returns the milliseconds between frames."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="make the run there, or use the one that is there")
    args = parser.parse_args()
    program = find()
    if program is None:
        sys.exit("no Chromium or Chrome on this machine")
    with tempfile.TemporaryDirectory() as temporary:
        run = (args.keep or Path(temporary)) / "long-run"
        if not run.exists():
            make_run(run, args.steps, args.samples)
        rows = [{"what": "steps", "value": args.steps}, {"what": "samples", "value": args.samples}]
        rows.append(row("load of the machine before, in processes", os.getloadavg()[0], ""))
        with Browser(program) as browser:
            rows += live_rows(browser, run) + report_rows(browser, run)
    print(table(rows, ["what", "value", "unit"]))
    print(f"saved {save('live_page', rows)}")


def make_run(run: Path, steps: int, samples: int) -> None:
    """Write the files of a run."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"seed: 0\ntraining: {{steps: {steps}}}\n")
    noise = np.random.default_rng(0)
    names = [
        "reward/mean",
        "rollout/length_mean",
        "actor/entropy",
        "actor/grad_norm",
        "loss",
        "mismatch/mean",
        "time/step_s",
    ]
    names += [f"other/metric_{k:03d}" for k in range(METRICS - len(names))]
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            values = noise.random(METRICS).tolist()
            file.write(json.dumps({"step": step} | dict(zip(names, values, strict=True))) + "\n")
    (run / "log.txt").write_text(f"2026-01-01 10:00:00  step {steps}/{steps}  reward 1\n")
    words = [f"word{k} " for k in range(500)]
    for number in range(-(-samples // TABLE)):
        first = number * TABLE
        rows = [sample_row(first + k, words, noise) for k in range(min(TABLE, samples - first))]
        write_samples(run / "samples", 1 + number * steps * TABLE // samples, "train", rows)


def sample_row(index: int, words: list[str], noise: np.random.Generator) -> dict[str, Any]:
    pieces = [words[k] for k in noise.integers(0, len(words), TOKENS)]
    if index % 5000 == 17:
        pieces[60] = "needle "
    return {
        "group": f"prompt {index // GROUP}",
        "sample": index % GROUP,
        "data_source": "words",
        "prompt": f"Say some words, number {index // GROUP}. " * 8,
        "completion": "".join(pieces),
        "answer": "word",
        "reward": float(noise.integers(0, 5)) / 4,
        "accuracy": float(noise.integers(0, 2)),
        "parts": {"task": 1.0},
        "advantage": float(noise.normal()),
        "truncated": False,
        "finish": "stop",
        "length": TOKENS,
        "pieces": pieces,
        "logp": (-noise.exponential(1.0, TOKENS)).tolist(),
        "gap": noise.normal(0, 0.01, TOKENS).tolist(),
        "entropy": noise.exponential(1.0, TOKENS).tolist(),
        "mask": [1.0] * TOKENS,
    }


def live_rows(browser: Browser, run: Path) -> list[dict[str, Any]]:
    """The times of the live page. The first opening finds a server that has read nothing yet."""
    command = [sys.executable, "-m", "burnish.cli.main", "view", str(run), "--port", "0"]
    started = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        found = re.search(r"http://\S+/", server.stderr.readline())
        assert found is not None
        rows = [row("live: server ready", time.perf_counter() - started, "s")]
        try:
            for what in ("live, first opening", "live, opened again"):
                rows += opening_rows(browser, found[0], what)
            rows += use_rows(browser, "live")
        finally:
            server.terminate()
    return rows


def report_rows(browser: Browser, run: Path) -> list[dict[str, Any]]:
    """The times of the same page as a file."""
    started = time.perf_counter()
    path = write_report(run)
    rows = [
        row("report: written", time.perf_counter() - started, "s"),
        row("report: size", path.stat().st_size / 1e6, "MB"),
    ]
    return rows + opening_rows(browser, path, "report") + use_rows(browser, "report")


def opening_rows(browser: Browser, place: Path | str, what: str) -> list[dict[str, Any]]:
    browser.open(place)
    now = "performance.now() / 1000"
    browser.wait("document.querySelector('#main-charts polyline')")
    curves = browser.run(now)
    browser.wait("document.querySelector('.row .line-text')?.textContent")
    samples = browser.run(now)
    browser.wait("page.store.isComplete && Number(document.body.dataset.loaded) >= 1")
    complete = browser.run(now)
    paint = browser.run("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
    return [
        row(f"{what}: first contentful paint", paint, "s"),
        row(f"{what}: curves drawn", curves, "s"),
        row(f"{what}: newest samples shown", samples, "s"),
        row(f"{what}: all samples in the list", complete, "s"),
    ]


def use_rows(browser: Browser, what: str) -> list[dict[str, Any]]:
    rows = []
    elapsed = "(async () => { const start = performance.now(); byId('search').value = 'needle'; await page.explorer.refresh(); return (performance.now() - start) / 1000; })()"
    rows.append(row(f"{what}: search in all texts", browser.run(elapsed), "s"))
    rows.append({"what": f"{what}: found", "value": browser.run("byId('count').textContent.split(' samples')[0]")})
    filtered = elapsed.replace("'needle'", "''; byId('reward-low').value = '1'; byId('order').value = 'longest'")
    rows.append(row(f"{what}: filter by reward and sort by length", browser.run(filtered), "s"))
    browser.run("byId('filters').reset()")
    browser.wait("page.explorer.list.items.length === page.store.numSamples")
    for pixels, speed in ((120, "two rows"), (6200, "a hundred rows")):
        browser.run("byId('list').scrollTop = 0")
        script = SCROLL.replace("STEP", str(pixels)).replace("FRAMES", str(FRAMES))
        times = np.array(browser.run(script))
        for name, value in (
            ("mean", times.mean()),
            ("99th percentile", np.percentile(times, 99)),
            ("longest", times.max()),
        ):
            rows.append(row(f"{what}: frame while scrolling {speed} a frame, {name}", float(value), "ms"))
    return rows


def row(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": round(float(value), 4), "unit": unit}


if __name__ == "__main__":
    main()
