"""`burnish data pairs`: samples of one prompt as preferences for `burnish prefer`, the shortest right one before longer ones.

Chosen is the shortest right sample; rejected are wrong ones longer than it, and right ones at least `ratio` times as
long. Kimi k1.5 (2501.12599), long2short DPO.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.outputs import Kept, Report, quiet, write_output
from burnish.evaluation.sampled import Sample, is_right, prompts_of, read_samples_of, source_sums


@dataclass(frozen=True)
class Pairing:
    """Which samples are paired."""

    ratio: float = 1.5
    most: int | None = None
    """Pairs of one prompt; the longest rejected ones come first."""


def pair_up(
    source: Path,
    out: Path,
    options: Pairing,
    prompts: Path | None = None,
    force: bool = False,
    report: Report = quiet,
) -> tuple[dict[str, Any], bool]:
    """Write rows with `prompt`, `chosen` and `rejected`; the manifest, and whether anything was written."""
    if options.ratio < 1 or (options.most is not None and options.most < 1):
        raise UserError(f"--ratio {options.ratio:g} and --most {options.most}: expected 1 or more")
    asked = {"command": "pairs", **asdict(options), **source_sums(source, prompts)}
    return write_output(out, asked, lambda say: _paired(source, options, prompts, say), force, report)


def _paired(source: Path, options: Pairing, prompts: Path | None, report: Report) -> Kept:
    samples = [sample for sample in read_samples_of(source) if sample.accuracy is not None]
    asked = prompts_of(samples, source, prompts)
    report(f"pairing {len(samples):,} completions")
    found = pairs_of(samples, options)
    kept = Kept([])
    for chosen, rejected in found:
        record = {"prompt": asked[chosen.prompt_id], "chosen": chosen.completion, "rejected": rejected.completion}
        kept.records.append({**record, "id": chosen.prompt_id, "tokens": [chosen.length, rejected.length]})
    kinds = Counter("right" if is_right(rejected) else "wrong" for _, rejected in found)
    kept.facts = {
        "completions": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "prompts_paired": len({chosen.prompt_id for chosen, _ in found}),
        "rejected": {"wrong and longer": kinds["wrong"], "right and much longer": kinds["right"]},
    }
    return kept


def pairs_of(samples: Sequence[Sample], options: Pairing) -> list[tuple[Sample, Sample]]:
    """(chosen, rejected), prompt by prompt; a sample that was cut off is never chosen, and texts that are alike are no pair."""
    import torch

    from burnish.algorithms.selection import long2short_pairs

    if not samples:
        return []
    places = {name: place for place, name in enumerate(dict.fromkeys(sample.prompt_id for sample in samples))}
    groups = torch.tensor([places[sample.prompt_id] for sample in samples])
    lengths = torch.tensor([sample.length for sample in samples])
    good = torch.tensor([is_right(sample) and sample.is_whole for sample in samples])
    chosen, rejected = (indices.tolist() for indices in long2short_pairs(lengths, good, groups, options.ratio))
    found: dict[str, dict[str, tuple[Sample, Sample]]] = {}
    for one, other in zip(chosen, rejected, strict=True):
        better, worse = samples[one], samples[other]
        if better.completion.strip() != worse.completion.strip():
            found.setdefault(better.prompt_id, {}).setdefault(worse.completion, (better, worse))
    longest = [sorted(pairs.values(), key=lambda pair: -pair[1].length) for pairs in found.values()]
    return [pair for pairs in longest for pair in pairs[: options.most]]
