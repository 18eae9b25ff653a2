"""Environments with skyrl-gym's interface: a plain class here, the user file and the package's own where it is installed."""

import importlib.util
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters.skyrl_gym import SkyRLGymEnvironment
from burnish.environments.base import End
from tests.environments.adapters.episodes import USER_FILES, contents, episode, play, rewards


def sky(target: str = "sky_plain.py:Echo", **options: Any) -> SkyRLGymEnvironment:
    return SkyRLGymEnvironment(target=target, base=USER_FILES, **options)


def test_rewards_are_of_turns_and_metrics_come_at_the_end():
    row = episode(reward_spec={"ground_truth": "odd"}, max_turns=3)
    seen = play(sky(max_turns=9), row, "even", "odd")
    assert contents(seen[0]) == ["Go.", "At most 3 turns."]  # the row comes before the option
    assert contents(seen[1]) == ["You said even."]
    assert rewards(seen) == [0.1, 0.2]
    assert seen[2] == End(reward=0.2, metrics={"turns": 2.0, "num_answers": 2.0})


def test_answer_of_a_row_becomes_the_ground_truth():
    seen = play(sky(max_turns=2), episode(answer="yes"), "yes")
    assert contents(seen[0]) == ["Go.", "At most 2 turns."]
    assert isinstance(seen[1], End)


def test_postprocessed_action_is_refused_unless_it_is_the_answer():
    row = episode(answer="x", max_turns=2)
    assert contents(play(sky(env_config={"cut": 10}), row, "abcdef")[1]) == ["You said abcdef."]
    with pytest.raises(UserError, match=r"postprocessed_action that is not the model's answer.*wrong log-probs"):
        play(sky(env_config={"cut": 3}), row, "abcdef")


def test_row_without_a_class_is_an_error():
    with pytest.raises(UserError, match="rows with a column env_class"):
        play(SkyRLGymEnvironment(), episode())


@pytest.mark.skipif(importlib.util.find_spec("skyrl_gym") is not None, reason="skyrl-gym is installed")
def test_missing_package_is_named():
    with pytest.raises(UserError, match=r"No module named 'skyrl_gym'.*pip install skyrl-gym"):
        sky("sky_env.py:Parity")
    with pytest.raises(UserError, match="'gsm8k' needs the package 'skyrl-gym'"):
        play(SkyRLGymEnvironment("gsm8k"), episode())


def test_user_file_runs_with_the_package():
    pytest.importorskip("skyrl_gym")
    row = episode(reward_spec={"ground_truth": "odd"})
    seen = play(sky("sky_env.py:Parity"), row, "Even.", "It is odd.")
    assert contents(seen[0]) == ["Go."]
    assert contents(seen[1]) == ["No. Even or odd?"]
    assert seen[2] == End(reward=1.0)


def test_gsm8k_of_the_package():
    pytest.importorskip("skyrl_gym")
    row = episode(reward_spec={"ground_truth": "18"}, env_class="gsm8k")
    seen = play(SkyRLGymEnvironment(), row, "It is\n#### 18")
    assert isinstance(seen[1], End)
    assert seen[1].reward == 1.0
