"""Monte-Carlo values of steps: what is continued, and what the values are."""

import pytest

from burnish.evaluation.strategies.search import Search
from burnish.evaluation.strategies.search_runner import tree_record
from burnish.evaluation.strategies.search_tree import SearchNode
from tests.evaluation.strategies.toy import END, solve


def three_steps(text: str) -> dict[str, float]:
    """Writes three letters, each `a` (right) with probability 0.6 or `b`, one a line, and ends."""
    written = text.partition("?")[2]
    if len(written) >= 6:
        return {END: 1.0}
    return {"\n": 1.0} if len(written) % 2 else {"a": 0.6, "b": 0.4}


def all_a(text: str) -> float:
    """1 if no line is wrong."""
    return float("b" not in text)


def chains_of(search: Search) -> list[list[SearchNode]]:
    """The answers as chains of steps."""
    ends = [n for n in search.nodes if len(n.path()) == 4 and n.notes.get("visits") == 1 and n.score is not None]
    return [node.path()[1:] for node in ends]


def test_the_value_of_a_step_is_the_share_of_right_continuations_and_that_of_the_last_its_score() -> None:
    search, program = solve("step_values", three_steps, score=all_a, n=6, rollouts=40, step="\n")
    chains = chains_of(search)
    assert len(chains) == 6
    for chain in chains:
        assert [search.tokenizer.decode(node.tokens)[1:] for node in chain] == ["\n", "\n", "\n"]
        for k, node in enumerate(chain[:-1]):
            is_good = "b" not in search.text(node)
            assert node.notes["visits"] == 40
            assert node.notes["value"] == pytest.approx(0.6 ** (2 - k) if is_good else 0.0, abs=0.2)
            own = [n for n in search.nodes if n.parent is node and n.score is not None and n is not chain[k + 1]]
            assert node.notes["value"] == sum(all_a(search.text(n)) for n in own) / 40
        assert chain[-1].notes["value"] == all_a(search.text(chain[-1]))
    assert program.choice is not None
    assert program.choice.node.score == max(chain[-1].score or 0 for chain in chains)


def test_splitting_an_answer_keeps_its_tokens_log_probs_and_text() -> None:
    whole, _ = solve("majority", three_steps, n=6)
    parts, _ = solve("step_values", three_steps, score=all_a, n=6, rollouts=1, step="\n")
    answers = [node for node in whole.nodes if node.parent is whole.root]
    for answer, chain in zip(answers, chains_of(parts), strict=True):
        assert chain[-1].context == answer.context
        assert parts.text(chain[-1]) == whole.text(answer)
        assert [x for node in chain for x in node.logp.tolist()] == answer.logp.tolist()
        assert chain[-1].end == answer.end == "stop"


def test_bisection_finds_the_first_step_without_a_right_continuation() -> None:
    search, _ = solve("step_values", three_steps, score=all_a, n=12, rollouts=30, step="\n", order="bisect")
    for chain in chains_of(search):
        valued = {k: node.notes["value"] for k, node in enumerate(chain) if "value" in node.notes}
        if chain[-1].score == 1:
            assert valued == {2: 1.0}
            continue
        first_wrong = next(k for k, node in enumerate(chain) if "b" in search.text(node))
        assert all(value == 0 for k, value in valued.items() if k >= first_wrong)
        assert all(value > 0 for k, value in valued.items() if k < first_wrong)
        # The step before the first wrong one and that step itself were visited, or are the borders of the search.
        assert first_wrong in valued
        assert first_wrong == 0 or first_wrong - 1 in valued


def test_a_special_token_between_steps_is_in_the_record_of_the_tree() -> None:
    def special(text: str) -> dict[str, float]:
        written = text.partition("?")[2].replace("<s>", "\n")
        return {"<s>" if name == "\n" else name: chance for name, chance in three_steps(f"?{written}").items()}

    search, program = solve("step_values", special, score=all_a, n=4, rollouts=2, step="<s>", marks=["<s>"])
    steps = [n for n in tree_record(search, program.choice) if "value" in n]
    assert len(steps) == 4 * 3
    assert {n["step_text"][1:] for n in steps} <= {"<s>", ""}
    assert {n["text"] for n in steps} == {"a", "b"}
