"""MemAgent rewrites its memory section by section; self-correction pays for the second attempt; a prover reads the checker's message."""

from __future__ import annotations

import pytest

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.host import run_now
from burnish.environments.mem_agent import NO_MEMORY, MemAgent, split_text
from burnish.environments.prove import Prove
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


def test_a_prover_reads_the_reason_tries_again_and_earns_less_for_a_repair() -> None:
    game = Prove(discount=0.5)
    for num_failed in (0, 1, 2):  # the object is started again for each episode
        assert run_now(game.start(Episode("r#0.0", 0, "?", answer="p & q |- p"))).messages is None
        for turn in range(num_failed):
            seen = run_now(game.step(answer("<proof>1 p & q given\n2 q left 1</proof>", turn)))
            assert isinstance(seen, Observation)
            assert seen.messages is not None
            assert "The proof is wrong. Line 2: `left` gives p. Write" in seen.messages[0]["content"]
            assert seen.state == "line 2: `left` gives p"
        end = run_now(game.step(answer("<proof>1 p & q given\n2 p left 1</proof>", num_failed)))
        assert isinstance(end, End)
        assert (end.reward, end.success) == (0.5**num_failed, True)
        assert end.metrics == {"proved_first": float(num_failed == 0), "repaired": float(num_failed > 0)}
    run_now(game.start(Episode("r#0.0", 0, "?", answer="p & q |- p")))
    unproved = run_now(game.end("turns"))
    assert (unproved.reward, unproved.success) == (0.0, False)
    for options in ({"discount": 0.0}, {"prompt": "again"}):
        with pytest.raises(UserError, match="environment prove"):
            Prove(**options)
