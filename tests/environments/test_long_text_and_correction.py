"""MemAgent reads a text in sections and rewrites its memory; self-correction pays for what the second attempt changes."""

from __future__ import annotations

import pytest

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.host import run_now
from burnish.environments.mem_agent import NO_MEMORY, MemAgent, split_text
from burnish.environments.self_correction import SelfCorrection


def answer(text: str, turn: int) -> Answer:
    return Answer(text, text, "stop", 1, turn)


def test_the_model_reads_each_section_once_with_its_own_memory_and_then_the_problem() -> None:
    text = "alpha beta gamma delta epsilon zeta"
    game = MemAgent(chunk_chars=12)
    sections = split_text(text, 12)
    assert " ".join(sections) == text
    assert all(len(section) <= 12 for section in sections)
    seen = run_now(game.start(Episode("r#0.0", 0, "Which letter?", extra={"context": text})))
    for turn, section in enumerate(sections):
        assert isinstance(seen, Observation)
        assert seen.new_conversation == (turn > 0)
        assert seen.messages is not None
        prompt = seen.messages[0]["content"]
        assert section in prompt
        assert (NO_MEMORY if turn == 0 else f"note {turn - 1}") in prompt
        seen = run_now(game.step(answer(f"note {turn}", turn)))
    assert isinstance(seen, Observation)
    assert seen.messages is not None
    last = seen.messages[0]["content"]
    assert f"note {len(sections) - 1}" in last
    assert not any(section in last for section in sections)
    end = run_now(game.step(answer("beta", len(sections))))
    assert isinstance(end, End)
    assert end.reward is None  # the configured reward scores the answer
    with pytest.raises(UserError, match="no text in column 'context'"):
        run_now(MemAgent().start(Episode("r#0.0", 0, "?")))


@pytest.mark.parametrize(
    ("first", "second", "reward"),
    [("5", "7", 1 + 10), ("7", "7", 1.0), ("7", "5", -10.0), ("5", "6", 0.0)],
)
def test_a_correction_earns_the_second_value_and_ten_times_the_change(first: str, second: str, reward: float) -> None:
    game = SelfCorrection(verifier="number")
    run_now(game.start(Episode("r#0.0", 0, "3 + 4?", answer=7)))
    assert isinstance(run_now(game.step(answer(first, 0))), Observation)
    end = run_now(game.step(answer(second, 1)))
    assert isinstance(end, End)
    assert end.reward == reward
    assert end.success == (second == "7")
    assert end.metrics["corrected"] == float(reward == 11)
