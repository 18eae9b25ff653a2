# trl_env.py: environment_factory=trl_env.Safe
class Safe:
    def reset(self, code: str = "42", **row) -> str:
        self.code, self.tries, self.is_open = code, 0, False
        return f"The safe has a code of {len(code)} digits."

    def try_code(self, code: str) -> str:
        """Try to open the safe.

        Args:
            code: The digits to dial.
        """
        self.tries += 1
        self.is_open = code == self.code
        return "open" if self.is_open else "locked"

    def get_reward(self) -> float:
        return float(self.is_open) - 0.1 * (self.tries - 1)
