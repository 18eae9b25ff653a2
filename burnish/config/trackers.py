"""`run.trackers`: the services that also receive the metrics, config, samples and report of a run. Each has a section of its own.

Addresses and keys of accounts are no part of a recipe: each package reads its own environment variables (docs/trackers.md).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from burnish.config.records import Slot, choice


class TrackerSlot(Slot):
    """What all trackers have."""

    module: ClassVar[str]
    """The module to import. The extra of the tracker's name installs it."""
    sample_rows: int = Field(16, ge=0)
    """Rows of each table of samples that the tracker gets. 0: no tables."""


class TensorBoard(TrackerSlot):
    """Event files in the folder `tensorboard` of the run: `tensorboard --logdir runs`."""

    name: Literal["tensorboard"] = "tensorboard"
    module: ClassVar[str] = "tensorboard"


class Wandb(TrackerSlot):
    """Weights & Biases. Its files are in the folder `wandb` of the run."""

    name: Literal["wandb"] = "wandb"
    module: ClassVar[str] = "wandb"
    project: str = "burnish"
    """The project that the run belongs to."""
    entity: str | None = None
    """User or team. null: the account's default."""
    group: str | None = None
    """The group of runs that this one belongs to."""
    tags: list[str] = Field(default_factory=list)
    """Labels of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline: write files that `wandb sync` sends later. null: WANDB_MODE, else online if there is a key (WANDB_API_KEY or netrc)."""


class Mlflow(TrackerSlot):
    """MLflow. Without a server its files are in the folder `mlflow` beside the runs."""

    name: Literal["mlflow"] = "mlflow"
    module: ClassVar[str] = "mlflow"
    uri: str | None = None
    """Address of a tracking server or store. null: MLFLOW_TRACKING_URI, else the folder `mlflow` in run.directory."""
    experiment: str = "burnish"
    """The experiment that the run belongs to."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Labels of the run."""


class SwanLab(TrackerSlot):
    """SwanLab. Its files are in the folder `swanlab` of the run: `swanlab watch RUN/swanlab` shows them."""

    name: Literal["swanlab"] = "swanlab"
    module: ClassVar[str] = "swanlab"
    project: str = "burnish"
    """The project that the run belongs to."""
    workspace: str | None = None
    """User or organisation. null: the account's default."""
    group: str | None = None
    """The group of runs that this one belongs to."""
    tags: list[str] = Field(default_factory=list)
    """Labels of the run."""
    mode: Literal["online", "local", "offline"] | None = None
    """local: files for `swanlab watch`. offline: files that `swanlab sync` sends later. null: SWANLAB_MODE, else local."""


class Trackio(TrackerSlot):
    """trackio. Its database is in the folder `trackio` beside the runs, or in TRACKIO_DIR."""

    name: Literal["trackio"] = "trackio"
    module: ClassVar[str] = "trackio"
    project: str = "burnish"
    """The project that the run belongs to."""
    group: str | None = None
    """The group of runs that this one belongs to."""
    space: str | None = None
    """A Hugging Face Space to log to. null: TRACKIO_SPACE_ID, else the database alone."""


TRACKER_RECORDS: tuple[type[TrackerSlot], ...] = (TensorBoard, Wandb, Mlflow, SwanLab, Trackio)
AnyTracker: Any = choice(*TRACKER_RECORDS, plugin=False)
