"""Readers of published data sets with images: Geometry3K and CLEVR. `published_datasets.SHAPES` names them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from burnish.data.files import Record
from burnish.data.images import IMAGE_MARK
from burnish.data.published_example import PublishedExample, UnusableRow, first_value, question_of, user_messages

GEOMETRY_INSTRUCTION = (
    " First think about the problem inside <think> </think> tags, then put the final answer within \\boxed{}."
)
COUNT_INSTRUCTION = "\nThink step by step, then give the answer alone, a word or a number, inside <answer> </answer>."
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def geometry3k(record: Record) -> PublishedExample:
    """Geometry3K (hiyouga/geometry3k, as verl and Easy-R1 use it): `problem` has `<image>` where the figure of `images` is."""
    question, answer, images = question_of(record), record["answer"], _images(record, "images")
    if answer is None or not str(answer).strip():
        raise UnusableRow("no answer")
    if IMAGE_MARK not in question:
        question = IMAGE_MARK * len(images) + question
    return PublishedExample(
        _identity(question, images),
        user_messages(question + GEOMETRY_INSTRUCTION),
        str(answer).strip(),
        images=images,
    )


def clevr(record: Record) -> PublishedExample:
    """CLEVR: its question files (`CLEVR_v1.0/questions/*.json`, images beside them), or R1-V's rows with `image`, `problem` and `solution`."""
    question, value = question_of(record), first_value(record, "answer", "solution")
    images = _images(record, "images", "image")
    if not images:
        name, split = str(record["image_filename"]), str(record["split"])
        images = (f"../images/{split}/{name}",)
    tagged = ANSWER_TAG.search(str(value))
    answer = (tagged[1] if tagged else str(value)).strip()
    if value is None or not answer:
        raise UnusableRow("no answer")
    asked = question if IMAGE_MARK in question else IMAGE_MARK * len(images) + question
    return PublishedExample(
        _identity(question, images), user_messages(asked + COUNT_INSTRUCTION), [answer], images=images
    )


def _images(record: Record, *columns: str) -> tuple[Any, ...]:
    value = first_value(record, *columns)
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _identity(question: str, images: tuple[Any, ...]) -> str:
    """The question with a name of its images: rows of one wording with other images are other questions."""
    return f"{question} [{' '.join(_name(image) for image in images)}]"


def _name(image: Any) -> str:
    given = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    return hashlib.blake2b(given, digest_size=8).hexdigest() if isinstance(given, bytes) else str(given)
