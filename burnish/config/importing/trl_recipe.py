"""Turns a TRL script into a recipe of `burnish train`, `sft`, `prefer` or `reward-model`, with a table of every argument."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.config.foreign_keys.counterparts import SECTION_BY_CONFIG
from burnish.config.foreign_keys.trl_keys import TRAINING_DEFAULTS, TRL, TRL_DEFAULTS, TRL_PATTERNS
from burnish.config.importing.draft import PLACEHOLDER, DataFacts, Draft, Imported, show
from burnish.config.importing.python_script import PythonScript, Unknown, called_name
from burnish.config.importing.trl_command import RENAMED, read_trl_command
from burnish.config.importing.trl_rollouts import set_rollouts
from burnish.config.importing.trl_script import TrlScript, find_data, read_trl_script
from burnish.config.model import PROJECTIONS
from burnish.config.stages import CONFIG_TYPES

COMMANDS = {
    "GRPOConfig": "train",
    "RLOOConfig": "train",
    "DPOConfig": "prefer",
    "KTOConfig": "prefer",
    "ORPOConfig": "prefer",
    "CPOConfig": "prefer",
    "SFTConfig": "sft",
    "RewardConfig": "reward-model",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
NO_CLIP = 1e9
"""A limit of the gradient norm that no gradient reaches."""
DPO_LOSSES = {"sigmoid": "dpo", "sigmoid_norm": "dpo", "ipo": "ipo"}
"""TRL's pair losses that `burnish prefer` has."""
LONGEST_ROW = 32768
"""Tokens of a row where TRL sets no limit."""
TRAINER_ARGUMENTS = (
    "model",
    "reward_funcs",
    "train_dataset",
    "eval_dataset",
    "peft_config",
    "tools",
    "environment_factory",
)


def import_trl(
    path: Path,
    out: Path | None,
    environment: Mapping[str, str],
    facts: DataFacts,
    processes: int = 1,
    trainer: str | None = None,
) -> Imported:
    """The recipe of a TRL script. `processes` is the number that accelerate would start, `out` where the recipe will be."""
    made = None if path.suffix == ".py" else read_trl_command(path, environment, trainer)
    found = read_trl_script(path, environment, trainer, None if made is None else made.text)
    processes = processes if made is None or processes > 1 else made.processes
    command = COMMANDS[found.config_name]
    script = found.script
    given = {name: _plain(script.value(node)) for name, node in found.arguments.items()}
    given |= {name: _plain(script.value(node)) for name, node in found.trainer.items() if name != "args"}
    defaults = {**TRAINING_DEFAULTS, **TRL_DEFAULTS[found.config_name]}
    draft = Draft(CONFIG_TYPES[command], given, defaults, TRL)
    for name, value in list(draft.given.items()):
        if isinstance(value, Unknown):
            draft.given[name] = value.text
            if (name in TRL or name.startswith("**")) and name not in TRAINER_ARGUMENTS:
                draft.forget(name, "its value is not known without running the script: set it by hand")
    if not found.arguments and "args" in found.trainer:
        draft.given["args"] = script.source(found.trainer["args"])
        draft.differs(
            "args", f"no {found.config_name}(...) is in the script: TRL's defaults are used, set what differs"
        )
    section = SECTION_BY_CONFIG.get(CONFIG_TYPES[command].__name__, "training")
    files: dict[str, str] = {}
    _model(draft, found)
    _data(draft, found)
    if command == "train":
        files = set_rollouts(draft, found, out, processes)
    else:
        _stage(draft, found, section, processes)
    _optimizer(draft, section)
    _length(draft, section, facts)
    _run(draft)
    rows = draft.finish(TRL_PATTERNS)
    if made is not None:
        draft.notes += made.notes
        rows = [row._replace(key=RENAMED.get(row.key, row.key)) for row in rows]
    if processes > 1:
        draft.notes.append(f"{processes} processes: {_several_processes(command, processes)}")
    return Imported(command, draft.ordered_tree(), rows, draft.notes, files)


def _several_processes(command: str, processes: int) -> str:
    if command == "train":
        return "placement={name: ray, workers: ..., engines: ...} trains on as many GPUs; one process is set"
    return f"start this with torchrun --nproc-per-node {processes}"


def _plain(value: Any) -> Any:
    """A value without `Unknown` inside; a list or dictionary with one is unknown as a whole."""
    if isinstance(value, list) and any(isinstance(item, Unknown) for item in value):
        return Unknown("a list that is not known")
    return value


# --- model and data ---------------------------------------------------------------------------------------------------------


def _model(draft: Draft, found: TrlScript) -> None:
    script = found.script
    node = found.trainer.get("model")
    path: Any = None
    dtype: Any = None
    kwargs = found.arguments.get("model_init_kwargs")
    quantization: ast.expr | None = None
    if node is not None:
        node = script.resolve(node)
        if isinstance(node, ast.Call) and called_name(node) == "get_peft_model" and len(node.args) > 1:
            found.trainer.setdefault("peft_config", node.args[1])
            node = script.resolve(node.args[0])
        if isinstance(node, ast.Call) and called_name(node) == "from_pretrained":
            arguments = script.arguments(node, ("path",))
            path = script.value(arguments.get("path", arguments.get("pretrained_model_name_or_path", node)))
            dtype = script.value(arguments["dtype"]) if "dtype" in arguments else None
            dtype = script.value(arguments["torch_dtype"]) if "torch_dtype" in arguments else dtype
            quantization = arguments.get("quantization_config")
        else:
            path = script.value(node)
    if isinstance(path, str):
        draft.given["model"] = path
        draft.translate("model", "model.path", path)
    else:
        draft.set("model.path", f"{PLACEHOLDER}/model")
        draft.differs("model", "the model is not known without running the script: set model.path")
    options = script.value(kwargs) if kwargs is not None else {}
    if isinstance(options, dict):
        dtype = options.get("dtype", options.get("torch_dtype", dtype))
    _dtype(draft, dtype)
    _adapters(draft, found, quantization)


def _dtype(draft: Draft, dtype: Any) -> None:
    is_float = draft.value("bf16") is False or (draft.value("bf16") is None and dtype == "float32")
    is_float = is_float and not draft.flag("fp16")
    kind = "float32" if is_float else "bfloat16"
    draft.set("model.dtype", kind)
    remark = "bfloat16 arithmetic with float32 master weights" if kind == "bfloat16" else "no mixed precision"
    draft.explain(["bf16", "torch_dtype", "dtype"], "translated", f"model.dtype={kind} ({remark})")
    draft.explain(["fp16"], "differs", "float16 has too small a range for gradients: model.dtype=bfloat16")
    draft.explain(["model_init_kwargs"], "translated" if dtype else "none", f"model.dtype={kind}" if dtype else "")


def _adapters(draft: Draft, found: TrlScript, quantization: ast.expr | None) -> None:
    script, node = found.script, found.trainer.get("peft_config")
    node = None if node is None else script.resolve(node)
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        draft.explain(["peft_config"], "same", "no adapters")
        return
    if not (isinstance(node, ast.Call) and called_name(node) == "LoraConfig"):
        draft.differs(
            "peft_config",
            "the adapters are not known without running the script: set model.lora={rank: ..., alpha: ...}",
        )
        return
    values = {name: script.value(value) for name, value in script.arguments(node).items()}
    lora = {"rank": values.get("r", 8), "alpha": values.get("lora_alpha", 8)}
    targets = values.get("target_modules")
    names = targets if isinstance(targets, list) else [targets]
    if all(name in PROJECTIONS for name in names):
        lora["targets"] = names
    elif targets is None:
        lora["targets"] = ["q_proj", "v_proj"]
    elif targets != "all-linear":
        draft.notes.append(
            f"peft_config: target_modules={show(targets)} becomes all-linear; the names are {', '.join(PROJECTIONS)}"
        )
    if values.get("use_rslora"):
        lora["rslora"] = True
    base = _quantized_base(script, quantization or found.trainer.get("quantization_config"))
    lora |= {"base": base} if base else {}
    draft.set("model.lora", lora)
    draft.given["peft_config"] = f"LoraConfig({', '.join(f'{key}={show(value)}' for key, value in values.items())})"
    draft.say("peft_config", "model.lora", lora)
    left = [
        key for key in values if key not in ("r", "lora_alpha", "target_modules", "use_rslora", "task_type", "bias")
    ]
    if left:
        draft.notes.append(f"peft_config: {', '.join(left)} has no counterpart")


def _quantized_base(script: PythonScript, node: ast.expr | None) -> str | None:
    """The format of frozen 4-bit weights that a BitsAndBytesConfig asks for."""
    node = None if node is None else script.resolve(node)
    if not (isinstance(node, ast.Call) and called_name(node) == "BitsAndBytesConfig"):
        return None
    values = {name: script.value(value) for name, value in script.arguments(node).items()}
    if not values.get("load_in_4bit"):
        return None
    return "nf4-double" if values.get("bnb_4bit_use_double_quant") else "nf4"


def _data(draft: Draft, found: TrlScript) -> None:
    section = SECTION_BY_CONFIG.get(draft.config_type.__name__)
    for key, split, train_key, stage_key in (
        ("train_dataset", "train", "data.train", f"{section}.data"),
        ("eval_dataset", "test", "data.validation", f"{section}.held_out"),
    ):
        node = found.trainer.get(key)
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            draft.explain([key], "same", "there is none")
            continue
        ours = train_key if section is None else stage_key
        data = find_data(found.script, node, split)
        draft.given[key] = found.script.source(node)
        if section == "sft" and key == "eval_dataset":
            draft.differs(key, "`burnish sft` has no held-out data: `burnish eval` measures its result")
            continue
        source = data.source if section is None else {k: v for k, v in data.source.items() if k != "prompt_key"}
        draft.translate(key, ours, source)
        if source["path"].startswith(PLACEHOLDER):
            draft.differs(key, f"the rows are not in a file: set {ours}.path")
        draft.notes += data.notes
    if "train_dataset" not in draft.rows:
        draft.set("data.train" if section is None else f"{section}.data", {"path": f"{PLACEHOLDER}/train.jsonl"})
        draft.notes.append("the script gives its trainer no train_dataset: set the path of the data")


# --- sft, prefer, reward-model ----------------------------------------------------------------------------------------------


def _stage(draft: Draft, found: TrlScript, section: str, processes: int) -> None:
    """The keys of the commands without rollouts."""
    per_device, accumulated = draft.integer("per_device_train_batch_size"), draft.integer("gradient_accumulation_steps")
    size = per_device * accumulated * processes
    remark = f"{per_device} x {accumulated}" + (f" x {processes} processes" if processes > 1 else "")
    draft.set(f"{section}.batch_size", size)
    draft.say("per_device_train_batch_size", f"{section}.batch_size", size, remark, is_always=True)
    draft.explain(
        ["gradient_accumulation_steps"],
        "translated",
        f"{section}.batch_size={size} ({remark}); micro-batches are packed by tokens",
    )
    draft.explain(["per_device_eval_batch_size"], "same", "forward passes are packed by tokens")
    key = draft.first_given("max_length", "max_seq_length")
    is_unlimited = key in draft.given and draft.given[key] is None
    longest = LONGEST_ROW if is_unlimited else draft.integer(key, 1024)
    remark = "TRL sets no limit" if is_unlimited else "longer rows are left out, never truncated"
    draft.translate(key, f"{section}.max_tokens", longest, remark)
    draft.explain(
        ["max_prompt_length", "max_completion_length"],
        "differs",
        f"{section}.max_tokens limits prompt and answer together",
    )
    if section == "preference":
        _preference_loss(draft, found.config_name)
    elif section == "sft":
        _supervised(draft)
    else:
        centre = draft.number("center_rewards_coefficient", 0.0)
        if centre:
            draft.translate("center_rewards_coefficient", "reward_model.centre", centre)
    if draft.tree[section].get("held_out") and draft.value("eval_strategy") == "steps" and draft.is_given("eval_steps"):
        draft.translate("eval_steps", f"{section}.held_out_every", draft.integer("eval_steps"))
    text = (
        f"{section} is evaluated before the first update and at the end"
        if draft.tree[section].get("held_out")
        else "no held-out data"
    )
    draft.explain(["eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start"], "same", text)


def _preference_loss(draft: Draft, config_name: str) -> None:
    beta = draft.number("beta", 0.1)
    loss: dict[str, Any]
    if config_name == "DPOConfig":
        given = draft.value("loss_type")
        names = given if isinstance(given, list) else [given]
        name = DPO_LOSSES.get(str(names[0]))
        loss = {"name": name or "dpo", "beta": beta}
        if str(names[0]) == "sigmoid_norm":
            loss["average"] = True
        if name is None or len(names) > 1:
            draft.differs(
                "loss_type", f"preference.loss={loss['name']}: burnish has dpo, ipo, simpo, orpo and kto, one at a time"
            )
        draft.explain(["loss_type"], "translated", f"preference.loss.name={loss['name']}")
        if draft.number("label_smoothing", 0.0) and loss["name"] == "dpo":
            loss["smoothing"] = draft.number("label_smoothing")
            draft.say("label_smoothing", "preference.loss.smoothing", loss["smoothing"])
        draft.explain(["label_smoothing"], "same", "no smoothing")
    elif config_name == "KTOConfig":
        loss = {"name": "kto", "beta": beta}
        for theirs, ours in (("desirable_weight", "desirable"), ("undesirable_weight", "undesirable")):
            loss[ours] = draft.number(theirs, 1.0)
            draft.say(theirs, f"preference.loss.{ours}", loss[ours])
    elif config_name == "ORPOConfig":
        loss = {"name": "orpo", "coef": beta}
    elif str(draft.value("loss_type")) == "simpo":
        loss = {"name": "simpo", "beta": beta, "margin": draft.number("simpo_gamma", 0.5)}
        draft.say("loss_type", "preference.loss.name", "simpo")
        draft.say("simpo_gamma", "preference.loss.margin", loss["margin"])
        draft.explain(
            ["cpo_alpha"], "same" if not draft.value("cpo_alpha") else "differs", "simpo has no imitation term"
        )
    else:
        loss = {"name": "simpo", "beta": beta}
        draft.differs("loss_type", "burnish has CPO's simpo only: preference.loss=simpo")
    option = "coef" if loss["name"] == "orpo" else "beta"
    draft.set("preference.loss", loss)
    draft.say("beta", f"preference.loss.{option}", beta, is_always=True)
    text = "reference log-probs are computed once before training (preference.reference=cached), with the same numbers"
    draft.explain(["precompute_ref_log_probs", "precompute_ref_batch_size"], "same", text)
    draft.explain(
        ["sync_ref_model"],
        "same" if not draft.flag("sync_ref_model") else "none",
        "the reference is the start of the run",
    )


def _supervised(draft: Draft) -> None:
    if draft.is_given("completion_only_loss") and not draft.flag("completion_only_loss"):
        draft.differs(
            "completion_only_loss",
            "only completions are learnt; join prompt and completion in a column text to learn both",
        )
    draft.explain(["completion_only_loss"], "same", "only completions are learnt")
    if draft.flag("assistant_only_loss"):
        draft.same("assistant_only_loss", "only the assistant's turns are learnt")
    draft.explain(
        ["assistant_only_loss"],
        "differs",
        "rows with messages: only the assistant's turns are learnt; TRL learns all of them",
    )
    if "assistant_only_loss" not in draft.given:
        draft.notes.append(
            "rows with messages: only the assistant's turns are learnt here; TRL learns all of them unless assistant_only_loss"
        )
    field = draft.value("dataset_text_field")
    if field != "text":
        draft.differs(
            "dataset_text_field", f"rename the column {field} to text: rows with `text` are learnt as a whole"
        )
    draft.explain(["dataset_text_field"], "same", "rows with a column `text` are learnt as a whole")
    draft.explain(["shuffle_dataset"], "same", "rows are shuffled each epoch")
    if draft.value("loss_type") != "nll":
        draft.differs("loss_type", "the loss is the mean negative log-likelihood of the learnt tokens")
    draft.explain(["loss_type"], "same", "the loss is the mean negative log-likelihood of the learnt tokens")


# --- optimizer, steps, run --------------------------------------------------------------------------------------------------


def _optimizer(draft: Draft, section: str) -> None:
    ours = f"{section}.optimizer"

    def take(key: str, option: str, value: Any, is_always: bool = False, remark: str = "") -> None:
        if is_always or draft.is_given(key):
            draft.set(f"{ours}.{option}", value)
            draft.say(key, f"{ours}.{option}", value, remark, is_always)

    take("learning_rate", "lr", draft.number("learning_rate", 1e-6), is_always=True)
    take("weight_decay", "weight_decay", draft.number("weight_decay"))
    clip_norm = draft.number("max_grad_norm", 1.0)
    remark = "" if clip_norm else "0 in TRL: gradients are not clipped"
    take("max_grad_norm", "clip_norm", clip_norm or NO_CLIP, remark=remark)
    take("adam_epsilon", "eps", draft.number("adam_epsilon", 1e-8))
    if draft.is_given("adam_beta1", "adam_beta2"):
        betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
        take("adam_beta1", "betas", betas, is_always=True)
        draft.say("adam_beta2", f"{ours}.betas", betas)
    given = str(draft.value("lr_scheduler_type")).rpartition(".")[2].lower()
    schedule = SCHEDULES.get(given, "linear")
    if given in SCHEDULES:
        take(
            "lr_scheduler_type",
            "schedule",
            schedule,
            is_always=schedule != "constant" or draft.is_given("lr_scheduler_type"),
        )
    else:
        draft.set(f"{ours}.schedule", schedule)
        draft.differs(
            "lr_scheduler_type", f"{ours}.schedule=linear; there are {', '.join(dict.fromkeys(SCHEDULES.values()))}"
        )
    kwargs = draft.value("lr_scheduler_kwargs")
    if isinstance(kwargs, dict) and "min_lr_rate" in kwargs and schedule != "constant":
        take("lr_scheduler_kwargs", "final", kwargs["min_lr_rate"], is_always=True)
    draft.explain(["lr_scheduler_kwargs"], "none", f"{ours} has schedule, warmup, decay and final")
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if steps:
        take(
            "warmup_steps",
            "warmup",
            int(steps) if steps >= 1 else steps,
            remark="updates" if steps >= 1 else "share of all updates",
        )
        draft.explain(["warmup_ratio"], "same", "warmup_steps counts")
    elif ratio:
        take("warmup_ratio", "warmup", ratio, remark="share of all updates")
    draft.explain(["warmup_steps", "warmup_ratio"], "same", "no warm-up")
    name = str(draft.value("optim")).rpartition(".")[2].lower()
    chosen = "adam8bit" if "8bit" in name and "adam" in name else "muon" if "muon" in name else "adamw"
    if chosen != "adamw":
        take("optim", "name", chosen)
    elif "adamw" not in name:
        draft.differs("optim", f"{ours}.name has adamw, adam8bit and muon; adamw is used")
    draft.explain(["optim"], "translated", f"{ours}.name=adamw, the default")
    if draft.flag("activation_offloading"):
        draft.translate("activation_offloading", f"{section}.activations", "offload")
    elif draft.flag("gradient_checkpointing"):
        draft.translate("gradient_checkpointing", f"{section}.activations", "recompute")
    draft.explain(
        ["gradient_checkpointing", "activation_offloading"], "same", f"{section}.activations says what is kept"
    )


def updates_per_step(draft: Draft) -> int:
    """Optimizer steps of one RL step, which TRL counts one by one. 1 for other commands."""
    training = draft.tree.get("training", {})
    return int(training.get("mini_batches", 1)) * int(training.get("epochs", 1))


def _length(draft: Draft, section: str, facts: DataFacts) -> None:
    """`max_steps`, or epochs if the rows can be counted."""
    ours = f"{section}.steps" if section == "training" else f"{section}.updates"
    per_step = updates_per_step(draft)
    remark = f"TRL counts updates, {per_step} a step" if per_step > 1 else ""
    if draft.integer("max_steps", -1) > 0:
        draft.translate("max_steps", ours, max(1, math.ceil(draft.integer("max_steps") / per_step)), remark)
        draft.explain(["num_train_epochs"], "same", "max_steps counts")
        return
    epochs = draft.number("num_train_epochs", 3)
    source = draft.tree["data"]["train"] if section == "training" else draft.tree[section]["data"]
    batch = draft.tree["rollout"]["prompts"] if section == "training" else draft.tree[section]["batch_size"]
    rows = facts.num_rows(source["path"])
    draft.explain(["max_steps"], "same", "num_train_epochs counts")
    if rows is None:
        draft.differs(
            "num_train_epochs",
            f"burnish counts steps, and the data is not here to count its rows: set {ours} to {epochs:g} x rows / {batch}",
        )
        return
    rows = min(rows, source.get("limit", rows))
    steps = max(1, math.ceil(rows * epochs / batch))
    draft.translate("num_train_epochs", ours, steps, f"{epochs:g} epochs of {rows} rows")


def _run(draft: Draft) -> None:
    if draft.is_given("output_dir"):
        folder = Path(str(draft.value("output_dir")))
        name = re.sub(r"[^\w.-]+", "-", str(draft.value("run_name", folder.name or "run"))).strip("-.") or "run"
        draft.set("run.directory", str(folder.parent) if str(folder.parent) != "." else "runs")
        draft.set("run.name", name)
        draft.say("output_dir", "run", {"directory": draft.tree["run"]["directory"], "name": name})
        draft.say("run_name", "run.name", name)
    elif draft.is_given("run_name"):
        draft.translate("run_name", "run.name", re.sub(r"[^\w.-]+", "-", str(draft.value("run_name"))).strip("-."))
    per_step = updates_per_step(draft)
    strategy = str(draft.value("save_strategy")).rpartition(".")[2].lower()
    if strategy == "steps" and draft.number("save_steps") >= 1:
        every = max(1, round(draft.number("save_steps") / per_step))
        draft.translate(
            "save_steps", "run.save_every", every, f"TRL counts updates, {per_step} a step" if per_step > 1 else ""
        )
        draft.explain(["save_strategy"], "translated", "run.save_every")
    else:
        draft.differs("save_strategy", "run.save_every counts steps, 25 by default; the last step is always saved")
        draft.explain(["save_steps"], "same", f"not used with save_strategy={strategy}")
    if draft.is_given("save_total_limit"):
        draft.translate("save_total_limit", "run.keep_last", max(1, draft.integer("save_total_limit")))
    if draft.is_given("seed"):
        draft.copy("seed")
    draft.set_trackers("report_to", always_there=("none",))
