"""Two, four and eight processes train what one trains, number by number, however they divide the work.

One worker runs all cases of two and four (`rank_worker.py`), another those of eight; the tests read what they wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.models.lora.peft_files import ADAPTER_WEIGHTS
from burnish.models.weight_files import file_tensors, stored_tensors
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from tests.training.parallel import two_rank_runs
from tests.training.parallel.cases import CASES, parallel_of

ROOT = Path(__file__).parents[3]
DEADLINE_S = 1800
TOGETHER = ((2, 4), (8,))
"""Numbers of ranks that one worker runs; eight are for `make slow`."""
Records = dict[str, dict[str, Any]]


def cases_of(*dtypes: str) -> list[Any]:
    """(number of ranks, name) of the cases of these types."""
    return [
        pytest.param(ranks, name, marks=[pytest.mark.slow] if ranks == 8 else [])
        for ranks, cases in CASES.items()
        for name, case in cases.items()
        if case.dtype in dtypes
    ]


ALL, WIDE, SINGLE = cases_of("float64", "float32", "bfloat16"), cases_of("float64"), cases_of("float32")


class Folders(dict[int, Path]):
    """Where the ranks of each number have written. Of several test processes one runs the worker, the others wait."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.base = base

    def __missing__(self, num_ranks: int) -> Path:
        numbers = next(numbers for numbers in TOGETHER if num_ranks in numbers)
        folder, done = (self.base / f"ranks-{numbers[0]}{suffix}" for suffix in ("", ".txt"))
        try:
            folder.mkdir()
        except FileExistsError:
            until = time.monotonic() + DEADLINE_S
            while not done.exists() and time.monotonic() < until:
                time.sleep(0.1)
        else:
            command = [sys.executable, "-m", "tests.training.parallel.rank_worker", str(folder), *map(str, numbers)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            ran = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
            )
            said = [file.read_text() for file in sorted(folder.glob("*/*.txt"))]
            done.write_text("" if ran.returncode == 0 else "\n".join([*said, ran.stdout, ran.stderr]))
        problem = done.read_text()
        assert not problem, problem  # whole: pytest shortens what it compares
        self.update({number: folder / str(number) for number in numbers})
        return self[num_ranks]


class Results(dict[int, tuple[Records, list[Records]]]):
    """What one process saw, and what each of several saw, by their number."""

    def __init__(self, folders: Folders) -> None:
        super().__init__()
        self.folders = folders

    def __missing__(self, num_ranks: int) -> tuple[Records, list[Records]]:
        folder = self.folders[num_ranks]
        several = [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]
        self[num_ranks] = torch.load(folder / "alone.pt"), several
        return self[num_ranks]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    base = tmp_path_factory.getbasetemp()
    return Folders(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@pytest.fixture(scope="session")
def records(folders: Folders) -> Results:
    return Results(folders)


def curves(results: Results, ranks: int, name: str) -> tuple[list[dict[str, float]], list[list[dict[str, float]]]]:
    alone, several = results[ranks]
    return alone[name]["curve"], [record[name]["curve"] for record in several]


@pytest.mark.parametrize(("ranks", "name"), WIDE)
def test_every_rank_tells_what_one_process_tells(ranks: int, name: str, records: Results) -> None:
    alone, several = curves(records, ranks, name)
    assert len(alone) == CASES[ranks][name].steps
    assert abs(alone[0]["loss"] - alone[-1]["loss"]) > 1e-3
    for curve in several:
        for step, (got, expected) in enumerate(zip(curve, alone, strict=True)):
            assert got == pytest.approx(expected, rel=1e-10, abs=1e-10), f"update {step + 1}"


@pytest.mark.parametrize(("ranks", "name"), SINGLE)
def test_float32_differs_by_rounding_alone(ranks: int, name: str, records: Results) -> None:
    alone, several = curves(records, ranks, name)
    for curve in several:
        assert curve[0] == pytest.approx(alone[0], abs=1e-5)
        assert [s["loss"] for s in curve] == pytest.approx([s["loss"] for s in alone], abs=1e-3)


@pytest.mark.parametrize("name", ["fsdp, bfloat16", "pipeline, bfloat16"])
def test_half_types_train_with_masters_on_every_piece(name: str, records: Results) -> None:
    alone, several = curves(records, 2, name)
    for curve in several:
        assert curve == several[0]  # what all ranks are told is the same to the bit
        assert [s["loss"] for s in curve] == pytest.approx([s["loss"] for s in alone], abs=0.01)
        assert [s["grad_norm"] for s in curve] == pytest.approx([s["grad_norm"] for s in alone], rel=0.05)


@pytest.mark.parametrize(("ranks", "name"), WIDE)
def test_the_weights_that_come_out_are_those_of_one_process(ranks: int, name: str, records: Results) -> None:
    alone, several = records[ranks]
    expected: dict[str, Tensor] = alone[name]["after"]
    for record in several:
        assert record[name]["comes back"], "what was cut is not what is gathered"
        assert record[name]["after"].keys() == expected.keys()
        for parameter, tensor in record[name]["after"].items():
            torch.testing.assert_close(tensor, expected[parameter], atol=1e-10, rtol=0)


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_a_rank_holds_its_pieces_only(ranks: int, name: str, records: Results) -> None:
    alone, several = records[ranks]
    sizes = parallel_of(CASES[ranks][name]).sizes(ranks)
    replicas = sizes.replicate
    held, whole = [record[name]["held"] for record in several], alone[name]["held"]
    if sizes.tensor > 1:  # embedding, head, norms and a vision tower are whole on each
        tower = alone[name]["tower"]
        assert (tower > 0) == CASES[ranks][name].pictures
        assert max(held) - tower < 0.6 * (whole - tower)
    elif sizes.pipeline > 1:
        assert sum(held) == replicas * (
            whole + alone[name]["embedding"] * CASES[ranks][name].tied
        )  # tied: on two stages
        assert max(held) < 1.7 * replicas * whole / ranks  # of four stages the first has two of five layers
    else:
        assert sum(held) == replicas * whole
        assert max(held) <= 1.1 * replicas * whole / ranks


@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_data_parallel_ranks_have_shares_of_their_own(ranks: int, name: str, records: Results) -> None:
    sizes = parallel_of(CASES[ranks][name]).sizes(ranks)
    index = torch.arange(sizes.batch_shards).view(-1, 1, sizes.expert, 1)  # [data, context, expert, tensor]
    expected = index.expand(-1, sizes.context, -1, sizes.tensor).flatten().tolist()
    assert [record[name]["index"] for record in records[ranks][1]] == sizes.pipeline * expected


# --- `burnish sft` -----------------------------------------------------------------------------------------------------


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


@pytest.mark.parametrize("name", [*two_rank_runs.RUNS, two_rank_runs.HANDED_OVER])
def test_a_supervised_run_of_two_processes_is_that_of_one(name: str, folders: dict[int, Path]) -> None:
    """Also one that was stopped by a signal to one process, and one that another number of processes goes on with."""
    folder, twin = folders[2], "plain" if name == two_rank_runs.HANDED_OVER else name
    got, expected = (without_times(folder / run / "metrics.jsonl") for run in (name, f"{twin}-alone"))
    assert len(expected) == 6
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    left = [folder / run / "checkpoints/step-000006" for run in (name, f"{twin}-alone")]
    one, other = (weights(path) for path in left)
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", two_rank_runs.PREFERENCES)
def test_a_run_on_preferences_of_two_processes_is_that_of_one(name: str, folders: dict[int, Path]) -> None:
    runs = [folders[2] / run.replace(" ", "_") for run in (name, f"{name}-alone")]
    got, expected = (without_times(run / "metrics.jsonl") for run in runs)
    assert [row["step"] for row in expected] == [0, 1, 2, 3]
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    one, other = (weights(run / "checkpoints/step-000003") for run in runs)
    for key, tensor in one.items():
        torch.testing.assert_close(tensor, other[key], atol=1e-9, rtol=0)


def weights(path: Path) -> dict[str, Tensor]:
    """By Hugging Face's or PEFT's names."""
    stored = file_tensors(path / ADAPTER_WEIGHTS) if (path / ADAPTER_WEIGHTS).exists() else stored_tensors(path)
    return {name: tensor.whole().clone() for name, tensor in stored}


def test_only_the_first_process_speaks_and_all_stop_together(folders: dict[int, Path]) -> None:
    log = (folders[2] / two_rank_runs.HANDED_OVER / "log.txt").read_text()
    assert log.count("going on after step 3 of 6") == 1
    assert sum("step 3/6" in line for line in log.splitlines()) == 1
    first = folders[2] / "plain/checkpoints/step-000006"
    assert len(list(first.glob("optimizer-*-of-00002.safetensors"))) == 2
