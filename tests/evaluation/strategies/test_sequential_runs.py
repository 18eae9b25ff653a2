"""The sequential strategies on the native engine, from a config's record to trajectories."""

from __future__ import annotations

import pytest

from burnish.config.data import Data, Reward, RewardPart, Source, Template
from burnish.config.errors import UserError
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample, validation_prompts
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_record
from burnish.models.policy import PolicyModel, load_policy
from burnish.models.tokenizer import Tokenizer
from tests.evaluation.strategies.toy import TURNS

ALPHABET = "0123456789>. <:again"
BUDGET = 60
FORCED = {"name": "budget_forcing", "wait": "again", "think_end": "9", "answer_prompt": ":", "answer_tokens": 3}
STRATEGIES = {
    "revise": {"rounds": 3, "chains": 2, "request": "again", "choose": "best"},
    "budget_forcing": FORCED | {"n": 2, "max_thinking": 8, "waits": 2},
    "early_stopping": {"n": 6, "window": 2, "rule": "unanimous"},
    "by_difficulty": {"probe": 2, "levels": [{"at_least": 0.9, "strategy": "majority"}, {"strategy": FORCED}]},
}


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    """A tiny random decoder whose character tokenizer has a chat template."""
    alphabet = "".join(dict.fromkeys(ALPHABET))
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=96)
    plain = load_policy(Model(new=new, dtype="float64", device="cpu"), None, alphabet, seed=1)
    return PolicyModel(plain.module, Tokenizer.from_characters(alphabet, chat_template=TURNS), None, "chat")


@pytest.fixture(scope="module")
def prompts(policy: PolicyModel) -> list[Prompt]:
    return validation_prompts([Source(task="sort_digits")], policy.tokenizer, Data(), 0, 5)


def solved(policy: PolicyModel, prompts: list[Prompt], name: str, rows: int = 256) -> list[Trajectory]:
    """The chosen answers of a strategy, in the order of the questions."""
    record = strategy_record(name, **{key: value for key, value in STRATEGIES[name].items() if key != "name"})
    reward = Reward(parts=[RewardPart(name="exact")])
    engine = build_engine(policy, Rollout(max_rows=rows))
    runner = build_search_runner(
        record, policy, engine, reward, [p.row for p in prompts], seed=3, budget=BUDGET, keep_trees=True
    )
    sampling = SamplingOptions(max_tokens=20, stop_tokens=policy.tokenizer.eos_ids)
    try:
        found = runner.run([PromptSample(prompt, 0) for prompt in prompts], 1, sampling, "eval")
        return sorted(found, key=lambda trajectory: trajectory.prompt_id)
    finally:
        runner.close()


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_answers_all_questions_within_the_budget_whatever_runs_at_once(
    policy: PolicyModel, prompts: list[Prompt], name: str
) -> None:
    first, second = (solved(policy, prompts, name, rows) for rows in (256, 2))
    assert [one.prompt_id for one in first] == sorted(prompt.row.id for prompt in prompts)
    assert [one.error for one in first] == [None] * 5
    for one, other in zip(first, second, strict=True):
        costs, tree = one.metadata["search"], one.metadata["search"]["tree"]
        assert costs["tokens"] == sum(node["tokens"] for node in tree if node["sampled"] and "reopens" not in node)
        assert 0 < costs["tokens"] <= BUDGET
        assert [node.tokens.tolist() for node in one.nodes] == [node.tokens.tolist() for node in other.nodes]
        assert costs | {"wall_s": 0} == other.metadata["search"] | {"wall_s": 0}


def test_a_revised_answer_has_the_conversation_as_its_prompt(policy: PolicyModel, prompts: list[Prompt]) -> None:
    found = solved(policy, prompts, "revise")
    revised = [one for one in found if one.metadata["prompt_length"] > len(prompts[0].start) + 5]
    assert revised, "no later answer was chosen"
    for one in revised:
        text = policy.tokenizer.decode(one.nodes[0].tokens.tolist(), skip_special=False)
        assert text.startswith("<")
        assert text.endswith("<eos><again>:")
        assert one.completion == policy.tokenizer.decode(one.nodes[1].tokens.tolist())


def test_forced_thinking_has_log_probs_of_sampled_tokens_alone(policy: PolicyModel, prompts: list[Prompt]) -> None:
    wait, closing = (policy.tokenizer.encode(text) for text in ("again", "9:"))
    num_waits = num_cuts = 0
    for one in solved(policy, prompts, "budget_forcing"):
        written = [node.tokens.tolist() for node in one.nodes[1:] if node.logp is None]
        assert all(tokens in (wait, closing) for tokens in written)
        num_waits, num_cuts = num_waits + written.count(wait), num_cuts + written.count(closing)
    assert num_waits
    assert num_cuts


def test_a_plain_template_is_refused_before_anything_is_sampled(policy: PolicyModel, prompts: list[Prompt]) -> None:
    for record in (strategy_record("revise"), strategy_record("by_difficulty", levels=[{"strategy": "revise"}])):
        with pytest.raises(
            UserError, match="the strategy asks the model about its own answers, which needs a chat template"
        ):
            build_search_runner(
                record,
                policy,
                build_engine(policy, Rollout()),
                Reward(parts=[RewardPart(name="exact")]),
                [p.row for p in prompts],
                seed=0,
                template=Template(kind="plain"),
            )
