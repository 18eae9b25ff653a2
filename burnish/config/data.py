"""Config sections for data and rewards: row sources, prompt templates, reward parts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.algorithms.curriculum.spec import LengthBudget
from burnish.config.records import Record, as_list, name_to_record


class Source(Record):
    """A source of rows: files, a built-in task, or a plug-in. Exactly one of path, task and plugin must be given."""

    path: str | None = None
    """A jsonl, json, csv, parquet or arrow file, or a glob."""
    shape: str | None = None
    """The published data set whose columns the file has (gsm8k, math, mbpp, ...). Its rows get the prompts and the verifier that
    `burnish data prepare` would write. null: the format is detected from the columns."""
    task: str | None = None
    """A generated task: sort_digits, addition, countdown, guess_number, calculator, reverse_text, proofs, pair_verdict, absolute_zero, knights_and_knaves, speak, count_shapes, read_chart, click_target, a game (sokoban, ...), or reasoning-gym/<name>."""
    plugin: str | None = None
    """`path/to/file.py:function` or `package.module:function`. It is called with `options` and returns an iterable of rows (dictionaries)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task or plug-in."""
    split: str | None = None
    """Split of a task: train or test. null: train for training data, test for validation data. For a file with a `shape` that holds
    several splits (mbpp): the split to read."""
    weight: float = Field(1.0, gt=0)
    """Relative weight of this source among several when prompts are drawn."""
    limit: int | None = Field(None, ge=1)
    """Number of rows to use, from the first on. null: all rows."""
    name: str | None = None
    """`data_source` of rows that have none. null: the name of the file or task."""
    prompt_key: str = "question"
    """Column of the prompt in plain rows, which have no `prompt` column. With the default, the columns problem, query, instruction and
    input are tried too."""
    answer_key: str = "answer"
    """Column of the expected answer in plain rows and in TRL rows. A reward that compares with an answer refuses rows without one."""

    @model_validator(mode="after")
    def _check_one_kind(self) -> Source:
        given = [k for k in ("path", "task", "plugin") if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(f"a data source needs exactly one of path, task, plugin; got {', '.join(given) or 'none'}")
        if self.options and self.path is not None:
            raise ValueError("options belong to a task or a plug-in, not to a file")
        if self.split is not None and self.task is None and self.shape is None:
            raise ValueError("split needs a task, or a file with a shape; any other file has no splits")
        if self.split is not None and self.task is not None and self.split not in ("train", "test"):
            raise ValueError(f"a task has the splits train and test, not {self.split!r}")
        if self.shape is not None and self.path is None:
            raise ValueError("shape describes the rows of a file: it needs a path")
        if (self.task or self.shape) and (self.prompt_key, self.answer_key) != ("question", "answer"):
            what = "a task" if self.task else "a file with a shape"
            raise ValueError(
                f"prompt_key and answer_key name columns of a file or a plug-in; they have no effect on {what}"
            )
        return self


Sources = Annotated[list[Source], BeforeValidator(as_list)]


def without_former_prerendered(values: Any) -> Any:
    """A former key of two sections: false had no effect and stands in saved configs, true has a new name."""
    if not isinstance(values, dict) or "prerendered" not in values:
        return values
    if values["prerendered"] is not False:
        raise ValueError("prerendered is now a kind of template: template.kind=prerendered")
    return {key: value for key, value in values.items() if key != "prerendered"}


class Template(Record):
    """How a prompt becomes text."""

    kind: Literal["auto", "chat", "plain", "prerendered"] = "auto"
    """chat: the tokenizer's chat template. plain: `text`. auto: chat if the tokenizer has a template, else plain. prerendered: prompts are
    rendered already, no template is applied, and special tokens in prompts and in demonstrations are parsed; otherwise special tokens
    in the text of a row, such as `<|im_end|>`, are encoded as plain text."""
    text: str = "{prompt}"
    """The plain template; `{prompt}` is replaced by the prompt. `r1-zero` stands for DeepSeek-R1-Zero's prompt for base models."""
    system: str | None = None
    """A system message before the messages of each prompt (chat only)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the chat template, such as enable_thinking (chat only)."""

    @property
    def prerendered(self) -> bool:
        """Whether prompts are rendered already."""
        return self.kind == "prerendered"

    _former = model_validator(mode="before")(without_former_prerendered)

    @model_validator(mode="after")
    def _check_prerendered(self) -> Template:
        if self.prerendered and (self.text != "{prompt}" or self.system or self.kwargs):
            raise ValueError(
                "prerendered prompts are not rendered again: leave out text, system and kwargs, or kind=prerendered"
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
    max_prompt_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens of a prompt."""
    overlong_prompts: Literal["filter", "error"] = "filter"
    """What to do with longer prompts: filter drops them (with their number and the first ones printed), error stops the run."""
    sampler: Literal["shuffle", "sequential"] | str = "shuffle"
    """Order of prompts: shuffle (seeded, a new order each epoch), sequential, or a plug-in."""
    budget: LengthBudget | None = None
    """Adds to every prompt the request for a number of tokens (LCPO). null: prompts are not changed."""
    demonstrations: Sources = Field(default_factory=list)
    """Demonstrations: answers that the policy did not sample, in the row formats of `sft.data`. They are imitated
    (algorithm.auxiliary.sft) or join the groups of their prompts (demonstrations_per_group). A row names its prompt by `id` or `prompt`."""
    demonstrations_per_update: int = Field(32, ge=1)
    """Demonstrations imitated with each mini-batch."""
    demonstrations_per_group: int = Field(0, ge=0)
    """Demonstrations that join the samples of each prompt, for loss mixed_offpolicy. A prompt with fewer demonstrations gets all it has."""
    demonstration_column: str | None = None
    """Read the demonstrations of a group from this column of the training rows instead: a text, messages, or a list of either."""

    @model_validator(mode="after")
    def _check_budget(self) -> Data:
        if self.template.prerendered and self.budget is not None:
            raise ValueError(
                "budget adds text to the end of the user message, and a prerendered prompt does not show where that is"
            )
        return self

    _former = model_validator(mode="before")(without_former_prerendered)


class RewardPart(Record):
    """One term of the reward."""

    name: str
    """exact, number, choice, math, answer_set, format, think_format, language, rule_scores, task, qa, search_r1, research, table_r1, ifeval, code, code_output, code_input, proof, lean, rm_r1, gui_r1, row, model, judge, `path/to/file.py:function` or `package.module:function`."""
    weight: float = 1.0
    """Weight of this part in the sum."""
    correct_at: float | None = None
    """An answer with this value or more counts as correct, for accuracy, pass@k and filters by accuracy. null: 1 for the built-in
    verifiers. A function decides itself by returning True, False or a dict with `acc`. Other functions, `model` and the score of a judge
    are graded: no answer counts as correct."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier, such as `pattern` for format."""
    sources: list[str] | None = None
    """Apply this part only to rows of these data sources. null: to all rows."""


RewardParts = Annotated[
    list[Annotated[RewardPart, BeforeValidator(name_to_record)]],
    BeforeValidator(as_list),
]


class Reward(Record):
    """The reward function, and the processes that compute it."""

    parts: RewardParts = Field(default_factory=lambda: [RewardPart(name="task")])
    """Terms of the weighted sum: a name, a record, or a list of them. `task` is the generated task's own checker."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit of one call. When it is exceeded, the process is killed and the answer counts as incorrect."""
    workers: int = Field(2, ge=1)
    """Worker processes."""
    max_answer_chars: int = Field(20_000, ge=1)
    """Longer completions are cut to their last characters before they are verified."""
    memory_gib: float = Field(2.0, gt=0)
    """Address-space limit of a verifier process, or of a program of the `code` reward (of Lean) with all processes it starts."""
    sandbox: Literal["namespaces", "unsafe"] = "namespaces"
    """Where programs of the `code` reward, and Lean, run. namespaces: without files and network. unsafe: as your user, with resource limits only."""

    @model_validator(mode="after")
    def _check_sandbox(self) -> Reward:
        if self.sandbox == "unsafe" and not any(
            part.name in ("code", "code_input", "lean", "row") for part in self.parts
        ):
            raise ValueError(
                "reward.sandbox=unsafe has no effect: no part of the reward runs programs (code, code_input, lean, row)"
            )
        return self
