"""The data of the page: what is in the files, no more after a rewind, and only what is new when asked again."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.report.live_samples import ChangedTable, LiveSamples
from burnish.report.page_data import RunData
from burnish.report.run_files import LogTail, MetricsTail
from burnish.report.run_list import RunList
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.snapshot import BytesFile, Snapshot
from burnish.run.journal import Journal
from burnish.run.metrics import MetricsFile
from burnish.run.samples import EventExamplesFile, write_samples
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, Heartbeat

LOG = "2026-01-01 10:00:00  "


def make_run(folder: Path, name: str = "run-1", config: str = "seed: 0\nmodel: {path: a, dtype: float32}\n") -> RunData:
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config)
    return RunData(name, run)


def append(run: RunData, step: int, **values: float) -> None:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    MetricsFile(run.directory.metrics).append(step, dict(named))


def sample_row(index: int, **changes: Any) -> dict[str, Any]:
    texts = {"prompt": f"sort {index // 2}", "completion": f"answer {index}", "answer": "12", "parts": {"task": 1.0}}
    return {"group": f"g{index // 2}", "sample": index % 2, "reward": 1.0, "length": 3} | texts | changes


# --- metrics ----------------------------------------------------------------------------------------------------------------


def test_only_new_lines_are_read_and_a_torn_one_waits_for_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.metrics("main")["rows"] == 0
    append(run, 1, reward__mean=0.5)
    with open(run.directory.metrics, "a") as file:
        file.write('{"step": 2, "reward/')
    first = run.metrics("main")
    assert (first["rows"], first["series"]) == (1, {"reward/mean": [[1, 0.5]]})
    with open(run.directory.metrics, "a") as file:
        file.write('mean": 0.75}\n')
    second = run.metrics("main", since=1)
    assert (second["since"], second["rows"], second["series"]) == (1, 2, {"reward/mean": [[2, 0.75]]})
    assert run.metrics("main", since=2)["series"] == {}


def test_a_resumed_run_begins_another_generation_with_all_its_points(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step in (1, 2, 3):
        append(run, step, reward__mean=step / 10)
    before = run.metrics("main")
    MetricsFile(run.directory.metrics).truncate_after(1)
    append(run, 2, reward__mean=0.9)
    append(run, 3, reward__mean=0.9)
    after = run.metrics("main", since=before["rows"], generation=before["generation"])
    assert (after["generation"], after["since"]) == (before["generation"] + 1, 0)
    assert after["series"] == {"reward/mean": [[1, 0.1], [2, 0.9], [3, 0.9]]}


def test_a_file_that_was_replaced_by_a_longer_one_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n')
    tail = MetricsTail(path)
    tail.update()
    path.write_text('{"step": 1, "a": 7}\n{"step": 2, "a": 8}\n')  # the same inode
    tail.update()
    assert tail.series["a"].points() == [(1, 7.0), (2, 8.0)]
    path.unlink()
    tail.update()
    assert (tail.series, tail.generation) == ({}, 2), "a page that holds the older lines learns that they are gone"


def test_a_damaged_line_is_left_out_and_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.directory.metrics.write_text('{"step": 1, "a": 1.0}\nnot JSON\n{"step": 3, "a": "nan"}\n{"step": 4, "a": 2}\n')
    assert run.metrics("other")["series"] == {"a": [[1, 1.0], [4, 2.0]]}
    assert run.overview()["damaged"] == ["metrics.jsonl: 1 lines cannot be read and are left out of the curves: 2"]


def test_a_long_line_is_thinned_with_its_spike(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    rows = [{"step": step, "reward/mean": 99.0 if step == 1234 else step % 7} for step in range(1, 5001)]
    run.directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = run.metrics("main")["series"]["reward/mean"]
    assert 1000 < len(points) <= 2002
    assert [1234, 99.0] in points


# --- overview ---------------------------------------------------------------------------------------------------------------


def test_the_headline_shows_before_and_after_steps_and_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    append(run, 0, validation__greedy__accuracy=0.402, **{"validation__greedy__accuracy__length=4": 0.8})
    append(run, 1, reward__mean=0.25, time__step_s=30.0, memory__peak_gib=2.0)
    append(run, 2, reward__mean=0.5, time__step_s=60.5, memory__peak_gib=1.0, validation__greedy__accuracy=0.995)
    overview = run.overview()
    assert overview["headline"] == [
        ["held-out accuracy, greedy", "0.402 → 0.995", "step 0 → step 2"],
        ["mean reward", "0.250 → 0.500", "first step → last step"],
        ["steps", "2", ""],
        ["time in steps", "1m30s", "45.25 s a step"],
    ]
    assert overview["breakdown"] == {
        "title": "Held-out accuracy by part",
        "rows": [["greedy", "length=4", "0.800 (step 0)", "0.800 (step 0)"]],
    }
    assert overview["memory"] == [["memory/peak_gib", 1.0, 2.0]]


def test_a_graded_run_is_told_by_its_mean_reward_and_the_metric_of_its_best_checkpoint(tmp_path: Path) -> None:
    run, name = make_run(tmp_path), "validation/greedy/reward_mean"
    for step, value in ((0, 1.0), (1, 6.5), (2, 4.0)):
        append(run, step, **{name: value, f"{name}/kind=a": value})
    for step, score in ((1, 6.5), (2, 4.0)):
        Checkpoints(run.directory.checkpoints, keep_last=3).write(step, Snapshot([BytesFile("w", "w")]), score, name)
    overview = run.overview()
    assert overview["headline"][:2] == [
        ["held-out reward, greedy", "1.000 → 4.000", "step 0 → step 2"],
        ["best checkpoint", "step 1", f"by {name} 6.500"],
    ]
    assert overview["breakdown"]["title"] == "Held-out reward by part"
    assert [chart["title"] for chart in run.metrics("main")["charts"]] == ["Held-out reward"]


def test_health_lines_are_parted_and_lines_of_steps_are_no_notes(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    tail = LogTail(log)
    line = "step 7: a/b is 2 (healthy 0 to 1); likely cause: it broke; try: mend it"
    log.write_text(f"{LOG}note\n{LOG}step 1/2  reward 0.5\n{LOG}{line}\n")
    tail.update()
    assert tail.health_items() == [
        {"cause": "it broke", "seen": "step 7: a/b is 2 (healthy 0 to 1)", "remedy": "mend it"}
    ]
    assert list(tail.notes) == [f"{LOG}note", f"{LOG}{line}"]
    with open(log, "a") as file:
        file.writelines(f"{LOG}again {k}\n" for k in range(300))
    tail.update()
    assert (len(tail.notes), tail.num_notes, tail.num_health) == (200, 302, 1)


def test_events_are_counted_over_training_and_validation(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.directory.samples.mkdir()
    example = {"sample": "p#0.1", "kind": "tool_raised", "what": "search", "message": "a<b", "traceback": "line 7"}
    EventExamplesFile(run.directory.events).append(3, [example])
    append(run, 1, environment__tool_raised=2.0, environment__tool_raised_mean=9.0)
    append(run, 2, validation__greedy__environment__tool_raised=1.0)
    assert run.overview()["events"] == [{"step": 3, "number": 3.0, **example}]


def test_configs_are_dotted_keys_and_earlier_ones_are_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.directory.path / "config.1.yaml").write_text("seed: 1\n")
    config = run.config()
    assert config["keys"] == {"seed": "0", "model.path": "'a'", "model.dtype": "'float32'"}
    assert config["earlier"] == [{"name": "config.1.yaml", "keys": {"seed": "1"}}]


# --- samples ----------------------------------------------------------------------------------------------------------------


def test_tables_are_indexed_newest_first_in_parts_and_later_ones_are_added(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_samples(tmp_path, step, "train", [sample_row(k) for k in range(4)])
    live = LiveSamples(tmp_path)
    live.update(limit=2)
    assert (live.index.groups["step"], live.num_waiting) == ([30, 30, 20, 20], 1)
    live.update(limit=2)
    write_samples(tmp_path, 40, "train", [sample_row(0, reward=None)])
    live.update()
    assert live.index.groups["step"] == [30, 30, 20, 20, 10, 10, 40]
    assert live.index.groups["first"] == [0, 2, 4, 6, 8, 10, 12]
    assert live.index.groups["block"] == [0, 0, 1, 1, 2, 2, 3]
    assert (live.generation, live.num_waiting) == (0, 0)
    newest = live.index.since(6)
    assert (newest["groups"]["step"], newest["samples"]["reward"]) == ([40], [None])
    assert len(live.index.since(0, limit=1)["groups"]["step"]) == 2, "a part ends with a whole block"


def test_a_table_that_is_written_again_begins_another_generation(tmp_path: Path) -> None:
    write_samples(tmp_path, 10, "train", [sample_row(0), sample_row(1)])
    live = LiveSamples(tmp_path)
    live.update()
    write_samples(tmp_path, 10, "train", [sample_row(0, completion="another answer")])
    with pytest.raises(ChangedTable):
        live.texts(0)
    live.update()
    assert (live.generation, live.index.groups["first"], len(live.index.samples["number"])) == (1, [0], 1)
    assert json.loads(live.texts(0))["text"] == ["another answer"]


def test_a_table_that_cannot_be_read_is_told_and_hides_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_samples(run.directory.samples, 10, "train", [sample_row(0)])
    (run.directory.samples / "train-000020.parquet").write_bytes(b"torn")
    assert run.samples()["groups"]["step"] == [10]
    (text,) = run.overview()["damaged"]
    assert "train-000020.parquet: not readable as a table of samples" in text


def test_large_tables_are_several_blocks_of_whole_groups_whose_rows_may_be_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.report.live_samples.BLOCK_SAMPLES", 4)
    rows = [sample_row(k) for k in range(12)]
    write_samples(tmp_path, 1, "train", rows[::2] + rows[1::2])
    live = LiveSamples(tmp_path)
    live.update()
    assert live.index.groups["block"] == [0, 0, 1, 1, 2, 2]
    assert [json.loads(live.texts(block))["text"] for block in range(3)] == [
        [f"answer {k}" for k in range(4 * block, 4 * block + 4)] for block in range(3)
    ]
    assert live.search("answer 10", 0, 3) == [10]
    assert live.search("SORT 2", 0, 3) == [4, 5], "a word of a prompt finds its group, in any case"
    assert live.search("sort 2", 2, 3) == []


def test_a_search_reads_conversations_events_and_errors(tmp_path: Path) -> None:
    turns = json.dumps([{"who": "environment", "text": "a\nNeedle"}])
    events = json.dumps([{"kind": "k", "what": "w", "message": "Haystack", "traceback": ""}])
    rows = [sample_row(0, turns=turns), sample_row(1, events=events), sample_row(2, error="Traceback"), sample_row(3)]
    write_samples(tmp_path, 1, "train", rows)
    live = LiveSamples(tmp_path)
    live.update()
    found = {words: live.search(words, 0, 1) for words in ("a\nneedle", "haystack", "TRACE", "answer 3", "absent")}
    assert found == {"a\nneedle": [0], "haystack": [1], "TRACE": [2], "answer 3": [3], "absent": []}


# --- the list of runs -------------------------------------------------------------------------------------------------------


def test_runs_are_found_below_folders_and_while_the_page_is_open(tmp_path: Path) -> None:
    make_run(tmp_path, "b")
    make_run(tmp_path, "stages/first")
    make_run(tmp_path, "b/checkpoints/inside")
    (tmp_path / ".hidden").mkdir()
    runs = RunList([tmp_path, tmp_path / "b"])
    assert [run["id"] for run in runs.summaries()["runs"]] == ["b", "stages/first"]
    kept = runs.get("b")
    make_run(tmp_path, "a")
    (tmp_path / "stages" / "first" / "config.yaml").unlink()
    assert [run["id"] for run in runs.summaries()["runs"]] == ["a", "b"]
    assert runs.get("b") is kept
    with pytest.raises(UserError, match="did you mean 'stages'"):
        RunList([tmp_path / "stage"])


def test_reading_ahead_reads_what_the_page_will_ask_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a")
    append(run, 1, reward__mean=0.5)
    for step in range(40):
        write_samples(run.directory.samples, step, "train", [sample_row(0)])
    make_run(tmp_path, "b")
    runs = RunList([tmp_path])
    runs.read_ahead(threading.Event())
    read = runs.get("a")
    assert read is not None
    assert (read.metrics_tail.num_rows, len(read.live_samples.blocks)) == (1, 40)


def test_two_runs_of_one_name_have_ids_of_their_own(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        make_run(tmp_path / folder, "same")
    runs = RunList([tmp_path / "x", tmp_path / "y"])
    assert [run["id"] for run in runs.summaries()["runs"]] == ["same", "same (2)"]


def test_the_state_is_that_of_heartbeat_and_journal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert run.summary()["state"] == "new"
    beat = Heartbeat(run.directory.path / HEARTBEAT_FILE)
    beat.beat(3, "rollout 5/8")
    beat.close()
    append(run, 2, reward__mean=0.5, time__step_s=2.0, time__tokens_per_s=100.0)
    run.directory.log.write_text(f"{LOG}step 2/10  reward 0.5\n")
    found = run.summary()
    assert (found["state"], found["step"], found["total"]) == ("running", 2, 10)
    assert (found["phase"], found["phase_step"], found["left_s"]) == ("rollout 5/8", 3, 16.0)
    assert found["numbers"] == {"reward": 0.5, "s/step": 2.0, "tokens/s": 100.0}
    path = run.directory.path / HEARTBEAT_FILE
    record = json.loads(path.read_text()) | {"pid": 2**22 + 1, "time": 0.0}  # a process that cannot exist, long ago
    path.write_text(json.dumps(record))
    assert run.summary()["state"] == "ended early"
    for event, state in (("stopped", "stopped"), ("complete", "finished")):
        Journal(run.directory.journal).append(event, step=2)
        assert run.summary()["state"] == state
    Journal(run.directory.journal).append("resumed", step=2)
    path.write_text(json.dumps(record | {"pid": os.getpid()}))
    assert run.summary()["state"] == "running"


def test_stamps_change_with_their_files_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    append(run, 1, a=1.0)
    before = run.summary()["stamps"]
    append(run, 2, a=1.0)
    write_samples(run.directory.samples, 2, "train", [sample_row(0)])
    after = run.summary()["stamps"]
    assert {name for name in before if before[name] != after[name]} == {"metrics", "samples"}
