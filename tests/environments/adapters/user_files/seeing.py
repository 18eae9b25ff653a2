"""User code that returns images, in the conventions of gymnasium and TRL."""

import numpy as np


def board(value):
    return np.full((8, 8, 3), value, dtype=np.uint8)


class Boards:
    """gymnasium: the observation of turn k is a board of value k; two turns."""

    action_space = None

    def reset(self, seed=None):
        self.turn = 0
        return board(0), {}

    def step(self, action):
        self.turn += 1
        return board(self.turn), 1.0, self.turn == 2, False, {"suffix": f"turn {self.turn}"}


class Camera:
    """TRL."""

    def reset(self, **row):
        return [{"type": "text", "text": " Seen:"}, {"type": "image", "image": board(7)}]

    def look(self, value: int) -> list:
        """Look.

        Args:
            value: Where.
        """
        return [{"type": "text", "text": "here"}, {"type": "image", "image": board(value)}]
