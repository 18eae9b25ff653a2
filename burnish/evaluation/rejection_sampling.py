"""Training data from scored samples: `burnish data reject` writes demonstrations, `burnish data pairs` writes preferences.

Rejection sampling turns right completions into demonstrations for `burnish sft`. DeepSeek-R1 (2501.12948) fine-tunes on
right, readable, single-language samples of its first RL stage; Kimi k1.5 (2501.12599) on the shortest right sample of each
prompt. Pairs are preferences for `burnish prefer` and `burnish reward-model`. Of short and long, the shortest right sample is chosen; rejected
are longer wrong samples, and right ones at least `ratio` times as long (long2short DPO of Kimi k1.5). Of right and wrong, right samples are
chosen and wrong ones rejected, whatever their lengths.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.core.random_keys import fold
from burnish.data.curation.decontamination import word_ngrams
from burnish.data.curation.output_files import KeptRows, ProgressReport, no_progress, with_progress, write_output
from burnish.data.files import Record
from burnish.data.row import Message
from burnish.evaluation.scored_samples import ScoredSample, is_right, prompts_of, read_samples_of, source_checksums
from burnish.rewards.language_id import may_be_language
from burnish.rewards.verifiers import count_words_by_script, strip_markup

REPEAT_WORDS = 8
"""Length of the word n-grams that `repeated_share` counts."""
_MIXED_SCRIPTS = ({"CJK", "HIRAGANA", "KATAKANA"}, {"CJK", "HANGUL"})
"""Scripts that one language mixes."""
_BROKEN_CHARACTERS = {"\ufffd", "\ufffe", "\uffff"}
_ALLOWED_CONTROL = {"\n", "\t", "\r"}


@dataclass(frozen=True)
class RejectionOptions:
    """Which completions become demonstrations."""

    most: int = 1
    """Completions per prompt."""
    pick: str = "shortest"
    seed: int = 0
    language: str | None = None
    purity: float = 0.98
    """Smallest share of words in one script."""
    max_repeat: float = 0.2
    """Largest share of repeated word n-grams."""
    max_paragraph: int | None = None
    no_code: bool = False
    trees: bool = False
    """Choose among all finished answers of searches with trees, and not only among those that the strategy chose."""


def write_demonstrations(
    source: Path,
    out: Path,
    options: RejectionOptions,
    prompts: Path | None = None,
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write the demonstrations. `prompts` is the file of the prompts. Returns the manifest, and whether anything was written."""
    if options.most < 1:
        raise UserError(f"--most {options.most}: expected 1 or more")
    asked = {"command": "reject", **asdict(options), **source_checksums(source, prompts)}
    return write_output(out, asked, lambda say: _demonstrations(source, options, prompts, say), force, report)


def _demonstrations(source: Path, options: RejectionOptions, prompts: Path | None, report: ProgressReport) -> KeptRows:
    samples = read_samples_of(source, options.trees)
    asked = prompts_of(samples, source, prompts)
    kept = KeptRows([])
    good: dict[str, list[ScoredSample]] = {}
    seen: set[tuple[str, str]] = set()
    for sample in with_progress(samples, "completions", report):
        reason = rejection_reason(sample, options)
        if reason is None and (sample.prompt_id, _collapse_spaces(sample.completion)) in seen:
            reason = "repeated"
        if reason is not None:
            kept.drop(reason, sample.where)
            continue
        seen.add((sample.prompt_id, _collapse_spaces(sample.completion)))
        good.setdefault(sample.prompt_id, []).append(sample)
    chosen = [sample for each in good.values() for sample in _picked(each, options, kept)]
    kept.records = _records(chosen, asked)
    right = [sample for sample in samples if is_right(sample)]
    kept.facts = {"read": _described(samples), "right": _described(right), "written": _described(chosen)}
    return kept


def rejection_reason(sample: ScoredSample, options: RejectionOptions) -> str | None:
    """Return why a completion is rejected, or None."""
    text = sample.completion
    if not is_right(sample):
        return "not judged" if sample.accuracy is None else "wrong"
    if not sample.is_whole:
        return "cut off"
    if not text.strip() or is_broken(text):
        return "empty, or with broken characters"
    if script_purity(text) < options.purity:
        return "mixed scripts"
    if options.language is not None and not is_in_language(text, options.language):
        return f"not in {options.language}"
    if repeated_share(text) > options.max_repeat:
        return "repeats itself"
    if options.max_paragraph is not None and longest_paragraph(text) > options.max_paragraph:
        return f"a paragraph of more than {options.max_paragraph} words"
    if options.no_code and has_code(text):
        return "code"
    return None


def _picked(samples: Sequence[ScoredSample], options: RejectionOptions, kept: KeptRows) -> list[ScoredSample]:
    """Return at most `options.most` samples of one prompt. Of equally short ones, the earlier wins."""

    def rank(index: int) -> tuple[int, int]:
        sample = samples[index]
        key = sample.length if options.pick == "shortest" else fold(options.seed, sample.prompt_id, sample.completion)
        return key, index

    order = sorted(range(len(samples)), key=rank)
    for index in order[options.most :]:
        kept.drop(f"more than {options.most} of its prompt", samples[index].where)
    return [samples[index] for index in sorted(order[: options.most])]


def _described(samples: Sequence[ScoredSample]) -> dict[str, Any]:
    return {
        "completions": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "mean_tokens": sum(sample.length for sample in samples) / max(1, len(samples)),
    }


def _collapse_spaces(text: str) -> str:
    return " ".join(text.split())


# Quality of a completion as a demonstration. DeepSeek-R1 (2501.12948) left mixed languages, long paragraphs and code blocks out.


def script_purity(text: str) -> float:
    """Return the share of words in the most common script; 1 if there are no words. Formulas and code are not counted."""
    words = count_words_by_script(text)
    total = sum(words.values())
    groups = [*_MIXED_SCRIPTS, *({script} for script in words)]
    return max(sum(words[script] for script in group) for group in groups) / total if total else 1.0


def is_in_language(text: str, language: str) -> bool:
    """Whether a text may be in a language, by its script and its function words."""
    return may_be_language(strip_markup(text), language)


def repeated_share(text: str, length: int = REPEAT_WORDS) -> float:
    """Return the share of n-grams of words that occurred before in the text: near 1 for a text that loops."""
    ngrams = list(word_ngrams(text.split(), length))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def longest_paragraph(text: str) -> int:
    """Return the number of words in the longest paragraph."""
    return max(len(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))


def has_code(text: str) -> bool:
    """Whether the text has a code block."""
    return "```" in text


def is_broken(text: str) -> bool:
    """Whether the text has control characters, or what a decoder writes for an incomplete character."""
    return any(c in _BROKEN_CHARACTERS or (unicodedata.category(c) == "Cc" and c not in _ALLOWED_CONTROL) for c in text)


def _records(samples: Sequence[ScoredSample], asked: dict[str, str | list[Message]]) -> list[Record]:
    """Return records with `messages`; if a prompt is text or contains an assistant message, with `prompt` and `completion`."""
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
    """Whether a prompt is a list of messages without an assistant message, which would be trained on."""
    return not isinstance(prompt, str) and all(message["role"] != "assistant" for message in prompt)


@dataclass(frozen=True)
class PairingOptions:
    """How samples are paired."""

    ratio: float = 1.5
    most: int | None = None
    """Pairs per prompt. Of longer ones, those with the longest rejected sample come first."""
    reject: str = "longer"
    """longer: the shortest right sample is chosen. wrong: right samples are chosen, each in one pair at most."""
    seed: int = 0
    """Of the order in which right and wrong samples meet."""
    trees: bool = False
    """Pair all finished answers of searches with trees, and not only those that the strategy chose."""


def write_pairs(
    source: Path,
    out: Path,
    options: PairingOptions,
    prompts: Path | None = None,
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write rows with `prompt`, `chosen` and `rejected`. Returns the manifest, and whether anything was written."""
    if options.ratio < 1 or (options.most is not None and options.most < 1):
        raise UserError(f"--ratio {options.ratio:g} and --most {options.most}: expected 1 or more")
    asked = {"command": "pairs", **asdict(options), **source_checksums(source, prompts)}
    return write_output(out, asked, lambda say: _paired(source, options, prompts, say), force, report)


def _paired(source: Path, options: PairingOptions, prompts: Path | None, report: ProgressReport) -> KeptRows:
    read = read_samples_of(source, options.trees)
    samples = [sample for sample in read if sample.accuracy is not None]
    asked = prompts_of(samples, source, prompts)
    report(f"pairing {len(samples):,} completions")
    found = pairs_of(samples, options)
    kept = KeptRows([])
    for sample in read:
        if sample.accuracy is None:
            kept.drop("completions that were not judged", sample.where)
    _drop_unpaired(samples, {chosen.prompt_id for chosen, _ in found}, kept)
    for chosen, rejected in found:
        record = {"prompt": asked[chosen.prompt_id], "chosen": chosen.completion, "rejected": rejected.completion}
        kept.records.append({**record, "id": chosen.prompt_id, "tokens": [chosen.length, rejected.length]})
    kinds = Counter("right" if is_right(rejected) else "wrong" for _, rejected in found)
    kept.facts = {
        "completions": len(samples),
        "prompts": len({sample.prompt_id for sample in samples}),
        "prompts_paired": len({chosen.prompt_id for chosen, _ in found}),
        "rejected": (
            {"wrong": kinds["wrong"], "of them longer": sum(worse.length > better.length for better, worse in found)}
            if options.reject == "wrong"
            else {"wrong and longer": kinds["wrong"], "right and much longer": kinds["right"]}
        ),
    }
    return kept


def _drop_unpaired(samples: Sequence[ScoredSample], paired: set[str], kept: KeptRows) -> None:
    """Count the prompts that gave no pair, with the reason."""
    by_prompt: dict[str, list[ScoredSample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, []).append(sample)
    for prompt_id, own in by_prompt.items():
        if prompt_id not in paired:
            has_right = any(is_right(sample) and sample.is_whole for sample in own)
            reason = "a completion to reject" if has_right else "a right completion that ended"
            kept.drop(f"prompts without {reason}", own[0].where)


def pairs_of(samples: Sequence[ScoredSample], options: PairingOptions) -> list[tuple[ScoredSample, ScoredSample]]:
    """Return (chosen, rejected) pairs, prompt by prompt. A truncated sample is never chosen; equal texts are no pair."""
    return _right_and_wrong(samples, options) if options.reject == "wrong" else _short_and_longer(samples, options)


def _right_and_wrong(
    samples: Sequence[ScoredSample], options: PairingOptions
) -> list[tuple[ScoredSample, ScoredSample]]:
    """Right samples and wrong ones of a prompt, each in a drawn order, in pairs until one of the two has run out."""
    by_prompt: dict[str, dict[str, ScoredSample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt_id, {}).setdefault(sample.completion.strip(), sample)

    def drawn(sample: ScoredSample) -> int:
        return fold(options.seed, sample.prompt_id, sample.completion)

    found = []
    for texts in by_prompt.values():
        order = sorted(texts.values(), key=drawn)
        right = [sample for sample in order if is_right(sample) and sample.is_whole]
        wrong = [sample for sample in order if not is_right(sample)]
        found += list(zip(right, wrong, strict=False))[: options.most]
    return found


def _short_and_longer(
    samples: Sequence[ScoredSample], options: PairingOptions
) -> list[tuple[ScoredSample, ScoredSample]]:
    """The shortest right sample of a prompt with each longer one."""
    import torch

    from burnish.algorithms.curriculum.prompt_selection import long2short_pairs

    if not samples:
        return []
    places = {name: place for place, name in enumerate(dict.fromkeys(sample.prompt_id for sample in samples))}
    groups = torch.tensor([places[sample.prompt_id] for sample in samples])
    lengths = torch.tensor([sample.length for sample in samples])
    good = torch.tensor([is_right(sample) and sample.is_whole for sample in samples])
    chosen, rejected = (indices.tolist() for indices in long2short_pairs(lengths, good, groups, options.ratio))
    found: dict[str, dict[str, tuple[ScoredSample, ScoredSample]]] = {}
    for one, other in zip(chosen, rejected, strict=True):
        better, worse = samples[one], samples[other]
        if better.completion.strip() != worse.completion.strip():
            found.setdefault(better.prompt_id, {}).setdefault(worse.completion, (better, worse))
    longest = [sorted(pairs.values(), key=lambda pair: -pair[1].length) for pairs in found.values()]
    return [pair for pairs in longest for pair in pairs[: options.most]]
