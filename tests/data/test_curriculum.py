"""Curricula depend only on seed, data, step and observations, and continue where they were saved."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from burnish.algorithms.curriculum.prompt_selection import prioritised_probabilities
from burnish.algorithms.curriculum.spec import (
    CURRICULUM_RECORDS,
    CurriculumSlot,
    EasyToHardCurriculum,
    HardOnlyCurriculum,
    NoCurriculum,
    PrioritisedCurriculum,
)
from burnish.config.data import Data, Source
from burnish.config.errors import UserError
from burnish.core.random_keys import permutation
from burnish.core.trajectory import Trajectory
from burnish.data.curriculum import PromptStatistics, priority_weights, visit_accuracies
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.models.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_characters("0123456789")
LEVELS = [3, 1.5, 2, 1, 5, 4, 1, 6]  # sorted: rows 3 and 6, 1, 2, 0, 5, 4, 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")

    def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("four.jsonl", [{"prompt": str(i)} for i in range(4)])
    write("eight.jsonl", [{"prompt": str(i), "level": level} for i, level in enumerate(LEVELS)])
    write("long.jsonl", [{"prompt": str(i) * (9 if i % 2 else 1), "level": i} for i in range(6)])
    write("odd.jsonl", [{"prompt": "1", "level": 1}, {"prompt": "2", "level": "hard"}])
    return folder


def stream(folder: Path, *files: str, seed: int = 0, curriculum: Any = None, **data: Any) -> PromptStream:
    sources = [Source(path=file) for file in files]
    return PromptStream(sources, TOKENIZER, Data(**data), seed, "train", folder, curriculum)


def answers(draws: Iterable[PromptSample], right: Iterable[int], n: int = 2) -> list[Trajectory]:
    """`n` answers to each draw: all right if the row's index is in `right`, else all wrong."""
    chosen = set(right)
    return [
        Trajectory(d.prompt.row.id, d.visit, k, [], "stop", "", 1.0, float(index_of(d) in chosen))
        for d in draws
        for k in range(n)
    ]


def index_of(draw: PromptSample) -> int:
    return int(draw.prompt.row.id.rpartition("/")[2])


def with_success(made: PromptStream, file: str, success: list[float]) -> PromptStream:
    """The stream as after visits that left these success rates."""
    state = made.state()
    state["statistics"] = {f"{file}/{i}": [s, 1, s, 1] for i, s in enumerate(success)}
    made.restore(json.loads(json.dumps(state)))
    return made


def seen(draws: Iterable[PromptSample]) -> list[tuple[str, int]]:
    return [(d.prompt.row.id, d.visit) for d in draws]


# --- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_move_by_half_from_zero_and_count_everything() -> None:
    statistics = PromptStatistics()
    assert (statistics["p"].success, statistics["p"].visits, len(statistics)) == (0.0, 0, 0)
    statistics.observe("p", 4, 4)
    assert statistics["p"].success == 0.5
    statistics.observe("p", 1, 4)
    record = statistics["p"]
    assert (record.success, record.visits, record.right, record.total) == (0.375, 2, 5, 8)
    statistics.observe("q", 0, 0)  # no answer was judged
    assert len(statistics) == 1
    last_only = PromptStatistics(ema=1.0)
    last_only.observe("p", 4, 4)
    last_only.observe("p", 1, 4)
    assert last_only["p"].success == 0.25


def test_statistics_come_back_from_json() -> None:
    statistics, again = PromptStatistics(), PromptStatistics()
    for name, right in (("p", 1), ("q", 0.5), ("p", 3)):
        statistics.observe(name, right, 4)
    again.observe("gone", 1, 1)
    again.restore(json.loads(json.dumps(statistics.state())))
    assert again.state() == statistics.state() == {"p": [0.4375, 2, 4, 8], "q": [0.0625, 1, 0.5, 4]}


def test_each_visit_counts_its_judged_answers() -> None:
    def one(name: str, visit: int, reward: float | None, accuracy: float | None) -> Trajectory:
        return Trajectory(name, visit, 0, [], "stop", "", reward, accuracy)

    found = visit_accuracies(
        [one("p", 0, 1, 1), one("p", 1, 1, 0), one("p", 0, 1, 0.5), one("q", 0, None, 1), one("p", 0, 1, None)]
    )
    assert found == [("p", 1.5, 2), ("p", 0.0, 1)]


# --- prioritised -------------------------------------------------------------------------------------------------------


def test_priorities_are_exact() -> None:
    assert [w / 2.5 for w in priority_weights([0.9, 0.5, 0.1, 0.0])] == pytest.approx([0.04, 0.2, 0.36, 0.4], abs=1e-6)
    assert priority_weights([1.0, 1.0]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_priorities_are_the_algorithms_formula(success: list[float]) -> None:
    own = torch.tensor(priority_weights(success), dtype=torch.float64)
    torch.testing.assert_close(own / own.sum(), prioritised_probabilities(torch.tensor(success, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("success", "expected"),
    [
        ([0.9, 0.5, 0.1, 0.0], [0.04, 0.2, 0.36, 0.4]),
        ([1.0, 1.0, 1.0, 1.0], [0.25, 0.25, 0.25, 0.25]),
        ([0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]),
        ([], [0.25, 0.25, 0.25, 0.25]),  # unseen
    ],
)
def test_prompts_are_drawn_by_priority(folder: Path, success: list[float], expected: list[float]) -> None:
    made = with_success(stream(folder, "four.jsonl", curriculum=PrioritisedCurriculum()), "four.jsonl", success)
    num = 4000
    counts = Counter(index_of(d) for d in made.draw(num))
    for index, chance in enumerate(expected):
        deviation = (chance * (1 - chance) / num) ** 0.5
        assert abs(counts[index] / num - chance) <= 4.5 * deviation


def test_priorities_wait_for_the_warm_up(folder: Path) -> None:
    made = stream(folder, "four.jsonl", curriculum=PrioritisedCurriculum(warmup_steps=2))
    with_success(made, "four.jsonl", [1.0, 1.0, 1.0, 0.0])
    for step, expected in ((1, {0, 1, 2, 3}), (2, {0, 1, 2, 3}), (3, {3})):
        made.at(step)
        assert {index_of(d) for d in made.draw(4)} == expected


def test_the_draws_of_a_seed_are_these_on_every_machine(folder: Path) -> None:
    made = stream(folder, "four.jsonl", seed=5, curriculum=PrioritisedCurriculum())
    with_success(made, "four.jsonl", [0.9, 0.5, 0.1, 0.0])
    assert [index_of(d) for d in made.draw(12)] == [3, 3, 3, 0, 3, 3, 2, 2, 1, 2, 1, 3]
    buckets = stream(folder, "eight.jsonl", seed=5, curriculum=EasyToHardCurriculum(column="level", buckets=2, steps=2))
    assert [index_of(d) for d in buckets.draw(8)] == [3, 2, 1, 6, 2, 1, 6, 3]


def test_what_was_observed_changes_the_next_draws_and_nothing_else_does(folder: Path) -> None:
    def drawn(*right: int) -> list[int]:
        made = stream(folder, "four.jsonl", seed=1, curriculum=PrioritisedCurriculum(ema=1.0))
        first = made.draw(40)
        made.observe(answers(first, right))
        return [index_of(d) for d in made.draw(40)]

    assert drawn() == drawn()
    assert set(drawn(0, 1, 2)) == {3}
    assert drawn(0, 1, 2, 3) == drawn()  # all solved is uniform, as none solved is


# --- easy to hard ------------------------------------------------------------------------------------------------------


def test_buckets_take_their_turns_from_easy_to_hard_and_the_last_stays(folder: Path) -> None:
    record = EasyToHardCurriculum(column="level", buckets=4, steps=8, warmup_steps=1)
    made = stream(folder, "eight.jsonl", curriculum=record)
    expected = [{3, 6}, {3, 6}, {1, 2}, {1, 2}, {0, 5}, {0, 5}, {4, 7}, {4, 7}, {4, 7}, {4, 7}]
    made.at(1)
    assert seen(made.draw(8)) == [(f"eight.jsonl/{i}", 0) for i in permutation(8, 0, "eight.jsonl", 0)]
    for step, bucket in enumerate(expected, start=2):
        made.at(step)
        draws = made.draw(4)
        assert {index_of(d) for d in draws[:2]} == {index_of(d) for d in draws[2:]} == bucket


def test_buckets_of_unequal_size_hold_every_prompt_once(folder: Path) -> None:
    made = stream(folder, "eight.jsonl", curriculum=EasyToHardCurriculum(column="level", buckets=3, steps=3))
    found: list[int] = []
    for step, size in ((1, 3), (2, 3), (3, 2)):
        made.at(step)
        found += [index_of(d) for d in made.draw(size)]
    assert sorted(found) == list(range(8))


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("eight.jsonl", {"column": "levle"}, r"row eight\.jsonl/0 has no column 'levle'.*did you mean 'level'"),
        (
            "odd.jsonl",
            {"column": "level", "buckets": 2},
            r"row odd\.jsonl/1: column 'level' should be a number.*'hard'",
        ),
        ("eight.jsonl", {"column": "level", "buckets": 9}, "8 prompts cannot fill 9 buckets"),
    ],
)
def test_a_difficulty_that_cannot_order_the_prompts_is_an_error(
    folder: Path, file: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        stream(folder, file, curriculum=EasyToHardCurriculum(**options))


# --- hard only ---------------------------------------------------------------------------------------------------------


def test_annealing_takes_the_prompts_that_were_hard_when_it_began(folder: Path) -> None:
    made = stream(folder, "eight.jsonl", curriculum=HardOnlyCurriculum(start=2))
    draws = made.draw(6)
    unseen = set(range(8)) - {index_of(d) for d in draws}
    right = [index_of(d) for d in draws][:3]
    assert seen(draws) == [(f"eight.jsonl/{i}", 0) for i in permutation(8, 0, "eight.jsonl", 0)[:6]]
    made.observe(answers(draws, right))
    hard = set(range(8)) - unseen - set(right)
    for step in (2, 3):
        made.at(step)
        draws = made.draw(6)
        assert {index_of(d) for d in draws[:3]} == {index_of(d) for d in draws[3:]} == hard
        made.observe(answers(draws, range(8)))  # solving them now does not change what was hard


@pytest.mark.parametrize(("right", "is_hard"), [(3, True), (4, False)])
def test_hard_is_less_than_four_of_sixty_four(folder: Path, right: int, is_hard: bool) -> None:
    made = stream(folder, "four.jsonl", curriculum=HardOnlyCurriculum(start=2))
    state = made.state()
    state["statistics"] = {"four.jsonl/0": [0.0, 4, right, 64], "four.jsonl/1": [0.0, 1, 0, 8]}
    made.restore(state)
    made.at(2)
    assert ("four.jsonl/0" in {d.prompt.row.id for d in made.draw(10)}) is is_hard


def test_a_source_with_nothing_hard_gives_its_share_to_the_others(folder: Path) -> None:
    made = stream(folder, "four.jsonl", "eight.jsonl", curriculum=HardOnlyCurriculum(start=3))
    draws = made.draw(40)
    made.observe(answers([d for d in draws if d.prompt.row.data_source == "four.jsonl"], range(4)))
    made.observe(answers([d for d in draws if d.prompt.row.data_source == "eight.jsonl"], range(7)))
    made.at(3)
    assert {d.prompt.row.id for d in made.draw(10)} == {"eight.jsonl/7"}


def test_annealing_with_nothing_hard_at_all_stops_and_says_so(folder: Path) -> None:
    made = stream(folder, "four.jsonl", curriculum=HardOnlyCurriculum(start=2))
    made.observe(answers(made.draw(4), range(4)))
    made.at(2)
    with pytest.raises(UserError, match="step 2: no prompt was hard enough"):
        made.draw(1)


# --- all of them -------------------------------------------------------------------------------------------------------

RECORDS = [
    PrioritisedCurriculum(warmup_steps=2, ema=0.3),
    EasyToHardCurriculum(column="level", buckets=3, steps=5, warmup_steps=1),
    HardOnlyCurriculum(start=4),
]


def name(record: Any) -> str:
    return str(record.name)


def one_step(made: PromptStream, step: int, size: int) -> list[tuple[str, int]]:
    made.at(step)
    draws = made.draw(size)
    made.observe(answers(draws, [(step + k) % 5 for k in range(3)]))
    return seen(draws)


@pytest.mark.parametrize("record", RECORDS, ids=name)
@settings(max_examples=10)
@given(cut=st.integers(0, 8), size=st.integers(6, 9), seed=st.integers(0, 3))
def test_a_stream_restored_in_a_curriculum_goes_on_as_the_unbroken_one(
    folder: Path, record: Any, cut: int, size: int, seed: int
) -> None:
    files = ("eight.jsonl", "long.jsonl")
    unbroken = stream(folder, *files, seed=seed, curriculum=record, max_prompt_tokens=4)
    for step in range(1, cut + 1):
        one_step(unbroken, step, size)
    saved = json.loads(json.dumps(unbroken.state()))
    restored = stream(folder, *files, seed=seed, curriculum=record, max_prompt_tokens=4)
    one_step(restored, 1, 3)  # its earlier state must not matter
    restored.restore(saved)
    for step in range(cut + 1, 10):
        assert one_step(restored, step, size) == one_step(unbroken, step, size)
    assert restored.state() == unbroken.state()


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_the_sizes_of_draws_do_not_matter_and_no_visit_is_drawn_twice(folder: Path, record: Any) -> None:
    whole, single = (
        stream(folder, "eight.jsonl", "long.jsonl", seed=2, curriculum=record, max_prompt_tokens=4) for _ in range(2)
    )
    drawn: list[tuple[str, int]] = []
    for step in range(1, 9):
        whole.at(step)
        single.at(step)
        draws = whole.draw(6)
        assert seen(draws) == seen([single.draw(1)[0] for _ in range(6)])
        for made in (whole, single):
            made.observe(answers(draws, (0, 1, 2, 4)))
        drawn += seen(draws)
        assert all(len(d.prompt.tokens) <= 4 for d in draws)  # over-long ones are never chosen
    for prompt_id in {row for row, _ in drawn}:
        numbers = [visit for row, visit in drawn if row == prompt_id]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_another_seed_draws_otherwise(folder: Path, record: Any) -> None:
    def drawn(seed: int) -> list[tuple[str, int]]:
        made = stream(folder, "eight.jsonl", seed=seed, curriculum=record)
        one_step(made, 1, 8)
        return one_step(made, 4, 20)

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)


@pytest.mark.parametrize("record", RECORDS, ids=name)
def test_curricula_refuse_what_they_cannot_work_with(folder: Path, record: Any) -> None:
    with pytest.raises(UserError, match=r"sort_digits is an endless generated task.*set the source's limit"):
        PromptStream([Source(task="sort_digits")], TOKENIZER, Data(), 0, curriculum=record)
    with pytest.raises(UserError, match=r"data\.sampler=sequential would have no effect"):
        stream(folder, "eight.jsonl", curriculum=record, sampler="sequential")


@pytest.mark.parametrize("record", [RECORDS[0], RECORDS[2]], ids=name)
def test_a_reward_that_never_says_right_or_wrong_is_refused(folder: Path, record: Any) -> None:
    made = stream(folder, "four.jsonl", curriculum=record)
    made.observe([Trajectory("four.jsonl/0", 0, 0, [], "stop", "", None, None)])  # a failed scorer gives no verdict
    with pytest.raises(UserError, match="no part of the reward tells right from wrong"):
        made.observe([Trajectory("four.jsonl/0", 0, 0, [], "stop", "", 0.5, None)])
    late = Trajectory("four.jsonl/1", 0, 0, [], "stop", "", 0.0, 0.0, metadata={"timed_out": True})
    made.observe([late])  # of a verifier whose every call was too slow
    with pytest.raises(
        UserError, match="no part of the reward tells right from wrong"
    ):  # a call that times out is no verdict
        made.observe([Trajectory("four.jsonl/0", 0, 0, [], "stop", "", 0.5, None), late])


@pytest.mark.parametrize("record", [None, NoCurriculum(), RECORDS[1]])
def test_nothing_is_kept_that_no_curriculum_reads(folder: Path, record: Any) -> None:
    made = stream(folder, "eight.jsonl", curriculum=record)
    made.observe(answers(made.draw(4), (0,)))
    assert made.state()["statistics"] == {}


def test_records_are_told_apart_by_name_and_refuse_what_makes_no_sense() -> None:
    slot = TypeAdapter(CurriculumSlot)
    assert [slot.validate_python(r.model_dump()) for r in RECORDS] == RECORDS
    assert slot.validate_python("prioritised") == PrioritisedCurriculum()
    assert {r.model_fields["name"].default for r in CURRICULUM_RECORDS} == {
        "none",
        "prioritised",
        "easy_to_hard",
        "hard_only",
    }
    with pytest.raises(ValidationError, match="leaves no step for some of the 4 buckets"):
        EasyToHardCurriculum(column="level", buckets=4, steps=3)
