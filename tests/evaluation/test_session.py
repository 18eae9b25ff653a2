"""What an evaluation checks and plans before it samples: batch size, KV cache, and strategies that fit the data and the verifier."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from burnish.config.environment import Environment
from burnish.config.errors import UserError
from burnish.core.engine import SamplingOptions
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.evaluation.output_paths import OutputPaths
from burnish.evaluation.session import (
    MAX_ROWS,
    WORK_BYTES,
    EvalJob,
    PreparedEval,
    check_votes,
    most_new_tokens,
    plan_batch_size,
)
from burnish.evaluation.settings import load_settings
from burnish.evaluation.strategies.registry import PLUGIN_WIDTH, strategy_verifier
from burnish.evaluation.strategies.verifiers import check_steps, step_delimiter
from burnish.memory_plan.kv_cache import BLOCK_SIZE, GIB

TOKEN = 28_672  # KV-cache bytes per token of a 1.5B model


def test_a_large_device_takes_all_of_gsm8k_at_once() -> None:
    rows, size = plan_batch_size(1319, 250, 1024, TOKEN, 130 * GIB)
    assert rows == 1344  # whole tiles
    assert size == (1344 * 1280 + BLOCK_SIZE) * TOKEN  # every row at its longest, and one block that no row has
    assert size < 130 * GIB - WORK_BYTES


def test_few_requests_take_no_more_than_they_need() -> None:
    assert plan_batch_size(30, 250, 1024, TOKEN, 130 * GIB) == (30, (30 * 1280 + BLOCK_SIZE) * TOKEN)


def test_more_requests_than_a_step_gains_from_wait_their_turn() -> None:
    assert plan_batch_size(100_000, 50, 100, TOKEN, 130 * GIB).rows == MAX_ROWS


def test_long_answers_share_the_cache_at_half_of_their_length() -> None:
    rows, size = plan_batch_size(1319, 250, 8192, TOKEN, 130 * GIB)
    assert size == int(130 * GIB * 0.85)
    assert rows == int(130 * GIB * 0.85) // ((250 + 4096) * TOKEN)


def test_a_small_device_keeps_room_to_work() -> None:
    rows, size = plan_batch_size(1319, 250, 1024, TOKEN, 6 * GIB)
    assert size == int(6 * GIB * 0.4)
    assert rows == size // ((250 + 512) * TOKEN)
    assert plan_batch_size(10, 250, 100_000, TOKEN, GIB).rows == 1  # the engine reports what does not fit


def test_a_context_of_an_episode_may_grow_to_its_limit_and_not_only_by_answers() -> None:
    assert most_new_tokens(100, 256, Environment(), 4096) == 256
    tools = Environment(name="search_r1", max_turns=3, max_tokens=4096)
    assert most_new_tokens(100, 256, tools, 32768) == 4096 - 100
    assert most_new_tokens(100, 256, tools, 2048) == 2048 - 100
    game = Environment(name="frozen_lake", max_turns=5)
    assert most_new_tokens(4, 256, game, 32768) == 2 * 5 * 256  # the board is not in the row
    assert most_new_tokens(4, 256, game, 512) == 508
    assert most_new_tokens(4, 256, game, None) == 2 * 5 * 256


def prepared(num_prompts: int, *overrides: str) -> PreparedEval:
    config = load_settings("task:sort_digits", {"sampling.temperature": 1.0}, overrides, {}).config
    job = EvalJob(OutputPaths("d", Path("d.jsonl")), config, Path(), {})
    prompts = [Prompt(Row(str(k), "1", "d", "1"), "1", [1]) for k in range(num_prompts)]
    return PreparedEval(job, prompts, SamplingOptions(max_tokens=4))


def test_rows_are_planned_for_all_requests_that_the_searches_have_at_once() -> None:
    assert prepared(8, "sampling.n=2").num_requests == 16
    assert prepared(8, "strategy=mcts").num_requests == 8 * 16
    assert prepared(8, "strategy={name: revise, chains: 3}", "sampling.n=2").num_requests == 48
    assert prepared(8, "strategy=own.py:search").num_requests == 8 * PLUGIN_WIDTH


def vote(strategy: str, reward: str) -> None:
    one = prepared(2, f"strategy={strategy}", reward)
    assert one.job.config.strategy is not None
    check_votes(one.job.config.strategy, one)


CODE, GRADED = 'reward.parts=[{name: "code"}]', "reward.parts=[{name: model, options: {path: m}}]"


@pytest.mark.parametrize(
    ("strategy", "reward", "kinds"),
    [
        ("majority", CODE, r"\(code\)"),
        ("weighted_vote", GRADED, r"\(a graded reward\)"),
        ("early_stopping", "reward.parts=ifeval", r"\(ifeval\)"),
        ("rebase", CODE, r"\(code\)"),
        ("{name: revise, chains: 2}", CODE, r"\(code\)"),
        ("{name: budget_forcing, n: 2}", CODE, r"\(code\)"),
        ("by_difficulty", CODE, r"\(code\)"),
    ],
)
def test_a_vote_on_answers_that_cannot_be_compared_is_refused(strategy: str, reward: str, kinds: str) -> None:
    with pytest.raises(UserError, match=rf"d: strategy .* votes on equal answers.*{kinds}.*best_of_n with a verifier"):
        vote(strategy, reward)


@pytest.mark.parametrize(
    ("strategy", "reward"),
    [
        ("majority", "reward.parts=math"),
        ("majority", 'reward.parts=[{name: "code", sources: [other]}, {name: "number"}]'),
        ("{name: majority, n: 1}", CODE),
        ("best_of_n", CODE),
        ("{name: rebase, choose: best}", CODE),
        ("revise", CODE),
        ("budget_forcing", CODE),
        ("{name: by_difficulty, predict: score, levels: [{strategy: best_of_n}]}", CODE),
        ("own.py:search", CODE),
    ],
)
def test_a_strategy_without_a_vote_or_with_comparable_answers_is_not_refused(strategy: str, reward: str) -> None:
    vote(strategy, reward)


STEP_SCORER = "verifier: {name: model, options: {path: scorer}}"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (f"{{name: beam_search, {STEP_SCORER}}}", r"with '\\n\\n' \(strategy.step\).*steps that end with ';'"),
        (f"{{name: rebase, step: null, step_tokens: 8, {STEP_SCORER}}}", r"after step_tokens alone .*end with ';'"),
        (f"{{name: by_difficulty, levels: [{{strategy: dvts}}], {STEP_SCORER}}}", r"dvts: .*end with ';'"),
        (f'{{name: mcts, step: ";", {STEP_SCORER}}}', None),
        (f"{{name: mcts, value: rollout, {STEP_SCORER}}}", None),  # which scores finished answers alone
        (f"{{name: best_of_n, {STEP_SCORER}}}", None),
    ],
)
def test_a_search_has_the_steps_that_its_reward_model_was_trained_on(
    tmp_path: Path, strategy: str, said: str | None
) -> None:
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "config.json").write_text("{}")
    (tmp_path / "scorer" / "steps.json").write_text('{"delimiter": ";"}')
    chosen = prepared(1, f"strategy={strategy}").job.config.strategy
    assert chosen is not None
    part = strategy_verifier(chosen)
    assert part is not None
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        check_steps(chosen, step_delimiter(part, tmp_path))
