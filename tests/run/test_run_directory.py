"""The run directory: one writer, one config."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.directory import RunDirectory, flatten

CONFIG = "seed: 0\ntraining:\n  steps: 10\n  optimizer: {lr: 0.1}\n"


def test_the_same_config_opens_the_same_run_again(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "r", CONFIG) as run:
        run.metrics.write_text("kept")
    with RunDirectory.create(tmp_path, "r", "# a comment\n" + CONFIG) as again:
        assert again.metrics.read_text() == "kept"
        assert again.config.read_text().endswith(CONFIG)
    assert {p.name for p in (tmp_path / "r").iterdir() if p.is_dir()} == {"journal", "samples", "checkpoints"}


def test_another_config_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    with pytest.raises(UserError) as error:
        RunDirectory.create(tmp_path, "r", "seed: 0\ntraining:\n  steps: 20\n  optimizer: {}\n")
    assert "training.steps: 10 there, 20 now" in str(error.value)
    assert "training.optimizer.lr: 0.1 there, not set now" in str(error.value)
    assert "seed" not in str(error.value)
    assert (tmp_path / "r" / "config.yaml").read_text() == CONFIG
    RunDirectory.create(tmp_path, "r", CONFIG).close()  # the refusal gave the lock back


def test_leftovers_of_a_killed_writer_are_swept(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    leftover = tmp_path / "r" / "checkpoints" / ".tmp-0-step-000001"
    leftover.mkdir()
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    assert not leftover.exists()


def test_a_locked_run_names_the_run_and_the_process(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "r", CONFIG), pytest.raises(UserError) as error:
        RunDirectory.create(tmp_path, "r", CONFIG)
    assert str(tmp_path / "r") in str(error.value)
    assert f"pid {os.getpid()}" in str(error.value)
    RunDirectory.create(tmp_path, "r", CONFIG).close()


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from burnish.run.directory import RunDirectory\n"
        f"run = RunDirectory.create(Path({str(tmp_path)!r}), 'r', {CONFIG!r}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"pid {process.pid}"):
            RunDirectory.create(tmp_path, "r", CONFIG)
        process.kill()
        process.wait()
        RunDirectory.create(tmp_path, "r", CONFIG).close()


def test_an_orphaned_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, time; from pathlib import Path; from burnish.run.directory import RunDirectory\n"
        f"run = RunDirectory.create(Path({str(tmp_path)!r}), 'r', {CONFIG!r})\n"
        "if os.fork() == 0: print(os.getpid(), flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            os.kill(worker, 0)  # the worker is still there
            RunDirectory.create(tmp_path, "r", CONFIG).close()
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_folder_that_is_not_a_run_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"not a run.*thesis\.tex"):
        RunDirectory.create(tmp_path, "r", CONFIG)
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["thesis.tex"]


def test_a_run_that_hung_before_it_had_begun_begins_again_beside_its_stacks(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    (folder / "stacks").mkdir(parents=True)
    (folder / "stacks" / "driver-7.txt").write_text("where it was")
    (folder / "lock").write_text("7\n")
    RunDirectory.claim(tmp_path, "r", CONFIG).close()
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    assert (folder / "config.yaml").read_text() == CONFIG
    assert (folder / "stacks" / "driver-7.txt").read_text() == "where it was"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        RunDirectory.create(tmp_path, name, CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_opening_something_else_suggests_the_nearest_run(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "default-0", CONFIG).close()
    with pytest.raises(UserError, match=r"no config\.yaml; did you mean 'default-0'\?"):
        RunDirectory.open(tmp_path / "defualt-0")
    assert RunDirectory.open(tmp_path / "default-0").name == "default-0"


def test_a_reader_needs_no_lock(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "r", CONFIG):
        assert RunDirectory.open(tmp_path / "r").log == tmp_path / "r" / "log.txt"


def test_flattening_uses_dotted_names() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}


def test_a_run_that_was_claimed_but_never_began_vanishes(tmp_path: Path) -> None:
    with RunDirectory.claim(tmp_path, "r", CONFIG), pytest.raises(UserError, match="another process"):
        RunDirectory.create(tmp_path, "r", CONFIG)
    assert list(tmp_path.iterdir()) == []
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    RunDirectory.claim(tmp_path, "r", CONFIG).close()
    assert (tmp_path / "r" / "config.yaml").read_text() == CONFIG


def test_what_leaves_the_numbers_as_they_are_may_change(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, "r", "run: {save_every: 10, keep_last: 2}\nseed: 1\n").close()
    with RunDirectory.create(tmp_path, "r", "run: {save_every: 5, keep_last: 9}\nseed: 1\n") as run:
        assert "save_every: 5" in run.config.read_text()
    with pytest.raises(UserError, match="may change only what leaves its numbers"):
        RunDirectory.create(tmp_path, "r", "run: {save_every: 5, keep_last: 9}\nseed: 2\n")
    assert "seed: 1" in (tmp_path / "r" / "config.yaml").read_text()
