"""Calls of text or tokens in the token tree: they continue the answer whose tokens they begin with."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.gateway.token_nodes import NodeTree
from tests.gateway.answered_session import Session


def test_a_text_that_begins_with_a_prompt_and_its_answer_keeps_their_tokens() -> None:
    session = Session()
    prompt = session.tree.place_text("Q: 1+1? A:")
    spelled = [session.tokenizer.encode(letter)[0] for letter in "the"]
    message = session.tree.record(prompt, spelled, [-1.0] * 3, 1, "stop", "r0")
    again = session.tree.place_text(f"Q: 1+1? A:{message['content']} Q: in? A:")
    assert again.kind == "continued"
    assert again.tokens == (*prompt.tokens, *spelled, *session.tokenizer.encode(" Q: in? A:"))
    session.record(again, "yes")
    assert session.tree.place_text("Q: 1+1? A:the Q: in? A:yes so").kind == "continued"
    assert session.tree.place_text("Q: 1+1? A:the Q: in? A:yes so").kind == "retry"
    assert session.tree.place_text("another").kind == "root"


def test_tokens_share_what_is_equal_and_never_split_an_answer() -> None:
    session = Session()
    first = session.tree.place_tokens([1, 2, 3, 4])
    session.tree.record(first, [5, 6, 7], [-1.0, -2.0, -3.0], 1, "stop", "r0")
    continued = session.tree.place_tokens([1, 2, 3, 4, 5, 6, 7, 8])
    within = session.tree.place_tokens([1, 2, 3, 4, 5, 6, 9])
    before = session.tree.place_tokens([1, 2, 9])
    assert [p.kind for p in (first, continued, within, before)] == ["root", "continued", "fork", "root"]
    for number, prompt in enumerate((continued, within, before)):
        session.tree.record(prompt, [20 + number], [-4.0], 2, "stop", f"s{number}")
    export = session.tree.export()
    nodes = [(node.parent, node.tokens.tolist(), node.is_sampled) for node in export.nodes]
    assert nodes == [
        (-1, [1, 2], False),
        (0, [3, 4], False),
        (1, [5, 6, 7], True),
        (2, [8], False),
        (3, [20], True),
        (1, [5, 6, 9], False),
        (5, [21], True),
        (0, [9], False),
        (7, [22], True),
    ]
    assert export.links == [-1, 0, 0, -1]
    assert session.tree.place_tokens([]).parent == -1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.booleans()), min_size=1, max_size=12))
def test_inserted_contexts_are_found_again(contexts: list[tuple[list[int], bool]]) -> None:
    """The number of tokens is that of a trie, as long as nothing was sampled."""
    tree, prefixes = NodeTree(), set[tuple[int, ...]]()
    ends = []
    for tokens, _ in contexts:
        ends.append(tree.insert(tree.root, tokens))
        prefixes |= {tuple(tokens[: size + 1]) for size in range(len(tokens))}
        assert sum(len(node.tokens) for node in tree.nodes) == len(prefixes)
    for (tokens, is_sampled), end in zip(contexts, ends, strict=True):
        assert tree.tokens_to(end) == tuple(tokens)
        if is_sampled:
            tree.add_sampled(end, np.array([3]), np.zeros(1, np.float32), np.zeros(1, np.int32))
            assert tree.insert(tree.root, [*tokens, 3]).is_sampled
