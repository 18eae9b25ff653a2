"""Which learning rate and weight decay a parameter has: the optimizer's, or those of the first group that matches it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.optimizer import Optimizer as Config


@dataclass(frozen=True)
class Setting:
    """How one parameter is trained."""

    lr_scale: float = 1.0
    decay: float = 0.0


def settings_of(
    parameters: Mapping[str, Tensor], config: Config, aliases: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Setting]:
    """The setting of every parameter. `aliases` are other names of a parameter, or of the blocks of rows it consists of.

    Norm scales and biases are not decayed unless a group says so: shrinking them is not regularisation.
    """
    aliases = aliases or {}
    found = {
        name: Setting(decay=config.weight_decay if parameter.dim() >= 2 else 0.0)
        for name, parameter in parameters.items()
    }
    left = list(parameters)
    for group in config.groups:
        matched = [name for name in parameters if _matches(group.match, name, aliases.get(name, ()))]
        taken = [name for name in matched if name in left]
        if not taken:
            raise _no_match(group.match, matched, [n for name in parameters for n in (name, *aliases.get(name, ()))])
        left = [name for name in left if name not in matched]
        for name in taken:
            decay = found[name].decay if group.weight_decay is None else group.weight_decay
            found[name] = Setting(group.lr_scale, decay)
    return found


def _matches(pattern: str, name: str, others: Sequence[str]) -> bool:
    if re.search(pattern, name):
        return True
    hits = [other for other in others if re.search(pattern, other)]
    if hits and len(hits) < len(others):
        rest = [other for other in others if other not in hits]
        raise UserError(
            f"optimizer.groups: {pattern!r} matches {', '.join(hits)}, which is one parameter, {name}, with {', '.join(rest)}: "
            "match all of them or none"
        )
    return bool(hits)


def _no_match(pattern: str, matched: Sequence[str], names: Sequence[str]) -> UserError:
    if matched:
        return UserError(
            f"optimizer.groups: everything {pattern!r} matches is in an earlier group, {matched[0]} for one: "
            "the first group that matches counts, so put the narrower one first"
        )
    general = list(dict.fromkeys(re.sub(r"\.\d+\.", r".<i>.", name) for name in names))
    near = sorted(general, key=lambda name: -_likeness(pattern, name))[:3]
    return UserError(f"optimizer.groups: {pattern!r} matches no parameter; the nearest are {', '.join(near)}")


def _likeness(pattern: str, name: str) -> float:
    return max(SequenceMatcher(None, pattern, word).ratio() for word in (name, *name.split(".")))
