"""The slot functions with the default options of their records, so that a test names only the options it is about.

Each table of functions has the name that the package gives it. Each function is importable by its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from burnish.algorithms.advantages import advantage_functions
from burnish.algorithms.correction import corrections
from burnish.algorithms.filters import filter_functions
from burnish.algorithms.losses import loss_functions, ratios_and_clips
from burnish.algorithms.shaping import shapers
from burnish.algorithms.spec import SLOT_RECORDS
from burnish.config.records import default_options

Table = dict[str, Callable[..., Any] | None]


def with_defaults(slot: str, functions: Mapping[str, Callable[..., Any] | None]) -> Table:
    """The functions of a slot, with the default options of the record of that name."""
    defaults = default_options(*SLOT_RECORDS[slot])
    table: Table = {}
    for name, function in functions.items():
        table[name] = None if function is None else partial(function, **defaults[name])
        if function is not None:
            globals()[function.__name__] = table[name]
    return table


ADVANTAGES = with_defaults("advantage", advantage_functions.ADVANTAGES)
CLIPS = with_defaults("clip", ratios_and_clips.CLIPS)
LOSSES = with_defaults("loss", loss_functions.LOSSES)
GROUP_FILTERS = with_defaults("filters", filter_functions.GROUP_FILTERS)
SAMPLE_FILTERS = with_defaults("filters", filter_functions.SAMPLE_FILTERS)
RESAMPLERS = with_defaults("filters", filter_functions.RESAMPLERS)
SHAPERS = with_defaults("shaping", shapers.SHAPERS)
CORRECTIONS = with_defaults("correction", corrections.CORRECTIONS)
