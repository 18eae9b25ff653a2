"""The servers an engine has: which one gets the next request, which ones are lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burnish.config.errors import UserError
from burnish.rollout.sglang.check import Facts
from burnish.rollout.sglang.http import ServerError

DOWN_S = 3.0
"""A server that cannot be reached for so long is lost: a moment's refusal is none."""
AGAIN_S = 0.25

logger = logging.getLogger(__name__)


def patiently(action: Callable[[], None]) -> None:
    """Do it, again while the server is out of reach and not lost."""
    deadline = time.monotonic() + DOWN_S
    while True:
        try:
            action()
            return
        except ServerError as error:
            if error.kind != "unreachable" or time.monotonic() > deadline:
                raise
        time.sleep(AGAIN_S)


@dataclass
class Place:
    """A server and how it is doing."""

    facts: Facts
    num_requests: int = 0
    down_since: float | None = None
    is_lost: bool = False
    last: str = ""
    """What went wrong last."""


class Pool:
    """The places of an engine. The caller holds its lock."""

    def __init__(self, servers: Sequence[Facts]) -> None:
        self.places = [Place(facts) for facts in servers]

    @property
    def present(self) -> list[Place]:
        """Those that are not lost."""
        return [place for place in self.places if not place.is_lost]

    def pick(self, avoid: Place | None = None) -> Place:
        """The one with least work, and not `avoid` where there is another; a server that just failed comes last."""
        if not self.present:
            told = "; ".join(f"{p.facts.url}: {p.last}" for p in self.places)
            raise UserError(f"no SGLang server is left ({told}); look at its log, start it again, and resume the run")
        return min(self.present, key=lambda p: (p is avoid, p.down_since is not None, p.num_requests))

    def went_well(self, place: Place) -> None:
        """It answered."""
        place.down_since = None

    def went_wrong(self, place: Place, error: ServerError) -> None:
        """It did not; one that has been out of reach for long enough is lost."""
        place.last = error.what
        if error.kind != "unreachable":
            return
        now = time.monotonic()
        if place.down_since is None:
            place.down_since = now
        elif now - place.down_since > DOWN_S:
            self.lose(place)

    def lose(self, place: Place) -> None:
        """Use it no more, until it has been sent new weights."""
        if not place.is_lost:
            place.is_lost = True
            logger.warning(
                "SGLang server %s is lost (%s); %d others go on", place.facts.url, place.last, len(self.present)
            )

    def found(self, place: Place, facts: Facts) -> None:
        """A lost one is back."""
        place.facts, place.is_lost, place.down_since = facts, False, None
