"""Rows for a step reward model from the trees of searches: `burnish data steps`.

`burnish eval DIR DATA --strategy step_values --keep-trees` (or mcts with `strategy.verifier=oracle`) saves every node of a search with its
text, score and value. A path of step nodes becomes a row of prompt, steps and values, which `burnish reward-model --steps` learns from
(Math-Shepherd, 2312.08935; OmegaPRM, 2406.06592).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.curation.output_files import KeptRows, ProgressReport, no_progress, with_progress, write_output
from burnish.data.files import Record
from burnish.evaluation.scored_samples import Node, SearchedTree, prompts_of, read_trees, source_checksums
from burnish.evaluation.strategies.step_values import COUNT, VALUE


@dataclass(frozen=True)
class StepRowOptions:
    """Which paths become rows."""

    step: str = "\n\n"
    """What ends a step, as the search had it."""
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
    """Write rows with `prompt`, `steps`, `values` and `counts`. Returns the manifest, and whether anything was written."""
    if options.min_count < 1 or not options.step:
        raise UserError(f"--min-count {options.min_count} and --step {options.step!r}: expected 1 or more, and a text")
    asked = {"command": "steps", **asdict(options), **source_checksums(source, prompts)}
    return write_output(out, asked, lambda say: _step_rows(source, options, prompts, say), force, report)


def _step_rows(source: Path, options: StepRowOptions, prompts: Path | None, report: ProgressReport) -> KeptRows:
    trees = read_trees(source)
    asked = prompts_of([tree.sample for tree in trees], source, prompts)
    kept = KeptRows([])
    num_steps = num_labels = 0
    for tree in with_progress(trees, "trees", report):
        for record in tree_step_rows(tree, options, kept):
            kept.records.append({"prompt": asked[tree.sample.prompt_id], **record, "id": tree.sample.prompt_id})
            num_steps += len(record["steps"])
            num_labels += sum(value is not None for value in record["values"])
    kept.facts = {"trees": len(trees), "steps": num_steps, "labels": num_labels}
    return kept


def tree_step_rows(tree: SearchedTree, options: StepRowOptions, kept: KeptRows) -> list[Record]:
    """Return a row for each path of a tree whose nodes are steps. What is left out is counted in `kept`.

    A node with several steps is a rollout, which was sampled for the value of the node before it: paths end before it.
    """
    found: dict[tuple[str, ...], Record] = {}
    for nodes in tree.paths():
        steps: list[Node] = []
        for node in nodes:
            text = node["text"].removesuffix(options.step)
            if options.step in text or not text.strip():
                break
            steps.append(node)
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
        texts = tuple(node["text"].removesuffix(options.step) for node in steps)
        counts = [
            int(node.get(COUNT, 1)) if value is not None else 0 for node, value in zip(steps, values, strict=True)
        ]
        found[texts] = {"steps": list(texts), "values": values, "counts": counts}
    # A row whose steps begin another one would weigh its steps twice.
    prefixes = {steps[:length] for steps in found for length in range(1, len(steps))}
    return [record for steps, record in found.items() if steps not in prefixes]


def _label(node: Node, options: StepRowOptions) -> float | None:
    """Return the value of a step, from its continuations or its score; None with too few of them. A finished answer needs none."""
    value: float | None = node.get(VALUE, node["score"])
    is_certain = node["end"] != "open" or int(node.get(COUNT, 1)) >= options.min_count
    return value if is_certain else None
