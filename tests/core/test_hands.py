"""Threads side by side: who does what, in which order, under which settings."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from burnish.core.hands import Hands


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_results_are_in_order_and_every_hand_takes_its_items_in_theirs() -> None:
    taken: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def square(hand: int, item: int) -> int:
        taken[hand].append(item)
        return item * item

    assert Hands(3).map(square, list(range(8))) == [i * i for i in range(8)]
    assert taken == {0: [0, 3, 6], 1: [1, 4, 7], 2: [2, 5]}


def test_hands_work_at_the_same_time() -> None:
    """Neither passes the barrier before the other has come to it."""
    meeting = threading.Barrier(2, timeout=30)
    assert sorted(Hands(2).map(lambda hand, _: meeting.wait() * 0 + hand, ["a", "b"])) == [0, 1]


def test_each_hand_has_its_share_of_the_threads_and_they_come_back() -> None:
    assert Hands(2).map(lambda *_: torch.get_num_threads(), [0, 0]) == [2, 2]
    assert torch.get_num_threads() == 4
    assert Hands(8).map(lambda *_: torch.get_num_threads(), [0] * 8) == [1] * 8
    assert Hands(8).map(lambda *_: torch.get_num_threads(), [0]) == [4]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system does not say which cores a thread may use"
)
def test_each_hand_has_cores_of_its_own_and_they_come_back() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is one core")
    torch.set_num_threads(2)
    first, second = Hands(2).map(lambda *_: os.sched_getaffinity(0), [0, 0])
    assert not first & second
    assert first | second == before
    assert os.sched_getaffinity(0) == before
    many = len(before) + 1
    assert Hands(many).map(lambda *_: os.sched_getaffinity(0), [0] * many) == [before] * many
    torch.set_num_threads(4)
    assert Hands(2).map(lambda *_: os.sched_getaffinity(0), [0, 0]) == [before] * 2


def test_hands_compute_with_or_without_gradient_as_the_caller_does() -> None:
    def modes(hand: int, item: int) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    hands = Hands(2)
    assert hands.map(modes, [0, 0]) == [(True, False)] * 2
    with torch.no_grad():
        assert hands.map(modes, [0, 0]) == [(False, False)] * 2
    with torch.inference_mode():
        assert hands.map(modes, [0, 0]) == [(False, True)] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_raised_when_all_have_ended(failing: int) -> None:
    ended = []

    def work(hand: int, item: int) -> None:
        if hand == failing:
            raise ValueError("this one")
        time.sleep(0.05)
        ended.append(hand)

    with pytest.raises(ValueError, match="this one"):
        Hands(2).map(work, [0, 0])
    assert ended == [1 - failing]
    assert torch.get_num_threads() == 4
