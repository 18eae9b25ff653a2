"""Suggestions for keys of TRL, verl and OpenRLHF in the error for an unknown key.

They only suggest, because the same key may have another unit or default elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from burnish.config.foreign_keys.counterparts import our_key
from burnish.config.foreign_keys.openrlhf_keys import OPENRLHF
from burnish.config.foreign_keys.trl_keys import TRL
from burnish.config.foreign_keys.verl_keys import VERL
from burnish.config.records import Record

MAX_COUNTERPARTS = 8


def counterparts(config_type: type[Record], key: str, given: Any) -> list[str]:
    """Texts such as `TRL's learning_rate is training.optimizer.lr` for an unknown key, or for the keys of an unknown section."""
    found = [_counterpart_text(config_type, path) for path in _leaves(key, given)]
    return list(dict.fromkeys(text for text in found if text is not None))[:MAX_COUNTERPARTS]


def _leaves(key: str, given: Any) -> Iterator[str]:
    if isinstance(given, Mapping) and given:
        for name, value in given.items():
            yield from _leaves(f"{key}.{name}", value)
    else:
        yield key


def _counterpart_text(config_type: type[Record], path: str) -> str | None:
    last = path.rpartition(".")[2]
    for system, theirs, table in (("verl", path, VERL), ("TRL", last, TRL), ("OpenRLHF", last, OPENRLHF)):
        ours = table.get(theirs)
        text = None if ours is None else our_key(ours, config_type)
        if text is not None:
            return f"{system}'s {theirs} is {text}"
    return None
