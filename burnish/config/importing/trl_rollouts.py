"""The keys of GRPO and RLOO scripts: sampling, rewards, the algorithm and the batch."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

from burnish.config.importing.draft import PLACEHOLDER, Draft
from burnish.config.importing.python_script import PythonScript, called_name
from burnish.config.importing.trl_script import TRAINERS, TrlScript

AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
    "vespo": "token-mean",
}
"""How each loss type of GRPOTrainer averages tokens (`_compute_loss`)."""
PRESETS = {"cispo": "cispo", "sapo": "sapo", "dr_grpo": "dr_grpo", "luspo": "luspo", "vespo": "vespo"}
GAMMA_KEYS = {
    "k_positive": "vespo_k_pos",
    "lam_positive": "vespo_lambda_pos",
    "k_negative": "vespo_k_neg",
    "lam_negative": "vespo_lambda_neg",
}
"""Options of the clip of VESPO, and TRL's keys of them."""
TRL_EPSILON = 1e-4
"""What TRL adds to a standard deviation."""
TRL_REWARDS = {
    "accuracy_reward": ("math", "compares with the column `solution`; extra [math]"),
    "reasoning_accuracy_reward": ("math", "compares with the column `solution`; extra [math]"),
    "think_format_reward": ("think_format", "R1's tags, with an <answer>"),
}
"""Functions of trl.rewards, and the closest parts here."""
SMALLEST_WEIGHT = 1e-8
"""Lower bound of an importance weight where TRL sets none."""


def set_rollouts(draft: Draft, found: TrlScript, out: Path | None, processes: int) -> dict[str, str]:
    """Translate everything of a GRPO or RLOO script but the optimizer. The files returned belong beside the recipe."""
    _batch(draft, processes)
    _sampling(draft)
    files, shaping = _rewards(draft, found, out)
    _environment(draft, found, out)
    if found.config_name == "RLOOConfig":
        _set_rloo(draft, shaping)
    else:
        _set_grpo(draft, shaping)
    _validation(draft)
    return files


def _batch(draft: Draft, processes: int) -> None:
    """TRL counts completions. A generation batch is split into updates of per_device x accumulation x processes completions."""
    n = max(1, draft.integer("num_generations", 8))
    per_device, accumulated = (
        draft.integer("per_device_train_batch_size", 8),
        draft.integer("gradient_accumulation_steps", 1),
    )
    generations = draft.integer("steps_per_generation", accumulated)
    size = per_device * processes * generations
    if draft.is_given("generation_batch_size"):
        size = draft.integer("generation_batch_size")
        generations = max(1, size // (per_device * processes))
    prompts, updates = max(1, size // n), max(1, generations // max(1, accumulated))
    remark = f"{size} completions, {n} of each prompt"
    draft.translate("num_generations", "rollout.n", n)
    draft.set("rollout.prompts", prompts)
    if size % n:
        draft.differs("per_device_train_batch_size", f"rollout.prompts={prompts}: {remark} do not divide evenly")
    draft.say("per_device_train_batch_size", "rollout.prompts", prompts, remark, is_always=True)
    text = f"rollout.prompts={prompts} ({remark}); micro-batches are packed up to training.token_budget tokens"
    draft.explain(["gradient_accumulation_steps", "generation_batch_size"], "translated", text)
    draft.set("training.mini_batches", min(updates, prompts))
    draft.say("steps_per_generation", "training.mini_batches", min(updates, prompts), "updates of one generation batch")
    if draft.integer("num_iterations", 1) > 1 or draft.is_given("num_iterations"):
        draft.translate("num_iterations", "training.epochs", draft.integer("num_iterations", 1))
    draft.explain(["per_device_eval_batch_size"], "same", "validation samples rollout.max_rows at once")


def _sampling(draft: Draft) -> None:
    draft.copy("temperature", "top_p")
    draft.translate("top_k", "rollout.top_k", max(0, draft.integer("top_k")))
    draft.translate("max_completion_length", "rollout.max_tokens", draft.integer("max_completion_length", 512))
    if draft.is_given("max_prompt_length"):
        draft.copy("max_prompt_length")
    else:
        draft.notes.append(
            "TRL does not limit prompts: here data.max_prompt_tokens=1024 leaves longer ones out, with their number"
        )
    if draft.value("shuffle_dataset") is False:
        draft.translate("shuffle_dataset", "data.sampler", "sequential")
    draft.explain(["shuffle_dataset"], "translated", "data.sampler=shuffle, the default")
    kwargs = draft.value("chat_template_kwargs")
    if isinstance(kwargs, dict) and kwargs:
        draft.translate("chat_template_kwargs", "data.template.kwargs", kwargs)
    if draft.flag("use_vllm"):
        text = "burnish samples with its own engine, from the tensors it trains; rollout.engine=vllm selects vLLM"
        draft.explain(["use_vllm"], "differs", text)
    draft.explain(["use_vllm"], "same", "burnish samples with its own engine")


# --- rewards ----------------------------------------------------------------------------------------------------------------


def _rewards(draft: Draft, found: TrlScript, out: Path | None) -> tuple[dict[str, str], list[Any]]:
    """The parts of the reward, further files, and shapers that TRL has as rewards."""
    script, node = found.script, found.trainer.get("reward_funcs")
    node = None if node is None else script.resolve(node)
    functions = [] if node is None else node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    given = draft.value("reward_weights")
    weights = given if isinstance(given, list) else [1.0] * len(functions)
    own = [f.id for f in functions if isinstance(f, ast.Name) and f.id in script.definitions]
    is_copied = bool(own) and script.runs_on_import(TRAINERS)
    file = f"{(out or Path('recipe.yaml')).stem}_rewards.py"
    place = file if is_copied else _relative(script.path, out)
    parts, shaping = list[dict[str, Any]](), list[Any]()
    for function, weight in zip(functions, [*weights, *[1.0] * len(functions)], strict=False):
        part = _reward_part(draft, script, function, place, shaping)
        if part is not None:
            parts.append({**part, **({"weight": weight} if weight != 1 else {})})
    if not parts:
        parts = [{"name": f"{PLACEHOLDER}/rewards.py:reward"}]
        draft.notes.append("the reward functions are not known: set reward.parts to file.py:function")
    draft.set("reward.parts", parts)
    if node is not None:
        draft.given["reward_funcs"] = script.source(found.trainer["reward_funcs"])
        draft.say("reward_funcs", "reward.parts", parts)
    draft.say("reward_weights", "reward.parts", parts, "each part has a weight")
    if is_copied:
        draft.notes.append(
            f"importing {script.path.name} would start its training, so its reward functions are copied to {file}, with what they use"
        )
    return ({file: script.extract(own)} if is_copied else {}), shaping


def _relative(path: Path, out: Path | None) -> str:
    return os.path.relpath(path, out.parent if out is not None else Path())


def _reward_part(
    draft: Draft, script: PythonScript, node: ast.expr, place: str, shaping: list[Any]
) -> dict[str, Any] | None:
    if isinstance(node, ast.Name) and node.id in script.definitions:
        return {"name": f"{place}:{node.id}"}
    value = script.value(node)
    if isinstance(value, str):
        return {"name": "model", "options": {"path": value}}
    node = node if isinstance(node, ast.Name) and node.id in script.imports else script.resolve(node)
    if isinstance(node, ast.Call) and called_name(node) == "get_soft_overlong_punishment":
        values = {
            k: script.value(v) for k, v in script.arguments(node, ("max_completion_len", "soft_punish_cache")).items()
        }
        shaping.append(
            {
                "name": "soft_overlong",
                "max_tokens": values.get("max_completion_len"),
                "cache": values.get("soft_punish_cache"),
            }
        )
        draft.notes.append("get_soft_overlong_punishment is the shaper soft_overlong (algorithm.shaping)")
        return None
    name = called_name(node) if isinstance(node, ast.Call) else node.id if isinstance(node, ast.Name) else ""
    module, imported = script.imports.get(name, ("", ""))
    if module.split(".")[0] == "trl" and imported in TRL_REWARDS:
        part, remark = TRL_REWARDS[imported]
        draft.notes.append(f"trl.rewards.{imported} is the reward {part} here: {remark}")
        for source in draft.tree.get("data", {}).values() if part == "math" else ():
            source["answer_key"] = "solution"
        return {"name": part}
    if module and imported and isinstance(node, ast.Name):
        return {"name": f"{module}:{imported}"}
    draft.notes.append(
        f"the reward {script.source(node)} is not known without running the script: name a function in reward.parts"
    )
    return None


def _environment(draft: Draft, found: TrlScript, out: Path | None) -> None:
    script = found.script
    place = _relative(script.path, out)
    turns = draft.integer("max_tool_calling_iterations", 0)
    options: dict[str, Any] = {}
    for key in ("tools", "environment_factory"):
        node = found.trainer.get(key)
        node = None if node is None else script.resolve(node)
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            draft.explain([key], "same", "there is none")
            continue
        names = [
            n.id for n in (node.elts if isinstance(node, ast.List | ast.Tuple) else [node]) if isinstance(n, ast.Name)
        ]
        draft.given[key] = script.source(node)
        if not names:
            draft.differs(
                key, "not known without running the script: environment.name=trl with options.target or options.tools"
            )
            continue
        specs = [_plugin(script, name, place) for name in names]
        options["tools" if key == "tools" else "target"] = specs if key == "tools" else specs[0]
        draft.say(
            key, f"environment.options.{'tools' if key == 'tools' else 'target'}", specs if key == "tools" else specs[0]
        )
        if script.runs_on_import(TRAINERS):
            draft.notes.append(
                f'importing {script.path.name} would start its training: put its last lines under `if __name__ == "__main__":`'
            )
    if options:
        draft.set("environment", {"name": "trl", "options": options, "max_turns": turns + 1 if turns else 8})
        draft.say("max_tool_calling_iterations", "environment.max_turns", turns + 1 if turns else 8)
    draft.explain(["max_tool_calling_iterations"], "same", "there are no tools")


def _plugin(script: PythonScript, name: str, place: str) -> str:
    module, imported = script.imports.get(name, ("", ""))
    return f"{place}:{name}" if name in script.definitions or not imported else f"{module}:{imported}"


# --- the algorithm ----------------------------------------------------------------------------------------------------------


def _set_grpo(draft: Draft, shaping: list[Any]) -> None:
    loss_type, level = str(draft.value("loss_type")), str(draft.value("importance_sampling_level"))
    slots: dict[str, Any] = {"advantage": _advantage(draft), **_policy_loss(draft, loss_type, level), **_kl(draft)}
    slots |= _entropy(draft)
    if draft.flag("mask_truncated_completions"):
        slots["filters"] = ["overlong"]
        draft.say("mask_truncated_completions", "algorithm.filters", ["overlong"])
    draft.explain(["mask_truncated_completions"], "same", "truncated completions stay in the loss")
    slots |= {"shaping": shaping} if shaping else {}
    slots |= _correction(draft)
    preset = PRESETS.get(loss_type, "gspo" if level == "sequence" else "grpo")
    if slots["advantage"]["name"] == "gdpo":
        preset = "gdpo"
    draft.set_algorithm(preset, slots)


def _advantage(draft: Draft) -> dict[str, Any]:
    if draft.value("multi_objective_aggregation") == "normalize_then_sum":
        parts = draft.tree["reward"]["parts"]
        draft.say("multi_objective_aggregation", "algorithm.advantage", "gdpo")
        draft.explain(["scale_rewards"], "same", "each reward is divided by its own deviation")
        weights = {part["name"].rpartition(":")[2]: part["weight"] for part in parts if "weight" in part}
        return {"name": "gdpo", "eps": TRL_EPSILON, **({"weights": weights} if weights else {})}
    draft.explain(["multi_objective_aggregation"], "same", "rewards are summed, then normalised")
    scale = draft.value("scale_rewards")
    std = {"True": "group", "False": "none"}.get(str(scale), str(scale))
    draft.say("scale_rewards", "algorithm.advantage.std", std, is_always=True)
    return {"name": "grpo", "std": std, **({} if std == "none" else {"eps": TRL_EPSILON})}


def _policy_loss(draft: Draft, loss_type: str, level: str) -> dict[str, Any]:
    """The slots ratio, clip, loss and aggregation, as `GRPOTrainer._compute_loss` has them."""
    low = draft.number("epsilon", 0.2)
    high = draft.number("epsilon_high", low)
    slots: dict[str, Any] = {"ratio": "sequence" if level == "sequence" else "token"}
    if loss_type == "cispo":
        slots |= {"clip": {"name": "is_weight", "cap": max(1.0, high)}, "loss": "sg_logprob"}
        draft.say("epsilon_high", "algorithm.clip.cap", max(1.0, high))
        draft.explain(
            ["epsilon"],
            "same",
            "CISPO has no lower bound" if draft.is_given("epsilon_high") else "the cap of the weight",
        )
    elif loss_type == "sapo":
        taus = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
        slots["clip"] = {"name": "soft", **{option: draft.number(key) for option, key in taus.items()}}
        for option, key in taus.items():
            draft.say(key, f"algorithm.clip.{option}", slots["clip"][option])
    elif loss_type == "vespo":
        slots["ratio"] = "token"  # the clip makes its own ratio of whole sequences
        slots["loss"] = "sg_logprob"
        slots["clip"] = {"name": "gamma", **{option: draft.number(key) for option, key in GAMMA_KEYS.items()}}
        for option, key in GAMMA_KEYS.items():
            draft.say(key, f"algorithm.clip.{option}", slots["clip"][option])
    else:
        slots["clip"] = {"name": "ppo", "low": low, "high": high}
        draft.say("epsilon", "algorithm.clip.low", low)
        draft.say("epsilon_high", "algorithm.clip.high", high)
        for option, key in (("dual", "delta"), ("drift", "off_policy_mask_threshold")):
            if draft.is_given(key):
                slots["clip"][option] = draft.number(key)
                draft.say(key, f"algorithm.clip.{option}", slots["clip"][option])
    draft.explain(
        ["epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg", *GAMMA_KEYS.values()],
        "same",
        f"not used by {loss_type}",
    )
    draft.explain(["importance_sampling_level"], "translated", f"algorithm.ratio={slots['ratio']}")
    name = AGGREGATIONS.get(loss_type)
    if name is None:
        draft.differs("loss_type", "algorithm.aggregation=token-mean; this loss has no counterpart")
    else:
        draft.say("loss_type", "algorithm.aggregation", name, is_always=True)
    slots["aggregation"] = {"name": name or "token-mean"}
    return slots


def _kl(draft: Draft) -> dict[str, Any]:
    beta = draft.number("beta", 0.0)
    draft.say("beta", "algorithm.kl.loss.coef", beta)
    if not beta:
        draft.explain(
            ["use_bias_correction_kl", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"],
            "same",
            "no KL: beta is 0",
        )
        return {}
    is_corrected = draft.flag("use_bias_correction_kl")
    draft.say("use_bias_correction_kl", "algorithm.kl.loss.is_corrected", is_corrected, is_always=True)
    loss = {"coef": beta, "estimator": "k3", **({"is_corrected": True} if is_corrected else {})}
    return {"kl": {"loss": loss, "reference": _reference(draft)}}


def _reference(draft: Draft) -> Any:
    if not draft.flag("sync_ref_model"):
        draft.explain(["sync_ref_model"], "same", "the reference is the start of the run")
        return "frozen"
    mixed, every = draft.number("ref_model_mixup_alpha", 0.6), draft.integer("ref_model_sync_steps", 512)
    per_step = draft.tree["training"]["mini_batches"] * draft.tree["training"].get("epochs", 1)
    steps = max(1, round(every / per_step))
    if mixed == 1:
        draft.say("sync_ref_model", "algorithm.kl.reference", {"name": "hard_sync", "every": steps})
    else:
        text = f"algorithm.kl.reference=hard_sync every {steps} steps; TRL mixes {mixed:g} of the policy into the reference"
        draft.differs("sync_ref_model", text)
    draft.explain(
        ["ref_model_mixup_alpha", "ref_model_sync_steps"], "translated", f"algorithm.kl.reference.every={steps}"
    )
    return {"name": "hard_sync", "every": steps}


def _entropy(draft: Draft) -> dict[str, Any]:
    entropy: dict[str, Any] = {}
    if draft.number("entropy_coef", 0.0) or draft.flag("use_adaptive_entropy"):
        entropy["coef"] = draft.number("entropy_coef", 0.0)
        draft.say("entropy_coef", "algorithm.entropy.coef", entropy["coef"])
    if draft.flag("use_adaptive_entropy"):
        entropy["adaptive"] = {
            "target": draft.number("entropy_target", 0.2),
            "delta": draft.number("entropy_coef_delta", 0.005),
        }
        for key, option in (("entropy_target", "target"), ("entropy_coef_delta", "delta")):
            draft.say(key, f"algorithm.entropy.adaptive.{option}", entropy["adaptive"][option])
        draft.say("use_adaptive_entropy", "algorithm.entropy.adaptive", entropy["adaptive"])
        draft.explain(["entropy_coef_min", "entropy_coef_max"], "none", "the coefficient is not bounded")
    if draft.number("top_entropy_quantile", 1.0) < 1:
        entropy["top_share"] = draft.number("top_entropy_quantile")
        draft.say("top_entropy_quantile", "algorithm.entropy.top_share", entropy["top_share"])
    keys = (
        "entropy_coef",
        "use_adaptive_entropy",
        "entropy_target",
        "entropy_coef_delta",
        "entropy_coef_min",
        "entropy_coef_max",
        "top_entropy_quantile",
    )
    draft.explain(keys, "same", "no entropy bonus, and all tokens are learnt")
    return {"entropy": entropy} if entropy else {}


def _correction(draft: Draft) -> dict[str, Any]:
    """TRL weights samples of vLLM by their importance ratio to the trainer."""
    keys = [key for key in draft.given if key.startswith("vllm_importance_sampling")]
    if not draft.flag("use_vllm") or not draft.flag("vllm_importance_sampling_correction"):
        draft.explain(keys, "same", "no correction: the mismatch is measured at every step")
        return {}
    level, _, kind = str(draft.value("vllm_importance_sampling_mode")).partition("_")
    cap = draft.first_given("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    highest = draft.number(cap, 3.0)
    lowest = draft.number("vllm_importance_sampling_clip_min", SMALLEST_WEIGHT) or SMALLEST_WEIGHT
    correction = {
        "name": "decoupled",
        "weights": level,
        "threshold": highest if kind == "truncate" else [lowest, highest],
    }
    draft.say("vllm_importance_sampling_mode", "algorithm.correction", correction, is_always=True)
    draft.explain(keys, "translated", "algorithm.correction.threshold")
    return {"correction": correction}


def _set_rloo(draft: Draft, shaping: list[Any]) -> None:
    """RLOOTrainer: leave-one-out advantages, the KL in the reward, and a clipped sequence ratio."""
    beta = draft.number("beta", 0.05)
    low = draft.number("epsilon", 0.2)
    high = draft.number("epsilon_high", low)
    slots: dict[str, Any] = {
        "advantage": {"name": "rloo"},
        "ratio": "seq_prod",
        "clip": {"name": "ppo", "low": low, "high": high},
        "loss": "surrogate",
        "aggregation": {"name": "seq-mean-token-mean"},
    }
    draft.say("epsilon", "algorithm.clip.low", low)
    draft.say("epsilon_high", "algorithm.clip.high", high)
    draft.say("beta", "algorithm.kl.reward.coef", beta, is_always=True)
    if beta:
        slots["kl"] = {"reward": {"coef": beta, "estimator": "k1"}, "reference": _reference(draft)}
    if draft.flag("normalize_advantages"):
        slots["advantage"] = {"name": "reinforce_plus_plus_baseline"}
        draft.differs(
            "normalize_advantages",
            "algorithm.advantage=reinforce_plus_plus_baseline: normalised over the batch, by token",
        )
    draft.explain(["normalize_advantages"], "same", "advantages are not divided")
    if draft.flag("mask_truncated_completions"):
        slots["filters"] = ["overlong"]
        draft.say("mask_truncated_completions", "algorithm.filters", ["overlong"])
    draft.explain(["reward_clip_range"], "none", "rewards are not clipped; a reward function may do it")
    slots |= {"shaping": shaping} if shaping else {}
    draft.set_algorithm("rloo", slots)


def _validation(draft: Draft) -> None:
    """TRL evaluates by sampling at the training temperature."""
    keys = ["eval_strategy", "evaluation_strategy", "eval_steps", "eval_on_start", "num_generations_eval"]
    if "validation" not in draft.tree.get("data", {}):
        draft.explain(keys, "same", "there is no held-out data")
        return
    per_step = draft.tree["training"]["mini_batches"] * draft.tree["training"].get("epochs", 1)
    strategy = draft.value(draft.first_given("eval_strategy", "evaluation_strategy"))
    if strategy == "steps" and draft.number("eval_steps") >= 1:
        draft.translate("eval_steps", "validation.every", max(1, round(draft.number("eval_steps") / per_step)))
    n = draft.integer("num_generations_eval", 1)
    mode = {"temperature": draft.number("temperature", 1.0), **({"n": n} if n > 1 else {})}
    draft.set("validation.modes", {"sampled": mode})
    draft.say("num_generations_eval", "validation.modes.sampled.n", n)
    draft.set("validation.before", draft.flag("eval_on_start"))
    draft.explain(keys, "translated", f"validation.every={draft.tree['validation'].get('every', 0)}")
