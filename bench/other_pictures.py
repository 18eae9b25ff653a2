"""What a trained model answers when its pictures are blank or another's: a model that reads them falls to chance.

python bench/other_pictures.py runs/count_shapes [...]     # `modalities_cpu.py` calls it too

The last checkpoint answers the rows of validation greedily, with each of `SHOWN`. Another's picture is that of the next row, or of
another board at its start.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.data.images import ImageInput
from burnish.data.tasks.picture_task import image_as_url
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import Task
from burnish.environments.base import Episode, Observation
from burnish.environments.games.board_pictures import board_picture
from burnish.environments.games.boards import BoardGame
from burnish.environments.games.frozen_lake import FrozenLake
from burnish.environments.games.sokoban import Sokoban

Shown = Literal["own", "blank", "another"]
SHOWN: tuple[Shown, ...] = get_args(Shown)
GREY = 127
GAMES = {"frozen_lake": "OtherPictureLake", "sokoban": "OtherPictureSokoban"}


def accuracies(run: Path) -> dict[str, float]:
    """Greedy accuracy of a run's last checkpoint with each kind of picture, and of always giving the most frequent answer."""
    found = {f"greedy_{shown}": _accuracy(run, shown) for shown in SHOWN}
    config = load(TrainConfig, run / "config.yaml").config
    source = config.data.validation[0]
    if source.task == "count_shapes":
        task = make_task(source.task, source.options, config.seed)
        answers = [task.row("test", index).answer for index in range(config.validation.limit or 0)]
        found["most_frequent"] = max(map(answers.count, set(answers))) / len(answers)
    return found


def _accuracy(run: Path, shown: Shown) -> float:
    config = load(TrainConfig, run / "config.yaml").config
    source, num = config.data.validation[0], config.validation.limit
    assert source.task is not None, "these runs validate on a generated task"
    assert num is not None, "and on some rows of it"
    with tempfile.TemporaryDirectory() as folder:
        rows, out = Path(folder) / "rows.jsonl", Path(folder) / "out"
        settings = ["--limit", num, "--seed", config.seed, "--max-tokens", config.rollout.max_tokens, "--out", out]
        if source.task in GAMES:
            played = {
                "options": {**config.environment.options, "shown": shown},
                "max_turns": config.environment.max_turns,
            }
            game = {"name": f"{Path(__file__).resolve()}:{GAMES[source.task]}", **played}
            words = [f"task:{source.task}", f"environment={json.dumps(game)}"]
        else:
            write_rows(rows, make_task(source.task, source.options, config.seed), num, shown)
            words = [str(rows), "--reward", "task", "--correct-at", "1"]
        last = max((run / "checkpoints").glob("step-*"))
        command = [sys.executable, "-m", "burnish.cli.main", "eval", last, *words, *settings]
        subprocess.run(list(map(str, command)), check=True)
        (result,) = out.glob("*.json")
        return float(json.loads(result.read_text())["accuracy"])


def write_rows(path: Path, task: Task, num: int, shown: Shown) -> None:
    """Write test rows of a task as JSON lines; another's picture is that of the next row."""
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


class OtherPicture(BoardGame):
    """A game whose pictures are blank, or those of a player who stands still on the start of another board."""

    shown: Shown

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


class OtherPictureLake(OtherPicture, FrozenLake):
    def __init__(self, shown: Shown, **options: Any) -> None:
        super().__init__(**options)
        self.shown = shown


class OtherPictureSokoban(OtherPicture, Sokoban):
    def __init__(self, shown: Shown, **options: Any) -> None:
        super().__init__(**options)
        self.shown = shown


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, accuracies(Path(name)))
