"""Batches of supervised rows, pairs and demonstrations with images: each has the images of its rows at their places."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.algorithms.losses.preference_losses import PreferenceLoss
from burnish.config.data import Source, Template
from burnish.core.batch import Batch
from burnish.core.trajectory import pack
from burnish.data.demonstrations import Demonstration, encode_demonstration
from burnish.data.images import ImageInput
from burnish.data.preference_pairs import EncodingOptions, LabelledAnswer, load_pairs
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.data.supervised import Example, encode_example
from burnish.rollout.scoring import GroupDemonstrations
from burnish.trainers.preference import answer_pairs, answer_pairs_of_labelled, fingerprint, pack_answer_pairs
from burnish.trainers.reward_model import pack_pairs
from burnish.trainers.sft import pack_examples
from tests.seeing_tokenizer import scene, seeing_tokenizer

TOKENIZER = seeing_tokenizer()


def question(seed: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "image", "image": scene(16, 16, seed)}, {"type": "text", "text": "?"}]}
    ]


def example(seed: int | None, answer: str = "yes") -> Example:
    prompt: Any = "no image" if seed is None else question(seed)
    row = Row(f"r{seed}", prompt, "rows", None, completion=answer)
    return Example(row.id, *encode_example(row, TOKENIZER, Template()))


def placeholders(batch: Batch) -> list[list[int]]:
    """The keys of each sequence, after checking that they stand at their placeholders and at no other token."""
    assert TOKENIZER.image_processor is not None
    mark, bounds = TOKENIZER.image_processor.image_mark, batch.offsets.tolist()
    for first, last, spans in zip(bounds, bounds[1:], batch.picture_spans(), strict=False):
        inside = {k for span in spans for k in range(span.start, span.end)}
        assert inside == set((batch.tokens[first:last] == mark).nonzero().flatten().tolist())
    return [[span.picture.key for span in spans] for spans in batch.picture_spans()]


def test_supervised_rows_with_and_without_images_make_one_batch() -> None:
    keys = placeholders(pack_examples([example(0), example(None), example(1), example(0)]))
    assert [len(own) for own in keys] == [1, 0, 1, 1]
    assert keys[0] == keys[3] != keys[2]
    assert pack_examples([example(None)]).pictures == {}


def test_both_answers_of_a_pair_have_the_image_once(tmp_path: Path) -> None:
    url = ImageInput(scene(16, 16, 3)).data_url()
    row = {"prompt": "<image>?", "chosen": "yes", "rejected": "no", "images": [url]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    options = EncodingOptions(TOKENIZER, Template(), 200, base=tmp_path)
    pairs, _ = load_pairs([Source(path="pairs.jsonl")], options)
    for batch in (pack_pairs(pairs, TOKENIZER.pad_id), pack_answer_pairs(answer_pairs(pairs), PreferenceLoss())):
        first, second = placeholders(batch)
        assert first == second
        assert len(batch.pictures) == 1


def test_a_mismatched_answer_follows_the_image_of_its_prompt() -> None:
    answers = [LabelledAnswer(f"a{k}", example(k, f"answer {k}"), True) for k in range(2)]
    pairs = answer_pairs_of_labelled(answers, 200)
    keys = placeholders(pack_answer_pairs(pairs, PreferenceLoss(name="kto")))
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert all(f"answer {1 - k}" in TOKENIZER.decode(pair.second.tokens) for k, pair in enumerate(pairs))
    assert fingerprint(pairs) != fingerprint([replace(pair, first=replace(pair.first, pictures=())) for pair in pairs])


def test_a_demonstration_in_a_group_has_the_image_of_its_prompt() -> None:
    row = Row("r", question(5), "rows", None)
    traced = encode_demonstration(row, Demonstration("yes", "here"), TOKENIZER, Template())

    class Traces:
        def of(self, row: Row) -> list[Any]:
            return [traced]

    made = GroupDemonstrations(Traces(), 1, TOKENIZER)  # type: ignore[arg-type]
    (one,) = made(PromptSample(Prompt(row, "", traced.tokens[: traced.num_prompt].tolist()), 0), 4)
    one.reward = 1.0
    assert len(placeholders(pack([one]))[0]) == 1
    assert np.array_equal(one.sequences[0].tokens, traced.tokens)
