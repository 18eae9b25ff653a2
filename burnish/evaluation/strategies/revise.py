"""Sequential revision: the model improves its answer in a conversation (Self-Refine, 2303.17651; revisions in 2408.03314).

A turn of the conversation continues what was read and sampled, token for token (`Search.reply`). So revisions are conditioned on what the
model wrote rather than on a new tokenisation of it, and an engine finds the conversation in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from burnish.evaluation.strategies.search import Choice, Search, SearchFailed
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import Revise
from burnish.evaluation.strategies.votes import best_scored, elect, vote_weights

REQUESTS = {
    "none": "Read your answer again and look for mistakes. Then write a better answer to the question, complete and in the same form.",
    "self": "Now write a better answer to the question, complete and in the same form, without the mistakes that you found.",
    "verifier": (
        "A checker gave your answer the score {score}.\n{details}\n"
        "Write a better answer to the question, complete and in the same form."
    ),
}
"""The texts that ask for a revision, by the kind of feedback."""
CRITIQUE = (
    "Check your answer step by step. Name each mistake, and say how to repair it. Do not write the new answer yet."
)


async def revise(search: Search, options: Revise) -> Choice:
    """Revise each first answer `rounds` times and choose among all answers."""
    first = await search.sample(search.root, options.chains, may_continue=True)
    chains = await search.gather(*(revised(search, node, options) for node in first))
    answers = [node for chain in chains for node in chain]
    if options.choose == "last":
        choice = elect(search, [chain[-1] for chain in chains])
    elif options.choose == "vote":
        choice = elect(search, answers)
    else:
        await search.score(answers)
        best = best_scored(answers)  # raises if all scores failed, which a vote would not
        choice = Choice(best) if options.choose == "best" else elect_by_chain(search, chains)
    return Choice(
        choice.node, choice.votes, {"answers": float(len(answers)), "revisions": float(len(answers) - len(first))}
    )


async def revised(search: Search, first: SearchNode, options: Revise) -> list[SearchNode]:
    """Return the answers of one conversation, in order. It ends early when the budget is spent or the context is full."""
    chain, num_same = [first], 0
    for _ in range(options.rounds):
        turn = await request_turn(search, chain[-1], options)
        found = [] if turn is None else await search.sample(turn, may_continue=True)
        if not found:
            break
        num_same = num_same + 1 if what_is_said(search, found[0]) == what_is_said(search, chain[-1]) else 0
        chain += found
        if num_same == options.stop_when_same:
            break
    return chain


async def request_turn(search: Search, node: SearchNode, options: Revise) -> SearchNode | None:
    """Return the root of the turn that revises an answer; None if there is no feedback to ask with."""
    text = options.request or REQUESTS[options.feedback]
    if options.feedback == "self":
        critique = await search.sample(search.reply(node, options.critique or CRITIQUE), may_continue=True)
        return search.reply(critique[0], text) if critique else None
    if options.feedback == "verifier":
        score = (await search.score([node]))[0]
        if score is None:
            return None
        text = with_feedback(text, score, node.notes.get("verifier", ""))
    return search.reply(node, text)


def with_feedback(text: str, score: float, details: str) -> str:
    """Return a request that quotes what the verifier said. Without details, a line of {details} alone is left out."""
    if not details:
        text = text.replace("{details}\n", "")
    # The details come last, so that nothing in them is replaced.
    return text.replace("{score}", f"{score:.3g}").replace("{details}", details)


def what_is_said(search: Search, node: SearchNode) -> str:
    """Return what two answers are compared by: the normalised answer, or the text where there is none."""
    answer = search.answer(node)
    return search.text(node) if answer is None else answer


def elect_by_chain(search: Search, chains: Sequence[Sequence[SearchNode]]) -> Choice:
    """Return the winner among the winners of all chains, by votes weighed by the scores."""
    scores = [node.score for chain in chains for node in chain if node.score is not None]
    if not search.log_scores and min(scores) < 0:
        raise SearchFailed(
            f"revise: the verifier gave {min(scores):g}, and votes weighed by negative scores are meaningless: set strategy.choose to best, "
            "or use a verifier with scores from 0"
        )

    def weighted(nodes: Sequence[SearchNode]) -> Choice:
        scores = [node.score for node in nodes]
        return elect(search, nodes, vote_weights(scores, None, search.log_scores))

    return weighted([weighted(chain).node for chain in chains])
