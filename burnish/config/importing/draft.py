"""A recipe in the making: our keys that were set so far, and what became of each key of the other system.

Every key that was given ends in exactly one row of the table. A verdict says what the row means:

- translated: the key became a key of ours, which means the same;
- same: burnish does this without a key;
- differs: there is something here that means something else, and the row says what;
- none: nothing here corresponds to it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from burnish.algorithms.spec import Algorithm
from burnish.config.foreign_keys.counterparts import SECTION_BY_CONFIG, Counterpart, leading_key, our_key
from burnish.config.loading import algorithm_from_preset, load
from burnish.config.records import Record, Slot
from burnish.config.schema import TrainConfig
from burnish.config.trackers import TRACKER_RECORDS

NOT_SET = "off or not set, so there is nothing to translate"
PLACEHOLDER = "path/to"
"""The folder of files that a script does not name."""
Verdict = Literal["translated", "same", "differs", "none"]
VERDICTS: dict[Verdict, str] = {
    "translated": "translated",
    "same": "the same here without a key",
    "differs": "something else here",
    "none": "no counterpart",
}


class TableRow(NamedTuple):
    """What became of one key, or of a section whose keys have the same fate."""

    key: str
    value: Any
    verdict: Verdict
    ours: str
    is_default: bool = False
    """Whether the value is the other system's default, which the script does not mention."""
    num_keys: int = 1
    """How many keys the row stands for; `key` is then a pattern."""


class DataFacts(NamedTuple):
    """What the importer asks about files that it does not read itself."""

    num_rows: Callable[[str], int | None] = lambda path: None
    """The number of rows of a file, or None if it is not here."""
    data_sources: Callable[[str], list[str]] = lambda path: []
    """The values of `data_source` in the first rows of a file."""


class Imported(NamedTuple):
    """A recipe, the command that runs it, its table, and notes about what could not be read."""

    command: str
    tree: dict[str, Any]
    rows: list[TableRow]
    notes: list[str]
    files: Mapping[str, str] = MappingProxyType({})
    """Further files that belong beside the recipe, by name."""


class Draft:
    """Collects a recipe and its table. `given` are the keys of the other system, `defaults` its values for keys that are not given."""

    def __init__(
        self,
        config_type: type[Record],
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        table: Mapping[str, Counterpart],
    ) -> None:
        self.config_type, self.given, self.defaults, self.table = config_type, dict(given), defaults, table
        self.tree: dict[str, Any] = {}
        self.rows: dict[str, TableRow] = {}
        self.notes: list[str] = []
        self.forgotten: set[str] = set()

    # --- the other system's values

    def value(self, key: str, otherwise: Any = None) -> Any:
        """The value of a key, given or by default."""
        value = self.given.get(key, self.defaults.get(key, otherwise))
        return otherwise if value is None else value

    def is_given(self, *keys: str) -> bool:
        """Whether the script has one of these keys, with a value."""
        return any(self.given.get(key) is not None for key in keys)

    def first_given(self, *keys: str) -> str:
        """The first of several names of one thing that is given, or the first of all. Names of older versions come last."""
        return next((key for key in keys if self.is_given(key)), keys[0])

    def number(self, key: str, otherwise: float = 0) -> float:
        """The value of a key that must be a number. Any other value is noted, and the default is used."""
        value = self.value(key, otherwise)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        default = self.defaults.get(key)
        default = default if isinstance(default, int | float) else otherwise
        note = f"{key}={show(value)} is not a number; {default:g} is used"
        self.notes += [] if note in self.notes else [note]
        return default

    def integer(self, key: str, otherwise: int = 0) -> int:
        """The value of a key that must be a whole number."""
        return int(self.number(key, otherwise))

    def flag(self, key: str) -> bool:
        """Whether a key is true. `True` as text is true as well."""
        return str(self.value(key, False)).lower() in ("true", "1")

    def forget(self, key: str, text: str) -> None:
        """Treat a key as not given, because its value is not known. Its row says so and stays, whatever becomes of the default."""
        self.differs(key, text)
        self.forgotten.add(key)
        del self.given[key]

    # --- our values

    def set(self, key: str, value: Any) -> None:
        """Set a key of the recipe."""
        *sections, last = key.split(".")
        tree = self.tree
        for name in sections:
            tree = tree.setdefault(name, {})
        tree[last] = value

    def translate(self, key: str, ours: str, value: Any, remark: str = "") -> None:
        """Set our key and say which key of theirs it came from. A default of theirs that is ours too is left out."""
        if key not in self.given and _value_at(default_values(self.config_type), ours) == value:
            return
        self.set(ours, value)
        self._row(key, "translated", f"{ours}={show(value)}{f' ({remark})' if remark else ''}")

    def say(self, key: str, ours: str, value: Any, remark: str = "", is_always: bool = False) -> None:
        """The row of a key whose value is set together with others. A key that is not given has one only with `is_always`."""
        if is_always or key in self.given:
            self._row(key, "translated", f"{ours}={show(value)}{f' ({remark})' if remark else ''}")

    def copy(self, *keys: str) -> None:
        """Translate keys whose values mean the same here, by the table of counterparts. A default of theirs is copied too."""
        for key in keys:
            if self.value(key) is not None:
                self.translate(key, self.ours(key), self.value(key))

    def ours(self, key: str) -> str:
        """Our key for one of theirs."""
        text = our_key(self.table[key], self.config_type)
        assert text is not None, key
        return leading_key(text)

    def same(self, key: str, text: str) -> None:
        """Say that burnish does this without a key."""
        self._row(key, "same", text)

    def differs(self, key: str, text: str) -> None:
        """Say what is different here."""
        self._row(key, "differs", text)

    def none(self, key: str, text: str = "") -> None:
        """Say that there is nothing here for this key."""
        self._row(key, "none", text)

    def explain(self, keys: Iterable[str], verdict: Verdict, text: str) -> None:
        """Give the same row to all of these keys that are given and have none yet."""
        for key in keys:
            if key in self.given and key not in self.rows:
                self._row(key, verdict, text)

    def _row(self, key: str, verdict: Verdict, ours: str) -> None:
        if key in self.forgotten:
            return
        is_given = key in self.given
        if is_given and self.given[key] is None and verdict != "translated":
            verdict, ours = "same", NOT_SET
        if is_given or verdict != "same":
            self.rows[key] = TableRow(key, self.value(key), verdict, ours, not is_given)

    def set_trackers(self, key: str, always_there: Sequence[str]) -> None:
        """Translate a name or a list of names of trackers. `always_there` are names for what burnish does in any case."""
        given = self.value(key)
        names = [str(name) for name in (given if isinstance(given, list) else [] if given is None else [given])]
        known = [name for name in names if name in tracker_names()]
        unknown = [name for name in names if name not in known and name not in always_there]
        if known:
            self.set("run.trackers", known)
        if unknown:
            self.differs(
                key, f"run.trackers={show(known)}: {', '.join(unknown)} is none of {', '.join(tracker_names())}"
            )
        elif known:
            self.say(key, "run.trackers", known)
        self.explain([key], "same", "the console and metrics.jsonl are always there")

    # --- the end

    def finish(self, patterns: Sequence[tuple[str, Verdict, str]]) -> list[TableRow]:
        """The rows of all keys. Keys without a row get that of the first pattern that matches them, or `none`."""
        groups: dict[tuple[str, Verdict, str], list[str]] = {}
        for key in self.given:
            if key not in self.rows:
                found = next((one for one in patterns if fnmatch.fnmatchcase(key, one[0])), (key, "none", ""))
                if found[1] != "same" and (_is_off(key, self.given[key]) or self._is_in_disabled_section(key)):
                    found = (found[0], "same", NOT_SET)
                groups.setdefault(found, []).append(key)
        rest = []
        for (pattern, verdict, text), keys in groups.items():
            if len(keys) > 2 and "*" in pattern:
                rest.append(TableRow(pattern, None, verdict, text, num_keys=len(keys)))
            else:
                rest += [TableRow(key, self.given[key], verdict, text) for key in keys]
        return [*self.rows.values(), *rest]

    def _is_in_disabled_section(self, key: str) -> bool:
        """Whether a section around the key is switched off by its `enable` or `enabled`."""
        parts = key.split(".")
        sections = [".".join(parts[:end]) for end in range(1, len(parts))]
        return any(self.given.get(f"{one}.{switch}") is False for one in sections for switch in ("enable", "enabled"))

    def ordered_tree(self) -> dict[str, Any]:
        """The recipe with its sections, and the keys of each section, in the order of the schema."""
        ordered = {}
        for name, field in self.config_type.model_fields.items():
            if name in self.tree:
                value, section = self.tree[name], field.annotation
                if isinstance(value, dict) and isinstance(section, type) and issubclass(section, Record):
                    value = {key: value[key] for key in sorted(value, key=list(section.model_fields).index)}
                ordered[name] = value
        return ordered

    def set_algorithm(self, preset: str, slots: dict[str, Any]) -> None:
        """Set the algorithm: a preset, and the slots in which this algorithm differs from it."""
        try:
            wanted = Algorithm.model_validate({**slots, "preset": preset})
        except ValidationError:  # loading the recipe reports what does not go together
            self.tree["algorithm"] = {"preset": preset, **slots}
            return
        difference = record_difference(algorithm_from_preset(preset), wanted)
        self.tree["algorithm"] = {"preset": preset, **difference} if difference else preset


def tracker_names() -> tuple[str, ...]:
    """The trackers of `run.trackers`."""
    return tuple(record.model_fields["name"].default for record in TRACKER_RECORDS)


@cache
def default_values(config_type: type[Record]) -> dict[str, Any]:
    """The values of a config that gives only a model and data."""
    data = "data.train" if config_type is TrainConfig else f"{SECTION_BY_CONFIG[config_type.__name__]}.data"
    return load(config_type, None, ["model.path=MODEL", f"{data}.path=DATA"]).resolved


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _is_off(key: str, value: Any) -> bool:
    """Whether a value switches nothing on: null, false, empty, or one process."""
    return value is None or value is False or value in ("", [], {}) or (key.endswith("parallel_size") and value == 1)


def record_difference(base: Record, wanted: Record) -> dict[str, Any]:
    """The keys that turn one record into another of the same type, as a recipe would give them."""
    changes = {}
    for name in type(wanted).model_fields:
        before, after = getattr(base, name), getattr(wanted, name)
        if before != after:
            changes[name] = _value_difference(before, after)
    return changes


def _value_difference(before: Any, after: Any) -> Any:
    if (
        isinstance(after, Record)
        and type(before) is type(after)
        and getattr(before, "name", 0) == getattr(after, "name", 0)
    ):
        return record_difference(before, after)
    return _plain(after)


def _plain(value: Any) -> Any:
    """A value as a recipe gives it, without the defaults of its records."""
    if isinstance(value, Record):
        options = {}
        for name, field in type(value).model_fields.items():
            inner, default = getattr(value, name), field.get_default(call_default_factory=True)
            if name != "name" and inner != default:
                options[name] = _value_difference(default, inner)
        if not isinstance(value, Slot):
            return options
        chosen = getattr(value, "name", None)
        return {"name": chosen, **options} if options else chosen
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def show(value: Any) -> str:
    """A value for the table, in YAML's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
