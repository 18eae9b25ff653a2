"""Rows for a step reward model from the trees of searches: `burnish data steps`.

`burnish eval DIR DATA --strategy step_values --keep-trees` (or mcts with `strategy.verifier=oracle`) saves every node of a search with its
text, score and value. A path of step nodes becomes a row of prompt, steps and values, which `burnish reward-model --steps` learns from
(Math-Shepherd, 2312.08935; OmegaPRM, 2406.06592).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.curation.output_files import KeptRows, ProgressReport, no_progress, with_progress, write_output
from burnish.data.files import Record
from burnish.evaluation.scored_samples import Node, SearchedTree, prompts_of, read_trees, source_checksums
from burnish.evaluation.strategies.search_tree import STEP_TEXT
from burnish.evaluation.strategies.step_values import COUNT, VALUE


@dataclass(frozen=True)
class StepRowOptions:
    """Which paths become rows."""

    step: str | None = None
    """What ends a step, for rows that do not say it; None takes what the rows say."""
    min_count: int = 1
    """Fewest continuations behind a value; steps with fewer have no label."""
    mixed: bool = False
    """Leave out answers whose labelled steps all have the same value."""


def write_step_rows(
    source: Path,
    out: Path,
    options: StepRowOptions,
    prompts: Path | None = None,
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write rows with `prompt`, `steps`, `values`, `counts` and `finished`. Returns the manifest, and whether anything was written."""
    if options.min_count < 1 or options.step == "":
        raise UserError(f"--min-count {options.min_count} and --step {options.step!r}: expected 1 or more, and a text")
    trees = read_trees(source)
    if not trees:
        raise UserError(f"{source} has no rows, so there are no steps")
    step = common_step(trees, options.step)
    which = {"delimiter": step, "min_count": options.min_count, "mixed": options.mixed}
    asked = {"command": "steps", **which, **source_checksums(source, prompts)}
    return write_output(out, asked, lambda say: _step_rows(trees, source, step, options, prompts, say), force, report)


def common_step(trees: Sequence[SearchedTree], given: str | None) -> str:
    """Return what ends a step in all trees: what their rows say, or `given` for rows that do not say it."""
    first, *others = [_step_of(tree, given) for tree in trees]
    for tree, step in zip(trees[1:], others, strict=True):
        if step != first:
            raise UserError(
                f"{tree.where}: the steps of this search ended with {step!r}, and those before it with {first!r}: a step reward model has one "
                "delimiter, so give searches with the same one"
            )
    return first


def _step_of(tree: SearchedTree, given: str | None) -> str:
    name = tree.search.get("strategy", "(not named)")
    step: str | None = tree.search.get("step", given)
    if step is None and "step" in tree.search:
        raise UserError(
            f"{tree.where}: the steps of its search ({name}) were cut by strategy.step_tokens alone (strategy.step is null), so no text ends "
            "them, and a step reward model could not tell where to score: search with strategy.step, such as a blank line"
        )
    if step is None:
        raise UserError(
            f"{tree.where}: the row does not say what ended a step of its search ({name}); if its nodes are steps, give that text with --step"
        )
    if given is not None and given != step:
        raise UserError(
            f"{tree.where}: --step {given!r}, but the steps of this search ended with {step!r}: leave --step out"
        )
    return step


def _step_rows(
    trees: Sequence[SearchedTree],
    source: Path,
    step: str,
    options: StepRowOptions,
    prompts: Path | None,
    report: ProgressReport,
) -> KeptRows:
    asked = prompts_of([tree.sample for tree in trees], source, prompts)
    kept = KeptRows([])
    num_steps = num_labels = 0
    for tree in with_progress(trees, "trees", report):
        for record in tree_step_rows(tree, step, options, kept):
            kept.records.append({"prompt": asked[tree.sample.prompt_id], **record, "id": tree.sample.prompt_id})
            num_steps += len(record["steps"])
            num_labels += sum(value is not None for value in record["values"])
    kept.facts = {"trees": len(trees), "steps": num_steps, "labels": num_labels}
    return kept


def tree_step_rows(tree: SearchedTree, step: str, options: StepRowOptions, kept: KeptRows) -> list[Record]:
    """Return a row for each path of a tree whose nodes are steps. What is left out is counted in `kept`.

    A node with several steps is a rollout, which was sampled for the value of the node before it: paths end before it. They also end before
    a node that was cut off inside its step, by a limit of tokens. A path is `finished` if its last step ended with an end token.
    """
    found: dict[tuple[tuple[str, bool], ...], Record] = {}
    cut: set[int] = set()
    for nodes in tree.paths():
        steps: list[Node] = []
        for node in nodes:
            text = _step_text(node).removesuffix(step)
            if step in text or not text.strip():
                break
            if not (_step_text(node).endswith(step) or _is_end(node)):
                cut.add(node["node"])
                break
            steps.append(node)
            if _is_end(node):
                break
        while steps and _label(steps[-1], options) is None:
            steps.pop()
        if not steps:
            kept.drop("paths without a step that has a value", tree.where)
            continue
        values = [_label(node, options) for node in steps]
        if wrong := next((value for value in values if value is not None and not 0 <= value <= 1), None):
            raise UserError(
                f"{tree.where}: a step has the value {wrong:g}, and labels are probabilities from 0 to 1: search with strategy.verifier=oracle, "
                "or with a verifier whose scores are probabilities"
            )
        if options.mixed and len({value for value in values if value is not None}) == 1:
            kept.drop("answers whose steps all have the same value", tree.where)
            continue
        texts = [_step_text(node).removesuffix(step) for node in steps]
        counts = [
            int(node.get(COUNT, 1)) if value is not None else 0 for node, value in zip(steps, values, strict=True)
        ]
        key = tuple((text, _is_end(node)) for text, node in zip(texts, steps, strict=True))
        found[key] = {"steps": texts, "values": values, "counts": counts, "finished": _is_end(steps[-1])}
    for _ in cut:
        kept.drop("steps or rollouts that were cut off before they ended", tree.where)
    # A row whose steps begin another one would weigh its steps twice.
    prefixes = {steps[:length] for steps in found for length in range(1, len(steps))}
    return [record for steps, record in found.items() if steps not in prefixes]


def _step_text(node: Node) -> str:
    """Return the text of a node with the delimiter in it, which may be the name of a special token."""
    return str(node.get(STEP_TEXT, node["text"]))


def _is_end(node: Node) -> bool:
    """Whether the answer ends with this step, by an end token."""
    return bool(node["end"] == "stop")


def _label(node: Node, options: StepRowOptions) -> float | None:
    """Return the value of a step, from its continuations or its score; None with too few of them. A finished answer needs none."""
    value: float | None = node.get(VALUE, node["score"])
    is_certain = node["end"] != "open" or int(node.get(COUNT, 1)) >= options.min_count
    return value if is_certain else None
