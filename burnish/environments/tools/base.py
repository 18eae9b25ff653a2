"""The contract of tools. A tool has a JSON schema, takes the arguments of a call, and returns a text, perhaps with images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from burnish.environments.base import Episode, RunsIn


@dataclass(frozen=True)
class ToolResult:
    """What a call returns to the model, with what it earns."""

    text: str
    reward: float | None = None
    """Added to the reward of the answer that made the call; None if the tool gives no rewards."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    """What the model sees behind the text: uint8 arrays [height, width, 3] or PIL images."""


class Tool:
    """Base class of tools. A stateless object serves all episodes at once; a stateful one belongs to one episode.

    `start`, `end` and `close` are called for stateful tools only: `start` before the first call of an episode, `end` after the last turn,
    `close` whatever happened.
    """

    runs_in: ClassVar[RunsIn] = "worker"
    is_stateful: ClassVar[bool] = False
    schema: dict[str, Any]
    """OpenAI's form: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
        """Begin an episode. `arguments` are what the row gives this tool."""

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Answer a call of the model. An exception becomes an error text that the model reads."""
        raise NotImplementedError

    async def end(self) -> float | None:
        """Return a reward for the whole episode, or None."""
        return None

    async def close(self) -> None:
        """Free what the tool holds for the episode."""
