"""A row of data: a prompt with what is needed to score its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Row:
    """A prompt with what is needed to score its answer.

    `id` is `<source name>/<index in the source>`: the same for every run over the same data, because sampling
    randomness is keyed by it. `extra` holds every other column.
    """

    id: str
    prompt: str | list[Message]
    data_source: str
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)
    completion: str | list[Message] | None = None
    messages: list[Message] | None = None
    nested: tuple[str, ...] = ()
    """Keys of `extra` that stood inside verl's `extra_info`: they are no columns of the row."""
    text: str | None = None
    """A text that stands as it is, without a template: all of it is learnt, or what `completion` adds to it."""
    style: str | None = None
    """verl's `reward_model.style`: who scores the row."""
    where: str = field(default="", compare=False)
    """The file and line it was read from."""

    @property
    def place(self) -> str:
        """Where to look for the row."""
        return self.where or f"row {self.id!r} of {self.data_source!r}"


Message = dict[str, Any]
