"""Base classes of the configuration, and the walk over its schema that loading, errors and help share.

A config section is a `Record`. A slot of an algorithm takes one `Slot` record out of several, told apart by `name`. The options of a
choice are its fields, so an option of another choice is an unknown key rather than a silent no-op. Any slot with a function also takes a
plug-in: `advantage: {name: path/to/file.py:function, options: {...}}`. `burnish.algorithms` holds the function of every record under the
same slot and name, and a test compares the two.

`SchemaNode` describes the type of a value in words; `walk_keys` lists all keys. Both are derived from type annotations alone.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticUndefined

from burnish.config.plugins import is_plugin

TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Any: "any value",
}
REQUIRED = PydanticUndefined
"""The default of a key that has none."""


class Record(BaseModel):
    """A frozen config section. Unknown keys are errors, and the docstrings of fields are their help texts (`field_help`).

    Pydantic makes the validator of a section when it is first needed: most processes validate few of the 200 sections or none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Slot(Record):
    """One choice for one slot."""

    name: str
    """Name of the choice. Every record narrows the type to its own literal."""
    formula: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    """What the rest of the system must provide.

    `groups`: several samples of each prompt. `critic`: a value of every token. `process`: a reward of every token from a process reward
    model. `greedy`: the reward of each prompt's greedy answer. `old`: log-probs under the policy before the batch's first update.
    `reference`: log-probs under the reference. `accuracy`: right or wrong, independent of the reward. `sum_p2`: the sum of squared
    probabilities. `entropy`: the entropy at each token before the batch's first update. `prompt_values`: a value of each prompt, estimated before training. `budget`: a length that the prompt asks for. `borders`: answers cut into segments, with a value at each border between
    segments. `tree`: answers that branch. `turns`: several turns per sample. `states`: the state in which each turn of an agent begins.
    `void_turns`: the number of turns with neither a call
    nor a final answer. `chat`: a chat template. `roles`: an environment with several roles. `answers`: rows with a known answer. `demonstrations`: answers in the groups that the policy did not sample.
    """
    rollout_options: ClassVar[tuple[str, ...]] = ()
    """Options that control how rollouts are made. They are not passed to the slot's function."""
    scope: ClassVar[Literal["token", "sequence", "group", "batch"]] = "token"
    """What a loss must see at once. For group and batch the learner makes two passes."""


class Plugin(Slot):
    """A user's function for a slot."""

    name: str
    """`path/to/file.py:function` or `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def slot_options(slot: Slot) -> dict[str, Any]:
    """The options of a slot record as keyword arguments of the slot's function."""
    if isinstance(slot, Plugin):
        return dict(slot.options)
    return slot.model_dump(exclude={"name", *slot.rollout_options})


def default_options(*records: type[Slot]) -> dict[str, dict[str, Any]]:
    """The default options of each record, by the record's name. Options without a default are left out."""
    return {
        record.model_fields["name"].default: {
            key: info.get_default(call_default_factory=True)
            for key, info in record.model_fields.items()
            if key not in ("name", *record.rollout_options) and not info.is_required()
        }
        for record in records
    }


def name_to_record(value: Any) -> Any:
    """`grpo` is short for `{name: grpo}`."""
    return {"name": value} if isinstance(value, str) else value


def as_list(value: Any) -> Any:
    """A single item is short for a list of one."""
    return value if isinstance(value, list) else [value]


def choice(*records: type[Slot], plugin: bool = True) -> Any:
    """The type of a slot: one of these records, told apart by `name`, or a plug-in."""
    options: list[Any] = [Annotated[r, Tag(r.model_fields["name"].default)] for r in records]
    if plugin:
        options.append(Annotated[Plugin, Tag("plugin")])
    union: Any = options[0]
    for option in options[1:]:
        union = union | option
    return Annotated[union, Discriminator(_tag), BeforeValidator(name_to_record)]


def _tag(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return "plugin" if isinstance(name, str) and is_plugin(name) else name


@dataclass(frozen=True)
class SchemaNode:
    """The type of one config value, read from its annotation."""

    form: Literal["value", "record", "choice", "list", "mapping"]
    expected: str
    """The type in words, for help and error messages."""
    records: tuple[type[Record], ...] = ()
    """The sections that the value may be."""
    item: SchemaNode | None = None
    """Node of the members of a list or a mapping."""
    short: str | None = None
    """The key that a bare string sets (`advantage: grpo` is `advantage: {name: grpo}`)."""
    words: tuple[str, ...] = ()
    """The allowed strings, for suggestions."""

    @property
    def is_text(self) -> bool:
        """Whether the value is text, possibly null."""
        return self.form == "value" and self.expected.removesuffix(", or null").endswith("text")

    def child(self, part: str | int) -> SchemaNode | None:
        """The node under a key or index; None if the schema has no such key."""
        if self.item is not None:
            return self.item
        holder = next((r for r in self.records if part in r.model_fields), None)
        return None if holder is None else field_node(holder, str(part))


@dataclass(frozen=True)
class ConfigKey:
    """One key of the schema with its path, help text and default."""

    path: str
    """Dotted path. `<i>` stands for a list index, `<name>` for a key of a mapping."""
    node: SchemaNode
    default: Any
    record: type[Record]
    """The record that has this field."""
    choice: str = ""
    """The slot choice that has this option; empty outside the slots."""

    @property
    def doc(self) -> str:
        """The help text; empty if there is none."""
        return field_help(self.record, self.path.rpartition(".")[2])

    @property
    def is_leaf(self) -> bool:
        """Whether the key takes a value rather than a section."""
        return self.node.form == "value" or (self.node.item is not None and not self.node.item.records)


@cache
def root_node(record_type: type[Record]) -> SchemaNode:
    """The node of a whole configuration."""
    return _record_node(record_type, ())


@cache
def field_node(record_type: type[Record], name: str) -> SchemaNode:
    """The node of one field of a record."""
    field = record_type.model_fields[name]
    return node_of(field.annotation, tuple(field.metadata))


def node_of(annotation: Any, metadata: Sequence[Any] = ()) -> SchemaNode:
    """The node of a type annotation."""
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
    nodes = [node_of(m, metadata) for m in members]
    if len(nodes) == 1:
        node = nodes[0]
    elif all(s.form == "record" for s in nodes):
        records = tuple(s.records[0] for s in nodes)
        node = SchemaNode("choice", f"one of {', '.join(map(choice_name, records))}", records, short="name")
    else:
        node = SchemaNode("value", " or ".join(s.expected for s in nodes))
    return replace(node, expected=f"{node.expected}, or null") if optional else node


def _record_node(record_type: type[Record], metadata: Sequence[Any]) -> SchemaNode:
    keys = ", ".join(record_type.model_fields)
    takes_string = any(isinstance(m, BeforeValidator) for m in metadata)
    short = "preset" if "preset" in record_type.model_fields else "name" if takes_string else None
    words = field_node(record_type, short).words if short else ()
    return SchemaNode("record", f"a section with the keys {keys}", (record_type,), short=short, words=words)


def choice_name(record: type[Record]) -> str:
    """The `name` of a slot's choice in a config."""
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


def field_help(record_type: type[Record], name: str) -> str:
    """The docstring of a field, in the class that declares it; empty if there is none."""
    declaring = next(one for one in record_type.__mro__ if name in inspect.get_annotations(one))
    return _field_docstrings(declaring.__module__).get((declaring.__qualname__, name), "")


@cache
def _field_docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstrings of the fields of a module's classes, by class and field. They are read from the source, since Python keeps none."""
    found = {}
    classes = [
        node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)
    ]
    for node in classes:
        for field, text in pairwise(node.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    found[node.name, name] = inspect.cleandoc(doc)
    return found


def explicit_values(record: Record) -> dict[str, Any]:
    """The values that were given to a record explicitly, and the name of a slot."""
    name = {"name": record.name} if isinstance(record, Slot) and hasattr(record, "name") else {}
    return name | record.model_dump(exclude_unset=True)


def default_of(record_type: type[Record], name: str) -> Any:
    """A field's default value, or REQUIRED."""
    return record_type.model_fields[name].get_default(call_default_factory=True)


def walk_keys(
    record_type: type[Record], prefix: str = "", instance: Record | None = None, choice: str = ""
) -> Iterator[ConfigKey]:
    """Every key in the order of the schema, with the values of a section before its subsections.

    `instance` holds the defaults of a section at this position if they differ from those of its type.
    """
    keys = []
    for name in record_type.model_fields:
        if choice and name == "name":
            continue  # the slot's own key shows its choices
        default = default_of(record_type, name) if instance is None else getattr(instance, name)
        keys.append(ConfigKey(prefix + name, field_node(record_type, name), default, record_type, choice))
    for key in sorted(keys, key=lambda k: not k.is_leaf):
        yield key
        yield from _walk_inside(key.node, key.path, key.default, choice)


def _walk_inside(node: SchemaNode, path: str, default: Any, choice: str) -> Iterator[ConfigKey]:
    if node.item is not None:
        yield from _walk_inside(node.item, path + (".<i>" if node.form == "list" else ".<name>"), None, choice)
        return
    if choice and node.form == "choice":
        return  # choices among an option of a choice have the options that their own slot shows
    for record in node.records:
        is_slot = issubclass(record, Slot)
        instance = default if isinstance(default, record) else None
        yield from walk_keys(
            record, f"{path}.", instance, choice_name(record) if is_slot and node.form == "choice" else choice
        )


def find_keys(record_type: type[Record], name: str) -> list[str]:
    """The paths of all keys of this name."""
    return list(dict.fromkeys(k.path for k in walk_keys(record_type) if k.path.rpartition(".")[2] == name))
