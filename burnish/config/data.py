"""Keys of the data: where rows come from, and how a prompt becomes text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.algorithms.curriculum.spec import LengthBudget
from burnish.config.records import Record, listed, named


class Source(Record):
    """Where rows come from: files, a built-in task, or a plug-in. Exactly one of path, task, plugin."""

    path: str | None = None
    """A jsonl, json, csv, parquet or arrow file, or a glob."""
    shape: str | None = None
    """Which published data set a file's rows are like (gsm8k, math, mbpp, ...): they are asked and judged as `burnish data prepare`
    would write them. Null: rows are recognised by their columns."""
    task: str | None = None
    """A generated task: sort_digits, addition, countdown, guess_number, or reasoning-gym/<name>."""
    plugin: str | None = None
    """`path/to/file.py:function` or `package.module:function`, called with options, returning an iterable of rows (dictionaries)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task or plug-in."""
    split: str | None = None
    """Which side of a task's split (train, test); null means train for training data and test for validation. Of a file with a
    shape: which of the splits it holds, where it holds several (mbpp)."""
    weight: float = Field(1.0, gt=0)
    """Share of draws when there are several sources."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows."""
    name: str | None = None
    """`data_source` of rows that do not carry one; null means the file or task name."""
    prompt_key: str = "question"
    """Column of the prompt in plain rows (those without a `prompt` column); left at question, also problem, query, instruction or input."""
    answer_key: str = "answer"
    """Column of the expected answer in plain rows and in TRL rows; a reward that compares with an answer refuses a row without one."""

    @model_validator(mode="after")
    def _one(self) -> Source:
        given = [k for k in ("path", "task", "plugin") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"a data source needs exactly one of path, task, plugin; got {', '.join(given) or 'none'}")
        if self.options and self.path is not None:
            raise ValueError("options belong to a task or a plug-in, not to a file")
        if self.split is not None and self.task is None and self.shape is None:
            raise ValueError("split belongs to a task, or to a file with a shape; any other file is its own split")
        if self.split is not None and self.task is not None and self.split not in ("train", "test"):
            raise ValueError(f"a task has the splits train and test, not {self.split!r}")
        if self.shape is not None and self.path is None:
            raise ValueError("shape tells what the rows of a file are like; it needs a path")
        if (self.task or self.shape) and (self.prompt_key, self.answer_key) != ("question", "answer"):
            what = "a task" if self.task else "a file with a shape"
            raise ValueError(f"prompt_key and answer_key name columns of a file or a plug-in; {what} has none to name")
        return self


Sources = Annotated[list[Source], BeforeValidator(listed)]


class Template(Record):
    """How a prompt becomes text."""

    kind: Literal["auto", "chat", "plain"] = "auto"
    """chat: the tokenizer's chat template; plain: `text`; auto: chat where the tokenizer has a template, else plain."""
    text: str = "{prompt}"
    """The plain template; `{prompt}` is replaced. `r1-zero` names DeepSeek-R1-Zero's prompt for base models."""
    system: str | None = None
    """A system message put before each prompt's messages (chat only)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the chat template, such as enable_thinking (chat only)."""
    prerendered: bool = False
    """Prompts are texts that were rendered already: no template is applied to them, and special tokens in them (and in completions to
    imitate) are parsed. Otherwise the text of a row is text: `<|im_end|>` in it is no special token."""

    @model_validator(mode="after")
    def _rendered_once(self) -> Template:
        if self.prerendered and (self.kind == "chat" or self.text != "{prompt}" or self.system or self.kwargs):
            raise ValueError(
                "prerendered prompts are not rendered again: leave out kind=chat, text, system and kwargs, or prerendered"
            )
        return self


class Data(Record):
    """Prompts for rollouts."""

    train: Sources = Field(default_factory=list)
    """Training prompts: one source or a list."""
    validation: Sources = Field(default_factory=list)
    """Held-out prompts."""
    template: Template = Template()
    """How a prompt becomes text."""
    prerendered: bool = False
    """Short for template.prerendered: prompts are texts with their special tokens in them, and no template is applied."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt."""
    overlong_prompts: Literal["filter", "error"] = "filter"
    """What to do with longer ones: leave them out (counted, the first ones named) or stop."""
    sampler: Literal["shuffle", "sequential"] | str = "shuffle"
    """Order of prompts: shuffle (seeded, a new order each epoch), sequential, or a plug-in."""
    budget: LengthBudget | None = None
    """Prompts that ask for a number of tokens (LCPO); null asks for none."""
    demonstrations: Sources = Field(default_factory=list)
    """Answers of somebody else, rows as `sft.data` takes them: to imitate (algorithm.auxiliary.sft), or to stand in the groups of
    their prompts (demonstrations_per_group), which a row names by its `id` or its `prompt`."""
    demonstrations_per_update: int = Field(32, ge=1)
    """How many are imitated with each mini-batch."""
    demonstrations_per_group: int = Field(0, ge=0)
    """How many join the samples of each prompt, for loss mixed_offpolicy; a prompt that has fewer gets what it has."""
    demonstration_column: str | None = None
    """Take those of a group from this column of the training rows instead: a text or messages, or a list of them."""

    @model_validator(mode="after")
    def _suffix_has_a_place(self) -> Data:
        if self.template.prerendered and self.budget is not None:
            raise ValueError(
                "budget writes behind what the user says, which prerendered prompts do not tell from the rest"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("prerendered") is not True:
            return values
        given = values.get("template", {})
        template = given.model_dump(exclude_unset=True) if isinstance(given, Template) else given
        return {**values, "template": {**template, "prerendered": True} if isinstance(template, dict) else given}


# --- Keys of the reward: its parts, and the processes they are computed in.


class RewardPart(Record):
    """One term of the reward."""

    name: str
    """exact, number, choice, math, format, think_format, language, rule_scores, task, qa, ifeval, code, row, model, judge, `path/to/file.py:function` or `package.module:function`."""
    weight: float = 1.0
    """Its weight in the sum."""
    correct_at: float | None = None
    """Values of this or more count as correct: accuracy, pass@k and filters by accuracy go by it. null: 1 for the built-in verifiers; a function says it
    itself (it returns True or False, or a dict with `acc`), and any other function, `model` and a judge's score are graded: no answer counts as correct."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier, such as `pattern` for format."""
    sources: list[str] | None = None
    """Only for rows of these data sources; null means all."""


RewardParts = Annotated[
    list[Annotated[RewardPart, BeforeValidator(named)]],
    BeforeValidator(listed),
]


class Reward(Record):
    """What is rewarded, and the processes it is computed in."""

    parts: RewardParts = Field(default_factory=lambda: [RewardPart(name="task")])
    """Terms of the weighted sum: a name, a record, or a list of them. `task` asks the generated task's own checker."""
    timeout_s: float = Field(10.0, gt=0)
    """Deadline of one call; past it the process is killed and the answer counts as incorrect."""
    workers: int = Field(2, ge=1)
    """Worker processes."""
    max_answer_chars: int = Field(20_000, ge=1)
    """Longer completions are cut to their last characters before verifying."""
    memory_gib: float = Field(2.0, gt=0)
    """Address-space limit of a verifier process; of a program of the `code` reward with all it starts."""
    sandbox: Literal["namespaces", "unsafe"] = "namespaces"
    """Where programs of the `code` reward run: namespaces (no files, no network), or unsafe: as you, with only the limits on resources."""

    @model_validator(mode="after")
    def _sandbox_has_an_effect(self) -> Reward:
        if self.sandbox == "unsafe" and not any(part.name in ("code", "row") for part in self.parts):
            raise ValueError("reward.sandbox=unsafe has no effect: no part of the reward runs programs (code, row)")
        return self
