"""The journal of an evaluation: killed anywhere it goes on, and other settings are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.evaluation.completions import Journal

SETTINGS: dict[str, Any] = {"sampling.n": 2, "sampling.temperature": 1.0, "model.content": "abc"}


def rows(*samples: int) -> list[dict[str, Any]]:
    return [{"id": "q/0", "sample": sample, "completion": "a\nb\u2028c"} for sample in samples]


def test_it_goes_on_with_what_it_has_and_goes_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    with Journal(path, SETTINGS) as journal:
        journal.add(rows(0, 1))
    with Journal(path, SETTINGS) as journal:
        assert journal.rows == rows(0, 1)
        journal.add(rows(2))
        assert journal.rows == rows(0, 1, 2)
        journal.close(remove=True)
    assert not path.exists()


def test_a_kill_at_any_byte_keeps_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    journal = Journal(path, SETTINGS)
    for sample in range(3):
        journal.add(rows(sample))
    journal.close()
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        journal = Journal(path, SETTINGS)
        whole = sum(end <= size for end in ends) - 1
        assert journal.rows == rows(*range(max(0, whole)))
        journal.add(rows(9))
        journal.close()
        again = Journal(path, SETTINGS)
        assert again.rows == [*rows(*range(max(0, whole))), *rows(9)]
        again.close()


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    journal = Journal(path, SETTINGS)
    journal.add(rows(0))
    journal.close()
    with pytest.raises(
        UserError, match=r"(?s)other settings:\n  sampling\.n: 2 there, 4 now\n  sampling\.top_k: None there, 5 now\n"
    ):
        Journal(path, {**SETTINGS, "sampling.n": 4, "sampling.top_k": 5})
    Journal(path, dict(reversed(SETTINGS.items()))).close()


def test_two_at_once_are_refused_and_a_stranger_too(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    with Journal(path, SETTINGS), pytest.raises(UserError, match="being written by another"):
        Journal(path, SETTINGS)
    assert not path.exists()  # nothing was in it
    path.write_text("hello\n")
    with pytest.raises(UserError, match="is no journal"):
        Journal(path, SETTINGS)
    assert path.read_text() == "hello\n"
