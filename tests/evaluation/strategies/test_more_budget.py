"""More budget with a perfect verifier never lowers a score: the sort task and a task of reasoning-gym, with a model from nothing."""

from __future__ import annotations

import string

import pytest

from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.core.engine import SamplingOptions
from burnish.data.prompt_stream import validation_prompts
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.evaluate import sample_and_score
from burnish.evaluation.result import Row
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_record
from burnish.models.policy import load_policy
from burnish.rewards.scoring import Rewards

SIZES = (1, 8, 64)


@pytest.mark.parametrize(
    ("task", "options", "max_tokens"),
    [("sort_digits", {"min_digits": 2, "max_digits": 2}, 3), ("reasoning-gym/letter_counting", {}, 1)],
)
def test_best_of_n_by_the_key_never_loses_by_more_samples(task: str, options: dict[str, int], max_tokens: int) -> None:
    if task.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym", reason="needs the extra [tasks]")
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=512)
    alphabet = "0123456789>" if task == "sort_digits" else string.printable
    policy = load_policy(Model(new=new, dtype="float32", device="cpu"), None, alphabet, seed=0)
    source = Source(task=task, options=options)
    prompts = validation_prompts([source], policy.tokenizer, Data(max_prompt_tokens=400), 0, 12)
    reward = Reward(parts=[RewardPart(name="task")], workers=1)
    sampling = SamplingOptions(max_tokens=max_tokens, stop_tokens=policy.tokenizer.eos_ids)
    engine, scores = build_engine(policy, Rollout(max_rows=256)), []
    for n in SIZES:
        record = strategy_record("best_of_n", n=n, verifier={"name": "oracle"})
        runner = build_search_runner(record, policy, engine, reward, [p.row for p in prompts], seed=0)
        rows: list[Row] = []
        with Rewards(reward) as rewards:
            sample_and_score(runner, rewards, prompts, 1, sampling, lambda text: None, rows.extend, reward.parts)
        runner.close()
        scores.append({row["id"]: row["reward"] for row in rows})
    for fewer, more in zip(scores, scores[1:], strict=False):
        assert all(more[question] >= fewer[question] for question in fewer)
    assert sum(scores[-1].values()) > sum(scores[0].values())
