"""Games with TextArena's interface that do not import TextArena, for the tests. They draw from the global generator, as its games do."""

import random
from enum import Enum

Kind = Enum("Kind", "PROMPT PLAYER_ACTION GAME_BOARD")


class Race:
    """Two players draw steps; the first at ten wins."""

    def reset(self, num_players, seed=None):
        assert num_players == 2, f"The number of players has to be 2, received {num_players}"
        random.seed(seed)
        self.at, self.player, self.is_done = [0, 0], 0, False
        self.new = {p: [(-1, f"You are Player {p}.", Kind.PROMPT)] for p in (0, 1)}
        self._board()

    def _board(self):
        for player in (0, 1):
            self.new[player].append((-1, f"At {self.at}. Available moves: '[step]', '[jump]'", Kind.GAME_BOARD))

    def get_observation(self):
        said, self.new[self.player] = self.new[self.player], []
        return self.player, said

    def step(self, action):
        for player in (0, 1):
            self.new[player].append((self.player, action, Kind.PLAYER_ACTION))
        self.at[self.player] += random.randint(1, 3) if "[step]" in action else random.choice([0, 5])
        self.is_done = self.at[self.player] >= 10
        self.winner = self.player
        self.player = 1 - self.player
        self._board()
        return self.is_done, {}

    def close(self):
        rewards = {self.winner: 1, 1 - self.winner: -1}
        return rewards, {p: {"reason": f"Player {self.winner} is there.", "turn_count": 3} for p in (0, 1)}


class Silent(Race):
    """Does not list the possible moves."""

    def _board(self):
        for player in (0, 1):
            self.new[player].append((-1, f"At {self.at}.", Kind.GAME_BOARD))


class Swapped(Race):
    """Passes players' actions in the wrong order, as some games do."""

    def get_observation(self):
        player, said = super().get_observation()
        return player, [(kind, sender, text) if kind is Kind.PLAYER_ACTION else (sender, text, kind) for sender, text, kind in said]


class Three(Race):
    def reset(self, num_players, seed=None):
        raise AssertionError("The number of players has to be 3")


def always_step(observation, generator):
    assert "You are Player 1." in observation
    return "[step]"
