"""Games of TextArena: single-player games, games of two players against a scripted opponent, and self-play."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from burnish.config.errors import UserError, did_you_mean
from burnish.environments.adapters.user_code import (
    OwnRandomState,
    PromptPlace,
    finite,
    load_target,
    missing_package,
    opening_messages,
    user_message,
)
from burnish.environments.adapters.user_thread import UserThread
from burnish.environments.base import Answer, End, Environment, Episode, Observation

Conversation = Literal["append", "rebuild"]
LISTED_MOVES = re.compile(r"\b(?:available|valid|legal)\s+(?:moves|actions)\b[^:\n]*:(.*)", re.IGNORECASE)
BRACKETS = re.compile(r"\[[^\[\]]+\]")
INVALID = "Invalid Move: "
"""How TextArena begins the reason of a game that an invalid move ended."""
Opponent = Callable[[str, random.Random], str]
"""Takes the opponent's observation and a generator, and returns its move."""


class TextArenaGame(Environment):
    """Plays a game of TextArena. A game of two players is played from one side against an opponent.

    Accepts:

    - `id`, such as `GuessTheNumber-v0`, or `target`, a class derived from `textarena.Env`. `make_options` go to it.
    - `conversation: append` (the default): each observation holds only what is new, and the model's own moves are its answers. With
      `rebuild`, the model reads one message a turn with the whole history, as TextArena's wrappers make it. Each turn is then a
      conversation of its own.
    - `opponent: random` plays a random move among those that the observation lists as available, valid or legal. Otherwise it names a
      function `path/to/file.py:name` of the observation and a generator, which returns the move.
    - `player`: 0, 1, or `seed`, which takes the side from the seed of the episode.
    - `prompt: row_first` puts the row's prompt before the first observation.

    The reward is TextArena's, at the end: usually 1 for a win and -1 for a loss. A game that the runner ends has reward 0.

    TextArena seeds and uses the global generator of Python. Each game has a state of that generator of its own, so games in one process do
    not disturb each other.

    Refuses games of more than two players. Games that ask a hosted model or need nltk's data raise when they are made.
    """

    correct_at = 1.0

    def __init__(
        self,
        id: str | None = None,
        *,
        target: str | None = None,
        make_options: Mapping[str, Any] | None = None,
        conversation: Conversation = "append",
        opponent: str = "random",
        player: int | Literal["seed"] = 0,
        prompt: PromptPlace = "observation",
        base: str | None = None,
    ) -> None:
        if (id is None) == (target is None):
            raise UserError("TextArena: give either id (such as TicTacToe-v0) or target (path/to/file.py:Class)")
        if conversation not in ("append", "rebuild"):
            raise UserError(f"TextArena: conversation should be append or rebuild, got {conversation!r}")
        if target is not None and conversation == "rebuild":
            raise UserError("TextArena: conversation=rebuild needs an id, because TextArena's wrappers belong to ids")
        if player not in (0, 1, "seed"):
            raise UserError(f"TextArena: player should be 0, 1 or seed, got {player!r}")
        self.name = id or str(target)
        self.conversation = conversation
        self.make = _maker(id, target, dict(make_options or {}), conversation, base)
        self.opponent: Opponent = random_move if opponent == "random" else load_target(opponent, base, {})
        self.player_option = player
        self.prompt: PromptPlace = prompt
        self.random = OwnRandomState(0)
        self.thread = UserThread()
        self.env: Any = None
        self.episode: Episode | None = None
        self.is_over = False

    async def start(self, episode: Episode) -> Observation:
        observation: Observation = await self.thread.run(self._start, episode)
        return observation

    async def step(self, answer: Answer) -> Observation | End:
        observation: Observation | End = await self.thread.run(self._step, answer)
        return observation

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=0.0)

    async def close(self) -> None:
        self.env = None

    def _start(self, episode: Episode) -> Observation:
        num_players = self._reset(episode, (1, 2))
        side = episode.seed % 2 if self.player_option == "seed" else int(self.player_option)
        self.player = side if num_players == 2 else 0
        self.opponent_random = random.Random(f"opponent {episode.seed}")
        self.opponent_text = ""
        text = self._play_opponent()
        if text is None:
            raise UserError(f"TextArena game {self.name} ended before the model's first move")
        return Observation(messages=opening_messages(episode, text, self.prompt))

    def _step(self, answer: Answer) -> Observation | End:
        self._move(answer.text)
        text = self._play_opponent()
        if text is None:
            rewards, reason, metrics = self._outcome(self.player)
            return End(reward=rewards[self.player], text=reason, metrics=metrics)
        return Observation(messages=user_message(text), new_conversation=self.conversation == "rebuild")

    def _reset(self, episode: Episode, allowed: tuple[int, ...]) -> int:
        """Make and reset the game for the first number of players that it takes."""
        self.episode = episode
        self.is_over = False
        problem: AssertionError | None = None
        for num_players in allowed:
            self.random = OwnRandomState(episode.seed)
            with self.random.active():
                self.env = self.make()
                try:
                    self.env.reset(num_players=num_players, seed=episode.seed % 2**31)
                except AssertionError as error:  # TextArena asserts the number of players
                    problem = error
                    continue
            return num_players
        raise UserError(f"TextArena game {self.name} is not for {' or '.join(map(str, allowed))} players: {problem}")

    def _move(self, action: str) -> None:
        with self.random.active():
            self.is_over, _ = self.env.step(action=action)

    def _observe(self) -> tuple[int, str]:
        """The player to move, and what is new for that player."""
        env = self.env
        while self.conversation == "append" and hasattr(env, "env"):
            env = env.env  # the wrappers of observations repeat the history; those of actions still apply in `step`
        with self.random.active():
            player, said = env.get_observation()
        if isinstance(said, str):
            return player, said.strip()
        lines = []
        for sender, message, kind in said:
            if not isinstance(sender, int):  # Countdown and others of 0.7.4 pass a player's action in the wrong order
                sender, message, kind = message, kind, sender
            if kind.name == "PLAYER_ACTION" and sender == player:
                continue  # the player wrote it
            lines.append(message if sender < 0 else f"[Player {sender}] {message}")
        return player, "\n".join(lines).strip()

    def _play_opponent(self) -> str | None:
        """Let the opponent move until the model is to move. Returns the model's observation, or None if the game is over."""
        while not self.is_over:
            player, text = self._observe()
            if player == self.player:
                return text
            self.opponent_text = text if self.conversation == "rebuild" else f"{self.opponent_text}\n{text}"
            self._move(self.opponent(self.opponent_text, self.opponent_random))
        return None

    def _outcome(self, player: int) -> tuple[dict[int, float], str, dict[str, float]]:
        with self.random.active():
            rewards, info = self.env.close()
        if not rewards:
            raise ValueError(f"TextArena game {self.name} is over but gives no rewards")
        about = info.get(player) or {}
        reason = str(about.get("reason") or "")
        if isinstance(
            rewards.get(player), str
        ):  # the games that swap observations also swap reward and reason of an invalid move
            rewards, reason = {**rewards, player: reason.removeprefix(INVALID)}, INVALID + rewards[player]
        metrics = {
            "invalid_move": float(bool(about.get("invalid_move"))),
            "game_turns": float(about.get("turn_count") or 0),
        }
        found = {int(k): finite(v, f"TextArena game {self.name}") for k, v in rewards.items()}
        return found, reason, metrics


class TextArenaSelfPlay(TextArenaGame):
    """Plays both sides of a game of two players with the model. The roles are `player_0` and `player_1`.

    Options are `id` or `target`, `make_options`, `conversation` and `prompt`, as for `TextArenaGame`. Each role reads its own observations
    only, and gets TextArena's reward of its side at the end.
    """

    roles = ("player_0", "player_1")

    def __init__(
        self,
        id: str | None = None,
        *,
        target: str | None = None,
        make_options: Mapping[str, Any] | None = None,
        conversation: Conversation = "append",
        prompt: PromptPlace = "observation",
        base: str | None = None,
    ) -> None:
        super().__init__(
            id, target=target, make_options=make_options, conversation=conversation, prompt=prompt, base=base
        )

    def _start(self, episode: Episode) -> Observation:
        self._reset(episode, (2,))
        self.has_moved = {0: False, 1: False}
        return self._next()

    def _step(self, answer: Answer) -> Observation | End:
        self._move(answer.text)
        if not self.is_over:
            return self._next()
        rewards, reason, metrics = self._outcome(0)
        return End(
            rewards={role: rewards[index] for index, role in enumerate(self.roles)}, text=reason, metrics=metrics
        )

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(rewards=dict.fromkeys(self.roles, 0.0))

    def _next(self) -> Observation:
        assert self.episode is not None
        player, text = self._observe()
        is_first = not self.has_moved[player]
        self.has_moved[player] = True
        return Observation(
            messages=opening_messages(self.episode, text, self.prompt) if is_first else user_message(text),
            role=self.roles[player],
            new_conversation=not is_first and self.conversation == "rebuild",
        )


def random_move(observation: str, generator: random.Random) -> str:
    """A random move among those that the last line about available, valid or legal moves lists in brackets."""
    for line in reversed(LISTED_MOVES.findall(observation)):
        if moves := BRACKETS.findall(line):
            return generator.choice(moves)
    raise UserError(
        "TextArena: opponent=random needs a game whose observation lists the possible moves in brackets, and this one does not. Give "
        "opponent=path/to/file.py:function(observation, generator), or let the model play both sides"
    )


def _maker(
    id: str | None, target: str | None, options: dict[str, Any], conversation: Conversation, base: str | None
) -> Callable[[], Any]:
    if target is not None:
        cls = load_target(target, base, {"textarena": "textarena"})
        return lambda: cls(**options)
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ModuleNotFoundError as error:
        if error.name != "textarena":
            raise
        raise missing_package(f"TextArena game {id!r}", "textarena", "textarena") from error
    if id not in ENV_REGISTRY:
        raise UserError(f"TextArena has no game {id!r}{did_you_mean(str(id), ENV_REGISTRY)}")
    if conversation == "rebuild" and str(id).endswith("-raw"):
        raise UserError(f"TextArena: conversation=rebuild needs the wrappers that {id!r} leaves out; leave out -raw")
    return lambda: textarena.make(id, **options)
