"""Held-out rows and lakes whose pictures are their own, blank, or another's: what a model answers without seeing what is asked about.

`modalities_cpu.py` measures the accuracy with each of `SHOWN`. A model that reads its picture falls to chance with a blank or another's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from burnish.data.images import ImageInput
from burnish.data.tasks.picture_task import image_as_url
from burnish.data.tasks.registry import make_task
from burnish.environments.base import Episode, Observation
from burnish.environments.games.board_pictures import board_picture
from burnish.environments.games.frozen_lake import FrozenLake

Shown = Literal["own", "blank", "another"]
SHOWN: tuple[Shown, ...] = get_args(Shown)
GREY = 127


def write_rows(path: Path, task_name: str, seed: int, num: int, shown: Shown) -> None:
    """Write test rows of a task as JSON lines; another's picture is that of the next row."""
    task = make_task(task_name, {}, seed)
    rows = [task.row("test", index) for index in range(num)]
    lines = []
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        own, another = _image(row.prompt), _image(other.prompt)
        picture = {"own": own, "blank": np.full_like(own, GREY), "another": another}[shown]
        line = {"prompt": _showing(row.prompt, picture), "answer": row.answer, **row.extra}
        lines.append(json.dumps(line, default=image_as_url) + "\n")
    path.write_text("".join(lines))


def _image(prompt: Any) -> np.ndarray:
    image: np.ndarray = next(block["image"] for block in prompt[0]["content"] if block["type"] == "image").load()
    return image


def _showing(prompt: Any, picture: np.ndarray) -> list[dict[str, Any]]:
    """A prompt with another picture."""
    blocks = [
        {**block, "image": ImageInput(picture)} if block["type"] == "image" else block for block in prompt[0]["content"]
    ]
    return [{**prompt[0], "content": blocks}]


class OtherPictureLake(FrozenLake):
    """FrozenLake whose pictures are blank, or those of a player who stands still on the start of another lake."""

    def __init__(self, shown: Shown, **options: Any) -> None:
        super().__init__(**options)
        self.shown = shown

    def reset(self, episode: Episode) -> None:
        super().reset(Episode(episode.id, episode.seed + 1, "", extra=episode.extra, is_training=episode.is_training))
        self.other_board = self.board()
        super().reset(episode)

    def _seen(self, before: str, reward: float) -> Observation:
        seen = super()._seen(before, reward)
        picture = board_picture(self.board() if self.shown == "own" else self.other_board, self.tile_layers)
        if self.shown == "blank":
            picture = np.full_like(picture, GREY)
        return Observation(messages=tuple(_showing(seen.messages, picture)), reward=reward, state=seen.state)
