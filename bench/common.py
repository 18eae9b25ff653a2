"""Functions that all benchmarks share: the machine's description, tables, and the file of results."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The machine in words, without names or paths."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = f"{models[0]} x {len(models)}" if models else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"gpu": gpu, "cpu": cpu, "torch": torch.__version__, "threads": torch.get_num_threads()}


def on_this_gpu(name: str) -> str:
    """The name with the GPU's last word behind it, `rollout-h200`; without a GPU as it is."""
    gpu = machine()["gpu"]
    return name if gpu is None else f"{name}-{gpu.split()[-1].lower()}"


def save(name: str, rows: list[dict[str, Any]], path: Path | None = None) -> Path:
    """Write `bench/results/<name>.json`, or another file."""
    RESULTS.mkdir(exist_ok=True)
    path = path or RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return path


def save_beside(name: str, rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> Path:
    """`save`, with the saved rows whose `key` none of these rows has. Benches that run at the same time take turns."""
    path = RESULTS / f"{name}.json"
    folder = os.open(RESULTS, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        saved = json.loads(path.read_text())["rows"] if path.is_file() else []
        measured = {key(row) for row in rows}
        kept = [row for row in saved if key(row) not in measured]
        return save(name, sorted([*kept, *rows], key=lambda row: str(key(row))))
    finally:
        os.close(folder)


def tiny_chat_model(folder: Path, alphabet: str, template: str, max_positions: int) -> Path:
    """A decoder of characters with a chat template, made from nothing, unless the folder has it."""
    from burnish.config.model import Model, NewModel
    from burnish.models.policy import load_policy

    if not folder.exists():
        folder.mkdir()
        new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=max_positions)
        load_policy(Model(new=new, device="cpu"), None, alphabet, seed=1).save(folder)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Rows as a small text table."""
    cells = [columns, *[[_cell(row.get(c)) for c in columns] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: Any) -> str:
    return (
        ""
        if value is None
        else f"{value:,.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )
