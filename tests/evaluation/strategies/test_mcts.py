"""Monte-Carlo tree search: selection against an independent implementation, virtual losses, rollouts and the choice."""

import math
from collections import defaultdict

import pytest
from pydantic import ValidationError

from burnish.core.engine import Request
from burnish.core.random_keys import fold, uniform_from_key
from burnish.evaluation.strategies.mcts import Branch, TreeSearch
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.search import Search
from burnish.evaluation.strategies.search_program import SearchProgram
from tests.evaluation.strategies.toy import solve

LOGP = {"a": -0.2, "b": -0.9, "c": -1.5}
DEPTH = 4


def value(text: str) -> float:
    """An arbitrary value of every path."""
    return round(uniform_from_key(fold(7, text)), 3)


def whole_tree() -> dict[str, list[tuple[str, float]]]:
    """Every path has the steps a, b and c; at the last step each ends the answer."""
    replies: dict[str, list[tuple[str, float]]] = {}
    texts = [""]
    for depth in range(DEPTH):
        ends = "$" if depth == DEPTH - 1 else ","
        for text in texts:
            replies[text] = [(f"{name}{ends}", LOGP[name]) for name in LOGP]
        texts = [f"{text}{name}," for text in texts for name in LOGP]
    return replies


def reference(simulations: int, c: float, select: str, backup: str) -> tuple[dict[str, int], dict[str, float]]:
    """Visits and values by an implementation of its own: paths are texts, and the tree is known from the beginning."""
    visits, values = defaultdict[str, int](int), defaultdict[str, list[float]](list)
    grown = {""}
    weights = {name: math.exp(LOGP[name]) / sum(map(math.exp, LOGP.values())) for name in LOGP}

    def q(text: str) -> float:
        found = values[text]
        return 0.0 if not found else max(found) if backup == "max" else sum(found) / len(found)

    def bound(text: str, name: str) -> float:
        child = f"{text}{name},"
        mean = q(child) if visits[child] else q(text)
        if select == "puct":
            return mean + c * weights[name] * math.sqrt(max(1, visits[text])) / (1 + visits[child])
        return mean + c * math.sqrt(math.log(visits[text]) / visits[child]) if visits[child] else math.inf

    for _ in range(simulations):
        path = [""]
        while True:
            text = path[-1]
            if text not in grown and visits[text] and text.count(",") < DEPTH:
                grown.add(text)
            if text not in grown:
                break
            path.append(f"{text}{max(LOGP, key=lambda name: bound(text, name))},")
        leaf = path[-1]
        found = value(leaf[:-1] if leaf.count(",") == DEPTH else leaf)
        for text in path:
            visits[text] += 1
            values[text].append(found)
    return dict(visits), {text: q(text) for text in visits}


@pytest.mark.parametrize("select", ["puct", "uct"])
@pytest.mark.parametrize("backup", ["mean", "max"])
@pytest.mark.parametrize("exploration", [0.3, 1.5])
def test_visits_and_values_are_those_of_an_independent_implementation(
    select: str, backup: str, exploration: float
) -> None:
    options = {"select": select, "backup": backup, "exploration": exploration, "simulations": 60}
    search, _ = solve("mcts", whole_tree(), score=value, children=3, parallel=1, step=",", **options)
    visits, values = reference(60, exploration, select, backup)
    nodes = {search.text(node): node for node in search.nodes if node.notes.get("visits")}
    assert {text if node.is_open else f"{text},": node.notes["visits"] for text, node in nodes.items()} == {
        text: count for text, count in visits.items() if count
    }
    for text, node in nodes.items():
        assert node.notes["value"] == pytest.approx(values[text if node.is_open else f"{text},"])


def test_priors_are_the_mean_probabilities_of_the_steps_among_their_siblings() -> None:
    search, _ = solve("mcts", whole_tree(), score=value, children=3, simulations=1, step=",")
    total = math.exp(-0.2) + math.exp(-0.9) + math.exp(-1.5)
    assert [node.notes["prior"] for node in search.nodes[1:4]] == pytest.approx(
        [math.exp(-0.2) / total, math.exp(-0.9) / total, math.exp(-1.5) / total]
    )


def test_a_virtual_loss_counts_as_a_visit_of_the_lowest_value() -> None:
    search, _ = solve("single", {"": ["1$"]})
    tree = TreeSearch(search, strategy_record("mcts", exploration=2.0))
    parent = Branch(search.root, visits=3, total=1.5, in_flight=1)
    child = Branch(search.nodes[1], prior=0.25, visits=1, total=0.8, in_flight=1)
    # value (0.8 + 0) / 2, and 2 * 0.25 * sqrt(3 + 1) / (1 + 2)
    assert tree.priority(parent, child) == pytest.approx(0.4 + 1 / 3)
    tree.lowest = -0.4
    assert tree.priority(parent, child) == pytest.approx(0.2 + 1 / 3)
    fresh = Branch(search.nodes[1], prior=0.5)
    assert tree.priority(parent, fresh) == pytest.approx(0.5 + 2 * 0.5 * 2)  # the parent's value


def test_leaves_of_one_iteration_are_different_and_are_evaluated_together() -> None:
    # Priors 0.57 and 0.43: the virtual loss of a halves its exploration, so the second path takes b.
    replies = {"": [("a,", -0.2), ("b,", -0.5)], "a,": ["1$"], "b,": ["2$"]}
    search, _ = solve("mcts", replies, score=value, children=2, parallel=2, simulations=2, step=",")
    visited = {search.text(node) for node in search.nodes[1:] if node.notes.get("visits")}
    assert visited == {"a,", "b,"}
    assert (search.cost.requests, search.cost.scores) == (2 + 1, 2 + 1)  # no answer has ended, so one path is completed


def test_rollouts_are_candidates_and_become_children_without_new_tokens() -> None:
    replies = {
        "": [("a,", -0.1), ("b,", -3.0)],
        "a,": ["x,y,1$", "z,"],  # a rollout, then one new child instead of two
        "a,x,": ["9$"],  # a rollout from the child that the first one made
    }
    scores = {"a,x,y,1": 0.9, "a,x,9": 0.2}
    seen: list[Request] = []
    search, program = solve(
        "mcts",
        replies,
        score=scores.__getitem__,
        step=",",
        value="rollout",
        children=2,
        exploration=0.0,
        simulations=2,
        parallel=1,
        seen=seen,
    )
    assert program.choice is not None, program.error
    assert search.text(program.choice.node) == "a,x,y,1"
    assert [search.tokenizer.decode(request.tokens)[1:] for request in seen] == ["", "", "a,", "a,", "a,x,"]
    assert search.cost.tokens == 2 + 2 + 6 + 2 + 2
    x = next(node for node in search.nodes if search.text(node) == "a,x,")
    assert x.is_sampled
    assert x.is_open
    assert (x.notes["visits"], x.notes["value"]) == (2, pytest.approx(0.55))
    a = search.nodes[1]
    assert (a.notes["visits"], a.notes["value"]) == (2, pytest.approx(0.55))


def test_a_rollout_is_followed_down_to_its_end() -> None:
    # Nothing else is ever better than the first rollout, so its steps are selected one after the other.
    replies = {"": ["a,"], "a,": ["x,1$"], "a,x,": ["2$", "3$"], "a,x,1": []}
    search, program = solve(
        "mcts",
        replies,
        score=lambda text: float(text.endswith("1")),
        step=",",
        value="rollout",
        children=1,
        exploration=0.0,
        simulations=3,
        parallel=1,
        choose="visits",
    )
    assert program.choice is not None, program.error
    parts = [search.text(node) for node in program.choice.node.path()]
    assert parts == ["", "a,", "a,x,", "a,x,1"]
    assert program.choice.node.end == "stop"
    assert [len(node.tokens) for node in program.choice.node.path()] == [1, 2, 2, 2]


def test_the_most_visited_path_is_completed_if_it_is_open() -> None:
    replies = {"": ["a,", "b,"], "a,": ["1$"]}
    search, program = solve(
        "mcts",
        replies,
        score=lambda text: 0.9 if "a" in text else 0.1,
        step=",",
        children=2,
        simulations=1,
        choose="visits",
    )
    assert program.choice is not None, program.error
    assert search.text(program.choice.node) == "a,1"
    assert program.choice.numbers == {"finished": 1, "cut": 0, "steps": 1, "simulations": 1}


def test_widening_samples_more_steps_behind_nodes_of_many_visits() -> None:
    """A node with N visits has ceil(2 sqrt(N)) sampled steps. The new one is visited first."""
    replies = {"": [f"{letter}," for letter in "abcde"], "a,": [f"{digit}$" for digit in "12345"]}
    scores = {"a,": 0.9, "b,": 0.5, "c,": 0.4, "d,": 0.3, "e,": 0.2} | {f"a,{digit}": 0.1 for digit in "12345"}
    visited = []
    for simulations in range(1, 6):
        search, _ = solve(
            "mcts",
            replies,
            score=scores.__getitem__,
            step=",",
            children=2,
            widening=0.5,
            exploration=0.0,
            simulations=simulations,
            parallel=1,
        )
        visited.append({search.text(node): node.notes["visits"] for node in search.nodes if node.notes.get("visits")})
    # Visits of the root before each simulation and its steps then: 0: 2, 1: 2, 2: 3, 3: 4, 4: 4.
    assert visited[0] == {"": 1, "a,": 1}
    assert visited[1] == {"": 2, "a,": 2, "a,1": 1}
    assert visited[2] == visited[1] | {"": 3, "c,": 1}
    assert visited[3] == visited[2] | {"": 4, "d,": 1}
    # Then b, which has the root's mean value (0.9 + 0.1 + 0.4 + 0.3) / 4, is behind a with (0.9 + 0.1) / 2. At its second visit a has three steps.
    assert visited[4] == visited[3] | {"": 5, "a,": 3, "a,3": 1}


def test_scores_that_are_log_probs_count_as_probabilities() -> None:
    search, _ = solve("mcts", whole_tree(), children=3, simulations=1, step=",")
    assert search.nodes[1].notes["value"] == pytest.approx(math.exp(-0.2))


def test_a_vote_weighs_finished_answers_by_their_scores() -> None:
    replies = {"": ["1$", "a,", "b,"], "a,": ["2$", "x2$", "3$"]}
    scores = {"1": 0.5, "a,": 0.9, "b,": 0.0, "a,2": 0.3, "a,x2": 0.4, "a,3": 0.1}
    _, program = solve(
        "mcts", replies, score=scores.__getitem__, kind="number", step=",", children=3, simulations=6, choose="vote"
    )
    assert program.choice is not None, program.error
    assert program.choice.votes == pytest.approx({"1": 0.5, "2": 0.7, "3": 0.1})


def random_maze(text: str) -> dict[str, float]:
    """Five steps of one digit; the last one ends the answer."""
    steps = text.count(",")
    return {"$": 1.0} if steps == 5 else {",": 1.0} if text[-1].isdigit() else {digit: 0.25 for digit in "1234"}


def sum_score(text: str) -> float:
    return sum(int(digit) for digit in text if digit.isdigit()) / 20


@pytest.mark.parametrize("how", ["verifier", "rollout"])
def test_more_simulations_never_lower_the_score_of_the_best_answer_found(how: str) -> None:
    means = []
    for simulations in (1, 8, 32):
        found: list[float] = []
        for seed in range(6):
            search, program = made(random_maze, seed, value=how, simulations=simulations)
            assert program.choice is not None
            found.append(sum_score(search.text(program.choice.node)))
        means.append(sum(found) / len(found))
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.15


def made(model: object, seed: int, **options: object) -> tuple[Search, SearchProgram]:
    return solve("mcts", model, score=sum_score, seed=seed, step=",", parallel=2, **options)  # type: ignore[arg-type]


def test_rollouts_without_rollouts_are_refused() -> None:
    with pytest.raises(ValidationError, match="rollouts=3 has no effect with value verifier"):
        strategy_record("mcts", rollouts=3)
