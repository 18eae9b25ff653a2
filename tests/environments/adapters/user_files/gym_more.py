"""More environments with gymnasium's interface, for the tests. They draw from the global generator, as GEM's do."""

import random


class Discrete:
    """The part of gymnasium's space that matters."""

    def __init__(self, n, start=0):
        self.n, self.start = n, start

    def __repr__(self):
        return f"Discrete({self.n})"


class Doors:
    """Three doors; the right one is drawn anew in each step."""

    action_space = Discrete(3, start=1)

    def reset(self, seed=None):
        random.seed(seed)
        self.closed = False
        return "Doors 1 to 3.", {"suffix": " Choose."}

    def step(self, action):
        assert type(action) is int
        right = random.randint(1, 3)
        return f"It was {right}.", float(action == right) - 0.5, False, random.random() < 0.0, {"right": right, "name": "door"}

    def close(self):
        self.closed = True


class Numbers(Doors):
    action_space = None

    def reset(self, seed=None, options=None):
        return (options or {}).get("opening", 7), {}


class OldGym(Doors):
    action_space = ["left", "right"]  # words, as in GEM's Sokoban

    def step(self, action):
        return "obs", 0.0, True, {}
