"""Config keys of other systems: suggestions for keys of TRL, verl and OpenRLHF, and the translation of verl's rollout correction.

The tables serve the error for an unknown key. They only suggest, because the same key may have another unit or default elsewhere.

verl's rollout-correction keys are translated to `algorithm.correction`, with a note. They have two forms:

- First form (2025-10): `algorithm.rollout_is_threshold` (null: no correction), `rollout_is` (true multiplies the loss, false only
  measures), `rollout_is_threshold_lower`, `rollout_is_level`, `rollout_is_mode`, `rollout_is_veto_threshold`.
- Second form: `rollout_is` (token, sequence or null), `rollout_is_threshold` (a number or "lo_hi"), `rollout_is_batch_normalize`,
  `rollout_rs`, `rollout_rs_threshold`, `bypass_mode`, `loss_type`, flat or inside `algorithm.rollout_correction`.

A boolean `rollout_is` belongs to the first form, a string to the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from burnish.algorithms.correction.spec import NoCorrection, parse_verl_rejections
from burnish.config.errors import UserError
from burnish.config.records import Record, SchemaNode, root_node


class Counterpart(NamedTuple):
    """Our key that does the same as a key of another system."""

    train: str | None
    """In `burnish train`: a key or `key=value`, with an optional remark after a semicolon. None if there is none."""
    stage: str | None = None
    """In `burnish sft`, `prefer` and `reward-model`; `{stage}` stands for their section. None if there is none."""


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
"""The main section of the other training configs, by class name."""
MAX_COUNTERPARTS = 8
FIRST_FORM_KEYS = {
    "rollout_is_threshold_lower": "lower",
    "rollout_is_level": "level",
    "rollout_is_mode": "mode",
    "rollout_is_veto_threshold": "veto",
}
SECOND_FORM_KEYS = ("rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
CORRECTION_KEYS = ("rollout_is", "rollout_is_threshold", *FIRST_FORM_KEYS, *SECOND_FORM_KEYS)
DEFAULT_CORRECTION = NoCorrection().model_dump()


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


def our_key(ours: Counterpart, config_type: type[Record]) -> str | None:
    """Our key in a config of this class, or in `burnish train` if only that has one."""
    section = SECTION_BY_CONFIG.get(config_type.__name__)
    if section is None:
        return ours.train
    text = None if ours.stage is None else ours.stage.replace("{stage}", section)
    if text is not None and has_key(config_type, leading_key(text)):
        return text
    return None if ours.train is None else f"{ours.train} (of `burnish train`)"


def leading_key(text: str) -> str:
    """The key at the start of a counterpart."""
    return re.split(r"[=; ]", text, maxsplit=1)[0]


def has_key(config_type: type[Record], key: str) -> bool:
    """Whether a config has a key. For an option of a slot: whether any of its choices has it."""
    nodes = [root_node(config_type)]
    for part in key.split("."):
        nodes = [child for node in nodes for child in _child_nodes(node, part)]
    return bool(nodes)


def _child_nodes(node: SchemaNode, part: str) -> list[SchemaNode]:
    node = node.item if node.form == "list" and node.item is not None else node
    members = [SchemaNode("record", "", (record,)) for record in node.records] if node.form == "choice" else [node]
    children = [member.child(part) for member in members]
    return [child for child in children if child is not None]


def translate_verl_keys(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree with verl's rollout-correction keys replaced by ours, and notes for the user."""
    _refuse_removed_key(tree)
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict):
        return tree, []
    nested = algorithm.get("rollout_correction")
    flat = {key: algorithm[key] for key in CORRECTION_KEYS if key in algorithm}
    given = {**flat, **nested} if isinstance(nested, dict) else flat
    if not given:
        return tree, []
    if unknown := [key for key in given if key not in CORRECTION_KEYS]:
        raise UserError(f"algorithm.rollout_correction.{unknown[0]} is not a key of verl's rollout correction")
    own = algorithm.get("correction", {})
    if not isinstance(own, dict) or {**DEFAULT_CORRECTION, **own} != DEFAULT_CORRECTION:
        raise UserError(
            f"algorithm.correction and verl's algorithm.{next(iter(given))} are both given; give one of them"
        )
    correction = _translate_correction(given)
    kept = {key: value for key, value in algorithm.items() if key not in (*CORRECTION_KEYS, "rollout_correction")}
    said = ", ".join(f"{key}={value}" for key, value in given.items())
    notes = [f"verl's algorithm.{said} is read as algorithm.correction={correction}"]
    if any(key.endswith("k1") for key in correction.get("reject", {})):
        notes.append(
            "bounds of k1 rejections are on the ratio trainer/engine, as verl documents them; its code bounds the inverse ratio"
        )
    return {**tree, "algorithm": {**kept, "correction": correction}}, notes


def _refuse_removed_key(tree: dict[str, Any]) -> None:
    actor = tree.get("actor_rollout_ref")
    actor = actor.get("actor") if isinstance(actor, dict) else None
    if isinstance(actor, dict) and "tis_imp_ratio_cap" in actor:
        raise UserError(
            "actor_rollout_ref.actor.tis_imp_ratio_cap was replaced: set algorithm.rollout_is_threshold to the cap and "
            "algorithm.rollout_is=true (or algorithm.correction={name: seed, threshold: ...})"
        )


def _translate_correction(given: dict[str, Any]) -> dict[str, Any]:
    form = given.get("rollout_is")
    early, later = [k for k in FIRST_FORM_KEYS if k in given], [k for k in SECOND_FORM_KEYS if k in given]
    is_second = isinstance(form, str) or bool(later)
    if is_second and (early or isinstance(form, bool)):
        one = early[0] if early else f"rollout_is={str(form).lower()}"
        other = later[0] if later else f"rollout_is={form}"
        raise UserError(
            f"algorithm.{one} belongs to verl's first form of rollout correction and algorithm.{other} to the second; use one form"
        )
    return _translate_second_form(given) if is_second else _translate_first_form(given)


def _translate_first_form(given: dict[str, Any]) -> dict[str, Any]:
    threshold = given.get("rollout_is_threshold")
    options = {ours: given[theirs] for theirs, ours in FIRST_FORM_KEYS.items() if theirs in given}
    if threshold is None:  # null is verl's master switch: no correction
        return {"name": "none"}
    return {"name": "seed", "apply": bool(given.get("rollout_is", False)), "threshold": threshold, **options}


def _translate_second_form(given: dict[str, Any]) -> dict[str, Any]:
    weights, bypass = given.get("rollout_is"), bool(given.get("bypass_mode", False))
    options: dict[str, Any] = {"name": "bypass" if bypass else "decoupled", "weights": weights}
    if weights is not None:
        options["threshold"] = given.get("rollout_is_threshold", 2.0)
        options["batch_normalise"] = bool(given.get("rollout_is_batch_normalize", False))
    if given.get("rollout_rs") is not None:
        if given.get("rollout_rs_threshold") is None:
            raise UserError(f"algorithm.rollout_rs={given['rollout_rs']} needs algorithm.rollout_rs_threshold")
        try:
            options["reject"] = parse_verl_rejections(given["rollout_rs"], given["rollout_rs_threshold"])
        except ValueError as error:
            raise UserError(f"algorithm.rollout_rs: {error}") from error
    if "loss_type" in given and not bypass:
        raise UserError(
            "algorithm.loss_type chooses the loss of bypass_mode, which is off: set algorithm.bypass_mode=true"
        )
    if bypass:
        options["loss"] = given.get("loss_type", "ppo_clip")
    return options
