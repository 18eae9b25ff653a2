"""Sorting digits with or without working: what `long2short_toy.yaml` imitates, and how it is judged.

`4213>` is answered by `1234`, or by `1>12>123>1234`: everything before the last `>` is working.
"""

from __future__ import annotations

from typing import Any

from burnish.data.tasks.sort_digits import SortDigits
from burnish.data.tasks.task import Dice


def demonstrations(num: int, share_long: float, right: float = 1.0, seed: int = 0) -> list[dict[str, str]]:
    """Rows to imitate: `share_long` of them with working, which is always right; `right` of those without."""
    rows = []
    for index, row in enumerate(SortDigits(seed, 3, 4).demonstrations(num, seed, clean=True)):
        dice, answer = Dice(seed, "long2short", index), row["completion"]
        if dice.unit() < share_long:
            answer = ">".join(answer[:length] for length in range(1, len(answer) + 1))
        elif dice.unit() >= right:
            answer = row["prompt"].rstrip(">")
        rows.append({"prompt": row["prompt"], "completion": answer})
    return rows


def last(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> bool:
    """Whether what follows the last `>` is right: True and False say that this is a verdict, and not a grade."""
    return bool(solution_str.rpartition(">")[2] == ground_truth)
