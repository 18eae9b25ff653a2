"""Stand-ins for the modules of OpenEnv that client files import, so that such files load without OpenEnv.

`install` answers for `openenv.core.env_client` (`EnvClient`, `StepResult`), `openenv.core.client_types` and
`openenv.core.env_server.types` (`Action`, `Observation`, `State`), only if OpenEnv is not installed. Call it in worker processes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, Field

from burnish.environments.adapters.user_code import install_stand_ins

ActionT = TypeVar("ActionT")
ObservationT = TypeVar("ObservationT")
StateT = TypeVar("StateT")


@dataclass
class StepResult(Generic[ObservationT]):
    """What a step returned."""

    observation: ObservationT
    reward: float | None = None
    done: bool = False
    metadata: dict[str, Any] | None = None


class EnvClient(Generic[ActionT, ObservationT, StateT]):
    """Base class of clients. burnish asks it for payloads and results only; it holds the connection itself."""

    def __init__(self, base_url: str | None = None, **options: Any) -> None:
        self.base_url = base_url

    def _step_payload(self, action: ActionT) -> dict[str, Any]:
        raise NotImplementedError

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[ObservationT]:
        raise NotImplementedError

    def _parse_state(self, payload: dict[str, Any]) -> StateT:
        raise NotImplementedError


class Action(BaseModel):
    """Base class of actions."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class Observation(BaseModel):
    """Base class of observations."""

    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class State(BaseModel):
    """Base class of states."""

    model_config = {"extra": "allow"}
    episode_id: str | None = None
    step_count: int = 0


def install() -> None:
    """Answer for OpenEnv's client modules if OpenEnv is not installed. Installing twice changes nothing."""
    types = {"Action": Action, "Observation": Observation, "State": State}
    install_stand_ins(
        "openenv",
        {
            "openenv": {},
            "openenv.core": {"EnvClient": EnvClient, "StepResult": StepResult},
            "openenv.core.env_client": {"EnvClient": EnvClient, "StepResult": StepResult},
            "openenv.core.client_types": {"StepResult": StepResult},
            "openenv.core.env_server": types,
            "openenv.core.env_server.types": types,
        },
    )
