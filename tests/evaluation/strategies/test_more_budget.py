"""Budget with a perfect verifier brings the answer, with a model from nothing: more samples never lose, and MCTS finds the answer."""

from __future__ import annotations

import string
from collections.abc import Sequence

import pytest

from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.core.engine import SamplingOptions
from burnish.data.prompt_stream import PromptSample, validation_prompts
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.evaluate import sample_and_score
from burnish.evaluation.result import Row
from burnish.evaluation.strategies import verifiers
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_record
from burnish.models.policy import PolicyModel, load_policy
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards

SIZES = (1, 8, 64)


def random_policy(alphabet: str) -> PolicyModel:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=512)
    return load_policy(Model(new=new, dtype="float32", device="cpu"), None, alphabet, seed=0)


@pytest.mark.parametrize(
    ("task", "options", "max_tokens"),
    [("sort_digits", {"min_digits": 2, "max_digits": 2}, 3), ("reasoning-gym/letter_counting", {}, 1)],
)
def test_best_of_n_by_the_key_never_loses_by_more_samples(task: str, options: dict[str, int], max_tokens: int) -> None:
    if task.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym", reason="needs the extra [tasks]")
    policy = random_policy("0123456789>" if task == "sort_digits" else string.printable)
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


class PerfectValues:
    """Scores the beginning of the answer by its share of the answer, and any other text by 0, in this process."""

    def __init__(self) -> None:
        self.scores: list[Score] = []

    @property
    def pending(self) -> int:
        return len(self.scores)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        for one in requests:
            is_right_so_far = str(one.answer).startswith(one.completion)
            value = len(one.completion) / len(str(one.answer)) if is_right_so_far else 0.0
            self.scores.append(Score(one.id, value, None))

    def poll(self, timeout_s: float | None) -> list[Score]:
        found, self.scores = self.scores, []
        return found

    def close(self) -> None:
        self.scores.clear()


@pytest.mark.parametrize("seed", range(4))
def test_mcts_with_a_perfect_value_finds_the_answer_that_samples_rarely_have(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A random model writes the three sorted digits once in thousands of samples, and the next right character once in about twelve."""
    monkeypatch.setattr(verifiers, "_scored", lambda reward, tokenizer, base: PerfectValues())
    policy = random_policy("0123456789>")
    source = Source(task="sort_digits", options={"min_digits": 3, "max_digits": 3})
    prompts = validation_prompts([source], policy.tokenizer, Data(), seed, 4)
    engine = build_engine(policy, Rollout(max_rows=256))
    sampling = SamplingOptions(max_tokens=4, stop_tokens=policy.tokenizer.eos_ids)
    answers = {prompt.row.id: prompt.row.answer for prompt in prompts}

    def found(strategy: str, **options: object) -> tuple[list[bool], int]:
        """Whether the strategy finds the answer of each question, and its tokens for a question."""
        record = strategy_record(strategy, verifier={"name": "oracle"}, **options)
        runner = build_search_runner(record, policy, engine, Reward(workers=1), [p.row for p in prompts], seed)
        ended = list(runner.run([PromptSample(prompt, 0) for prompt in prompts], 1, sampling, "eval"))
        is_right = [t.completion == answers[t.prompt_id] for t in ended]
        return is_right, sum(t.metadata["search"]["tokens"] for t in ended) // len(ended)

    steps = {"step": None, "step_tokens": 1, "simulations": 64, "children": 64, "backup": "max"}
    by_search, num_tokens = found("mcts", **steps)
    by_samples, num_sampled = found("best_of_n", n=128)
    assert all(by_search)
    assert not any(by_samples)
    assert num_sampled > num_tokens
