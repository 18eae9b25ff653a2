"""Games in plain Python: an episode follows from options, split and seed alone, and a step takes microseconds."""

from __future__ import annotations

from burnish.environments.games.alphabet_sort import AlphabetSort
from burnish.environments.games.bandit import Bandit
from burnish.environments.games.countdown import CountdownGame
from burnish.environments.games.frozen_lake import FrozenLake
from burnish.environments.games.game_2048 import Game2048
from burnish.environments.games.kuhn_poker import KuhnPoker
from burnish.environments.games.propose_sum import ProposeSum
from burnish.environments.games.sokoban import Sokoban
from burnish.environments.games.tabletop import Tabletop
from burnish.environments.games.text_game import Game
from burnish.environments.games.tic_tac_toe import TicTacToe, TicTacToeSelfPlay

GAMES: dict[str, type[Game]] = {
    game.name: game
    for game in (
        Sokoban,
        FrozenLake,
        Bandit,
        Game2048,
        CountdownGame,
        TicTacToe,
        TicTacToeSelfPlay,
        KuhnPoker,
        ProposeSum,
        AlphabetSort,
        Tabletop,
    )
}
"""Games by the name that `environment.name` gives."""
