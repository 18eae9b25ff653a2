"""A judge behind our own server: the reward part `judge` asks a model that `burnish serve` answers with."""

from __future__ import annotations

from typing import Any

from burnish.config.data import Reward
from burnish.rewards.judge.options import TEMPLATE, fill_template
from burnish.rewards.scoring import Rewards
from burnish.rewards.types import ScoreRequest


def test_a_served_model_judges(script_server: Any) -> None:
    question = fill_template(TEMPLATE, "6 x 7?", "42", "42")
    prompt = script_server.tokenizer.chat([{"role": "user", "content": question}])
    said = 'Both are 42.\n{"correct": true}'
    script = [*script_server.tokenizer.encode(said), script_server.tokenizer.eos_ids[0]]
    script_server.model.say(script, after=len(prompt))
    options = {"url": script_server.url, "model": script_server.name, "max_tokens": 64}
    with Rewards(Reward(parts=[{"name": "judge", "options": options}])) as rewards:
        (score,) = rewards.score([ScoreRequest("a", "6 x 7?", "42", "s", "42", {})])
    assert (score.reward, score.error) == (1.0, None)
    assert score.details["judge"] == said


def test_a_name_the_server_does_not_know_is_a_failure_that_says_so(script_server: Any) -> None:
    with Rewards(Reward(parts=[{"name": "judge", "options": {"url": script_server.url, "model": "other"}}])) as rewards:
        (score,) = rewards.score([ScoreRequest("a", "6 x 7?", "42", "s", "42", {})])
    assert score.reward is None
    assert score.error is not None
    assert "answered 404" in score.error
