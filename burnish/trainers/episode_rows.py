"""Episodes with an environment as columns of the samples table: who said what, and what went wrong.

An episode is a list of entries in the order in which they were played. An entry is a turn of the model, or what the environment
added to the context. If the context was rewritten, a later branch continues behind an earlier turn, or is a new conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from burnish.core.pictures import PictureSpan, shifted
from burnish.core.trajectory import EVENTS, LAST_WORDS, OPPONENT, TokenNode, Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.models.tokenizer import Tokenizer
from burnish.run.picture_files import picture_mark
from burnish.run.run import Run

MAX_TRACEBACK_CHARS = 4_000
"""The end of a traceback that is kept as an example."""


def episode_columns(trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the columns `turns`, `pictures`, `role`, `opponent`, `last_words` and `events` of a sample. A missing value is None."""
    events = trajectory.metadata.get(EVENTS)
    pictures = {span.picture.key: span.picture for node in trajectory.nodes for span in node.pictures}
    return {
        "pictures": list(pictures.values()) or None,
        "turns": turns_json(trajectory, tokenizer),
        "role": trajectory.role,
        "opponent": trajectory.metadata.get(OPPONENT),
        "last_words": trajectory.metadata.get(LAST_WORDS),
        "events": json.dumps(events, ensure_ascii=False) if events else None,
    }


def opening_text(trajectory: Trajectory, prompt: Prompt, tokenizer: Tokenizer) -> str:
    """Return the prompt that the model read. An environment may give another one than the row has."""
    nodes = trajectory.nodes  # branches may divide the prompt into several nodes, each behind the one before
    leading = takewhile(lambda k: not nodes[k].is_sampled and nodes[k].parent == k - 1, range(len(nodes)))
    opening = ReadTokens()
    for k in leading:
        opening.add(nodes[k])
    if not opening.tokens or (opening.tokens == list(prompt.tokens) and not opening.pictures):
        return prompt.text
    return opening.text(tokenizer, skip_special=False)


@dataclass
class ReadTokens:
    """Tokens of consecutive nodes, and the images among them."""

    tokens: list[int] = field(default_factory=list)
    pictures: list[PictureSpan] = field(default_factory=list)

    def add(self, node: TokenNode) -> None:
        """Append the tokens of a node."""
        self.pictures += shifted(node.pictures, len(self.tokens))
        self.tokens += node.tokens.tolist()

    def text(self, tokenizer: Tokenizer, skip_special: bool = True) -> str:
        """Return the text with a mark for each image (`run/picture_files.py`)."""
        parts, at = list[str](), 0
        for span in self.pictures:
            parts += [tokenizer.decode(self.tokens[at : span.start], skip_special), picture_mark(span.picture.key)]
            at = span.end
        return "".join([*parts, tokenizer.decode(self.tokens[at:], skip_special)])


def turns_json(trajectory: Trajectory, tokenizer: Tokenizer) -> str | None:
    """Return the entries after the prompt as JSON; None for a single turn without a state, where the completion is enough."""
    entries = episode_entries(trajectory, tokenizer)
    is_plain = len(entries) < 2 and all(span.state is None for span in trajectory.turns)
    return None if is_plain else json.dumps(entries, ensure_ascii=False)


def episode_entries(trajectory: Trajectory, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return what was said after the prompt.

    Each entry has `who` (model or environment) and `text`; a turn of the model also has `reward` and, if known, `state`. Where another
    branch begins or goes on, the entry has `branch` (its number) and `after`: the number of the turn behind which it continues. That
    is 0 for the prompt and None for a new conversation.
    """
    spans = {span.node: span for span in trajectory.turns}
    entries, read = list[dict[str, Any]](), list[ReadTokens]()
    turn_of, branch_of, parents, num_turns, num_branches, shown = list[int](), list[int](), set[int](), 0, 1, -1
    for index, node in enumerate(trajectory.nodes):
        is_branch = index > 0 and (node.parent < 0 or node.parent in parents)
        parents.add(node.parent)
        num_turns, num_branches = num_turns + node.is_sampled, num_branches + is_branch
        branch_of.append(num_branches if is_branch or node.parent < 0 else branch_of[node.parent])
        is_elsewhere = is_branch or (shown >= 0 and branch_of[index] != branch_of[shown])
        before = None if node.parent < 0 else turn_of[node.parent]
        turn_of.append(num_turns if node.is_sampled else before or 0)
        if not num_turns and not is_branch:
            continue  # the prompt
        continues_entry = not node.is_sampled and not is_branch and node.parent == shown
        if continues_entry and entries[-1]["who"] == "environment":
            read[-1].add(node)
        else:
            entry: dict[str, Any] = {"who": "model" if node.is_sampled else "environment"}
            entries.append(entry | ({"branch": branch_of[index], "after": before} if is_elsewhere else {}))
            read.append(ReadTokens())
            read[-1].add(node)
        if (span := spans.get(index)) is not None:
            entries[-1] |= {"reward": span.reward} | ({} if span.state is None else {"state": span.state})
        shown = index
    for entry, own in zip(entries, read, strict=True):
        entry["text"] = _written_text(own.tokens, tokenizer) if entry["who"] == "model" else own.text(tokenizer)
    return entries


def _written_text(tokens: list[int], tokenizer: Tokenizer) -> str:
    """Return the text of a turn with control tokens such as `[TOOL_CALLS]`, without the token that ended the turn."""
    return tokenizer.decode(tokens[:-1] if tokens[-1] in tokenizer.eos_ids else tokens, skip_special=False)


def record_new_events(run: Run, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Tell the user of each kind of event that the run had not seen before, and keep its first example for the report."""
    found: dict[str, list[tuple[Trajectory, dict[str, Any]]]] = {}
    for t in trajectories:
        for event in t.metadata.get(EVENTS, ()):
            found.setdefault(event["kind"], []).append((t, event))
    known = {row["kind"] for row in run.events.read()} if found else set()
    for kind in sorted(found.keys() - known):
        t, first = found[kind][0]
        example = {name: str(first.get(name) or "") for name in ("what", "message", "traceback")}
        example["traceback"] = example["traceback"][-MAX_TRACEBACK_CHARS:]
        run.events.append(step, [{"sample": t.id, "kind": kind, **example}])
        run.display.note(
            f"step {step}: {kind} in the environment, {len(found[kind])} times; first in {t.id}, {example['what']}: {example['message']} "
            f"(told once; environment/{kind} counts it, and the report has the traceback)"
        )
