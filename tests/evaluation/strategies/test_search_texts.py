"""Texts of nodes: whatever the tokenizer and wherever nodes begin, they are those of the whole path."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.engine import Completion, SamplingOptions
from burnish.evaluation.strategies.search import Choice, Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_runner import search_record, tree_record
from burnish.evaluation.strategies.search_tree import SearchNode, mean_logp
from burnish.evaluation.strategies.spec import Single
from burnish.evaluation.strategies.votes import single
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score
from tests.evaluation.strategies.toy import END, solve
from tests.made_tokenizers import byte_level, sentence_piece

TEXT = "A cat ran. Café 猫 and 🐈 sat   there, a cat was there a cat"
TOKENIZERS = {
    "sentencepiece": sentence_piece("▁a", "▁cat", "▁", "a", "c", "t", "▁there", "▁sat", ".", "A", "r", "n", "▁was"),
    "bytes": byte_level(),
}


def chain(tokenizer: Tokenizer, tokens: list[int], borders: list[int]) -> tuple[Search, list[SearchNode]]:
    """A search with these tokens as a chain of sampled nodes."""
    search = Search(Question("q", "?", (0,), "exact"), tokenizer, SamplingOptions(max_tokens=10_000))
    nodes, parent, at = [], search.root, 0
    for border in [*borders, len(tokens)]:
        node = search._add(parent, border - at, (), None)
        node.tokens, node.logp = tuple(tokens[at:border]), np.full(border - at, -1.0, dtype=np.float32)
        nodes.append(node)
        parent, at = node, border
    return search, nodes


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_text_of_a_node_is_that_of_its_whole_path(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = tokenizer.encode(TEXT)
    borders = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1), max_size=12)))
    search, nodes = chain(tokenizer, tokens, borders)
    for node, end in zip(nodes, [*borders, len(tokens)], strict=True):
        if data.draw(st.booleans()) or end == len(tokens):
            assert search.text(node) == tokenizer.decode(tokens[:end])
    whole = tokenizer.decode(tokens)
    if all(tokenizer.decode(tokens[:end]) in whole for end in borders):  # no border is inside a character
        assert "".join(one["text"] for one in tree_record(search, None)[1:]) == whole


def test_a_chain_of_thousands_of_nodes_has_a_context_and_a_mean_log_prob_at_once() -> None:
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.encode("ab" * 2500)
    search, nodes = chain(tokenizer, tokens, list(range(1, len(tokens))))
    nodes[7].logp[:] = -3.0
    assert nodes[-1].context == (0, *tokens)
    assert nodes[-1].num_answer_tokens == len(tokens)
    assert mean_logp(nodes[-1]) == pytest.approx(-(len(tokens) + 2) / len(tokens))
    assert search.text(nodes[-1]) == "ab" * 2500


def test_a_verifier_that_exceeds_its_deadline_has_failed() -> None:
    search, _ = solve("single", lambda text: {END: 1.0})

    async def scored(search: Search) -> object:
        found = await search.score([search.root])
        assert found == [None]
        return await single(search, Single())

    program = SearchProgram(search, scored(search))
    (request,) = program.score_requests()
    program.take_score(Score(request.id, 0.0, 0.0, timed_out=True))
    assert search.cost.failed_scores == 1
    assert search.cost.score_tokens is None
    assert "deadline" in (program.score_error or "")


def test_only_answers_that_one_request_could_sample_to_the_end_count_as_whole() -> None:
    def digits(text: str) -> dict[str, float]:
        return {END: 1.0} if len(text) >= 5 else {"1": 1.0}

    plain, _ = solve("majority", digits, n=4)
    stepped, _ = solve("beam_search", digits, n=4, beams=2, step=None, step_tokens=9)
    assert (plain.cost.whole_answers, plain.cost.whole_tokens) == (4, 20)
    assert stepped.cost.whole_answers == 0


def test_the_tokens_of_a_verifier_are_added_up_until_one_score_does_not_say() -> None:
    search, _ = solve("single", lambda text: {END: 1.0})

    async def scored(search: Search) -> object:
        nodes = await search.sample(search.root, 3)
        await search.score(nodes)
        return Choice(nodes[0])

    def sampled(search: Search) -> SearchProgram:
        program = SearchProgram(search, scored(search))
        for request in program.requests():
            program.take(Completion(request.id, np.array([1]), np.zeros(1, dtype=np.float32), "stop", version=0))
        return program

    program = sampled(search)
    found = []
    for request, num_tokens in zip(program.score_requests(), (5, 0, None), strict=True):
        program.take_score(Score(request.id, 0.5, None, num_tokens=num_tokens))
        found.append(search.cost.score_tokens)
    assert found == [5, 5, None]
    assert search_record(program)["verifier_tokens"] is None
    by_likelihood = sampled(solve("single", lambda text: {END: 1.0})[0])
    by_likelihood.score_by(mean_logp)
    assert search_record(by_likelihood)["verifier_tokens"] == 0
