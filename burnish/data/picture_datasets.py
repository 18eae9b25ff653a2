"""Readers of published data sets with images: Geometry3K, CLEVR and GUI-R1. `published_datasets.SHAPES` names them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from burnish.data.files import Record
from burnish.data.gui_actions import read_target
from burnish.data.images import IMAGE_MARK, image_input
from burnish.data.published_example import PublishedExample, UnusableRow, first_value, question_of, user_messages

GEOMETRY_INSTRUCTION = (
    " First think about the problem inside <think> </think> tags, then put the final answer within \\boxed{}."
)
COUNT_INSTRUCTION = "\nThink step by step, then give the answer alone, a word or a number, inside <answer> </answer>."
GUI_PROMPT = (
    "This is a screenshot: <image>. The command is '{instruction}', and the actions so far are '{history}'. Give the next action: "
    "click, type, scroll, select, open_app, press_home, press_back, enter, wait, complete or long_press; the point in pixels to click "
    "on; and the text to type, if any. Think inside <think> </think> tags, then answer in this form:\n"
    "<think> ... </think> <answer>[{'action': 'click', 'point': [x, y], 'input_text': 'no input text'}]</answer>"
)
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


def gui_r1(record: Record) -> PublishedExample:
    """GUI-R1 (ritzzai/GUI-R1): a screenshot `image`, an `instruction`, and the expected action with its box and text.

    A box between 0 and 1 is a share of the screenshot; the answer has it in pixels of the screenshot as it is in the data.
    """
    instruction, history, box = (
        str(record["instruction"]).strip(),
        record.get("history") or "None",
        record.get("gt_bbox"),
    )
    images = _images(record, "images", "image")
    if not instruction or len(images) != 1:
        raise UnusableRow("no instruction" if not instruction else f"{len(images)} screenshots")
    target: dict[str, Any] = {"action": str(record["gt_action"])}
    if box is not None:
        target["gt_bbox"] = _in_pixels([float(x) for x in box], images[0])
    text = first_value(record, "gt_input_text", "input_text")
    target |= {} if text is None else {"input_text": str(text)}
    read_target(target)  # raises for a box of another form
    prompt = GUI_PROMPT.replace("{instruction}", instruction).replace("{history}", str(history))
    return PublishedExample(_identity(instruction, images), user_messages(prompt), json.dumps(target), images=images)


def _in_pixels(box: list[float], image: Any) -> list[float]:
    if max(box, default=0) > 1:
        return box
    size = image_input(image, "image").size()
    return [share * size[axis % 2] for axis, share in enumerate(box)]


def _images(record: Record, *columns: str) -> tuple[Any, ...]:
    value = first_value(record, *columns)
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _identity(question: str, images: tuple[Any, ...]) -> str:
    """The question with a name of its images: rows of one wording with other images are other questions."""
    return f"{question} [{' '.join(_name(image) for image in images)}]"


def _name(image: Any) -> str:
    given = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    return hashlib.blake2b(given, digest_size=8).hexdigest() if isinstance(given, bytes) else str(given)
