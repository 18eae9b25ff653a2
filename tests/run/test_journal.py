"""The journal: what was appended is what is replayed, whatever a kill or a disk does to the file's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.run import durable_files
from burnish.run.journal import Journal, decode_record

EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("drawn", {"step": 1, "ids": ["a", "b"]}),
    ("completed", {"step": 1, "text": "line\nbreak \ud800 ü", "logp": [-0.1, float("-inf")]}),
    ("used", {"step": 1, "shape": (2, 3)}),
    ("step", {"step": 1}),
]


def written(folder: Path) -> bytes:
    journal = Journal(folder)
    journal.append_many(EVENTS)
    return journal.path.read_bytes()


def test_a_replay_gives_the_events_as_they_were_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("started", seed=3)
    journal.append_many(EVENTS)
    again = Journal(tmp_path)
    assert again.events == journal.events
    assert [e["i"] for e in again.events] == [0, 1, 2, 3, 4]
    assert again.events[3]["shape"] == [2, 3]
    again.append("more")
    assert Journal(tmp_path).events[-1]["i"] == 5


def test_a_torn_tail_at_every_byte_leaves_the_whole_records(tmp_path_factory: pytest.TempPathFactory) -> None:
    content = written(tmp_path_factory.mktemp("whole"))
    folder = tmp_path_factory.mktemp("torn")
    for cut in range(len(content) + 1):
        (folder / "events.jsonl").write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        journal = Journal(folder)
        assert len(journal.events) == whole
        assert journal.path.read_bytes() == b"".join(content.splitlines(keepends=True)[:whole])


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000), garbage=st.binary(max_size=40))
def test_garbage_after_a_torn_tail_is_cut_and_the_journal_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    content = written(folder)
    cut %= len(content) + 1
    (folder / "events.jsonl").write_bytes(content[:cut] + garbage)
    whole = content[:cut].count(b"\n")
    journal = Journal(folder)
    # Garbage may complete the cut record by chance (its newline): never fewer than the whole ones, at most one more.
    assert whole <= len(journal.events) <= whole + 1
    journal.append("after")
    assert [e["event"] for e in Journal(folder).events][-1] == "after"


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_a_changed_byte_is_never_replayed_as_truth(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    content = bytearray(written(folder))
    position %= len(content)
    content[position] ^= flip
    line = bytes(content[:position]).count(b"\n")
    (folder / "events.jsonl").write_bytes(bytes(content))
    original = [decode_record(text) for text in written(tmp_path_factory.mktemp("copy")).splitlines()]
    try:
        events = Journal(folder).events
    except UserError as error:
        assert line < len(EVENTS) - 1
        assert f"line {line + 1}:" in str(error)  # noqa: PT017 -- which outcome is right depends on the line
    else:
        # Equal spellings (d800 and D800 in an escape) may pass; a lost newline joins the last two records into one bad line.
        assert events == original[: len(events)]
        assert len(events) >= len(EVENTS) - 2


def test_a_missing_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    lines = written(tmp_path).splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines[:1] + lines[2:]))
    with pytest.raises(UserError, match=r"events\.jsonl, line 2: .* 2 intact ones follow"):
        Journal(tmp_path)


def test_several_bad_lines_at_the_end_are_cut_together(tmp_path: Path) -> None:
    content = written(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(content + b"\0\0\0\n\0\0")
    assert len(Journal(tmp_path).events) == len(EVENTS)
    assert (tmp_path / "events.jsonl").read_bytes() == content


def test_a_full_disk_is_a_user_error_and_the_file_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.append("one")
    with monkeypatch.context() as patch:
        patch.setattr(
            durable_files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(UserError, match=r"No space left.*make room"):
            journal.append("two")
    journal.append("three")
    assert [e["event"] for e in Journal(tmp_path).events] == ["one", "three"]


def test_the_records_own_fields_cannot_be_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="crc"):
        Journal(tmp_path).append("used", crc=1)
    assert Journal(tmp_path).events == []


def test_a_rewind_is_one_more_record_and_erases_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append("step", step=3)
    journal.rewind(2)
    assert [(e["event"], e["step"]) for e in Journal(tmp_path).events] == [("step", 3), ("resumed", 2)]


EVENT = st.tuples(st.sampled_from(["completed", "scored", "checkpoint"]), st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(lives=st.lists(st.lists(EVENT, max_size=12), max_size=3))
def test_only_records_of_steps_no_checkpoint_covers_are_held_and_all_are_counted(
    tmp_path_factory: pytest.TempPathFactory, lives: list[list[tuple[str, int]]]
) -> None:
    """A checkpoint is written while later steps go on, so its record comes after some of theirs."""
    folder = tmp_path_factory.mktemp("journal")
    oracle: list[tuple[str, int]] = []
    for life in [*lives, []]:
        journal = Journal(folder)
        for event, step in life:
            journal.append(event, step=step)
        oracle += life
        held = [
            (i, event, step)
            for i, (event, step) in enumerate(oracle)
            if not any(later == "checkpoint" and saved >= step for later, saved in oracle[i + 1 :])
        ]
        assert [(e["i"], e["event"], e["step"]) for e in journal.events] == held
        assert journal.num_events == len(oracle)


def test_attachments_come_back_exactly_or_not_at_all(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    arrays: dict[str, np.ndarray] = {
        "tokens": np.arange(6, dtype=np.int64)[::2],
        "logp": np.array([-0.1, -np.inf], dtype=np.float32),
    }
    reference = journal.attach("step-1", arrays)
    record = journal.append("completed", step=1, attachment=reference)
    loaded = Journal(tmp_path).attachment(record["attachment"])
    assert loaded is not None
    assert loaded["tokens"].tolist() == [0, 2, 4]
    assert loaded["logp"].dtype == np.float32
    assert loaded["logp"].tobytes() == arrays["logp"].tobytes()

    file = tmp_path / reference["file"]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert journal.attachment(reference) is None
    file.unlink()
    assert journal.attachment(reference) is None


def test_dropping_attachments_keeps_the_chosen_and_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for name in ("step-1", "step-2"):
        journal.append("completed", attachment=journal.attach(name, {"x": np.zeros(1)}))
    journal.drop_attachments(lambda name: name == "step-2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "step-2.safetensors"]


def test_an_attachment_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plain file name"):
        Journal(tmp_path).attach("../x", {"x": np.zeros(1)})
