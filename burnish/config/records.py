"""The slots of an algorithm as records: name, options, what each needs, its formula and its paper.

`burnish.algorithms` holds the function of every record, under the same slot and name; a test compares the two.
A record's options are its fields, so an option that belongs to another choice is an unknown key, not a silent no-op.
Any slot with a function also takes a user's own: `advantage: {name: path/to/file.py:function, options: {...}}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticUndefined

from burnish.config.plugins import is_plugin


class Record(BaseModel):
    """A frozen piece of configuration whose unknown keys are errors and whose field docstrings are its help."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Slot(Record):
    """One choice for one slot."""

    name: str
    """What the choice is called; every record narrows it to its own word."""
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """What the rest of the system must provide.

    `groups`: several samples of each prompt. `critic`: a value of every token. `process`: a reward of every token from a
    process reward model. `greedy`: the reward of each prompt's greedy answer. `old`: log-probs under the policy before the batch's first update. `reference`: log-probs under the
    reference. `accuracy`: right or wrong, apart from the reward. `sum_p2`: the sum of squared probabilities. `budget`: a length the prompt
    asks for. `borders`: answers cut into segments, with the values of the states between. `tree`: answers that branch.
    `demonstrations`: answers of somebody else in the groups.
    """
    of_rollouts: ClassVar[tuple[str, ...]] = ()
    """Options that say how rollouts are made for it; its function is not given them."""
    scope: ClassVar[Literal["token", "sequence", "group", "batch"]] = "token"
    """What a loss must see at once to be computed; the learner makes two passes for group and batch."""


class Plugin(Slot):
    """A user's own function for a slot."""

    name: str
    """`path/to/file.py:function` or `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the function."""


def slot_options(slot: Slot) -> dict[str, Any]:
    """The options of a slot record as keyword arguments of the slot's function."""
    if isinstance(slot, Plugin):
        return dict(slot.options)
    return slot.model_dump(exclude={"name", *slot.of_rollouts})


def default_options(*records: type[Slot]) -> dict[str, dict[str, Any]]:
    """The default options of each record, by the record's name; options without a default are left out."""
    return {
        record.model_fields["name"].default: {
            key: info.get_default(call_default_factory=True)
            for key, info in record.model_fields.items()
            if key not in ("name", *record.of_rollouts) and not info.is_required()
        }
        for record in records
    }


def tagged(value: Any) -> Any:
    """`grpo` is short for `{name: grpo}`."""
    return {"name": value} if isinstance(value, str) else value


def _tag(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return "plugin" if isinstance(name, str) and is_plugin(name) else name


def choice(*records: type[Slot], plugin: bool = True) -> Any:
    """The type of a slot: one of these records, told apart by `name`, or a user's own function."""
    options: list[Any] = [Annotated[r, Tag(r.model_fields["name"].default)] for r in records]
    if plugin:
        options.append(Annotated[Plugin, Tag("plugin")])
    union: Any = options[0]
    for option in options[1:]:
        union = union | option
    return Annotated[union, Discriminator(_tag), BeforeValidator(tagged)]


# --- Short forms in YAML: a name for a record, one thing for a list of it.


def named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


# --- What each place in the configuration holds, read off the schema: the one walk that merging, errors and help share.
#
# A `Shape` is a field's annotation in plain words. Nothing here knows a particular key: a record, a slot (a choice of
# records told apart by `name`), a list, a mapping or a value are recognised by their types.

TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Any: "any value",
}
REQUIRED = PydanticUndefined
"""The default of a key that has none."""


@dataclass(frozen=True)
class SchemaNode:
    """What a place holds: `expected` says it in words, `records` are the sections it may be."""

    form: Literal["value", "record", "choice", "list", "mapping"]
    expected: str
    records: tuple[type[Record], ...] = ()
    item: SchemaNode | None = None
    """Of a list or a mapping: what its members are."""
    short: str | None = None
    """The key that a bare word stands for (`advantage: grpo` is `advantage: {name: grpo}`)."""
    words: tuple[str, ...] = ()
    """The words a value may be, for suggestions."""

    @property
    def is_text(self) -> bool:
        return self.form == "value" and self.expected.removesuffix(", or null").endswith("text")

    def child(self, part: str | int) -> SchemaNode | None:
        """What is under this key or index; None where the schema has nothing there."""
        if self.item is not None:
            return self.item
        holder = next((r for r in self.records if part in r.model_fields), None)
        return None if holder is None else field_node(holder, str(part))


@dataclass(frozen=True)
class ConfigKey:
    """One key of the schema, at one position."""

    path: str
    """Dotted; a list's index is `<i>`, a mapping's key `<name>`."""
    shape: SchemaNode
    doc: str
    default: Any
    record: type[Record]
    """The section's type, whose field it is."""
    choice: str = ""
    """The slot choice this option belongs to, or empty outside the slots."""

    @property
    def is_leaf(self) -> bool:
        return self.shape.form == "value" or (self.shape.item is not None and not self.shape.item.records)


@cache
def root_node(kind: type[Record]) -> SchemaNode:
    """The whole configuration as one place."""
    return _record_node(kind, ())


@cache
def field_node(kind: type[Record], name: str) -> SchemaNode:
    """What one field of a record holds."""
    field = kind.model_fields[name]
    return node_of(field.annotation, tuple(field.metadata))


def node_of(annotation: Any, metadata: Sequence[Any] = ()) -> SchemaNode:
    """A type annotation in plain words."""
    while get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        metadata = (*extra, *metadata)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _union_node([a for a in args if a is not NoneType], NoneType in args, metadata)
    if origin is Literal:
        return SchemaNode("value", f"one of {', '.join(map(str, args))}", words=tuple(map(str, args)))
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return _record_node(annotation, metadata)
    if origin is list:
        item = node_of(args[0])
        return SchemaNode("list", f"a list of {_items_text(item)}", item=item)
    if origin is dict:
        item = node_of(args[1])
        return SchemaNode(
            "mapping", "a section of named entries" if item.records else "a section of options", item=item
        )
    if origin is tuple:
        return SchemaNode("value", f"a list of {len(args)} numbers")
    return SchemaNode("value", TYPE_NAMES[annotation] + _bounds_text(metadata))


def _union_node(members: list[Any], optional: bool, metadata: Sequence[Any]) -> SchemaNode:
    shapes = [node_of(m, metadata) for m in members]
    if len(shapes) == 1:
        shape = shapes[0]
    elif all(s.form == "record" for s in shapes):
        records = tuple(s.records[0] for s in shapes)
        shape = SchemaNode("choice", f"one of {', '.join(map(choice_name, records))}", records, short="name")
    else:
        shape = SchemaNode("value", " or ".join(s.expected for s in shapes))
    return replace(shape, expected=f"{shape.expected}, or null") if optional else shape


def _record_node(kind: type[Record], metadata: Sequence[Any]) -> SchemaNode:
    keys = ", ".join(kind.model_fields)
    takes_a_word = any(isinstance(m, BeforeValidator) for m in metadata)
    short = "preset" if "preset" in kind.model_fields else "name" if takes_a_word else None
    words = field_node(kind, short).words if short else ()
    return SchemaNode("record", f"a section with the keys {keys}", (kind,), short=short, words=words)


def choice_name(record: type[Record]) -> str:
    """How a slot's choice is named in a config."""
    return "path/to/file.py:function" if issubclass(record, Plugin) else str(record.model_fields["name"].default)


def _items_text(item: SchemaNode) -> str:
    if item.form == "choice":
        return f"choices ({item.expected})"
    if item.words:
        return f"any of {', '.join(item.words)}"
    return "sections" if item.records else "texts" if item.is_text else "values"


def _bounds_text(metadata: Sequence[Any]) -> str:
    low = next((m for m in metadata if isinstance(m, (Ge, Gt))), None)
    high = next((m for m in metadata if isinstance(m, (Le, Lt))), None)
    parts = []
    if low is not None:
        parts.append(f"above {low.gt}" if isinstance(low, Gt) else f"of {low.ge} or more")
    if high is not None:
        parts.append(f"below {high.lt}" if isinstance(high, Lt) else f"at most {high.le}")
    return " " + ", ".join(parts) if parts else ""


def explicit_values(record: Record) -> dict[str, Any]:
    """What a record states beyond its type's own defaults; a slot always states its name."""
    name = {"name": record.name} if isinstance(record, Slot) and hasattr(record, "name") else {}
    return name | record.model_dump(exclude_unset=True)


def default_of(kind: type[Record], name: str) -> Any:
    """A field's default value, or REQUIRED."""
    return kind.model_fields[name].get_default(call_default_factory=True)


def walk_keys(
    kind: type[Record], prefix: str = "", instance: Record | None = None, choice: str = ""
) -> Iterator[ConfigKey]:
    """Every key in the order of the schema, but a section's own values before the sections in it.

    `instance` holds the defaults of a section at this position, where they differ from its type's.
    """
    keys = []
    for name, field in kind.model_fields.items():
        if choice and name == "name":
            continue  # the choice itself, which the slot's own key shows
        default = default_of(kind, name) if instance is None else getattr(instance, name)
        keys.append(ConfigKey(prefix + name, field_node(kind, name), field.description or "", default, kind, choice))
    for key in sorted(keys, key=lambda k: not k.is_leaf):
        yield key
        yield from _walk_inside(key.shape, key.path, key.default, choice)


def _walk_inside(shape: SchemaNode, path: str, default: Any, choice: str) -> Iterator[ConfigKey]:
    if shape.item is not None:
        yield from _walk_inside(shape.item, path + (".<i>" if shape.form == "list" else ".<name>"), None, choice)
        return
    for record in shape.records:
        is_slot = issubclass(record, Slot)
        instance = default if isinstance(default, record) else None
        yield from walk_keys(
            record, f"{path}.", instance, choice_name(record) if is_slot and shape.form == "choice" else choice
        )


def find_keys(kind: type[Record], name: str) -> list[str]:
    """Where in the whole schema a key of this name exists."""
    return list(dict.fromkeys(k.path for k in walk_keys(kind) if k.path.rpartition(".")[2] == name))
