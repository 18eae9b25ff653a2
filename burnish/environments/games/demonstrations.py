"""Games of scripted players, as rows for a supervised warm start.

    python -m burnish.environments.games.demonstrations sokoban --num 2000 --out demonstrations.jsonl

Each row has a prompt and a completion of several messages, as SFT reads them; a game of two roles gives one row a role. All games are on
train boards, with seeds that no train row of the data tasks has. A share `noise` of the answers is random instead of best, so that the
result leaves something to learn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any, get_args

from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options
from burnish.data.row import Message
from burnish.data.tasks.games import GAME_TASKS
from burnish.data.tasks.picture_task import image_as_url
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import Dice
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.games import GAMES
from burnish.environments.games.boards import BoardGame, Description
from burnish.environments.games.text_game import Game

FIRST_SEED = 5_000_000_000
"""Seeds of demonstrations; train rows of run seeds below 4,990 have smaller ones."""


async def play_episode(game: Game, episode: Episode, noise: float, dice: Dice) -> tuple[dict[str, list[Any]], End]:
    """Play one episode. Returns the messages of each role (of "" in a game of one player), and the end."""
    conversations: dict[str, list[Any]] = {}
    seen: Observation | End = await game.start(episode)
    while not isinstance(seen, End):
        conversation = conversations.setdefault(seen.role or "", [])
        conversation.extend(seen.messages or ())
        text = game.random_answer(dice) if dice.unit() < noise else game.best_answer()
        conversation.append({"role": "assistant", "content": text})
        seen = await game.step(Answer(text, text, turn=len(conversation) // 2 - 1))
    return conversations, seen


def demonstrations(
    name: str,
    options: dict[str, Any] | None = None,
    num: int = 2000,
    seed: int = 0,
    noise: float = 0.0,
    described: Description | None = None,
) -> list[dict[str, Any]]:
    """Rows of prompt and completion from `num` episodes.

    With `described` each answer begins with what the player sees, in small the description of the state in VAGEN (2510.16907): `places` are row and
    column of player, boxes and goals, `12 33 Right`. `board` names their cells by letters, `fl Right`, and every cell before the first answer,
    `a_b_cOdP... fl Right`; a vision tower made from nothing learns to see from it. Random answers have it too.
    """
    if name not in GAMES:
        raise unknown_name_error("game", name, GAMES)
    if not 0 <= noise <= 1:
        raise UserError(f"demonstrations of {name}: noise should be a share from 0 to 1, got {noise!r}")
    options = options or {}
    check_options(GAMES[name], options, f"environment {name}")
    kind = GAMES[name]
    if described is not None and described not in get_args(Description):
        raise unknown_name_error("description of a board", described, get_args(Description))
    if described and not (issubclass(kind, BoardGame) and kind.located):
        raise UserError(
            f"demonstrations of {name}: {described} can be described in games on boards with things to locate"
        )

    async def play_all() -> list[dict[str, Any]]:
        rows = []
        for index in range(num):
            game = kind(**options)
            if isinstance(game, BoardGame):
                game.described = described
            dice = Dice(name, "demonstrations", seed, index)
            conversations, _ = await play_episode(game, _episode(name, seed, index), noise, dice)
            rows += [
                {"prompt": _prompt(messages[0]), "completion": messages[1:]} for messages in conversations.values()
            ]
        return rows

    return asyncio.run(play_all())


def _prompt(message: Message) -> str | list[Message]:
    """The first message as a prompt: its text, or the message itself if it has pictures."""
    return message["content"] if isinstance(message["content"], str) else [message]


def _episode(name: str, seed: int, index: int) -> Episode:
    """The index-th train episode of a game for demonstrations."""
    if name in GAME_TASKS:
        return Episode(f"{name}/{index}", FIRST_SEED + seed * 1_000_000 + index, "", extra={"split": "train"})
    row = make_task(name, {}, FIRST_SEED + seed).row("train", index)
    return Episode(row.id, 0, row.prompt, row.answer, row.extra)


def main() -> None:
    """Write demonstrations to a file of JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game", choices=sorted(GAMES))
    parser.add_argument("--num", type=int, default=2000, help="episodes to play")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="share of random answers")
    parser.add_argument("--described", choices=get_args(Description), help="what answers say of the board first")
    parser.add_argument("--options", type=json.loads, default={}, help="options of the game, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = demonstrations(args.game, args.options, args.num, args.seed, args.noise, args.described)
    lines = (json.dumps(row, ensure_ascii=False, default=image_as_url) + "\n" for row in rows)
    args.out.write_text("".join(lines), encoding="utf-8")
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
