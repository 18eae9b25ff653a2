"""More environments and tools in TRL's convention, for the tests."""

import asyncio


class Notebook:
    """Takes notes. Its tools are sync and async, and its reward is async. It does not take the column `environment`."""

    def reset(self, prompt, topic):
        self.topic, self.notes = topic, []

    def write(self, note: str) -> str:
        """Write a note.

        Args:
            note: The note.
        """
        self.notes.append(note)
        return f"wrote {note}"

    async def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        await asyncio.sleep(0)
        self.notes.append(f"looked up {word}")
        return f"{word} is a word"

    def burn(self) -> str:
        """Burn the notes."""
        raise RuntimeError("the notes are wet")

    async def get_reward(self):
        return float(len(self.notes))

    @property
    def pages(self):
        raise AssertionError("a property is no tool, and is not evaluated")

    def _hidden(self):
        return None


class Unscored:
    def reset(self, **row):
        return None

    def ping(self) -> str:
        """Ping."""
        return "pong"


class Infinite(Unscored):
    def get_reward(self):
        return float("nan")


class Untyped(Unscored):
    def add(self, a, b):
        """Add two numbers."""
        return a + b


def double(number: int) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number
