"""Every key of a run, with its type, its default and what it means.

The docstring under a field is its documentation: `burnish train --help` and docs/config.md print exactly these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.algorithm import Algorithm
from burnish.config.engines import Sglang, check_engine_fits
from burnish.config.environment import Environment, check_environment_fits
from burnish.config.fits import check_algorithm_fits
from burnish.config.lora import Lora
from burnish.config.optimizer import Optimizer, check_optimizer_fits
from burnish.config.parallel import Parallel, check_parallel_fits
from burnish.config.placement import LocalPlacement, PlacementSlot, check_placement_fits
from burnish.config.slots import Record
from burnish.config.slots.curriculum import LengthBudget
from burnish.config.slots.mismatch import MismatchSlot
from burnish.config.source import SourceSlot, Sync, check_source_fits
from burnish.config.vllm import Vllm, check_vllm_fits


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Activations = Literal["keep", "selective", "recompute", "offload"]


# --- model -----------------------------------------------------------------------------------------------------------


class NewModel(Record):
    """A decoder made from nothing, with random weights."""

    family: Literal["llama", "qwen2", "qwen3", "mistral", "gemma3_text"] = "llama"
    """Architecture."""
    hidden_size: int = Field(128, ge=1)
    """Width of the residual stream."""
    num_layers: int = Field(2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads; null means as many as query heads."""
    mlp_size: int = Field(336, ge=1)
    """Width of the gated MLP."""
    max_positions: int = Field(512, ge=2)
    """Longest sequence the model is declared for."""
    tied: bool = False
    """Whether the output head is the embedding matrix."""


class Model(Record):
    """The policy: a Hugging Face directory, or a new decoder."""

    path: str | None = None
    """A Hugging Face model directory (config.json, safetensors, tokenizer)."""
    new: NewModel | None = None
    """A decoder from nothing instead, with a tokenizer of the task's characters."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters and of the arithmetic; bfloat16 trains with float32 master weights, float16 only samples."""
    device: str = "auto"
    """`auto` takes a GPU when there is one; or cpu, cuda, cuda:1."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """Who does the forward: our decoder, or transformers for any other architecture (slower). auto picks native where the family is known."""
    lora: Lora | None = None
    """New low-rank adapters on the model, which alone are trained and saved; the critic has its own on the same frozen weights."""
    adapter: str | None = None
    """A PEFT adapter directory to start from instead, with its own rank and targets; without model.path, on the base it names."""

    @model_validator(mode="after")
    def _one(self) -> Model:
        if self.path is not None and self.new is not None:
            raise ValueError("give either model.path (a directory) or model.new (from nothing), not both")
        if self.lora is not None and self.adapter is not None:
            raise ValueError("model.adapter brings adapters with a rank and targets of their own: remove model.lora")
        given = "lora" if self.lora is not None else "adapter" if self.adapter is not None else None
        if given is not None and self.new is not None:
            raise ValueError(f"model.{given} adapts a model that has learnt something: give model.path, not model.new")
        if given is not None and self.backend == "transformers":
            raise ValueError(f"model.{given} needs the native decoder, and model.backend=transformers")
        return self


def check_trainable(model: Model) -> None:
    if model.path is None and model.new is None and model.adapter is None:
        raise ValueError("no model: give model.path (a Hugging Face directory) or model.new (from nothing)")
    if model.dtype == "float16":
        raise ValueError("model.dtype=float16 has too small a range for gradients: train in bfloat16 or float32")


# --- data ------------------------------------------------------------------------------------------------------------


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
    """`path/to/file.py:function`, called with options, returning an iterable of rows (dictionaries)."""
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
    """Column of the prompt in plain rows (those without a `prompt` column)."""
    answer_key: str = "answer"
    """Column of the expected answer in plain rows and in TRL rows that have one."""

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


Sources = Annotated[list[Source], BeforeValidator(_listed)]


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


class Data(Record):
    """Prompts for rollouts."""

    train: Sources = Field(default_factory=list)
    """Training prompts: one source or a list."""
    validation: Sources = Field(default_factory=list)
    """Held-out prompts."""
    template: Template = Template()
    """How a prompt becomes text."""
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


# --- reward ----------------------------------------------------------------------------------------------------------


class RewardPart(Record):
    """One term of the reward."""

    name: str
    """exact, number, choice, math, format, think_format, language, rule_scores, task, qa, ifeval, code, row, model, judge, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Its weight in the sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier, such as `pattern` for format."""
    sources: list[str] | None = None
    """Only for rows of these data sources; null means all."""


RewardParts = Annotated[
    list[Annotated[RewardPart, BeforeValidator(_named)]],
    BeforeValidator(_listed),
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


# --- rollout ---------------------------------------------------------------------------------------------------------


class Sampling(Record):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this probability."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 is off."""
    max_tokens: int = Field(256, ge=1)
    """Most new tokens of one completion."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, besides the model's end tokens."""


class RolloutStage(Record):
    """Rollout settings from a step on (progressive context, DeepScaleR); what is left out stays as it was."""

    start: int = Field(ge=2)
    """First step of the stage."""
    max_tokens: int | None = Field(None, ge=1)
    """Most new tokens of one completion; also where soft overlong penalties and the horizon of Dr.GRPO take theirs from."""
    n: int | None = Field(None, ge=1)
    """Samples of each prompt."""
    prompts: int | None = Field(None, ge=1)
    """Prompts a step."""

    @model_validator(mode="after")
    def _changes(self) -> RolloutStage:
        if self.max_tokens is None and self.n is None and self.prompts is None:
            raise ValueError(f"the stage from step {self.start} changes nothing: give max_tokens, n or prompts")
        return self


class Rollout(Sampling):
    """Sampling for training."""

    engine: Literal["auto", "native", "transformers", "vllm", "sglang"] = "auto"
    """Who samples; auto follows model.backend."""
    vllm: Vllm | None = None
    """How vLLM samples, with rollout.engine=vllm; null is an engine in this process."""
    sglang: Sglang | None = None
    """The servers of rollout.engine=sglang."""
    prompts: int = Field(64, ge=1)
    """Prompts a step."""
    n: int = Field(8, ge=1)
    """Samples of each prompt."""
    max_rows: int = Field(256, ge=1)
    """Most sequences decoded at once."""
    cache_gib: float | None = Field(None, gt=0)
    """Size of the native engine's KV cache in GiB: less sets rows aside when they grow, more keeps the beginnings of more prompts.
    null takes what all rows at their longest need, at most 40% of what is free. On a CPU a number chooses the paged cache. Also the
    cache of vLLM in this process, where null means 4."""
    cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8 keeps keys and values in 8 bits (half of bfloat16's memory) with a scale for each vector; what it changes of the samples
    the mismatch metrics show. On a CPU it chooses the paged cache, like cache_gib."""
    exact: bool = False
    """Sample and score with operations whose bits do not depend on what is computed beside them: the learner's log-prob of every
    sampled token is then the engine's, bit for bit, at a cost in speed that `bench/exact.py` measures."""
    mismatch: MismatchSlot | None = None
    """A fault injected between the policy that samples and the one that is trained, to study corrections; validation has it too."""
    stages: list[RolloutStage] = Field(default_factory=list)
    """Changes of max_tokens, n and prompts at later steps, in order."""
    source: SourceSlot = Sync()
    """When rollouts are made: before their step, during the one before, or all the time."""

    @model_validator(mode="after")
    def _in_order(self) -> Rollout:
        check_engine_fits(self)
        check_vllm_fits(self)
        other = self.engine not in ("auto", "native")
        if self.exact and other:
            raise ValueError(f"rollout.exact needs the native engine, and rollout.engine={self.engine}")
        if self.exact and (self.top_p < 1 or self.top_k):
            raise ValueError(
                "rollout.exact with top_p or top_k: the engine reports log-probs of the truncated distribution, the learner of the whole"
            )
        if other and self.engine != "vllm" and (self.cache_gib is not None or self.cache_dtype != "auto"):
            raise ValueError(
                f"rollout.cache_gib and cache_dtype are of the native engine, and rollout.engine={self.engine}"
            )
        if self.exact and self.cache_dtype != "auto":
            raise ValueError(
                "rollout.exact with cache_dtype=fp8: the learner has no cache to round, so the log-probs would differ"
            )
        if self.exact and self.mismatch is not None:
            raise ValueError("rollout.exact and rollout.mismatch contradict each other")
        starts = [stage.start for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"rollout.stages start at steps {starts}; each must start after the one before")
        return self

    def at(self, step: int) -> Rollout:
        """The settings of a step: every stage that has begun laid over the first ones."""
        begun = [stage.model_dump(exclude_none=True, exclude={"start"}) for stage in self.stages if stage.start <= step]
        changes = {key: value for stage in begun for key, value in stage.items()}
        return self.model_copy(update=changes)

    def all_stages(self) -> list[Rollout]:
        """The settings at the start and after each change."""
        return [self, *(self.at(stage.start) for stage in self.stages)]


# --- training --------------------------------------------------------------------------------------------------------


class Training(Record):
    """How the learner uses a batch."""

    steps: int = Field(100, ge=1)
    """RL steps."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps made of one batch and epoch; a group is never split over two."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens of one micro-batch (forward and backward at once); changes memory and speed, never the gradient."""
    share_prompts: bool = True
    """Compute what the samples of a prompt begin with once for all of them, forward and backward, where that saves a twentieth of
    the tokens or more; changes speed, never the gradient."""
    grad_norms: bool = False
    """Also log the gradient's norm of every block (embedding, each layer, head) as `actor/grad_norm_<block>`."""
    activations: Activations = "keep"
    """What waits for the backward pass: `keep` all of it, `selective` only the results of matmuls and attention, `recompute` only each
    layer's input, `offload` nothing on the GPU; each needs less memory and more time than the one before, and gives the same gradient."""
    compile: bool = False
    """Run the layers through torch.compile, which takes a minute at first: the arithmetic between the matmuls in fewer passes over memory."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _keeps(self) -> Training:
        if self.compile and self.activations == "selective":
            raise ValueError(
                "training.compile chooses by itself what the cheap operations keep: set training.activations to keep, recompute or offload"
            )
        return self


class ValidationMode(Sampling):
    """One way to measure."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    n: int = Field(1, ge=1)
    """Samples of each prompt."""


class Validation(Record):
    """Measuring on held-out prompts, before training, every k steps and at the end."""

    every: int = Field(0, ge=0)
    """Steps between validations; 0 means only before and after."""
    before: bool = True
    """Whether to measure before the first step."""
    limit: int | None = Field(None, ge=1)
    """Most prompts; null means all. A generated task needs it."""
    modes: dict[str, ValidationMode] = Field(default_factory=lambda: {"greedy": ValidationMode()}, min_length=1)
    """Named ways of sampling; the first one's accuracy chooses the best checkpoint. max_tokens unset follows rollout."""
    by: str | None = None
    """Also report accuracy by this column of the rows."""


class Sft(Record):
    """Supervised training on prompt/completion rows or messages, with loss only on what the assistant says."""

    data: Sources = Field(default_factory=list)
    """Rows with `prompt` and `completion` (text or messages), or `messages`; a task gives its demonstrations."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(128, ge=1)
    """Sequences an update."""
    max_tokens: int = Field(2048, ge=2)
    """Longest sequence."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with longer rows: leave them out (counted) or stop. They are never cut in silence."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens of one micro-batch."""
    activations: Activations = "keep"
    """What waits for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""


class Run(Record):
    """Where a run lives and what it keeps."""

    directory: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """This run's folder in it; null names it after the recipe and the seed."""
    save_every: int = Field(25, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    save: Literal["background", "wait"] = "background"
    """background: a checkpoint is copied to host memory and written while training goes on; wait: training stands still, no memory is needed."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept, besides the best one."""
    keep_best: bool = True
    """Save at every validation too, so that the best policy measured is kept; false saves only every save_every steps."""
    samples_every: int = Field(10, ge=1)
    """Steps between tables of samples."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Also send metrics there (extra: track)."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for arithmetic; null leaves torch's choice."""


class TrainConfig(Record):
    """`burnish train`."""

    seed: int = Field(0, ge=0)
    """All randomness follows from it."""
    run: Run = Run()
    """Where a run lives and what it keeps."""
    model: Model = Model()
    """The policy."""
    data: Data = Data()
    """Prompts."""
    environment: Annotated[Environment, BeforeValidator(_named)] = Environment()
    """What answers a completion."""
    reward: Reward = Reward()
    """What is rewarded."""
    rollout: Rollout = Rollout()
    """Sampling for training."""
    algorithm: Algorithm = Algorithm()
    """One choice per slot, or a preset's name."""
    training: Training = Training()
    """How the learner uses a batch."""
    validation: Validation = Validation()
    """Measuring."""
    warm_start: Sft | None = None
    """A supervised stage before RL; its result is checkpoint 0."""
    placement: PlacementSlot = LocalPlacement()
    """Where the processes of the run are."""
    parallel: Parallel = Parallel()
    """How `placement.workers` processes divide the work of training."""

    @model_validator(mode="after")
    def _combinations(self) -> TrainConfig:
        check_trainable(self.model)
        check_placement_fits(self)
        check_source_fits(self)
        for where, section in (
            ("training", self.training),
            ("warm_start", self.warm_start),
            ("algorithm.critic", self.algorithm.critic),
            ("algorithm.process", self.algorithm.process),
        ):
            if section is not None:
                check_optimizer_fits(section.optimizer, f"{where}.optimizer", self.model.dtype, self.model.device)
        if not self.data.train:
            raise ValueError("no training prompts: give data.train (a file, a task or a plug-in)")
        check_algorithm_fits(self)
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature is 0: greedy samples of a prompt are all alike, so nothing can be learnt"
            )
        fewest = min(stage.prompts for stage in self.rollout.all_stages())
        if self.training.mini_batches > fewest:
            raise ValueError(
                f"training.mini_batches={self.training.mini_batches} but there are only rollout.prompts={fewest} groups to divide"
            )
        check_environment_fits(self)
        measuring = [k for k in ("every", "limit", "by") if getattr(self.validation, k)]
        if measuring and not self.data.validation:
            raise ValueError(f"validation.{measuring[0]} has no effect without held-out prompts: give data.validation")
        if not self.run.keep_best and not self.validation.every:
            raise ValueError(
                "run.keep_best=false has no effect without validation.every: no policy but the last is measured"
            )
        for source in self.data.validation:
            if source.task is not None and self.validation.limit is None and source.limit is None:
                raise ValueError("a generated task has no end: set validation.limit (or the source's limit)")
        return self


class SftConfig(Record):
    """`burnish sft`."""

    seed: int = Field(0, ge=0)
    """All randomness follows from it."""
    run: Run = Run()
    """Where a run lives and what it keeps."""
    model: Model = Model()
    """The model to train."""
    template: Template = Template()
    """How messages become text."""
    sft: Sft = Sft()
    """Data and optimisation."""
    parallel: Parallel = Parallel()
    """How the processes that torchrun starts divide the work."""

    @model_validator(mode="after")
    def _combinations(self) -> SftConfig:
        check_trainable(self.model)
        check_parallel_fits(self.parallel, self.model, self.sft.optimizer, self.sft.activations)
        check_optimizer_fits(self.sft.optimizer, "sft.optimizer", self.model.dtype, self.model.device)
        if not self.run.keep_best:
            raise ValueError("run.keep_best=false has no effect on sft, which measures no policy between its updates")
        if not self.sft.data:
            raise ValueError("no data: give sft.data (a file, a task or a plug-in)")
        return self
