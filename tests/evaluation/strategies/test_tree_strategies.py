"""What all searches over steps have in common: budgets, determinism, economy, and a maze in which votes fail."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.errors import UserError
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.core.engine import Request, SamplingOptions
from burnish.data.prompt_stream import validation_prompts
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.evaluate import in_data_order, sample_and_score
from burnish.evaluation.result import Row
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.search import Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_runner import search_record, tree_record
from burnish.models.policy import PolicyModel, load_policy
from burnish.rewards.scoring import Rewards
from tests.evaluation.strategies.toy import solve

TREES: dict[str, dict[str, Any]] = {
    "beam": {"name": "beam_search", "n": 8, "beams": 2},
    "beam vote": {"name": "beam_search", "n": 8, "beams": 4, "choose": "vote"},
    "dvts": {"name": "dvts", "n": 8, "subtrees": 4},
    "rebase": {"name": "rebase", "n": 8},
    "mcts": {"name": "mcts", "simulations": 12, "children": 3},
    "mcts rollout": {
        "name": "mcts",
        "simulations": 10,
        "children": 3,
        "value": "rollout",
        "rollouts": 2,
        "choose": "vote",
    },
    "mcts visits": {
        "name": "mcts",
        "simulations": 12,
        "children": 3,
        "select": "uct",
        "backup": "max",
        "choose": "visits",
        "widening": 0.5,
    },
}
EACH = pytest.mark.parametrize("tree", TREES)


def run(tree: str, model: Any, **options: Any) -> tuple[Search, SearchProgram]:
    strategy = {"step": options.pop("step", ","), **TREES[tree]}
    return solve(strategy.pop("name"), model, **strategy, **options)


def letters(text: str) -> dict[str, float]:
    """Writes letters and commas, and ends at any place."""
    return {"1": 0.3, "2": 0.25, ",": 0.3, "$": 0.15}


def arbitrary(text: str) -> float:
    """A score of every text without any order in it."""
    return random.Random(text).random()


@EACH
@settings(max_examples=10, deadline=None)
@given(budget=st.integers(0, 150), seed=st.integers(0, 5))
def test_a_budget_is_never_exceeded_and_the_choice_is_what_there_is(tree: str, budget: int, seed: int) -> None:
    search, program = run(tree, letters, score=arbitrary, seed=seed, budget=budget, max_tokens=20)
    assert search.cost.tokens <= budget
    if not budget:
        assert program.error == "the budget is spent, and no answer was sampled"
        return
    assert program.choice is not None, program.error
    ended = [node for node in search.nodes if not node.is_open]
    assert program.choice.numbers["cut"] == (not ended)
    assert program.choice.node.is_open is (not ended)


@EACH
def test_a_budget_of_all_that_an_answer_may_need_gives_an_answer(tree: str) -> None:
    for seed in range(6):
        _, program = run(tree, letters, score=arbitrary, seed=seed, budget=100, max_tokens=20)
        assert program.choice is not None, program.error
        assert not program.choice.numbers["cut"]


@EACH
def test_open_paths_are_completed_with_the_last_tokens_of_the_budget(tree: str) -> None:
    """Steps of two tokens for ever: without the reserve, the budget would end all paths in the middle."""

    def forever(text: str) -> dict[str, float]:
        return {",": 1.0} if text[-1].isdigit() else {"1": 0.5, "2": 0.5}

    search, program = run(tree, forever, score=arbitrary, budget=90, max_tokens=16)
    assert program.choice is not None, program.error
    assert program.choice.node.end == "length"
    assert search.text(program.choice.node).count(",") == 8


@EACH
@pytest.mark.parametrize("budget", [None, 70])
def test_a_search_does_not_depend_on_the_order_of_completions_and_scores(tree: str, budget: int | None) -> None:
    records = []
    for shuffle in (None, 1, 2):
        search, program = run(tree, letters, score=arbitrary, budget=budget, max_tokens=20, shuffle=shuffle)
        records.append((search_record(program), tree_record(search, program.choice)))
    assert records[0] == records[1] == records[2]
    other, _ = run(tree, letters, score=arbitrary, budget=budget, max_tokens=20, seed=1)
    assert [other.text(node) for node in other.nodes] != [node["text"] for node in records[0][1]]


@EACH
def test_every_step_is_asked_for_once_and_children_share_their_context(tree: str) -> None:
    seen: list[Request] = []
    search, program = run(tree, letters, score=arbitrary, max_tokens=20, seen=seen)
    assert program.choice is not None, program.error
    assert (
        len({request.id for request in seen})
        == len({request.key for request in seen})
        == len(seen)
        == search.cost.requests
    )
    assert search.cost.context_tokens == sum(len(request.tokens) for request in seen)
    contexts: dict[int, tuple[int, ...]] = {}
    for request in seen:
        node = search.nodes[int(request.id.rpartition("/")[2])]
        assert node.parent is not None
        assert request.tokens is contexts.setdefault(node.parent.index, request.tokens)
        assert request.may_continue is (node.stop == (",",))
    texts = {(search.text(node), node.is_open) for node in search.nodes if node.score is not None}
    assert search.cost.scores == len(texts) or tree == "dvts"  # whose subtrees do not see one another


@EACH
def test_a_special_token_ends_steps_as_a_comma_would(tree: str) -> None:
    """The same model writes `<s>` in place of commas, and the tree is the same, node for node."""

    def special(text: str) -> dict[str, float]:
        return {"<s>" if name == "," else name: chance for name, chance in letters(text).items()}

    def score(text: str) -> float:
        return arbitrary(text.replace(",", ""))

    found = []
    for model, step in ((letters, ","), (special, "<s>")):
        search, program = run(tree, model, score=score, max_tokens=20, marks=["<s>"], step=step)
        nodes = tree_record(search, program.choice)
        texts = [node.get("step_text", node["text"]).replace(step, "|") for node in nodes]
        found.append((texts, search.cost.scores, [(n["parent"], n["tokens"], n["end"], n["score"]) for n in nodes]))
    assert found[0] == found[1]
    assert any(text.endswith("|") for text in found[0][0])


def test_steps_that_no_answer_can_end_with_are_refused() -> None:
    for step in ("a<s>", "<s>\n"):
        with pytest.raises(UserError, match=r"has the special token <s> beside a text, and never ends a step"):
            solve("beam_search", letters, marks=["<s>"], step=step)
    with pytest.raises(UserError, match="ends the whole answer"):
        solve("mcts", letters, step="<eos>")


def test_answers_that_end_within_their_first_step_are_no_measure_of_whole_answers() -> None:
    _, program = solve("beam_search", {"": ["1$", "a,"], "a,": ["2$", "3$"]}, score=len, n=2, beams=1, step=",")
    assert search_record(program)["tokens"] == 2 + 2 + 2 + 2
    assert "answer_tokens" not in search_record(program)


SUMS = (1, 3, 6, 0, 5, 1)


def careless(text: str) -> dict[str, float]:
    """Adds up 1 + 2 + 3 ... modulo 10, and is one too high at seven steps of ten."""
    done = text[1:].split(",")[:-1]
    if text[-1].isdigit():
        return {",": 1.0} if text.count(",") < len(SUMS) - 1 else {"$": 1.0}
    right = (int(done[-1] if done else 0) + len(done) + 1) % 10
    return {str(right): 0.3, str((right + 1) % 10): 0.7}


def num_right(text: str) -> int:
    """The number of steps before the first wrong one."""
    given = [int(step) for step in text.split(",") if step]
    return next((k for k, (step, right) in enumerate(zip(given, SUMS, strict=False)) if step != right), len(given))


def step_score(text: str) -> float:
    """A perfect process reward model: the share of steps that are done, or 0 if one of them is wrong."""
    return num_right(text) / len(SUMS) if num_right(text) == len([step for step in text.split(",") if step]) else 0.0


MAZE: dict[str, dict[str, Any]] = {
    "beam": {"n": 32},
    "beam vote": {"n": 64},
    "dvts": {"n": 64},
    "rebase": {"n": 64},
    "mcts": {"simulations": 64, "children": 8, "widening": 0.5},
    "mcts visits": {"simulations": 64, "children": 8},
}


@pytest.mark.parametrize("tree", MAZE)
def test_trees_find_the_answer_that_votes_of_samples_miss(tree: str) -> None:
    right = ",".join(map(str, SUMS))
    search, program = solve("majority", careless, kind="number", n=32)
    assert program.choice is not None
    assert search.answer(program.choice.node) != "1"
    assert right not in {search.text(node) for node in search.nodes}
    strategy = {"step": ",", **TREES[tree], **MAZE[tree]}
    search, program = solve(strategy.pop("name"), careless, kind="number", score=step_score, **strategy)
    assert program.choice is not None, program.error
    assert search.text(program.choice.node) == right


def test_rollouts_lead_to_the_answer_by_their_scores_alone() -> None:
    """The verifier sees finished answers only, and says how many of their steps are right."""
    options = {"step": ",", "value": "rollout", "simulations": 64, "children": 6, "widening": 0.5, "exploration": 0.5}
    search, program = solve("mcts", careless, score=lambda text: num_right(text) / len(SUMS), **options)
    assert program.choice is not None, program.error
    assert search.text(program.choice.node) == ",".join(map(str, SUMS))


def test_hard_questions_can_get_a_search_over_steps() -> None:
    levels = [
        {"at_least": 0.9, "strategy": {"name": "majority", "n": 4}},
        {"strategy": {"name": "beam_search", "n": 32, "beams": 2, "step": ","}},
    ]
    search, program = solve("by_difficulty", careless, kind="number", score=step_score, levels=levels)
    assert program.choice is not None, program.error
    assert search.text(program.choice.node) == ",".join(map(str, SUMS))
    assert program.choice.numbers["level"] == 1


# --- with a model and the native engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    return load_policy(Model(new=new, dtype="float64", device="cpu"), None, "0123456789>", seed=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base: Path = tmp_path_factory.mktemp("plugin")
    (base / "even.py").write_text(
        "def even(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) % 2 == 0\n"
        "def steps(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert ground_truth is None\n"
        "    return len(solution_str.split('4')) / 16\n"
    )
    return base


REWARD = Reward(parts=[RewardPart(name="even.py:even")], workers=1)


@pytest.fixture(scope="module")
def rewards(base: Path) -> Iterator[Rewards]:
    with Rewards(REWARD, base) as rewards:
        yield rewards


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [("beam", "even.py:steps"), ("dvts", "self_certainty"), ("rebase", "likelihood"), ("mcts rollout", "likelihood")],
)
def test_a_model_gets_one_row_for_each_question_whatever_runs_with_it(
    tree: str, verifier: str, policy: PolicyModel, base: Path, rewards: Rewards
) -> None:
    options = {"step": "4", **TREES[tree], "verifier": verifier}
    strategy = strategy_record(options.pop("name"), **options)
    prompts = validation_prompts([Source(task="sort_digits")], policy.tokenizer, Data(), 0, 5)
    sampling = SamplingOptions(max_tokens=12, stop_tokens=policy.tokenizer.eos_ids)
    measured: list[list[Row]] = []
    for max_rows in (256, 3):
        engine = build_engine(policy, Rollout(max_rows=max_rows))
        runner = build_search_runner(
            strategy, policy, engine, REWARD, [prompt.row for prompt in prompts], seed=0, base=base, budget=150
        )
        rows: list[Row] = []
        try:
            sample_and_score(runner, rewards, prompts, 1, sampling, lambda text: None, rows.extend)  # type: ignore[arg-type]
        finally:
            runner.close()
        measured.append(in_data_order(rows, prompts))
    assert [row["id"] for row in measured[0]] == [prompt.row.id for prompt in prompts]
    assert all(row["finish"] in ("stop", "length") and row["accuracy"] is not None for row in measured[0])
    keys = ("id", "sample", "completion", "accuracy", "length", "truncated")
    assert [[row[key] for key in keys] for row in measured[0]] == [[row[key] for key in keys] for row in measured[1]]
