# lock_env.py: a gymnasium/GEM environment with text in and out
class Lock:
    def reset(self, seed=None, options=None):
        self.n = (seed or 0) % 9 + 1
        return "Which digit opens the lock? Answer with one digit.", {}

    def step(self, action):
        digits = [c for c in action if c.isdigit()]
        won = bool(digits) and int(digits[-1]) == self.n
        hint = "open" if won else "higher" if digits and int(digits[-1]) < self.n else "lower"
        return hint, float(won), won, False, {"success": won}
