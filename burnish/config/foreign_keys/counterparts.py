"""`Counterpart`, our key that does the same as a key of another system, and lookups of our keys.

The tables of each system stand in `verl_keys.py`, `trl_keys.py` and `openrlhf_keys.py`. The error for an unknown key and `burnish import`
both read them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
SECTION_BY_CONFIG = {"SftConfig": "sft", "PreferConfig": "preference", "RewardModelConfig": "reward_model"}
"""The main section of the other training configs, by class name."""


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
