"""What holds for every game: determinism, splits, formats, options, demonstrations."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.core.random_keys import hash_text
from burnish.data.tasks.task import Dice
from burnish.environments.base import End, Observation
from burnish.environments.games import GAMES
from burnish.environments.games.board_pictures import LAKE_TILES, SOKOBAN_TILES, board_picture
from burnish.environments.games.demonstrations import demonstrations
from burnish.environments.games.text_game import answer_text, write_answer
from tests.environments.games.transcripts import answer, episode, now, row_episode, transcript

ROOT = Path(__file__).parents[3]
SHORT = {"game_2048": {"max_turns": 6}}
NEW_GAMES = sorted(set(GAMES) - {"countdown"})


def played(name: str, index: int, player: str = "random", **options: Any) -> list[Observation | End]:
    return transcript(name, row_episode(name, "train", index), player, **{**SHORT.get(name, {}), **options})


@pytest.mark.parametrize("name", sorted(GAMES))
def test_an_episode_is_a_function_of_options_row_and_seed(name: str) -> None:
    alone = [played(name, index) for index in range(3)]
    assert [played(name, index) for index in reversed(range(3))] == alone[::-1]
    games = [GAMES[name](**SHORT.get(name, {})) for _ in range(3)]
    episodes = [row_episode(name, "train", index) for index in range(3)]
    dice = [Dice("player", each.seed, each.id) for each in episodes]
    seen = [[now(game.start(each))] for game, each in zip(games, episodes, strict=True)]
    while any(not isinstance(parts[-1], End) for parts in seen):  # interleaved
        for game, one, parts in zip(games, dice, seen, strict=True):
            if not isinstance(parts[-1], End):
                parts.append(now(game.step(answer(game.random_answer(one)))))  # type: ignore[arg-type]
    assert seen == alone


def test_an_episode_is_the_same_in_another_process() -> None:
    code = "from tests.environments.games.test_all_games import digest_of_all_games; print(digest_of_all_games())"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert int(other.stdout) == digest_of_all_games()


def digest_of_all_games() -> int:
    return hash_text(repr([played(name, 0) for name in sorted(GAMES)]))


@pytest.mark.parametrize(("name", "num"), [("sokoban", 800), ("frozen_lake", 2000), ("game_2048", 2000)])
def test_train_and_test_boards_never_overlap(name: str, num: int) -> None:
    boards: dict[str, set[str]] = {}
    for split, run_seed in (("train", 0), ("train", 1), ("test", 0)):
        game: Any = GAMES[name]()
        for index in range(num // 2):
            game.reset(row_episode(name, split, index, run_seed))
            boards.setdefault(split, set()).add(game.board())
    assert not boards["train"] & boards["test"]
    assert min(len(boards["train"]), len(boards["test"])) > 90


def test_a_row_without_a_split_gets_train_boards_in_training_and_test_boards_elsewhere() -> None:
    from burnish.environments.base import Episode

    def board(**more: Any) -> str:
        return str(now(GAMES["sokoban"]().start(Episode("x", 5, "", **more))).state)

    assert board(is_training=True) == board(extra={"split": "train"}, is_training=False)
    assert board(is_training=False) == board(extra={"split": "test"})
    assert board(is_training=True) != board(is_training=False)


@pytest.mark.parametrize("name", sorted(GAMES))
@pytest.mark.parametrize("player", ["random", "best"])
def test_players_finish_every_game_with_legal_answers(name: str, player: str) -> None:
    for index in range(8):
        seen = played(name, index, player)
        end = seen[-1]
        assert isinstance(end, End)
        assert end.metrics.get("illegal", 0.0) == 0.0
        assert end.metrics.get("invalid_turns", 0.0) == 0.0
        roles = GAMES[name].roles
        rewards = list((end.rewards or {}).values()) if roles else [end.reward]
        assert all(reward is not None and math.isfinite(reward) for reward in rewards)
        assert set(end.rewards or {}) == set(roles)
        assert isinstance(end.success, bool) != bool(roles)
        assert all(isinstance(part, Observation) and part.state and part.messages for part in seen[:-1])


@pytest.mark.parametrize("name", sorted(GAMES))
def test_garbage_and_cut_off_answers_end_every_game_without_an_error(name: str) -> None:
    garbage = ["", "<answer></answer>", "<answer>||</answer>", "[", "\0", "<answer>" * 200, "١", "|| " * 1000]
    for text in garbage:
        for finish in ("stop", "length"):
            game = GAMES[name](**SHORT.get(name, {}))
            seen: Any = now(game.start(row_episode(name, "train", 0)))
            for _ in range(200):
                if isinstance(seen, End):
                    break
                seen = now(game.step(answer(text, finish)))
            assert isinstance(seen, End)
            assert not seen.success


@pytest.mark.parametrize("name", NEW_GAMES)
def test_the_runner_can_end_every_game_early(name: str) -> None:
    game = GAMES[name]()
    now(game.start(episode()))
    end = now(game.end("turns"))
    assert not end.success
    assert (set(end.rewards or {}) if game.roles else {end.reward}) == (set(game.roles) or {0.0})


# --- Formats ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("answer_tag", "<think>a</think><answer> Up || Right </answer><answer>Down</answer>", "Up || Right"),
        ("answer_tag", "<think>maybe <answer>Left</answer>?</think>\n<answer>Up</answer>", "Up"),
        ("answer_tag", "<answer>Up</answer>", "Up"),
        ("answer_tag", "Up", None),
        ("answer_tag", "<answer>Up", None),
        ("brackets", "[Left] no, [Up || Right] ok", "Up || Right"),
        ("brackets", "<think>[Left]</think> Up", None),
        ("last_word", "I go **Up**.", "Up"),
        ("last_word", " \n", None),
    ],
)
def test_answers_are_read_in_their_format(format: Any, text: str, expected: str | None) -> None:
    assert answer_text(text, format) == expected


@pytest.mark.parametrize("format", ["answer_tag", "brackets", "last_word"])
def test_what_a_player_writes_is_read_back(format: Any) -> None:
    assert answer_text(write_answer("Up", format), format) == "Up"
    for name in sorted(GAMES):
        if name not in ("alphabet_sort", "tabletop"):
            end = played(name, 0, "best", format=format)[-1]
            assert isinstance(end, End)
            assert end.metrics.get("illegal", 0.0) == 0.0


def test_prompts_state_rules_actions_limits_and_format() -> None:
    text = now(GAMES["sokoban"]().start(episode())).messages[0]["content"]  # type: ignore[index]
    for part in (
        "Up, Down, Left, Right",
        "Turn 1:\nState:\n######",
        "10 actions left",
        "<answer>first action || second action</answer>",
        "-0.1",
    ):
        assert part in text
    bare = now(GAMES["sokoban"](words=False).start(episode()))
    assert bare.messages[0]["content"] == bare.state  # type: ignore[index]


# --- Options ----------------------------------------------------------------------------------------------------------------

BOARD = {
    "format": "brackets",
    "words": False,
    "max_turns": 1,
    "max_actions": 1,
    "max_actions_per_turn": 1,
    "invalid_reward": -0.5,
}
MOVED: dict[str, dict[str, Any]] = {
    "sokoban": {**BOARD, "size": 7, "boxes": 2, "border": False, "observation": "grid_coord"},
    "frozen_lake": {**BOARD, "size": 5, "frozen": 0.7, "success_rate": 0.5, "observation": "grid_coord"},
    "bandit": {"format": "brackets", "words": False, "steady_reward": 0.2, "bold_chance": 0.9, "invalid_reward": -0.5},
    "game_2048": {**BOARD, "goal": 8},
    "countdown": {"format": "brackets", "words": False, "max_turns": 2, "numbers_reward": 0.2},
    "tic_tac_toe": {"opponent": "random", "plays": "O", "format": "brackets", "words": False, "draw_reward": 0.5},
    "tic_tac_toe_self_play": {"format": "brackets", "words": False, "draw_reward": 0.5},
    "kuhn_poker": {"format": "brackets", "words": False},
    "propose_sum": {"format": "brackets", "words": False, "invalid_reward": -0.1},
    "tabletop": {"bins": 8, "chunk": 1, "max_turns": 2},
    "alphabet_sort": {"min_turns": 3, "max_turns": 1, "min_names": 5, "max_names": 2, "power": 1.0, "power_of": "mean"},
}


@pytest.mark.parametrize("name", sorted(GAMES))
def test_every_option_changes_what_happens(name: str) -> None:
    assert set(MOVED[name]) == set(inspect.signature(GAMES[name]).parameters)

    def happened(**options: Any) -> str:
        first = [played(name, index, "random", **options) for index in range(6)]
        best = [played(name, index, "best", **options) for index in range(2)]
        game = GAMES[name](**options)
        now(game.start(row_episode(name, "train", 0)))
        return repr((first, best, now(game.step(answer("nothing")))))

    before = happened()
    for key, value in MOVED[name].items():
        assert happened(**{key: value}) != before, key


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sokoban", {"format": "answer_tags"}, "did you mean 'answer_tag'"),
        ("sokoban", {"size": 4}, "size should be a whole number from 5 to 12, got 4"),
        ("sokoban", {"max_turns": 0}, "max_turns should be a whole number of 1 or more, got 0"),
        ("sokoban", {"invalid_reward": float("nan")}, "invalid_reward should be a number"),
        ("sokoban", {"observation": "coords"}, "unknown observation of sokoban"),
        ("sokoban", {"words": "no"}, "words should be true or false"),
        ("frozen_lake", {"success_rate": 1.5}, "success_rate should be a number from 0 to 1, got 1.5"),
        ("game_2048", {"goal": 100}, "power of two"),
        ("tic_tac_toe", {"opponent": "itself"}, "unknown opponent of tic_tac_toe"),
        ("alphabet_sort", {"max_turns": 9, "max_names": 9}, "held-out names"),
    ],
)
def test_wrong_options_say_what_is_right(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GAMES[name](**options)


# --- Demonstrations ---------------------------------------------------------------------------------------------------------


def test_demonstrations_are_dialogues_that_end_with_an_answer() -> None:
    for name in sorted(GAMES):
        rows = demonstrations(name, SHORT.get(name, {}), num=3, seed=1)
        assert len(rows) == 3 * max(1, len(GAMES[name].roles))
        for row in rows:
            assert [message["role"] for message in row["completion"]] == ["assistant", "user"] * (
                len(row["completion"]) // 2
            ) + ["assistant"]
    assert demonstrations("sokoban", num=5, seed=1) == demonstrations("sokoban", num=5, seed=1)
    assert demonstrations("sokoban", num=5, seed=1) != demonstrations("sokoban", num=5, seed=2)
    assert demonstrations("sokoban", num=5, noise=1.0) != demonstrations("sokoban", num=5)


def test_places_in_demonstrations_are_those_of_the_pictured_board() -> None:
    lake = {"observation": "picture", "words": False, "format": "last_word"}
    rows = demonstrations("frozen_lake", lake, num=20, described="places")
    said = [m["content"] for row in rows for m in row["completion"][::2]]
    plain = [m["content"] for row in demonstrations("frozen_lake", lake, num=20) for m in row["completion"][::2]]
    assert [text.split()[-1] for text in said] == plain
    for text, action in zip(said, plain, strict=True):
        player, goal, word = text.split()
        (row, column), (goal_row, goal_column) = map(int, player), map(int, goal)
        assert word == action
        assert (row, column) != (goal_row, goal_column)
    row = demonstrations("sokoban", {"format": "answer_tag"}, num=1, described="places")[0]
    board = row["prompt"].split("State:\n")[1].splitlines()[:6]
    player, box, target = re.findall(r"(\d)(\d)", row["completion"][0]["content"].partition("</think>")[0])
    symbols = [board[int(row)][int(column)] for row, column in (player, box, target)]
    assert (symbols[0] in "PS", symbols[1] in "X√", symbols[2] in "OS√") == (True, True, True)


@pytest.mark.parametrize(
    ("name", "options", "tiles", "things"),
    [
        ("frozen_lake", {"size": 3}, LAKE_TILES, ("P", "G")),
        ("sokoban", {"size": 5, "border": False}, SOKOBAN_TILES, ("PS", "X√", "OS√")),
    ],
)
def test_described_boards_are_those_of_the_pictures(
    name: str, options: dict[str, Any], tiles: dict[str, str], things: tuple[str, ...]
) -> None:
    bare = {"observation": "picture", "words": False, "format": "last_word", "max_actions_per_turn": 1, **options}
    drawn = {board_picture(symbol, tiles).tobytes(): symbol for symbol in tiles}
    for row in demonstrations(name, bare, num=20, noise=0.5, described="board"):
        messages = [*row["prompt"], *row["completion"]]
        pictures = [message["content"][0]["image"].load() for message in messages[::2]]
        boards = [
            "".join(drawn[image[y : y + 16, x : x + 16].tobytes()] for y in (0, 16, 32) for x in (0, 16, 32))
            for image in pictures
        ]
        answers = [message["content"].split() for message in messages[1::2]]
        cells, *first = answers[0]
        assert (cells[::2], cells[1::2]) == ("abcdefghi", boards[0])
        for board, (where, _) in zip(boards, [first, *answers[1:]], strict=True):
            named = [board["abcdefghi".index(letter)] for letter in where]
            assert all(symbol in thing for symbol, thing in zip(named, things, strict=True))


def test_wrong_demonstrations_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'sokoban'"):
        demonstrations("sokban")
    with pytest.raises(UserError, match="noise should be a share"):
        demonstrations("sokoban", noise=2.0)
    with pytest.raises(UserError, match="did you mean 'size'"):
        demonstrations("sokoban", {"sise": 6})
    with pytest.raises(UserError, match="games on boards with things to locate"):
        demonstrations("game_2048", described="places")
    with pytest.raises(UserError, match="did you mean 'board'"):
        demonstrations("sokoban", described="bord")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="it may have 52, not 64"):
        demonstrations("frozen_lake", {"size": 8}, num=1, described="board")


@pytest.mark.parametrize(("name", "tiles"), [("sokoban", SOKOBAN_TILES), ("frozen_lake", LAKE_TILES)])
def test_a_picture_shows_every_cell_of_the_board_and_different_cells_differently(name: str, tiles: Any) -> None:
    drawn = {symbol: board_picture(symbol, tiles) for symbol in tiles}
    assert len({tile.tobytes() for tile in drawn.values()}) == len(tiles)
    game: Any = GAMES[name](observation="picture")
    seen = now(game.start(row_episode(name, "train", 0)))
    content = seen.messages[0]["content"]  # type: ignore[index]
    assert [block["type"] for block in content] == ["text", "image", "text"]
    assert game.board() not in content[0]["text"]
    image = content[1]["image"].load()
    lines = game.board().splitlines()
    assert image.shape == (16 * len(lines), 16 * len(lines[0]), 3)
    for row, line in enumerate(lines):
        for column, symbol in enumerate(line):
            assert (image[16 * row : 16 * row + 16, 16 * column : 16 * column + 16] == drawn[symbol]).all()
    bare = now(GAMES[name](observation="picture", words=False).start(row_episode(name, "train", 0)))
    assert [block["type"] for block in bare.messages[0]["content"]] == ["image"]  # type: ignore[index]


def test_demonstrations_with_pictures_have_them_in_every_turn() -> None:
    rows = demonstrations("frozen_lake", {"observation": "picture", "words": False, "max_actions_per_turn": 1}, num=3)
    for row in rows:
        shown = [*row["prompt"], *(message for message in row["completion"] if message["role"] == "user")]
        assert all(message["content"][0]["type"] == "image" for message in shown)
        assert len(shown) == sum(message["role"] == "assistant" for message in row["completion"])
