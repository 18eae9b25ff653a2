"""The run directory: one writer, one config."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.placement import Parallel, RayPlacement
from burnish.run.durable_files import folder_id
from burnish.run.journal import Journal
from burnish.run.run_directory import MAY_CHANGE, RunDirectory, earlier_configs, flatten_keys

CONFIG = "seed: 0\ntraining:\n  steps: 10\n  optimizer: {lr: 0.1}\n"
OTHER = CONFIG.replace("seed: 0", "seed: 1")


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
        RunDirectory.create(tmp_path, "r", "seed: 5\ntraining:\n  steps: 20\n  optimizer: {}\n")
    assert "  seed: 0 there, 5 now" in str(error.value)
    assert "training.steps: " not in str(error.value)  # which may change
    assert "or start the run anew: move its folder away" in str(error.value)
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
        "import sys, time; from pathlib import Path; from burnish.run.run_directory import MAY_CHANGE, RunDirectory\n"
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
        "import os, time; from pathlib import Path; from burnish.run.run_directory import MAY_CHANGE, RunDirectory\n"
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
    assert flatten_keys({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}


def test_a_run_that_was_claimed_but_never_began_vanishes(tmp_path: Path) -> None:
    with RunDirectory.claim(tmp_path, "r", CONFIG), pytest.raises(UserError, match="another process"):
        RunDirectory.create(tmp_path, "r", CONFIG)
    assert list(tmp_path.iterdir()) == []
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    RunDirectory.claim(tmp_path, "r", CONFIG).close()
    assert (tmp_path / "r" / "config.yaml").read_text() == CONFIG


def test_what_may_change_is_told_and_the_config_before_is_kept(tmp_path: Path) -> None:
    first, second = (
        "run: {save_every: 10}\nseed: 1\ntraining: {steps: 4}\n",
        "run: {save_every: 5}\nseed: 1\ntraining: {steps: 8}\n",
    )
    RunDirectory.create(tmp_path, "r", first).close()
    Journal(tmp_path / "r" / "journal").append("completed", step=5)
    with RunDirectory.create(tmp_path, "r", second.replace("8", "4")) as run:
        assert [str(change) for change in run.changes] == ["run.save_every: 10 before, 5 from here on"]
        assert not run.changes_training
    assert Journal(tmp_path / "r" / "journal").events != []
    with RunDirectory.create(tmp_path, "r", second) as run:
        assert [change.key for change in run.changes] == ["training.steps"]
        assert run.config.read_text() == second
    assert [path.name for path in earlier_configs(run.path)] == ["config.1.yaml", "config.2.yaml"]
    assert earlier_configs(run.path)[0].read_text() == first
    journal = Journal(tmp_path / "r" / "journal")
    assert [event["event"] for event in journal.events] == [
        "forgotten"
    ]  # rollouts of a policy that was trained otherwise
    with RunDirectory.create(tmp_path, "r", second) as run:
        assert run.changes == []
    with pytest.raises(UserError, match="  seed: 1 there, 2 now"):
        RunDirectory.create(tmp_path, "r", second.replace("seed: 1", "seed: 2"))
    (run.checkpoints / "step-000006").mkdir()
    with pytest.raises(UserError, match=r"training\.steps=4, but run .* has made 6: give 6 or more"):
        RunDirectory.create(tmp_path, "r", second.replace("steps: 8", "steps: 4"))
    assert run.config.read_text() == second


def test_a_run_may_go_on_in_any_other_place() -> None:
    assert {f"placement.{key}" for key in RayPlacement.model_fields} <= set(MAY_CHANGE)
    assert {f"parallel.{key}" for key in Parallel.model_fields} <= set(MAY_CHANGE)


@pytest.mark.parametrize(("model", "is_allowed"), [("{path: m}", True), ("{new: {layers: 1}}", False)])
def test_held_out_rows_may_change_unless_a_new_tokenizer_is_made_of_them(
    tmp_path: Path, model: str, is_allowed: bool
) -> None:
    text = "model: %s\ndata: {validation: [{path: %s}]}\n"
    RunDirectory.create(tmp_path, "r", text % (model, "a")).close()
    if is_allowed:
        RunDirectory.create(tmp_path, "r", text % (model, "b")).close()
    else:
        with pytest.raises(UserError, match=r"data\.validation"):
            RunDirectory.create(tmp_path, "r", text % (model, "b"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a: [", b"- 1\n"])
def test_a_damaged_config_is_named_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    (tmp_path / "r" / "config.yaml").write_bytes(content)
    with pytest.raises(
        UserError, match=r"r/config\.yaml is damaged \(.*\): restore it from a copy, or start the run anew: move"
    ):
        RunDirectory.create(tmp_path, "r", CONFIG)
    (tmp_path / "r" / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"r/config\.yaml is missing"):
        RunDirectory.create(tmp_path, "r", CONFIG)


def test_an_old_run_is_replaced_whole_when_the_new_one_begins_and_only_once(tmp_path: Path) -> None:
    assert folder_id(tmp_path / "r") is None
    with RunDirectory.create(tmp_path, "r", CONFIG) as run:
        run.metrics.write_text("kept")
        old = folder_id(tmp_path / "r")
        with pytest.raises(UserError, match="is being written by another process"):
            RunDirectory.claim(tmp_path, "r", OTHER, replaced=old)
    with RunDirectory.claim(tmp_path, "r", OTHER, replaced=old) as run:  # closed before it begins: a check has failed
        assert run.is_replaced
        with pytest.raises(UserError, match="is being written by another process"):
            RunDirectory.claim(tmp_path, "r", CONFIG)
    assert [folder.name for folder in tmp_path.iterdir()] == ["r"]
    assert (tmp_path / "r" / "config.yaml").read_text() == CONFIG
    with RunDirectory.create(tmp_path, "r", OTHER, replaced=old) as run:
        assert run.old_run == tmp_path / "r.1"
        assert (tmp_path / "r.1" / "metrics.jsonl").read_text() == "kept"
        assert not run.metrics.exists()
        RunDirectory.create(tmp_path, "r.1", CONFIG).close()  # its lock is free
        with pytest.raises(UserError, match="is being written by another process"):
            RunDirectory.claim(tmp_path, "r", OTHER)
        run.metrics.write_text("new")
    with RunDirectory.create(tmp_path, "r", OTHER, replaced=old) as run:  # a driver that goes on after another died
        assert (run.old_run, run.metrics.read_text()) == (None, "new")
    RunDirectory.create(tmp_path, "r", CONFIG, replaced=folder_id(tmp_path / "r")).close()
    assert (tmp_path / "r.2" / "metrics.jsonl").read_text() == "new"


def test_a_folder_that_is_not_a_run_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").touch()
    with pytest.raises(UserError, match="is not a run"):
        RunDirectory.claim(tmp_path, "r", CONFIG, replaced=folder_id(tmp_path / "r"))


def test_the_lock_of_a_run_that_was_moved_meanwhile_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory.create(tmp_path, "r", CONFIG).close()
    open_file, first = os.open, []

    def opened(*args: Any) -> int:
        descriptor = open_file(*args)
        if not first:  # between the second process's open and its flock the first one replaces the run
            first.append(descriptor)
            first.append(RunDirectory.create(tmp_path, "r", OTHER, replaced=folder_id(tmp_path / "r")))
        return descriptor

    second = RunDirectory(tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        with pytest.raises(UserError, match="is being written by another process"):
            second.lock()
    first[1].close()
