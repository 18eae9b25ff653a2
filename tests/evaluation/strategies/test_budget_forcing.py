"""Budget forcing: waits exactly as often as asked, tokens exactly where they belong, and limits that always leave an answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.config.errors import UserError
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.search import Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_tree import SearchNode, answer_trajectory
from burnish.models.tokenizer import Tokenizer
from tests.evaluation.strategies.toy import END, sampling, solve
from tests.made_tokenizers import byte_level, merging

SHORT = {"wait": "W", "think_end": "#", "answer_prompt": "=", "answer_tokens": 4}
MARK = "[end]"


def thinker(text: str) -> dict[str, float]:
    """Thinks `ttt`, ends its thinking with `#`, answers 7; behind a written `W` it thinks again, behind `=` it answers."""
    thought = text.rpartition("?")[2].rpartition("W")[2]
    if "#" in thought or "=" in thought:
        return {END: 1.0} if thought.endswith("7") else {"7": 1.0}
    return {"t": 1.0} if len(thought) < 3 else {"#": 1.0}


def random_thinker(text: str) -> dict[str, float]:
    """Ends its thinking, or its answer, at random places."""
    return {"t": 0.7, "#": 0.2, END: 0.1}


def answerer(text: str) -> dict[str, float]:
    """Writes `ab` and ends, again behind every written `W`."""
    said = text.rpartition("?")[2].rpartition("W")[2]
    return {"a": 1.0} if not said else {"b": 1.0} if said == "a" else {END: 1.0}


def marker(text: str) -> dict[str, float]:
    """As `thinker`, with a control token for `#`."""
    thought = text.rpartition("?")[2].rpartition("W")[2]
    if MARK in thought:
        return {END: 1.0} if thought.endswith("7") else {"7": 1.0}
    return {"t": 1.0} if len(thought) < 3 else {MARK: 1.0}


def chosen_text(search: Search, program: SearchProgram) -> str:
    assert program.choice is not None
    return search.text(program.choice.node)


@pytest.mark.parametrize(("waits", "text"), [(0, "ttt#7"), (1, "tttWttt#7"), (3, "tttWtttWtttWttt#7")])
def test_the_end_of_the_thinking_is_suppressed_exactly_as_often_as_asked(waits: int, text: str) -> None:
    search, program = solve("budget_forcing", thinker, waits=waits, **SHORT)
    assert chosen_text(search, program) == text
    assert program.choice is not None
    assert program.choice.numbers == {
        "waits": float(waits),
        "cuts": 0.0,
        "thinking_tokens": 3.0 + 4 * waits,
        "written_tokens": float(waits),
    }
    # Sampled: three tokens and the marker of each thinking, dropped or not, the answer and its end token.
    assert search.cost.tokens == 4 * (waits + 1) + 2


def test_what_is_continued_are_the_sampled_tokens_without_the_marker_and_the_written_ones() -> None:
    search, program = solve("budget_forcing", thinker, waits=1, **SHORT)
    assert program.choice is not None
    encode = search.tokenizer.encode
    thought, wait, second, answer = program.choice.node.path()[1:]
    first = next(node for node in search.nodes if node.is_sampled)
    assert first.tokens == (*encode("ttt"), *encode("#"))
    assert thought.tokens == first.tokens[:3]
    assert thought.logp is not None
    assert len(thought.logp) == 3
    assert wait.tokens == tuple(encode("W"))
    assert not wait.is_sampled
    assert second.parent is wait
    assert wait.context == (*search.root.tokens, *encode("tttW"))
    assert answer.context == (*search.root.tokens, *encode("tttWttt#7"), *search.tokenizer.eos_ids)
    trajectory = answer_trajectory(answer, "q", 0, 0, "", {})
    assert [node.logp is None for node in trajectory.nodes] == [True, False, True, False, False]


def test_thinking_is_suppressed_until_it_is_long_enough() -> None:
    # 3 tokens, and 4 more with each wait: 3 and 7 are below 8.
    search, program = solve("budget_forcing", thinker, waits=0, min_thinking=8, **SHORT)
    assert chosen_text(search, program) == "tttWtttWttt#7"


@pytest.mark.parametrize(
    ("most", "text", "cuts"),
    [
        (1, "t#=7", 1),
        (3, "ttt#=7", 1),  # the marker would be the fourth token of the thinking
        (4, "ttt#7", 0),  # it fits, and a wait would leave no token to think
        (5, "tttWt#=7", 1),
        (7, "tttWttt#=7", 1),
        (8, "tttWttt#7", 0),
        (9, "tttWtttWt#=7", 1),
    ],
)
def test_thinking_is_cut_at_its_limit_and_the_answer_follows(most: int, text: str, cuts: int) -> None:
    search, program = solve("budget_forcing", thinker, waits=2, max_thinking=most, **SHORT)
    assert chosen_text(search, program) == text
    assert program.choice is not None
    assert program.choice.numbers["cuts"] == cuts
    assert program.choice.numbers["thinking_tokens"] <= most


def test_without_a_marker_the_end_of_the_answer_is_suppressed() -> None:
    search, program = solve("budget_forcing", answerer, waits=2, **SHORT | {"think_end": None})
    assert chosen_text(search, program) == "abWabWab"
    assert program.choice is not None
    context = program.choice.node.context
    assert [context.count(token) for token in search.tokenizer.eos_ids] == [1]
    assert search.cost.tokens == 9


def test_a_control_token_may_end_the_thinking() -> None:
    options = SHORT | {"think_end": MARK}
    search, program = solve("budget_forcing", marker, waits=1, marks=(MARK,), **options)
    assert program.choice is not None
    said = search.tokenizer.decode(program.choice.node.context, skip_special=False)
    assert said == f"?tttWttt{MARK}7<eos>"
    search, program = solve("budget_forcing", marker, waits=1, max_thinking=6, marks=(MARK,), **options)
    assert program.choice is not None
    cut = program.choice.node.path()[-2]
    assert cut.tokens == tuple(search.tokenizer.encode(f"{MARK}="))
    assert len(cut.tokens) == 2


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(1, 60),
    n=st.integers(1, 4),
    waits=st.integers(0, 3),
    seed=st.integers(0, 1000),
    least=st.sampled_from([None, 5]),
)
def test_chains_keep_to_their_shares_and_every_cut_is_followed_by_an_answer(
    budget: int, n: int, waits: int, seed: int, least: int | None
) -> None:
    search, program = solve(
        "budget_forcing",
        random_thinker,
        seed=seed,
        budget=budget,
        n=n,
        waits=waits,
        max_tokens=30,
        min_thinking=least,
        **SHORT,
    )
    share = budget // n
    assert search.cost.tokens <= n * share <= budget
    assert all(len(node.context) <= 1 + 30 for node in search.nodes)
    if share == 0:
        assert program.error == "the budget is spent, and no answer was sampled"
        return
    assert program.choice is not None
    closing = tuple(search.tokenizer.encode("#="))
    assert all(node.num_children == 1 for node in search.nodes if node.tokens == closing and not node.is_sampled)
    for text in [search.text(node) for node in search.nodes if node.is_sampled and node.num_children == 0]:
        assert len(text.replace("W", "").replace("#=", "")) <= share
    again = solve(
        "budget_forcing",
        random_thinker,
        seed=seed,
        budget=budget,
        n=n,
        waits=waits,
        max_tokens=30,
        min_thinking=least,
        **SHORT,
    )
    assert [node.tokens for node in again[0].nodes] == [node.tokens for node in search.nodes]


def test_the_limit_of_the_answer_leaves_room_for_the_forced_one() -> None:
    # 12 tokens hold `#=` and 4 tokens of an answer, so the thinking is cut at 6.
    search, program = solve("budget_forcing", lambda text: {"t": 1.0}, max_tokens=12, **SHORT)
    assert chosen_text(search, program) == "tttttt#=tttt"
    assert search.cost.tokens == 10


def test_several_forced_answers_are_voted_on() -> None:
    def model(text: str) -> dict[str, float]:
        return {"1": 0.7, "2": 0.3} if text.endswith("=") else {"#": 1.0} if text.endswith("t") else {"t": 1.0}

    options = SHORT | {"answer_tokens": 1, "think_end": "##"}
    search, program = solve("budget_forcing", model, n=9, waits=0, max_thinking=1, **options)
    assert program.choice is not None
    assert program.choice.numbers["cuts"] == 9
    assert sum(program.choice.votes.values()) == 9
    assert set(program.choice.votes) == {"t##=1", "t##=2"}
    assert search.text(program.choice.node) == max(program.choice.votes, key=program.choice.votes.__getitem__)


@pytest.mark.parametrize(
    ("tokenizer", "text", "stop", "num_end", "left"),
    [
        (merging("ab.</>", (".", "<")), "ab.</>", "</>", 3, "ab"),  # `.<` is one token, and the marker begins inside it
        (merging("ab.</>"), "ab.</>", "</>", 3, "ab."),
        (byte_level(), "ab\u00e9", "\u00e9", 2, "ab"),  # both bytes of the character go
        (byte_level(), "ab", "\u00e9", 0, "ab"),
    ],
)
def test_reopening_drops_whole_tokens_from_the_first_one_of_the_marker(
    tokenizer: Tokenizer, text: str, stop: str, num_end: int, left: str
) -> None:
    question = Question("q", "a", tuple(tokenizer.encode("a")), "exact")
    search = Search(question, tokenizer, sampling(tokenizer))
    node = SearchNode(search.root, 1, 1, tuple(tokenizer.encode(text)), stop=(stop,))
    assert search.num_end_tokens(node) == num_end
    twin = search.reopen(node)
    assert search.text(twin) == left
    assert twin.tokens == node.tokens[: len(node.tokens) - num_end]


def test_an_answer_that_the_limit_cannot_hold_is_an_error_before_anything_is_sampled() -> None:
    with pytest.raises(UserError, match=r"budget_forcing keeps 6 tokens .* at most 6 in all"):
        solve("budget_forcing", thinker, max_tokens=6, **SHORT)


def test_limits_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(ValidationError, match="min_thinking 9 is above max_thinking 8"):
        strategy_record("budget_forcing", min_thinking=9, max_thinking=8)
    with pytest.raises(ValidationError, match="needs think_end or answer_prompt"):
        strategy_record("budget_forcing", think_end=None, answer_prompt="")
