"""The slots of an algorithm as records: name, options, what each needs, its formula and its paper.

`burnish.algorithms` holds the function of every record, under the same slot and name; a test compares the two.
A record's options are its fields, so an option that belongs to another choice is an unknown key, not a silent no-op.
Any slot with a function also takes a user's own: `advantage: {name: path/to/file.py:function, options: {...}}`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

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
