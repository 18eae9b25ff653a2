"""Rows for `science_world.yaml`: a task and one of its variations, by the splits of ScienceWorld 1.2."""

from __future__ import annotations

from typing import Any

TASKS = ("find-living-thing", "find-non-living-thing", "find-plant", "find-animal")
"""Tasks with 300 variations each, which are divided equally."""
VARIATIONS = {"train": range(0, 150), "dev": range(150, 225), "test": range(225, 300)}


def rows(split: str) -> list[dict[str, Any]]:
    """All variations of a split, task by task in turn."""
    return [
        {"prompt": f"{task} {variation}", "task": task, "variation": variation, "data_source": task}
        for variation in VARIATIONS[split]
        for task in TASKS
    ]
