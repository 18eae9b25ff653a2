"""The export of a session: its nodes and turns for a `Trajectory`, with marks for what is trained.

All sampled tokens are in the export, each once. These answers are marked as not trained unless the options say otherwise:

- `unused`: one of the n answers to a call that asked for several, which no call continued;
- `retried`: the same call came again after it, and no call continued it;
- `cut`: the client left before the end of the stream;
- `side`, with `train="main"`: an answer that is not on the main branch.

The main branch leads to the last answer that was recorded, over the links between calls. A link goes from a call to the answer before it,
also where the tokens differ because the template rewrote the history, a system message changed, or the context was compacted. A call
without any link, such as for a title or a token count, is not the end of the main branch unless all calls are so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from burnish.core.trajectory import TokenNode, TurnSpan
from burnish.gateway.session_calls import Answer
from burnish.gateway.token_nodes import Node, NodeTree

TrainedCalls = Literal["all", "main"]


@dataclass(frozen=True)
class SessionExport:
    """What a session gives a `Trajectory`. The lists about turns have one entry for each answer with tokens."""

    nodes: list[TokenNode]
    """Parents come before their children. Nodes that lead to no sampled token are left out."""
    turns: list[TurnSpan]
    """In the order in which the answers were recorded."""
    links: list[int]
    """The index of the turn before each turn, which need not be on the same path; -1 without one."""
    response_ids: list[str]
    finishes: list[str]
    agents: list[str | None]
    """The sub-agent of each turn; None if the client named none."""
    not_trained: dict[str, int]
    """Answers that are not trained, by reason."""
    main: int
    """The index of the last turn of the main branch; -1 without turns."""


def export_session(
    tree: NodeTree, answers: Sequence[Answer], train: TrainedCalls, n_leaves: bool, cut: bool, retried: bool
) -> SessionExport:
    """Return the nodes and turns of a session. The last three options train what is left out otherwise."""
    main = _main_branch(answers)
    trained = main if train == "main" else None
    nodes: list[TokenNode] = []
    places: dict[int, int] = {-1: -1}
    turns: list[TurnSpan] = []
    turn_of: dict[int, int] = {}
    sampled = [answer for answer in answers if len(answer.node.tokens)]
    not_trained: Counter[str] = Counter()
    for answer in sampled:
        for node in reversed(list(answer.node.path())):
            if node.number not in places:
                places[node.number] = _add(nodes, node, places, tree)
        reason = _reason(answer, trained, n_leaves, cut, retried)
        if reason is not None:
            not_trained[reason] += 1
            nodes[places[answer.node.number]].is_trained = False
        turn_of[answer.number] = len(turns)
        turns.append(TurnSpan(places[answer.node.number], None, answer.reward))
    return SessionExport(
        nodes=nodes,
        turns=turns,
        links=[_turn_before(answer, turn_of) for answer in sampled],
        response_ids=[answer.response_id for answer in sampled],
        finishes=[answer.finish for answer in sampled],
        agents=[answer.agent for answer in sampled],
        not_trained=dict(not_trained),
        main=max((turn for number, turn in turn_of.items() if number in main), default=len(turns) - 1),
    )


def _add(nodes: list[TokenNode], node: Node, places: dict[int, int], tree: NodeTree) -> int:
    """Add a node. An answer without tokens is left out: what follows it goes behind its parent."""
    assert node.parent is not None
    parent = places[node.parent.number]
    if not len(node.tokens):
        return parent
    made = TokenNode(parent, tree.tokens_of(node), node.logp, node.version, observed=node.observed)
    made.pictures = tree.pictures_of(node)
    nodes.append(made)
    return len(nodes) - 1


def _reason(answer: Answer, trained: set[int] | None, n_leaves: bool, cut: bool, retried: bool) -> str | None:
    """Return why an answer is not trained; None if it is."""
    if trained is not None and answer.number not in trained:
        return "side"
    if answer.is_cut and not cut:
        return "cut"
    if answer.is_continued:
        return None
    if answer.is_retried and not retried:
        return "retried"
    return "unused" if len(answer.call.answers) > 1 and not n_leaves else None


def _before(answer: Answer) -> Answer | None:
    return answer.call.extends or answer.call.link


def _main_branch(answers: Sequence[Answer]) -> set[int]:
    """Return the numbers of the answers on the main branch."""
    linked = {before.number for answer in answers if (before := _before(answer)) is not None}
    dialogues = [answer for answer in answers if _before(answer) is not None or answer.number in linked]
    found: set[int] = set()
    at = (dialogues or answers)[-1] if answers else None
    while at is not None and at.number not in found:
        found.add(at.number)
        at = _before(at)
    return found


def _turn_before(answer: Answer, turn_of: dict[int, int]) -> int:
    """Return the turn before an answer. Answers without tokens have none, so the one before them counts."""
    before = _before(answer)
    while before is not None and before.number not in turn_of:
        before = _before(before)
    return -1 if before is None else turn_of[before.number]
