"""Rows for `r1_small.yaml`: solutions of GSM8K's training file, written as thinking and an answer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.published_datasets import gsm8k


def cold_start(path: str, num: int) -> list[dict[str, Any]]:
    """The last `num` rows of a GSM8K file as demonstrations: the solution in <think>, the number in <answer>."""
    if not Path(path).is_file():
        raise UserError(
            f"r1_small: no file {path}: it is gsm8k_train.jsonl of openai/grade-school-math (docs/stages.md)"
        )
    lines = Path(path).read_text(encoding="utf-8").splitlines()[-num:]
    return [_demonstration(json.loads(line)) for line in lines]


def _demonstration(record: dict[str, Any]) -> dict[str, Any]:
    example = gsm8k(record)
    solution = re.sub(r"<<[^>]*>>", "", record["answer"].rpartition("####")[0])  # without calculator annotations
    answer = f"<think>\n{solution.strip()}\n</think>\n<answer>\\boxed{{{example.answer}}}</answer>"
    return {"prompt": example.messages, "completion": answer}
