"""Pydantic's findings as one message for people: the dotted key, what was given, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from burnish.config.errors import UserError, did_you_mean
from burnish.config.records import Plugin, Record, SchemaNode, choice_name, find_keys, root_node

# --- What other systems call a key: TRL's, verl's and OpenRLHF's options with the key of ours that does the same.
#
# The table serves the error for an unknown key. It only suggests: the same word may have another unit or default elsewhere, so a
# value is never taken over in silence (verl's rollout-correction keys are, with a note: `config/foreign_keys.py`).


class Counterpart(NamedTuple):
    """Our counterpart of another system's key."""

    train: str | None
    """In `burnish train`: a key, a `key=value`, or both with words behind a semicolon; None where it has no counterpart."""
    stage: str | None = None
    """In `burnish sft`, `prefer` and `reward-model`, whose section stands for `{stage}`; None where it has no counterpart."""


BATCH = Counterpart("rollout.prompts; a step samples rollout.n completions of each", "{stage}.batch_size")
MICRO_BATCH = Counterpart("training.token_budget; micro-batches are packed by tokens", "{stage}.token_budget")
DEVICES = Counterpart("placement=ray with placement.workers; one process uses one device", None)
EPOCHS = Counterpart(
    "training.steps; an epoch is the number of rows / rollout.prompts steps",
    "{stage}.updates; an epoch is rows / {stage}.batch_size updates",
)
MODEL, TRAIN_DATA = Counterpart("model.path", "model.path"), Counterpart("data.train.path", "{stage}.data.path")
HELD_OUT = Counterpart("data.validation.path", "{stage}.held_out.path")
LR, STEPS = (
    Counterpart("training.optimizer.lr", "{stage}.optimizer.lr"),
    Counterpart("training.steps", "{stage}.updates"),
)
WARMUP = Counterpart("training.optimizer.warmup", "{stage}.optimizer.warmup")
CLIP_NORM = Counterpart("training.optimizer.clip_norm", "{stage}.optimizer.clip_norm")
DECAY = Counterpart("training.optimizer.weight_decay", "{stage}.optimizer.weight_decay")
CHECKPOINTING = Counterpart("training.activations=recompute", "{stage}.activations=recompute")
BFLOAT16 = Counterpart("model.dtype=bfloat16", "model.dtype=bfloat16")
MAX_PROMPT, MAX_ANSWER = Counterpart("data.max_prompt_tokens"), Counterpart("rollout.max_tokens", "{stage}.max_tokens")
KL, MINI_BATCHES = (
    Counterpart("algorithm.kl.loss.coef"),
    Counterpart("training.mini_batches; the number of updates of a step's samples"),
)
LOW, HIGH = Counterpart("algorithm.clip.low"), Counterpart("algorithm.clip.high")
CLIP = Counterpart("algorithm.clip.low and algorithm.clip.high")
REWARD = Counterpart("reward.parts=path/to/file.py:function")
SAVE, TRACKERS = Counterpart("run.save_every", "run.save_every"), Counterpart("run.trackers", "run.trackers")
VALIDATE = Counterpart("validation.every", "{stage}.held_out_every")
FOLDER, NAME = Counterpart("run.directory", "run.directory"), Counterpart("run.name", "run.name")
LORA, RANK, ALPHA = (Counterpart(key, key) for key in ("model.lora={}", "model.lora.rank", "model.lora.alpha"))
SAMPLES, SHUFFLE = Counterpart("rollout.n"), Counterpart("data.sampler=sequential")
ENGINE, CACHE = Counterpart("rollout.engine"), Counterpart("rollout.cache_gib")
SCHEDULE = Counterpart("training.optimizer.schedule", "{stage}.optimizer.schedule")
ALGORITHM = Counterpart("algorithm=grpo", "{stage}.loss")
PROMPT_COLUMN = Counterpart("data.train.prompt_key")
ANSWER_COLUMN = Counterpart("data.train.answer_key")

TRL: dict[str, Counterpart] = {
    "model_name_or_path": MODEL,
    "dataset_name": TRAIN_DATA,
    "train_dataset": TRAIN_DATA,
    "eval_dataset": HELD_OUT,
    "learning_rate": LR,
    "lr_scheduler_type": SCHEDULE,
    "warmup_ratio": WARMUP,
    "warmup_steps": WARMUP,
    "weight_decay": DECAY,
    "adam_beta1": Counterpart("training.optimizer.betas", "{stage}.optimizer.betas"),
    "adam_beta2": Counterpart("training.optimizer.betas", "{stage}.optimizer.betas"),
    "adam_epsilon": Counterpart("training.optimizer.eps", "{stage}.optimizer.eps"),
    "optim": Counterpart("training.optimizer.name", "{stage}.optimizer.name"),
    "max_grad_norm": CLIP_NORM,
    "max_steps": STEPS,
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": Counterpart("rollout.max_rows", "{stage}.token_budget"),
    "gradient_accumulation_steps": MICRO_BATCH,
    "generation_batch_size": BATCH,
    "steps_per_generation": MINI_BATCHES,
    "gradient_checkpointing": CHECKPOINTING,
    "bf16": BFLOAT16,
    "fp16": BFLOAT16,
    "torch_dtype": BFLOAT16,
    "num_generations": SAMPLES,
    "max_prompt_length": MAX_PROMPT,
    "max_completion_length": MAX_ANSWER,
    "max_new_tokens": MAX_ANSWER,
    "max_length": MAX_ANSWER,
    "max_seq_length": MAX_ANSWER,
    "temperature": Counterpart("rollout.temperature"),
    "top_p": Counterpart("rollout.top_p"),
    "top_k": Counterpart("rollout.top_k"),
    "beta": Counterpart("algorithm.kl.loss.coef", "{stage}.loss.beta"),
    "epsilon": LOW,
    "epsilon_high": HIGH,
    "delta": Counterpart("algorithm.clip.dual"),
    "num_iterations": Counterpart("training.epochs"),
    "scale_rewards": Counterpart("algorithm=dr_grpo; its advantages are not divided by the standard deviation"),
    "loss_type": ALGORITHM,
    "mask_truncated_completions": Counterpart("algorithm.filters=[overlong]"),
    "importance_sampling_level": Counterpart("algorithm.ratio=sequence"),
    "sync_ref_model": Counterpart("algorithm.kl.reference=ema"),
    "reward_funcs": REWARD,
    "reward_weights": Counterpart("reward.parts; each part has a weight"),
    "use_vllm": Counterpart("rollout.engine=vllm"),
    "vllm_mode": Counterpart("rollout.vllm.url"),
    "vllm_gpu_memory_utilization": CACHE,
    "use_peft": LORA,
    "lora_r": RANK,
    "lora_alpha": ALPHA,
    "lora_target_modules": Counterpart("model.lora.targets", "model.lora.targets"),
    "load_in_4bit": Counterpart("model.lora.base=nf4", "model.lora.base=nf4"),
    "shuffle_dataset": SHUFFLE,
    "output_dir": FOLDER,
    "run_name": NAME,
    "save_steps": SAVE,
    "save_total_limit": Counterpart("run.keep_last", "run.keep_last"),
    "eval_steps": VALIDATE,
    "logging_steps": Counterpart("run.samples_every; metrics are logged at every step", "run.samples_every"),
    "report_to": TRACKERS,
    "chat_template_kwargs": Counterpart("data.template.kwargs", "template.kwargs"),
    "precompute_ref_log_probs": Counterpart(None, "{stage}.reference=cached"),
    "dataset_text_field": Counterpart(PROMPT_COLUMN.train, "{stage}.data.path; its rows have a column `text`"),
}
OPENRLHF: dict[str, Counterpart] = {
    "pretrain": MODEL,
    "prompt_data": TRAIN_DATA,
    "dataset": TRAIN_DATA,
    "eval_dataset": HELD_OUT,
    "actor_learning_rate": LR,
    "critic_learning_rate": Counterpart("algorithm.critic.optimizer.lr"),
    "rollout_batch_size": BATCH,
    "train_batch_size": MINI_BATCHES,
    "micro_train_batch_size": MICRO_BATCH,
    "micro_rollout_batch_size": Counterpart("rollout.max_rows"),
    "n_samples_per_prompt": SAMPLES,
    "prompt_max_len": MAX_PROMPT,
    "generate_max_len": MAX_ANSWER,
    "max_len": MAX_ANSWER,
    "init_kl_coef": Counterpart("algorithm.kl.reward.coef"),
    "kl_coef": Counterpart("algorithm.kl.reward.coef"),
    "kl_target": Counterpart("algorithm.kl.adaptive.target"),
    "use_kl_loss": KL,
    "kl_estimator": Counterpart("algorithm.kl.loss.estimator"),
    "eps_clip": CLIP,
    "eps_clip_low_high": CLIP,
    "entropy_loss_coef": Counterpart("algorithm.entropy.coef"),
    "lambd": Counterpart("algorithm.advantage.lam"),
    "gamma": Counterpart("algorithm.advantage.gamma"),
    "advantage_estimator": ALGORITHM,
    "max_epochs": Counterpart("training.epochs", EPOCHS.stage),
    "num_episodes": EPOCHS,
    "remote_rm_url": REWARD,
    "reward_pretrain": Counterpart("reward.parts={name: model, options: {path: DIRECTORY}}"),
    "input_key": PROMPT_COLUMN,
    "label_key": ANSWER_COLUMN,
    "apply_chat_template": Counterpart("data.template.kind=chat", "template.kind=chat"),
    "save_path": FOLDER,
    "ckpt_path": FOLDER,
    "use_wandb": TRACKERS,
    "lora_rank": RANK,
    "dynamic_filtering": Counterpart("algorithm.filters=[zero_signal]"),
}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL: dict[str, Counterpart] = {
    "data.train_files": TRAIN_DATA,
    "data.val_files": HELD_OUT,
    "data.train_batch_size": BATCH,
    "data.max_prompt_length": MAX_PROMPT,
    "data.max_response_length": MAX_ANSWER,
    "data.max_length": MAX_ANSWER,
    "data.prompt_key": PROMPT_COLUMN,
    "data.answer_key": ANSWER_COLUMN,
    "data.reward_fn_key": Counterpart("reward.parts; each part has sources, which are values of data_source"),
    "data.filter_overlong_prompts": Counterpart("data.overlong_prompts=filter"),
    "data.truncation": Counterpart("data.overlong_prompts=error"),
    "data.shuffle": SHUFFLE,
    "actor_rollout_ref.model.path": MODEL,
    "actor_rollout_ref.model.lora_rank": RANK,
    "actor_rollout_ref.model.lora_alpha": ALPHA,
    "actor_rollout_ref.model.enable_gradient_checkpointing": CHECKPOINTING,
    f"{ACTOR}.optim.lr": LR,
    f"{ACTOR}.optim.lr_warmup_steps": WARMUP,
    f"{ACTOR}.optim.weight_decay": DECAY,
    f"{ACTOR}.ppo_mini_batch_size": MINI_BATCHES,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": MICRO_BATCH,
    f"{ACTOR}.ppo_max_token_len_per_gpu": MICRO_BATCH,
    f"{ACTOR}.ppo_epochs": Counterpart("training.epochs"),
    f"{ACTOR}.grad_clip": CLIP_NORM,
    f"{ACTOR}.clip_ratio": CLIP,
    f"{ACTOR}.clip_ratio_low": LOW,
    f"{ACTOR}.clip_ratio_high": HIGH,
    f"{ACTOR}.clip_ratio_c": Counterpart("algorithm.clip.dual"),
    f"{ACTOR}.use_kl_loss": KL,
    f"{ACTOR}.kl_loss_coef": KL,
    f"{ACTOR}.kl_loss_type": Counterpart("algorithm.kl.loss.estimator"),
    f"{ACTOR}.entropy_coeff": Counterpart("algorithm.entropy.coef"),
    f"{ACTOR}.loss_agg_mode": Counterpart("algorithm.aggregation"),
    f"{ROLLOUT}.n": SAMPLES,
    f"{ROLLOUT}.name": ENGINE,
    f"{ROLLOUT}.temperature": Counterpart("rollout.temperature"),
    f"{ROLLOUT}.top_p": Counterpart("rollout.top_p"),
    f"{ROLLOUT}.top_k": Counterpart("rollout.top_k"),
    f"{ROLLOUT}.gpu_memory_utilization": CACHE,
    f"{ROLLOUT}.max_num_seqs": Counterpart("rollout.max_rows"),
    f"{ROLLOUT}.val_kwargs.n": Counterpart("validation.modes.greedy.n"),
    f"{ROLLOUT}.val_kwargs.temperature": Counterpart("validation.modes.greedy.temperature"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": Counterpart("environment.max_turns"),
    "algorithm.adv_estimator": ALGORITHM,
    "algorithm.gamma": Counterpart("algorithm.advantage.gamma"),
    "algorithm.lam": Counterpart("algorithm.advantage.lam"),
    "algorithm.use_kl_in_reward": Counterpart("algorithm.kl.reward.coef"),
    "algorithm.kl_ctrl.kl_coef": Counterpart("algorithm.kl.reward.coef"),
    "algorithm.kl_ctrl.target_kl": Counterpart("algorithm.kl.adaptive.target"),
    "algorithm.norm_adv_by_std_in_grpo": Counterpart("algorithm=dr_grpo"),
    "algorithm.filter_groups.enable": Counterpart("algorithm.filters=[zero_signal]"),
    "critic.optim.lr": Counterpart("algorithm.critic.optimizer.lr"),
    "reward_model.model.path": Counterpart("reward.parts={name: model, options: {path: DIRECTORY}}"),
    "reward_model.enable": Counterpart("reward.parts={name: model, options: {path: DIRECTORY}}"),
    "custom_reward_function.path": REWARD,
    "custom_reward_function.name": REWARD,
    "trainer.total_training_steps": STEPS,
    "trainer.total_epochs": EPOCHS,
    "trainer.save_freq": SAVE,
    "trainer.test_freq": VALIDATE,
    "trainer.val_before_train": Counterpart("validation.before"),
    "trainer.default_local_dir": FOLDER,
    "trainer.experiment_name": NAME,
    "trainer.logger": TRACKERS,
    "trainer.n_gpus_per_node": DEVICES,
    "trainer.nnodes": DEVICES,
}
SECTION_BY_CONFIG = {"SftConfig": "sft", "PreferConfig": "preference", "RewardModelConfig": "reward_model"}
"""Sections of the configs that are not of `burnish train`, by their classes."""
MAX_COUNTERPARTS = 8


def counterparts(config_type: type[Record], key: str, given: Any) -> list[str]:
    """`TRL's learning_rate is training.optimizer.lr`, for an unknown key or for the keys inside an unknown section."""
    found = [_counterpart_text(config_type, path) for path in _leaves(key, given)]
    return list(dict.fromkeys(text for text in found if text is not None))[:MAX_COUNTERPARTS]


def _leaves(key: str, given: Any) -> Iterator[str]:
    if isinstance(given, Mapping) and given:
        for name, value in given.items():
            yield from _leaves(f"{key}.{name}", value)
    else:
        yield key


def _counterpart_text(config_type: type[Record], path: str) -> str | None:
    word = path.rpartition(".")[2]
    for system, theirs, table in (("verl", path, VERL), ("TRL", word, TRL), ("OpenRLHF", word, OPENRLHF)):
        ours = table.get(theirs)
        text = None if ours is None else our_key(ours, config_type)
        if text is not None:
            return f"{system}'s {theirs} is {text}"
    return None


def our_key(ours: Counterpart, config_type: type[Record]) -> str | None:
    """Our key in a config of this class, or in `burnish train` where that alone has one."""
    section = SECTION_BY_CONFIG.get(config_type.__name__)
    if section is None:
        return ours.train
    text = None if ours.stage is None else ours.stage.replace("{stage}", section)
    if text is not None and has_key(config_type, leading_key(text)):
        return text
    return None if ours.train is None else f"{ours.train} (of `burnish train`)"


def leading_key(text: str) -> str:
    """The key that a counterpart begins with."""
    return re.split(r"[=; ]", text, maxsplit=1)[0]


def has_key(config_type: type[Record], key: str) -> bool:
    """Whether a config has a key; of a slot, whether one of its choices has it."""
    places = [root_node(config_type)]
    for part in key.split("."):
        places = [child for place in places for child in _child_nodes(place, part)]
    return bool(places)


def _child_nodes(place: SchemaNode, part: str) -> list[SchemaNode]:
    place = place.item if place.form == "list" and place.item is not None else place
    members = [SchemaNode("record", "", (record,)) for record in place.records] if place.form == "choice" else [place]
    children = [member.child(part) for member in members]
    return [child for child in children if child is not None]


def to_user_error(error: ValidationError, config_type: type[Record], where: str) -> UserError:
    """All problems of one configuration in one error, a line each."""
    lines = dict.fromkeys(_describe_error(config_type, e) for e in error.errors(include_url=False))
    if len(lines) == 1:
        return UserError(f"{where}: {next(iter(lines))}")
    return UserError(f"{where}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))


def _describe_error(config_type: type[Record], error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        *above, key = error["loc"]
        path, node, choice = _locate(config_type, tuple(above))
        return _unknown_key(config_type, path, node, choice, str(key), error["input"])
    path, node, _ = _locate(config_type, error["loc"])
    if error["type"] == "value_error":  # a combination the schema refuses; its text names the keys itself
        text = error["msg"].removeprefix("Value error, ")
        return f"{path}: {text}" if path else text
    if error["type"] == "missing" and path.endswith(str(error["loc"][-1])):
        return f"{path}: missing; expected {node.expected}"
    return f"{path}: {_mismatch(node, error['input'])}"


def _locate(config_type: type[Record], loc: tuple[int | str, ...]) -> tuple[str, SchemaNode, SchemaNode | None]:
    """The dotted key of a finding, its node, and the slot it is a choice of.

    Pydantic puts the tag of a chosen union member, and the name of each tried member, among the keys; both are dropped.
    """
    node, path = root_node(config_type), list[str]()
    choice: SchemaNode | None = None
    for part in loc:
        if node.form == "choice":
            choice = node
            chosen = [
                r for r in node.records if choice_name(r) == part or (part == "plugin" and "options" in r.model_fields)
            ]
            node = SchemaNode("record", "", tuple(chosen))
            continue
        child = node.child(part)
        if child is None or part == "[key]":
            break
        if node.form == "list" and not isinstance(part, int):
            break
        node = child
        path.append(str(part))
    return ".".join(path), node, choice if node.form == "record" and not node.expected else None


def _unknown_key(
    config_type: type[Record], path: str, node: SchemaNode, choice: SchemaNode | None, key: str, given: Any
) -> str:
    full = f"{path}.{key}" if path else key
    others = counterparts(config_type, full, given)
    if choice is not None:
        option = _unknown_option(choice, node.records[0], path.rpartition(".")[2], key)
        return "; ".join([f"{full}: {option}", *others])
    if others:
        return "; ".join([f"{full}: unknown key", *others])
    known = list(node.records[0].model_fields)
    elsewhere = find_keys(config_type, key)
    hint = did_you_mean(key, known)
    if elsewhere:
        hint += f"; {key!r} is a key elsewhere: {', '.join(elsewhere[:3])}"
    return f"{full}: unknown key" + (hint or f" (keys here: {', '.join(known)})")


def _unknown_option(choice: SchemaNode, record: type[Record], slot: str, key: str) -> str:
    options = [k for k in record.model_fields if k != "name"]
    owner = next((r for r in choice.records if key in r.model_fields), None)
    hint = f"; it belongs to {slot} {choice_name(owner)}" if owner else did_you_mean(key, options)
    name = "a plug-in" if issubclass(record, Plugin) else choice_name(record)
    takes = f"takes {', '.join(options)}" if options else "takes none"
    return f"{name} has no option {key!r}{hint} ({takes})"


def _mismatch(node: SchemaNode, given: Any) -> str:
    if node.short and isinstance(given, dict) and node.form == "choice":
        given = given.get(node.short)
    words = [choice_name(r) for r in node.records] if node.form == "choice" else list(node.words)
    hint = did_you_mean(given, words) if isinstance(given, str) and words else ""
    if node.is_text and isinstance(given, (bool, int, float)):
        hint = "; put it in quotes to make it text"
    return f"got {format_value(given)}, expected {node.expected}{hint}"


def format_value(value: Any) -> str:
    """A given value as the user would have written it, cut short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
