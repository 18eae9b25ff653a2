"""Revisions: what the model reads in each turn, token for token, how chains end, and how an answer is chosen among them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from burnish.config.errors import UserError
from burnish.core.engine import Completion
from burnish.environments.dialogue import ChatRenderer
from burnish.evaluation.strategies.registry import load_strategy, strategy_record
from burnish.evaluation.strategies.revise import CRITIQUE, REQUESTS
from burnish.evaluation.strategies.search import Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.verifiers import RewardVerifier
from burnish.rewards.score_types import Score
from tests.environments.chat_templates import small_tokenizer
from tests.evaluation.strategies.toy import END, TURNS, sampling, solve

AGAIN = "Again."


def counter(text: str) -> dict[str, float]:
    """Answers each turn with the number of turns before it."""
    return {str(text.count(">:") - 1): 1.0} if text.endswith(">:") else {END: 1.0}


def coin(text: str) -> dict[str, float]:
    """Answers 1, 2 or 3 in each turn."""
    return {"1": 0.5, "2": 0.3, "3": 0.2} if text.endswith(">:") else {END: 1.0}


def readings(search: Search) -> list[str]:
    """What the model read before each of its answers, control tokens included."""
    sampled = [node for node in search.nodes if node.is_sampled]
    return [search.tokenizer.decode(node.parent.context, skip_special=False) for node in sampled if node.parent]


def said(search: Search) -> list[str]:
    return [search.text(node) for node in search.nodes if node.is_sampled]


def test_each_turn_reads_the_question_and_all_answers_and_requests_so_far() -> None:
    search, program = solve("revise", counter, prompt="2+2", chat=TURNS, rounds=2, request=AGAIN)
    assert readings(search) == ["<2+2>:", "<2+2>:0<eos><Again.>:", "<2+2>:0<eos><Again.>:1<eos><Again.>:"]
    assert program.choice is not None
    assert search.text(program.choice.node) == "2"
    assert program.choice.numbers == {"answers": 3.0, "revisions": 2.0}
    assert search.cost.tokens == 6


def test_a_turn_continues_the_sampled_tokens_and_ends_an_answer_that_was_cut_off() -> None:
    search, _ = solve("revise", lambda text: {"1": 1.0}, chat=TURNS, max_tokens=3, rounds=1, request=AGAIN)
    first, second = (node for node in search.nodes if node.is_sampled)
    assert second.parent is not None
    assert second.parent.tokens[: len(first.context)] == first.context
    assert readings(search) == ["<?>:", "<?>:111<eos><Again.>:"]
    assert search.room(second.parent) == 3  # each answer has the limit of an answer


def test_sampled_tokens_are_kept_where_the_text_would_be_tokenised_otherwise() -> None:
    tokenizer = small_tokenizer("qwen2.5")
    chat = ChatRenderer(tokenizer)
    question = Question("q", "1+1?", chat.open("1+1?").tokens, "exact", chat=chat)
    search = Search(question, tokenizer, sampling(tokenizer))
    sampled = tuple(tokenizer.encode(letter)[0] for letter in "the")  # `the` is one token of this tokenizer
    assert len(tokenizer.encode("the")) == 1
    node = search.write(search.root, "")
    node.tokens = (*sampled, tokenizer.eos_ids[0])
    turn = search.reply(node, AGAIN)
    assert turn.tokens[: len(node.context)] == node.context
    assert tokenizer.decode(turn.tokens, skip_special=False) == tokenizer.decode(
        tokenizer.chat(
            [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "the"},
                {"role": "user", "content": AGAIN},
            ]
        ),
        skip_special=False,
    )


def test_a_template_that_drops_earlier_thinking_writes_the_turn_anew() -> None:
    tokenizer = small_tokenizer("qwen3")
    chat = ChatRenderer(tokenizer)
    question = Question("q", "1+1?", chat.open("1+1?").tokens, "exact", chat=chat)
    search = Search(question, tokenizer, sampling(tokenizer))
    node = search.write(search.root, "")
    node.tokens = (*tokenizer.encode("<think>\nhm\n</think>\n\n2"), tokenizer.eos_ids[0])
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": AGAIN},
    ]
    assert list(search.reply(node, AGAIN).tokens) == tokenizer.chat(messages)


def test_a_model_that_criticises_itself_has_a_turn_for_it_which_is_no_answer() -> None:
    search, program = solve("revise", counter, chat=TURNS, rounds=1, feedback="self")
    assert readings(search)[1:] == [
        f"<?>:0<eos><{CRITIQUE}>:",
        f"<?>:0<eos><{CRITIQUE}>:1<eos><{REQUESTS['self']}>:",
    ]
    assert program.choice is not None
    assert program.choice.numbers["answers"] == 2
    assert search.text(program.choice.node) == "2"


def test_the_request_quotes_the_score_and_what_the_verifier_says() -> None:
    search, _ = solve(
        "revise",
        counter,
        chat=TURNS,
        rounds=1,
        feedback="verifier",
        verifier="judge",
        score=lambda text: 0.25,
        details=lambda text: f"No, {text} is {{score}}.",
        request="{details} {score}!",
    )
    assert readings(search)[1] == "<?>:0<eos><No, 0 is {score}. 0.25!>:"
    assert search.cost.scores == 1  # the last answer needs no score
    options: dict[str, Any] = {"rounds": 1, "feedback": "verifier", "verifier": "judge"}
    search, _ = solve("revise", counter, chat=TURNS, score=lambda text: 0.5, **options)
    wanted = "A checker gave your answer the score 0.5.\nWrite a better answer to the question, complete and in the same form."
    assert readings(search)[1] == f"<?>:0<eos><{wanted}>:"


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("revise", {"feedback": "verifier"}),
        ("revise", {"feedback": "verifier", "verifier": "self_certainty"}),
        ("by_difficulty", {"levels": [{"strategy": {"name": "revise", "feedback": "verifier"}}]}),
    ],
)
def test_a_score_of_the_models_own_confidence_is_no_feedback(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"measures how sure the model was.*Set strategy.verifier to one that judges"):
        load_strategy(strategy_record(strategy, **options))
    load_strategy(strategy_record(strategy, **options | {"verifier": "judge"}))


def test_a_chain_ends_where_the_verifier_failed() -> None:
    search, program = solve(
        "revise",
        counter,
        chat=TURNS,
        rounds=5,
        feedback="verifier",
        verifier="judge",
        score=lambda text: None if text == "1" else 0.5,
        request="{score}",
    )
    assert said(search) == ["0", "1"]
    assert search.cost.failed_scores == 1
    assert program.choice is not None


@pytest.mark.parametrize(
    ("choose", "chosen"),
    # The scores of the chains' answers: 0 and 1 and 2 have 0.3, 0.9, 0.2.
    [("last", "2"), ("best", "1")],
)
def test_the_last_or_the_best_answer_of_a_chain_is_chosen(choose: str, chosen: str) -> None:
    values = {"0": 0.3, "1": 0.9, "2": 0.2}
    search, program = solve(
        "revise", counter, chat=TURNS, rounds=2, request=AGAIN, choose=choose, score=values.__getitem__
    )
    assert program.choice is not None
    assert search.text(program.choice.node) == chosen
    assert search.cost.scores == (3 if choose == "best" else 0)


def by_script(answers: list[list[str]], **options: object) -> tuple[Search, SearchProgram, list[list[SearchNode]]]:
    """Run `revise` with the k-th answer of each chain given; return also the nodes of each chain."""
    script = {(chain, k): text for chain, texts in enumerate(answers) for k, text in enumerate(texts)}
    search, _ = solve("single", lambda text: {END: 1.0}, chat=TURNS)
    search = Search(search.question, search.tokenizer, search.sampling)
    record = strategy_record("revise", rounds=len(answers[0]) - 1, chains=len(answers), request=AGAIN, **options)
    program = SearchProgram(search, load_strategy(record)(search))
    chains: list[list[SearchNode]] = [[] for _ in answers]
    scores = {"a": 0.5, "b": 0.45, "c": 0.3, "d": 0.1}
    round_number = 0
    while not program.is_done:
        requests = program.requests()
        for chain, request in enumerate(requests):
            tokens = [*search.tokenizer.encode(script[chain, round_number]), *search.tokenizer.eos_ids[:1]]
            chains[chain].append(search.nodes[int(request.id.rpartition("/")[2])])
            program.take(Completion(request.id, np.array(tokens), np.zeros(len(tokens), dtype=np.float32), "stop", 0))
        round_number += bool(requests)
        for asked in program.score_requests():
            program.take_score(Score(asked.id, scores[asked.completion], None))
    return search, program, chains


def test_answers_are_chosen_within_each_chain_and_then_among_chains() -> None:
    # Weights: a 0.5, b 0.45, c 0.3. Of all answers, c has the most votes (5), and a the best score.
    # Within the chains: a 0.5 against c 0.6; b 0.9; b 0.45 against c 0.6. Among the winners: c 0.6 against b 0.45.
    answers = [["a", "c", "c"], ["b", "b", "c"], ["b", "c", "c"]]
    for choose, chosen, votes in [
        ("last", "c", {"c": 3.0}),
        ("vote", "c", {"a": 1.0, "c": 5.0, "b": 3.0}),
        ("best", "a", {}),
        ("by_chain", "c", {"c": 0.6, "b": 0.45}),
    ]:
        search, program, _ = by_script(answers, choose=choose)
        assert program.choice is not None
        assert search.text(program.choice.node) == chosen, choose
        assert program.choice.votes == pytest.approx(votes)


def test_choosing_by_chain_differs_from_a_weighted_vote_of_all_answers() -> None:
    # Of all answers, a has 1.5 and b 0.9. By chain b has 0.9, from two chains, and a 0.5, from one.
    answers = [["a", "a", "a"], ["b", "c", "d"], ["b", "c", "d"]]
    _search, program, chains = by_script(answers, choose="by_chain")
    assert program.choice is not None
    assert program.choice.votes == pytest.approx({"a": 0.5, "b": 0.9})
    assert program.choice.node is chains[1][0]


def test_votes_by_chain_refuse_negative_scores() -> None:
    options = {"chat": TURNS, "rounds": 1, "request": AGAIN, "choose": "by_chain"}
    _, program = solve("revise", counter, score=lambda text: -1.0, **options)
    assert program.error is not None
    assert "set strategy.choose to best" in program.error
    assert solve("revise", counter, **options)[1].choice is not None  # log-probs are weighed by exp


@pytest.mark.parametrize(("times", "answers"), [(1, 2), (2, 3), (None, 7)])
def test_a_chain_ends_when_the_answer_stays_the_same(times: int | None, answers: int) -> None:
    def model(text: str) -> dict[str, float]:
        return {"5": 1.0} if text.endswith(">:") else {END: 1.0}

    search, _ = solve("revise", model, chat=TURNS, rounds=6, request=AGAIN, stop_when_same=times)
    assert len(said(search)) == answers


def test_a_chain_does_not_depend_on_the_other_chains() -> None:
    alone = solve("revise", coin, chat=TURNS, rounds=4, request=AGAIN, seed=5)[0]
    search, _ = solve("revise", coin, chat=TURNS, rounds=4, request=AGAIN, seed=5, chains=3, choose="vote")
    texts = readings(search)
    assert len(texts) == 15
    assert set(readings(alone)) <= set(texts)
    longest = [text for text in texts if text.count("Again") == 4]
    assert len(set(longest)) > 1  # and the chains differ


@pytest.mark.parametrize("budget", [1, 3, 5, 8, 13])
def test_revisions_end_with_the_budget(budget: int) -> None:
    search, program = solve("revise", coin, chat=TURNS, rounds=9, chains=2, request=AGAIN, budget=budget)
    assert search.cost.tokens == budget
    assert program.choice is not None


def test_a_revised_answer_is_scored_as_an_answer_to_the_question() -> None:
    search, _program, chains = by_script([["a", "b"]], choose="best")
    revised = chains[0][1]
    revised.score = None
    waiting = SearchProgram(search, load_strategy(strategy_record("single"))(search))._score_request(revised)
    assert list(waiting.tokens or ()) == [*search.question.tokens, *revised.tokens]
    assert waiting.num_prompt == len(search.question.tokens)
    assert (waiting.prompt, waiting.completion) == ("?", "b")


def test_a_model_without_a_chat_template_cannot_be_asked_again() -> None:
    with pytest.raises(UserError, match="needs a chat template"):
        solve("revise", lambda text: {END: 1.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feedback": "verifier", "request": "Again."}, r"needs \{score\} or \{details\}"),
        ({"request": "Why {score}?"}, r"has \{score\}, which is for feedback verifier, and feedback is none"),
        ({"critique": "Check it."}, "critique is for feedback self, and feedback is none"),
        ({"verifier": "self_certainty"}, "verifier has no effect with feedback none and choose last"),
    ],
)
def test_options_without_an_effect_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        strategy_record("revise", **options)


def test_what_the_oracle_says_besides_its_score_is_not_quoted() -> None:
    class Checked:
        """Scores whose details state the key."""

        pending = 0

        def poll(self, timeout_s: float | None) -> list[Score]:
            return [Score("q#0.0/1", 1.0, 1.0, details={"number": "expected 42"})]

        def close(self) -> None:
            """Nothing to close."""

    scores = [RewardVerifier(Checked(), {}, is_oracle=is_oracle).poll(None)[0] for is_oracle in (True, False)]  # type: ignore[arg-type]
    assert [score.details for score in scores] == [{}, {"number": "expected 42"}]
    assert [score.reward for score in scores] == [1.0, 1.0]
