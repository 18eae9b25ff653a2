"""`burnish data reject`: rejection sampling, completions that were judged right become demonstrations for `burnish sft`.

DeepSeek-R1 (2501.12948) fine-tunes its base again on right, readable, single-language samples of its first RL stage; Kimi
k1.5 (2501.12599) on the shortest right sample of each prompt (long2short).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.core.keys import fold
from burnish.data.files import Record
from burnish.data.outputs import Kept, Report, counted, quiet, write_output
from burnish.data.rows import Message
from burnish.evaluation.readable import has_code, is_broken, is_in, longest_paragraph, purity, repeated_share
from burnish.evaluation.sampled import Sample, is_right, prompts_of, read_samples_of, source_sums


@dataclass(frozen=True)
class Rejection:
    """Which completions are good enough."""

    most: int = 1
    """Of one prompt."""
    pick: str = "shortest"
    seed: int = 0
    language: str | None = None
    purity: float = 0.98
    """Share of words that must be of one script."""
    max_repeat: float = 0.2
    """Share of runs of words that may stand there twice."""
    max_paragraph: int | None = None
    no_code: bool = False


def reject(
    source: Path,
    out: Path,
    options: Rejection,
    prompts: Path | None = None,
    force: bool = False,
    report: Report = quiet,
) -> tuple[dict[str, Any], bool]:
    """Write the demonstrations; `prompts` is the file that was answered. The manifest, and whether anything was written."""
    if options.most < 1:
        raise UserError(f"--most {options.most}: expected 1 or more")
    asked = {"command": "reject", **asdict(options), **source_sums(source, prompts)}
    return write_output(out, asked, lambda say: _demonstrations(source, options, prompts, say), force, report)


def _demonstrations(source: Path, options: Rejection, prompts: Path | None, report: Report) -> Kept:
    samples = read_samples_of(source)
    asked = prompts_of(samples, source, prompts)
    kept = Kept([])
    good: dict[str, list[Sample]] = {}
    seen: set[tuple[str, str]] = set()
    for sample in counted(samples, "completions", report):
        reason = why_not(sample, options)
        if reason is None and (sample.prompt_id, _normal(sample.completion)) in seen:
            reason = "repeated"
        if reason is not None:
            kept.drop(reason, sample.where)
            continue
        seen.add((sample.prompt_id, _normal(sample.completion)))
        good.setdefault(sample.prompt_id, []).append(sample)
    chosen = [sample for each in good.values() for sample in _picked(each, options, kept)]
    kept.records = _records(chosen, asked)
    right = [sample for sample in samples if is_right(sample)]
    kept.facts = {"read": _described(samples), "right": _described(right), "written": _described(chosen)}
    return kept


def why_not(sample: Sample, options: Rejection) -> str | None:
    """Why a completion is no demonstration, or None."""
    text = sample.completion
    if not is_right(sample):
        return "not judged" if sample.accuracy is None else "wrong"
    if not sample.is_whole:
        return "cut off"
    if not text.strip() or is_broken(text):
        return "empty, or with broken characters"
    if purity(text) < options.purity:
        return "mixed scripts"
    if options.language is not None and not is_in(text, options.language):
        return f"not in {options.language}"
    if repeated_share(text) > options.max_repeat:
        return "repeats itself"
    if options.max_paragraph is not None and longest_paragraph(text) > options.max_paragraph:
        return f"a paragraph of more than {options.max_paragraph} words"
    if options.no_code and has_code(text):
        return "code"
    return None


def _picked(samples: Sequence[Sample], options: Rejection, kept: Kept) -> list[Sample]:
    """At most so many of one prompt; of equally short ones the earlier."""

    def rank(index: int) -> tuple[int, int]:
        sample = samples[index]
        key = sample.length if options.pick == "shortest" else fold(options.seed, sample.prompt_id, sample.completion)
        return key, index

    order = sorted(range(len(samples)), key=rank)
    for index in order[options.most :]:
        kept.drop(f"more than {options.most} of its prompt", samples[index].where)
    return [samples[index] for index in sorted(order[: options.most])]


def _described(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "completions": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "mean_tokens": sum(sample.length for sample in samples) / max(1, len(samples)),
    }


def _normal(text: str) -> str:
    return " ".join(text.split())


# --- what is written ---------------------------------------------------------------------------------------------------


def _records(samples: Sequence[Sample], asked: dict[str, str | list[Message]]) -> list[Record]:
    """Conversations as `messages`; prompts that are text, or have an assistant in them already, as prompt and completion."""
    as_messages = all(_is_question(asked[sample.prompt_id]) for sample in samples)
    records: list[Record] = []
    for sample in samples:
        prompt, said = asked[sample.prompt_id], sample.completion
        extra = {"id": sample.prompt_id, "tokens": sample.length}
        if as_messages and isinstance(prompt, list):
            records.append({"messages": [*prompt, {"role": "assistant", "content": said}], **extra})
        else:
            records.append({"prompt": prompt, "completion": said, **extra})
    return records


def _is_question(prompt: str | Iterable[Message]) -> bool:
    """Whether a prompt is messages none of which would be learnt."""
    return not isinstance(prompt, str) and all(message["role"] != "assistant" for message in prompt)
