"""Turns a config of verl's SFT trainer into a recipe of `burnish sft`."""

from __future__ import annotations

from typing import Any

from burnish.config.foreign_keys.verl_keys import VERL, VERL_PATTERNS, VERL_SFT_DEFAULTS, VERL_SFT_PATTERNS
from burnish.config.importing.draft import PLACEHOLDER, DataFacts, Draft, Imported
from burnish.config.importing.hydra_config import HydraConfig
from burnish.config.importing.verl_common import data_files, set_adapters, set_length, set_run
from burnish.config.importing.verl_optimizer import verl_optimizer
from burnish.config.schema import SftConfig

READ_COLUMNS = ("prompt", "messages", "question")
"""Columns that are recognised without being named."""


def import_verl_sft(config: HydraConfig, facts: DataFacts) -> Imported:
    """The recipe of a config of `verl.trainer.sft_trainer` or of the older `fsdp_sft_trainer`."""
    draft = Draft(SftConfig, config.values, VERL_SFT_DEFAULTS, VERL)
    draft.notes += config.notes
    _data(draft)
    _model(draft)
    batch = draft.integer("data.train_batch_size")
    draft.translate("data.train_batch_size", "sft.batch_size", batch)
    _memory(draft)
    draft.set("sft.optimizer", verl_optimizer(draft, "", "sft", 1))
    set_length(draft, "sft.updates", batch, facts)
    set_run(draft, draft.tree["sft"].get("updates"))
    if draft.is_given("trainer.seed"):
        draft.translate("trainer.seed", "seed", draft.integer("trainer.seed"))
    processes = draft.integer("trainer.n_gpus_per_node", 1) * draft.integer("trainer.nnodes", 1)
    text = f"start it with torchrun --nproc-per-node {processes}" if processes > 1 else "one process on one device"
    draft.explain(["trainer.n_gpus_per_node", "trainer.nnodes"], "differs" if processes > 1 else "same", text)
    return Imported("sft", draft.ordered_tree(), draft.finish([*VERL_SFT_PATTERNS, *VERL_PATTERNS]), draft.notes)


def _data(draft: Draft) -> None:
    files = data_files(draft.value("data.train_files"))
    sources: list[dict[str, Any]] = [{"path": path} for path in files] or [{"path": f"{PLACEHOLDER}/train.parquet"}]
    limit = draft.integer("data.train_max_samples", -1)
    if limit > 0:
        sources = [{**source, "limit": limit} for source in sources]
        draft.say("data.train_max_samples", "sft.data.limit", limit)
    draft.explain(["data.train_max_samples"], "same", "all rows are used")
    draft.set("sft.data", sources[0] if len(sources) == 1 else sources)
    if files:
        draft.say("data.train_files", "sft.data", draft.tree["sft"]["data"])
    else:
        draft.notes.append("the script names no data.train_files: set sft.data.path")
    draft.translate("data.max_length", "sft.max_tokens", draft.integer("data.max_length"))
    is_error = draft.value("data.truncation") == "error"
    draft.set("sft.overlong", "error" if is_error else "filter")
    if is_error:
        draft.say("data.truncation", "sft.overlong", "error", is_always=True)
    draft.explain(
        ["data.truncation"], "differs", "a row is never truncated: sft.overlong=filter leaves longer ones out"
    )
    for key in ("data.messages_key", "data.multiturn.messages_key", "data.prompt_key", "data.response_key"):
        if draft.is_given(key) and draft.value(key) not in (*READ_COLUMNS, "response", "completion", "answer"):
            draft.differs(key, f"rename the column {draft.value(key)}: rows have messages, or prompt and completion")
        draft.explain([key], "same", "rows are recognised by their columns")


def _model(draft: Draft) -> None:
    key = draft.first_given("model.path", "model.partial_pretrain")
    if draft.is_given(key):
        draft.translate(key, "model.path", *data_files(draft.value(key)))
    else:
        draft.set("model.path", f"{PLACEHOLDER}/model")
        draft.notes.append("the script names no model.path: set it")
    draft.set("model.dtype", "bfloat16")
    keys = ["model.fsdp_config.model_dtype", "engine.model_dtype", "engine.dtype"]
    draft.explain(keys, "translated", "model.dtype=bfloat16 (bfloat16 arithmetic with float32 master weights)")
    set_adapters(draft, "model")


def _memory(draft: Draft) -> None:
    remark = "tokens of a micro-batch; never changes the gradient"
    if draft.flag("data.use_dynamic_bsz"):
        draft.translate(
            "data.max_token_len_per_gpu", "sft.token_budget", draft.integer("data.max_token_len_per_gpu"), remark
        )
    elif draft.is_given("data.micro_batch_size_per_gpu"):
        tokens = draft.integer("data.micro_batch_size_per_gpu") * draft.integer("data.max_length")
        draft.translate("data.micro_batch_size_per_gpu", "sft.token_budget", tokens, remark)
    keys = [
        "data.use_dynamic_bsz",
        "data.max_token_len_per_gpu",
        "data.micro_batch_size_per_gpu",
        "data.micro_batch_size",
    ]
    draft.explain(keys, "same", "micro-batches are packed up to sft.token_budget tokens")
    recompute = "model.enable_gradient_checkpointing"
    if draft.flag(recompute):
        draft.translate(recompute, "sft.activations", "recompute")
    draft.explain([recompute], "same", "sft.activations says what is kept")
