"""Turns a verl config into a recipe of `burnish train`, with a table of what became of every key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.config.foreign_keys.verl_keys import ACTOR, POLICY_MODEL, ROLLOUT, VERL, VERL_DEFAULTS, VERL_PATTERNS
from burnish.config.importing.draft import PLACEHOLDER, DataFacts, Draft, Imported
from burnish.config.importing.hydra_config import HydraConfig, read_yaml_config
from burnish.config.importing.verl_algorithm import (
    has_signed_scores,
    is_multi_turn,
    num_mini_batches,
    set_algorithm,
    updates_per_step,
)
from burnish.config.importing.verl_common import data_files, set_adapters, set_length, set_run
from burnish.config.importing.verl_optimizer import verl_optimizer
from burnish.config.importing.verl_script import read_launch_script
from burnish.config.importing.verl_sft import import_verl_sft
from burnish.config.schema import TrainConfig

SCORES = (
    (
        ("openai/gsm8k", "gsm8k"),
        "number",
        "verl reads the number after ####; `number` also takes \\boxed{} or the last number",
    ),
    (("searchR1_", "searchr1", "search_r1", "nq_"), "search_r1", ""),
    (("codecontests", "apps", "codeforces", "taco", "code"), "code", "tests as docs/rewards.md#code describes them"),
    (("geometry3k", "geo3k"), "math", ""),
)
"""Beginnings of `data_source` or parts of file names, the reward part, and a remark. Everything else is mathematics."""
UNLIMITED_TURNS = 16
"""Turns of an episode where verl sets no limit."""


def import_verl(path: Path, environment: Mapping[str, str], facts: DataFacts) -> Imported:
    """The recipe of a verl YAML or launch script."""
    if path.suffix in (".yaml", ".yml"):
        config = HydraConfig(read_yaml_config(path, environment), [], [])
    else:
        config = read_launch_script(path, environment)
    if _is_supervised(config):
        return import_verl_sft(config, facts)
    draft = Draft(TrainConfig, config.values, VERL_DEFAULTS, VERL)
    draft.notes += config.notes
    for key in config.removed:
        draft.notes.append(f"~{key} removes a section of verl's config; nothing here depends on it")
    _data(draft)
    _model(draft)
    _training(draft, facts)
    _reward(draft, facts)
    _rollout(draft)
    set_algorithm(draft)
    _environment(draft)
    _validation(draft)
    set_run(draft, draft.tree["training"].get("steps"))
    _processes(draft)
    return Imported("train", draft.ordered_tree(), draft.finish(VERL_PATTERNS), draft.notes)


def _is_supervised(config: HydraConfig) -> bool:
    """Whether a config is one of the SFT trainer, whose model and optimizer stand at the top."""
    sections = {key.partition(".")[0] for key in config.values}
    has_its_keys = sections & {"model", "optim"} or {"data.max_length", "data.messages_key"} & config.values.keys()
    return bool(has_its_keys) and not sections & {"actor_rollout_ref", "algorithm"}


# --- data, model, training --------------------------------------------------------------------------------------------------


def _data(draft: Draft) -> None:
    for key, ours, limit in (
        ("data.train_files", "data.train", "data.train_max_samples"),
        ("data.val_files", "data.validation", "data.val_max_samples"),
    ):
        sources: list[dict[str, Any]] = [{"path": path} for path in data_files(draft.value(key))]
        if draft.integer(limit, -1) > 0:
            sources = [{**source, "limit": draft.integer(limit)} for source in sources]
            draft.say(limit, f"{ours}.limit", draft.integer(limit))
        if draft.value("data.prompt_key") != "prompt":
            sources = [{**source, "prompt_key": draft.value("data.prompt_key")} for source in sources]
        if sources:
            draft.translate(key, ours, sources[0] if len(sources) == 1 else sources)
        draft.explain([limit], "same", "all rows are used")
    if "train" not in draft.tree.get("data", {}):
        draft.set("data.train", {"path": f"{PLACEHOLDER}/train.parquet"})
        draft.notes.append("the script names no data.train_files: set data.train.path")
    draft.explain(
        ["data.prompt_key"],
        "translated",
        "rows with a column `prompt` are recognised; data.train.prompt_key names others",
    )
    draft.copy("data.max_prompt_length")
    is_filtered, truncation = draft.flag("data.filter_overlong_prompts"), draft.value("data.truncation")
    draft.set("data.overlong_prompts", "filter" if is_filtered else "error")
    draft.say("data.filter_overlong_prompts", "data.overlong_prompts", "filter" if is_filtered else "error")
    if truncation == "error" or is_filtered:
        draft.explain(["data.truncation"], "same", "a prompt is never truncated")
    else:
        draft.differs(
            "data.truncation", "a prompt is never truncated: data.overlong_prompts=filter leaves longer ones out"
        )
        draft.set("data.overlong_prompts", "filter")
    if not draft.flag("data.shuffle"):
        draft.translate("data.shuffle", "data.sampler", "sequential")
    draft.explain(["data.shuffle"], "translated", "data.sampler=shuffle, the default")
    if draft.is_given("data.seed"):
        draft.copy("data.seed")
    for key, value in draft.given.items():
        if key.startswith("data.apply_chat_template_kwargs.") and value is not None:
            draft.translate(key, f"data.template.kwargs.{key.rpartition('.')[2]}", value)


def _model(draft: Draft) -> None:
    path = draft.value(f"{POLICY_MODEL}.path")
    if path is None:
        draft.set("model.path", f"{PLACEHOLDER}/model")
        draft.notes.append(f"the script names no {POLICY_MODEL}.path: set model.path")
    else:
        draft.translate(f"{POLICY_MODEL}.path", "model.path", *data_files(path))
    draft.set("model.dtype", "bfloat16")
    kept = f"{ACTOR}.fsdp_config.model_dtype"
    if str(draft.value(kept, "fp32")) in ("bf16", "bfloat16"):
        draft.differs(
            kept, "float32 master weights are kept; training.optimizer.precision=stochastic trains without them"
        )
    remark = "float32 master weights, as verl's fp32 parameters with bfloat16 arithmetic"
    keys = [kept, f"{ACTOR}.fsdp_config.dtype", f"{ROLLOUT}.dtype"]
    draft.explain(keys, "translated", f"model.dtype=bfloat16 ({remark})")
    set_adapters(draft, POLICY_MODEL)


def _training(draft: Draft, facts: DataFacts) -> None:
    prompts, size = draft.integer("data.train_batch_size"), draft.integer(f"{ACTOR}.ppo_mini_batch_size")
    draft.translate("data.train_batch_size", "rollout.prompts", prompts)
    mini_batches = num_mini_batches(draft)
    remark = f"{prompts} prompts in mini-batches of {size}"
    draft.set("training.mini_batches", mini_batches)
    if size < prompts and prompts % max(1, size):
        draft.differs(
            f"{ACTOR}.ppo_mini_batch_size", f"training.mini_batches={mini_batches}: {remark} do not divide evenly"
        )
    else:
        draft.say(f"{ACTOR}.ppo_mini_batch_size", "training.mini_batches", mini_batches, remark, is_always=True)
    draft.copy(f"{ACTOR}.ppo_epochs")
    _token_budget(draft)
    _activations(draft)
    draft.set("training.optimizer", verl_optimizer(draft, ACTOR, "training", updates_per_step(draft)))
    set_length(draft, "training.steps", prompts, facts)


def _token_budget(draft: Draft) -> None:
    budget, micro = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    micro = draft.first_given(micro, f"{ACTOR}.ppo_micro_batch_size")
    remark = "tokens of a micro-batch; never changes the gradient"
    if draft.flag(f"{ACTOR}.use_dynamic_bsz"):
        draft.translate(budget, "training.token_budget", draft.integer(budget), remark)
        draft.explain([f"{ACTOR}.use_dynamic_bsz"], "same", "micro-batches are always packed by tokens")
    elif draft.is_given(micro):
        longest = draft.integer("data.max_prompt_length") + draft.integer("data.max_response_length")
        draft.translate(
            micro, "training.token_budget", draft.integer(micro) * longest, f"{longest} tokens a sequence; {remark}"
        )
    keys = [
        f"{ACTOR}.use_dynamic_bsz",
        f"{ACTOR}.ppo_micro_batch_size",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        budget,
    ]
    draft.explain(keys, "same", "micro-batches are packed up to training.token_budget tokens")


def _activations(draft: Draft) -> None:
    recompute, offload = f"{POLICY_MODEL}.enable_gradient_checkpointing", f"{POLICY_MODEL}.enable_activation_offload"
    if draft.flag(offload):
        draft.translate(offload, "training.activations", "offload")
    elif draft.flag(recompute):
        draft.translate(recompute, "training.activations", "recompute")
    draft.explain([recompute, offload], "same", "training.activations says what is kept")


# --- rewards and rollouts ---------------------------------------------------------------------------------------------------


def _reward(draft: Draft, facts: DataFacts) -> None:
    path = draft.first_given("reward.custom_reward_function.path", "custom_reward_function.path")
    enable = draft.first_given("reward.reward_model.enable", "reward_model.enable")
    if draft.is_given(path):
        section = path.removesuffix(".path")
        function = f"{draft.value(path)}:{draft.value(f'{section}.name')}"
        prefix = f"{section}.reward_kwargs."
        options = {key.removeprefix(prefix): value for key, value in draft.given.items() if key.startswith(prefix)}
        part = {"name": function, **({"options": options} if options else {})}
        draft.set("reward.parts", [part])
        for key in [key for key in draft.given if key.startswith(f"{section}.")]:
            draft.say(key, "reward.parts", [part], "runs unchanged")
    if draft.flag(enable):
        section = enable.removesuffix(".enable")
        key = draft.first_given(f"{section}.model_path", f"{section}.model.path")
        part = {"name": "model", "options": {"path": draft.value(key, f"{PLACEHOLDER}/reward-model")}}
        draft.set("reward.parts", [*draft.tree.get("reward", {}).get("parts", []), part])
        draft.say(key, "reward.parts", [part])
        draft.say(enable, "reward.parts", [part], "rows with reward_model.style: model are scored by it")
    draft.explain(
        [k for k in draft.given if "reward_model" in k and k.endswith(".enable")], "same", "no reward model is used"
    )
    if "parts" not in draft.tree.get("reward", {}):
        name, remark = _default_part(draft, facts)
        draft.set("reward.parts", [{"name": name}])
        draft.notes.append(
            f"reward: verl's default_compute_score chooses by data_source; reward.parts=[{name}] is the closest here"
            + (f" ({remark})" if remark else "")
        )
    if has_signed_scores(draft):
        text = "algorithm.shaping=[signed]: verl's score of DAPO's mathematics is 1 or -1"
        draft.explain(["reward_model.reward_manager", "reward.reward_manager.name"], "translated", text)
    keys = [k for k in draft.given if "custom_reward_function" in k]
    draft.explain(keys, "same", "no function of your own: verl's default_compute_score, see the note")


def _default_part(draft: Draft, facts: DataFacts) -> tuple[str, str]:
    files = data_files(draft.value("data.train_files"))
    names = [name for file in files for name in facts.data_sources(file)] or [
        "/".join(Path(file).parts[-2:]) for file in files
    ]
    for beginnings, part, remark in SCORES:
        if any(start.lower() in name.lower() for start in beginnings for name in names):
            return part, remark
    return "math", "extra [math]"


def _rollout(draft: Draft) -> None:
    draft.copy(
        "data.max_response_length",
        f"{ROLLOUT}.n",
        f"{ROLLOUT}.temperature",
        f"{ROLLOUT}.top_p",
        f"{ROLLOUT}.max_num_seqs",
    )
    draft.translate(f"{ROLLOUT}.top_k", "rollout.top_k", max(0, draft.integer(f"{ROLLOUT}.top_k")))
    name = draft.value(f"{ROLLOUT}.name")
    if name == "sglang":
        text = "burnish samples with its own engine, from the tensors it trains; SGLang servers: rollout.engine=sglang, rollout.sglang.urls"
    else:
        text = "burnish samples with its own engine, from the tensors it trains; rollout.engine=vllm selects vLLM (placement=local)"
    draft.explain([f"{ROLLOUT}.name"], "differs", text)


def _environment(draft: Draft) -> None:
    turns = f"{ROLLOUT}.multi_turn"
    if not is_multi_turn(draft):
        keys = [key for key in draft.given if key.startswith((f"{turns}.", f"{ROLLOUT}.agent."))]
        draft.explain(keys, "same", "one turn: multi_turn.enable is false")
        return
    options = {}
    for key in (
        "tool_config_path",
        "function_tool_path",
        "max_parallel_calls",
        "max_tool_response_length",
        "tool_response_truncate_side",
        "format",
    ):
        value = draft.value(f"{turns}.{key}", draft.value(f"data.{key}"))
        if value is not None:
            options[key] = value
            draft.say(f"{turns}.{key}", f"environment.options.{key}", value)
    if not options.get("tool_config_path") and not options.get("function_tool_path"):
        draft.notes.append("the script names no tools: set environment.options.tool_config_path or function_tool_path")
        options["tool_config_path"] = f"{PLACEHOLDER}/tools.yaml"
    draft.explain([f"{turns}.enable"], "translated", "environment.name=verl, which plays verl's tools")
    draft.explain([f"{ROLLOUT}.agent.default_agent_loop"], "translated", "environment.name=verl")
    limit = draft.integer(f"{turns}.max_assistant_turns", 0)
    total = draft.integer("data.max_prompt_length") + draft.integer("data.max_response_length")
    draft.set(
        "environment",
        {"name": "verl", "options": options, "max_turns": max(2, limit or UNLIMITED_TURNS), "max_tokens": total},
    )
    if limit:
        draft.say(f"{turns}.max_assistant_turns", "environment.max_turns", max(2, limit))
    else:
        draft.differs(f"{turns}.max_assistant_turns", f"a number is needed: environment.max_turns={UNLIMITED_TURNS}")
    draft.notes.append(
        f"verl's max_response_length limits all turns together: environment.max_tokens={total} does it here, and rollout.max_tokens one turn"
    )
    if draft.is_given(f"{ROLLOUT}.agent.num_workers"):
        draft.translate(
            f"{ROLLOUT}.agent.num_workers", "environment.workers", draft.integer(f"{ROLLOUT}.agent.num_workers")
        )
    draft.explain([f"{turns}.max_user_turns"], "differs", "environment.max_turns counts the model's turns")
    draft.explain(
        [f"{turns}.interaction_config_path"],
        "differs",
        "an interaction is an environment: environment.name=file.py:Class",
    )
    draft.explain([f"{turns}.tokenization_sanity_check_mode"], "same", "sampled tokens are never tokenised again")


# --- validation, run, processes ---------------------------------------------------------------------------------------------


def _validation(draft: Draft) -> None:
    keys = {name: f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k", "n", "do_sample")}
    if "validation" not in draft.tree.get("data", {}):
        draft.explain(
            [*keys.values(), "trainer.test_freq", "trainer.val_before_train"], "same", "there is no held-out data"
        )
        return
    every = draft.integer("trainer.test_freq")
    draft.say("trainer.test_freq", "validation.every", max(0, every))
    if every > 0:
        draft.set("validation.every", every)
    if not draft.flag("trainer.val_before_train"):
        draft.translate("trainer.val_before_train", "validation.before", False)
    draft.explain(["trainer.val_before_train"], "translated", "validation.before=true, the default")
    is_sampled = draft.flag(keys["do_sample"]) and draft.number(keys["temperature"]) > 0
    mode = {"temperature": draft.number(keys["temperature"]) if is_sampled else 0.0}
    mode |= {"top_p": draft.number(keys["top_p"])} if is_sampled and draft.number(keys["top_p"]) != 1 else {}
    mode |= {"top_k": draft.integer(keys["top_k"])} if is_sampled and draft.integer(keys["top_k"]) > 0 else {}
    mode |= {"n": draft.integer(keys["n"])} if draft.integer(keys["n"]) > 1 else {}
    name = "sampled" if is_sampled else "greedy"
    if mode != {"temperature": 0.0}:
        draft.set("validation.modes", {name: mode})
    for option, key in keys.items():
        if option in mode:
            draft.say(key, f"validation.modes.{name}.{option}", mode[option])
    draft.explain(keys.values(), "same", f"validation.modes.{name} has this already")


def _processes(draft: Draft) -> None:
    devices = max(1, draft.integer("trainer.n_gpus_per_node")) * max(1, draft.integer("trainer.nnodes"))
    megatron = f"{ACTOR}.megatron"
    dimensions = {
        f"{megatron}.pipeline_model_parallel_size": "parallel.pipeline",
        f"{ACTOR}.ulysses_sequence_parallel_size": "parallel.context",
        f"{megatron}.context_parallel_size": "parallel.context",
        f"{megatron}.expert_model_parallel_size": "parallel.expert",
        f"{megatron}.tensor_model_parallel_size": "parallel.tensor",
    }
    offload = draft.first_given(f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.megatron.param_offload")
    moments = draft.first_given(f"{ACTOR}.fsdp_config.optimizer_offload", f"{ACTOR}.megatron.optimizer_offload")
    if draft.flag(moments) and not (draft.flag(offload) and devices > 1):
        draft.translate(moments, "training.optimizer.offload", True)
    if devices == 1:
        draft.explain(
            ["trainer.n_gpus_per_node", "trainer.nnodes"], "same", "one process on one device: placement=local"
        )
        draft.explain([*dimensions, f"{ACTOR}.fsdp_config.fsdp_size"], "same", "one process holds the whole model")
        if draft.flag(offload):
            draft.differs(
                offload,
                "training.optimizer.offload=true keeps the optimizer in host memory; parameters stay on the GPU",
            )
            draft.set("training.optimizer.offload", True)
        draft.explain([offload, moments], "same", "nothing is offloaded, or training.optimizer.offload does it")
        return
    remark = "processes take turns on the GPUs; start several machines with `burnish launch`"
    draft.set("placement", {"name": "ray", "workers": devices, "engines": devices})
    for key in ("trainer.n_gpus_per_node", "trainer.nnodes"):
        draft.say(
            key,
            "placement",
            {"name": "ray", "workers": devices, "engines": devices},
            remark,
            is_always=key.endswith("node"),
        )
    for key, ours in dimensions.items():
        if draft.integer(key, 1) > 1:
            draft.translate(key, ours, draft.integer(key))
    size = draft.integer(f"{ACTOR}.fsdp_config.fsdp_size", -1)
    if 0 < size < devices and all(draft.integer(key, 1) == 1 for key in dimensions):
        draft.translate(f"{ACTOR}.fsdp_config.fsdp_size", "parallel.data", [devices // size, size])
    draft.explain([f"{ACTOR}.fsdp_config.fsdp_size"], "same", "the model is sharded over all processes")
    if draft.flag(offload):
        draft.translate(offload, "parallel.offload", True)
    draft.explain([offload, moments, *dimensions], "same", "off, or parallel.offload covers it")
