"""The algorithm of a verl config as one choice per slot."""

from __future__ import annotations

from typing import Any

from burnish.config.errors import UserError
from burnish.config.foreign_keys.rollout_correction import CORRECTION_KEYS, translate_correction
from burnish.config.foreign_keys.verl_keys import ACTOR, ROLLOUT
from burnish.config.importing.draft import Draft, show
from burnish.config.importing.verl_optimizer import verl_optimizer

ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "grpo_passk",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "optimal_token_baseline": "otb",
    "tir_optimal_token_baseline": "otb",
}
"""verl's advantage estimators (`AdvantageEstimator` in core_algos.py) and ours."""
PRESETS = {"gae": "ppo"}
"""Presets whose name is not that of their advantage."""
LOSS_PRESETS = {
    "gspo": "gspo_token",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "dro": "dro",
}
ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "full": "full",
}
"""verl's names of KL estimators (`kl_penalty_forward`) and ours."""
PF_PPO_MODES = {"pow": "power", "max_min": "best_worst", "max_random": "best_random"}
DEFAULT_CORRECTION = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
    "rollout_is_batch_normalize": False,
}
OVERLONG_SECTIONS = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
"""Where versions of verl have DAPO's soft overlong penalty."""
UNLIMITED_ROUNDS = 10
"""Generation rounds where verl sets no limit."""


def set_algorithm(draft: Draft) -> None:
    """Translate everything that belongs to the algorithm, and set the recipe's `algorithm`."""
    estimator, mode = str(draft.value("algorithm.adv_estimator")), str(draft.value(f"{ACTOR}.policy_loss.loss_mode"))
    advantage = _advantage(draft, estimator)
    slots: dict[str, Any] = {"advantage": advantage, **_policy_loss(draft, mode), **_kl(draft)}
    preset = LOSS_PRESETS.get(mode, PRESETS.get(advantage["name"], advantage["name"]))
    if preset == "grpo" and draft.flag("algorithm.filter_groups.enable"):
        preset = "dapo"
    if advantage["name"] == "gae":
        slots["critic"] = _critic(draft)
    else:
        draft.explain(
            [key for key in draft.given if key.startswith("critic.")], "same", "not used: only gae has a critic"
        )
        draft.explain(["trainer.critic_warmup"], "same", "not used: only gae has a critic")
    if draft.number(f"{ACTOR}.entropy_coeff"):
        slots["entropy"] = {"coef": draft.number(f"{ACTOR}.entropy_coeff")}
    draft.say(f"{ACTOR}.entropy_coeff", "algorithm.entropy.coef", draft.number(f"{ACTOR}.entropy_coeff"))
    filters, refill = _filters(draft)
    shaping = [*(["signed"] if has_signed_scores(draft) else []), *_overlong_penalty(draft)]
    slots |= {"filters": filters} if filters else {}
    slots |= {"refill": refill} if refill else {}
    slots |= {"shaping": shaping} if shaping else {}
    slots |= _correction(draft)
    slots |= _router(draft, slots)
    if preset == "grpo" and advantage.get("std") == "none" and slots["aggregation"]["name"].endswith("norm"):
        preset = "dr_grpo"
    draft.set_algorithm(preset, slots)


def _advantage(draft: Draft, estimator: str) -> dict[str, Any]:
    if estimator not in ADVANTAGES:
        raise UserError(
            f"algorithm.adv_estimator={estimator}: burnish knows {', '.join(ADVANTAGES)}; an estimator of your own is "
            "algorithm.advantage=file.py:function (docs/plugins.md)"
        )
    name = ADVANTAGES[estimator]
    slot: dict[str, Any] = {"name": name}
    draft.say("algorithm.adv_estimator", "algorithm.advantage", name, is_always=True)
    if estimator.startswith("tir_"):
        draft.differs("algorithm.adv_estimator", "algorithm.advantage=otb: its baseline counts tokens, not turns")
    if name in ("grpo", "grpo_passk"):
        is_scaled = draft.flag("algorithm.norm_adv_by_std_in_grpo")
        slot |= {} if is_scaled else {"std": "none"}
        draft.say("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.std", "group" if is_scaled else "none")
    if name in ("gae", "reinforce_plus_plus"):
        slot["gamma"] = draft.number("algorithm.gamma")
        draft.say("algorithm.gamma", "algorithm.advantage.gamma", slot["gamma"])
    if name == "gae":
        slot["lam"] = draft.number("algorithm.lam")
        draft.say("algorithm.lam", "algorithm.advantage.lam", slot["lam"])
    unused = ["algorithm.gamma", "algorithm.lam", "algorithm.norm_adv_by_std_in_grpo"]
    draft.explain(unused, "same", f"not used by {estimator}")
    return slot


def _policy_loss(draft: Draft, mode: str) -> dict[str, Any]:
    """The slots ratio, clip, loss and aggregation, by `policy_loss.loss_mode` (core_algos.py)."""
    low, high, dual = _clip_range(draft)
    loss = f"{ACTOR}.policy_loss"
    number = {
        key: draft.number(f"{loss}.{key}") for key in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio")
    }
    weighted = {"loss": "sg_logprob"}
    choices: dict[str, dict[str, Any]] = {
        "vanilla": {"clip": {"name": "ppo", "low": low, "high": high, "dual": dual}},
        "gspo": {"ratio": "seq_token", "clip": {"name": "ppo", "low": low, "high": high}},
        "sapo": {
            "clip": {
                "name": "soft",
                "tau_positive": draft.number(f"{ACTOR}.tau_pos"),
                "tau_negative": draft.number(f"{ACTOR}.tau_neg"),
            }
        },
        "gpg": {"ratio": "none", "clip": "none", "loss": "logprob"},
        "clip_cov": {
            "clip": {
                "name": "clip_cov",
                "share": number["clip_cov_ratio"],
                "low_cov": number["clip_cov_lb"],
                "high_cov": number["clip_cov_ub"],
                "low": low,
                "high": high,
            }
        },
        "kl_cov": {
            "clip": {"name": "kl_cov", "share": number["kl_cov_ratio"], "coef": draft.number(f"{loss}.ppo_kl_coef")}
        },
        "geo_mean": {"ratio": "sequence", "clip": {"name": "log_geo", "low": low, "high": high}},
        "cispo": {"clip": {"name": "is_weight", "low": None if low >= 1 else low, "cap": 1 + high}, **weighted},
        "dppo_tv": {"clip": {"name": "dppo_tv", "low": low, "high": high, "cap": dual}, **weighted},
        "dppo_kl": {"clip": {"name": "dppo_kl", "low": low, "high": high, "cap": dual}, **weighted},
        "dro": {"ratio": "none", "clip": "none", "loss": {"name": "dro", "beta": draft.number(f"{loss}.dro_beta")}},
    }
    if mode not in choices:
        raise UserError(
            f"{loss}.loss_mode={mode}: burnish knows {', '.join(choices)}; a loss of your own is algorithm.loss=file.py:function"
        )
    slots = choices[mode]
    clip = slots["clip"]
    chosen = f"algorithm.clip={clip if isinstance(clip, str) else clip['name']}"
    said = ", ".join([chosen, *(f"algorithm.{k}={show(v)}" for k, v in slots.items() if k != "clip")])
    draft.explain([f"{loss}.loss_mode"], "translated", said)
    if isinstance(clip, dict):
        _say_clip(draft, clip)
    unused = [f"{ACTOR}.{key}" for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")]
    unused += [key for key in draft.given if key.startswith(f"{loss}.")]
    draft.explain(unused, "same", f"not used by loss_mode {mode}")
    slots["aggregation"] = _aggregation(draft, mode)
    return slots


def _clip_range(draft: Draft) -> tuple[float, float, float]:
    """The clip range. verl reads clip_ratio_low and clip_ratio_high, which have defaults, and never clip_ratio."""
    low, high = draft.number(f"{ACTOR}.clip_ratio_low"), draft.number(f"{ACTOR}.clip_ratio_high")
    key = f"{ACTOR}.clip_ratio"
    if key in draft.given:
        value = draft.number(key, 0.2)
        if draft.is_given(f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high") or value == low == high:
            draft.same(key, "clip_ratio_low and clip_ratio_high count")
        else:
            low = high = value
            draft.differs(
                key,
                f"algorithm.clip.low={value:g} and high; verl 0.9 reads clip_ratio_low and clip_ratio_high (0.2) instead",
            )
    return low, high, draft.number(f"{ACTOR}.clip_ratio_c", 3.0)


def _say_clip(draft: Draft, clip: dict[str, Any]) -> None:
    names = {
        "low": f"{ACTOR}.clip_ratio_low",
        "high": f"{ACTOR}.clip_ratio_high",
        "dual": f"{ACTOR}.clip_ratio_c",
        "cap": f"{ACTOR}.{'clip_ratio_high' if clip['name'] == 'is_weight' else 'clip_ratio_c'}",
        "tau_positive": f"{ACTOR}.tau_pos",
        "tau_negative": f"{ACTOR}.tau_neg",
        "share": f"{ACTOR}.policy_loss.{clip['name']}_ratio",
        "low_cov": f"{ACTOR}.policy_loss.clip_cov_lb",
        "high_cov": f"{ACTOR}.policy_loss.clip_cov_ub",
        "coef": f"{ACTOR}.policy_loss.ppo_kl_coef",
    }
    for option, value in clip.items():
        if option != "name":
            draft.say(names[option], f"algorithm.clip.{option}", value, is_always=option == "dual")


def _aggregation(draft: Draft, mode: str) -> dict[str, Any]:
    key, scale = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.loss_scale_factor"
    name = str(draft.value(key))
    if mode == "geo_mean":  # one number a sequence, whose mean verl takes whatever the mode says
        draft.explain([key, scale], "same", "not used by geo_mean, which takes the mean over sequences")
        return {"name": "seq-mean-token-mean"}
    draft.say(key, "algorithm.aggregation", name, is_always=True)
    if draft.is_given(scale) and name == "seq-mean-token-sum-norm":
        draft.say(scale, "algorithm.aggregation.horizon", draft.integer(scale))
        return {"name": name, "horizon": draft.integer(scale)}
    draft.explain([scale], "same", f"not used by {name}")
    return {"name": name}


def _kl(draft: Draft) -> dict[str, Any]:
    kl: dict[str, Any] = {}
    in_loss, in_reward = draft.flag(f"{ACTOR}.use_kl_loss"), draft.flag("algorithm.use_kl_in_reward")
    if in_loss:
        coef, estimator = draft.number(f"{ACTOR}.kl_loss_coef"), _estimator(draft, f"{ACTOR}.kl_loss_type")
        kl["loss"] = {"coef": coef, "estimator": estimator}
        draft.say(f"{ACTOR}.use_kl_loss", "algorithm.kl.reference", "frozen")
        draft.say(f"{ACTOR}.kl_loss_coef", "algorithm.kl.loss.coef", coef, is_always=True)
        draft.say(f"{ACTOR}.kl_loss_type", "algorithm.kl.loss.estimator", estimator, is_always=True)
    keys = [f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]
    draft.explain(keys, "same", "no KL in the loss: use_kl_loss is false")
    if in_reward:
        coef, estimator = draft.number("algorithm.kl_ctrl.kl_coef"), _estimator(draft, "algorithm.kl_penalty")
        kl["reward"] = {"coef": coef, "estimator": estimator}
        draft.say("algorithm.use_kl_in_reward", "algorithm.kl.reference", "frozen")
        draft.say("algorithm.kl_ctrl.kl_coef", "algorithm.kl.reward.coef", coef, is_always=True)
        draft.say("algorithm.kl_penalty", "algorithm.kl.reward.estimator", estimator)
        if draft.value("algorithm.kl_ctrl.type") == "adaptive":
            target, horizon = draft.number("algorithm.kl_ctrl.target_kl"), draft.integer("algorithm.kl_ctrl.horizon")
            kl["adaptive"] = {"target": target, "horizon": horizon}
            draft.say("algorithm.kl_ctrl.type", "algorithm.kl.adaptive", kl["adaptive"])
            draft.say("algorithm.kl_ctrl.target_kl", "algorithm.kl.adaptive.target", target)
            draft.say("algorithm.kl_ctrl.horizon", "algorithm.kl.adaptive.horizon", horizon)
    keys = [
        "algorithm.use_kl_in_reward",
        "algorithm.kl_penalty",
        *(k for k in draft.given if k.startswith("algorithm.kl_ctrl.")),
    ]
    draft.explain(
        keys, "same", "the coefficient is fixed" if in_reward else "no KL in the reward: use_kl_in_reward is false"
    )
    kl |= {"reference": "frozen"} if any(term.get("coef") for term in kl.values()) else {}
    return {"kl": kl}


def _estimator(draft: Draft, key: str) -> str:
    given = str(draft.value(key))
    name = ESTIMATORS.get(given.removesuffix("+"))
    if name is None:
        raise UserError(f"{key}={given}: expected one of {', '.join(ESTIMATORS)}, perhaps with a plus")
    return f"{name}+" if given.endswith("+") and name != "k2" else name


def _critic(draft: Draft) -> dict[str, Any]:
    clip = draft.number("critic.cliprange_value")
    critic: dict[str, Any] = {
        "clip": clip,
        "optimizer": {"lr": 1e-5, **verl_optimizer(draft, "critic", "algorithm.critic", updates_per_step(draft))},
    }
    draft.say("critic.cliprange_value", "algorithm.critic.clip", clip)
    warmup = draft.integer("trainer.critic_warmup")
    critic |= {"warmup_steps": warmup} if warmup else {}
    draft.say("trainer.critic_warmup", "algorithm.critic.warmup_steps", warmup)
    path = draft.given.get("critic.model.path")
    if path is not None and path == draft.value("actor_rollout_ref.model.path"):
        draft.same("critic.model.path", "the critic starts from the policy's weights")
    return critic


def _filters(draft: Draft) -> tuple[list[Any], dict[str, Any]]:
    """DAPO's dynamic sampling, and PF-PPO's resampling."""
    filters: list[Any] = []
    refill: dict[str, Any] = {}
    section = "algorithm.filter_groups"
    if draft.flag(f"{section}.enable"):
        metric = "accuracy" if draft.value(f"{section}.metric") == "acc" else "reward"
        filters.append({"name": "zero_signal", "metric": metric})
        draft.say(f"{section}.enable", "algorithm.filters", ["zero_signal"], "refilled by algorithm.refill")
        draft.say(f"{section}.metric", "algorithm.filters.0.metric", metric)
        rounds = draft.integer(f"{section}.max_num_gen_batches")
        refill = {"rounds": rounds if rounds > 1 else UNLIMITED_ROUNDS, "short": "error"}
        if rounds > 0:
            draft.say(f"{section}.max_num_gen_batches", "algorithm.refill.rounds", refill["rounds"])
        else:
            draft.differs(
                f"{section}.max_num_gen_batches", f"a number is needed: algorithm.refill.rounds={UNLIMITED_ROUNDS}"
            )
        oversample = -(-draft.integer("data.gen_batch_size", 0) // max(1, draft.integer("data.train_batch_size")))
        if oversample > 1:
            refill["oversample"] = oversample
            draft.say("data.gen_batch_size", "algorithm.refill.oversample", oversample, "times rollout.prompts")
    draft.explain(
        [k for k in draft.given if k.startswith(f"{section}.")], "same", "no groups are dropped: enable is false"
    )
    draft.explain(["data.gen_batch_size"], "same", "a step samples rollout.prompts prompts")
    if draft.flag("algorithm.use_pf_ppo"):
        method = str(draft.value("algorithm.pf_ppo.reweight_method"))
        power = draft.number("algorithm.pf_ppo.weight_pow")
        mode = PF_PPO_MODES.get(method, "power")
        filters.append({"name": "pf_ppo", "mode": mode, **({"power": power} if mode == "power" else {})})
        draft.say("algorithm.use_pf_ppo", "algorithm.filters", ["pf_ppo"])
        draft.say("algorithm.pf_ppo.reweight_method", "algorithm.filters.mode", mode)
        draft.say("algorithm.pf_ppo.weight_pow", "algorithm.filters.power", power)
    keys = [key for key in draft.given if key.startswith(("algorithm.pf_ppo.", "algorithm.use_pf_ppo"))]
    draft.explain(keys, "same", "not used: use_pf_ppo is false")
    return filters, refill


def _overlong_penalty(draft: Draft) -> list[Any]:
    """DAPO's soft overlong punishment, which verl's reward manager `dapo` adds."""
    for section in OVERLONG_SECTIONS:
        keys = [key for key in draft.given if key.startswith(f"{section}.")]
        if not draft.flag(f"{section}.enable"):
            draft.explain(keys, "same", "no penalty: enable is false")
            continue
        cache, factor = draft.integer(f"{section}.len", 1), draft.number(f"{section}.penalty_factor", 1.0)
        draft.say(f"{section}.enable", "algorithm.shaping", ["soft_overlong"])
        draft.say(f"{section}.len", "algorithm.shaping.0.cache", cache)
        draft.say(f"{section}.penalty_factor", "algorithm.shaping.0.factor", factor)
        limit = f"{section.rpartition('.')[0]}.max_resp_len"
        draft.explain([limit], "same", "rollout.max_tokens is the length with the full penalty")
        draft.explain(keys, "same", "the penalty is in the metrics: reward/shaped against reward/mean")
        return [{"name": "soft_overlong", "cache": cache, "factor": factor}]
    return []


def has_signed_scores(draft: Draft) -> bool:
    """Whether verl's own score of DAPO's mathematics is used, which is 1 or -1."""
    manager = draft.value("reward.reward_manager.name", draft.value("reward_model.reward_manager"))
    parts = draft.tree.get("reward", {}).get("parts", [])
    return manager == "dapo" and [part["name"] for part in parts] == ["math"]


def _correction(draft: Draft) -> dict[str, Any]:
    """verl's rollout correction, flat or in its section; only values that are not verl's defaults say something."""
    keys = {key: f"algorithm.rollout_correction.{key}" for key in CORRECTION_KEYS}
    for key in CORRECTION_KEYS:
        keys[key] = draft.first_given(keys[key], f"algorithm.{key}")
    given = {key: draft.given[theirs] for key, theirs in keys.items() if theirs in draft.given}
    given = {key: value for key, value in given.items() if (key, value) not in DEFAULT_CORRECTION.items()}
    everywhere = [k for k in draft.given if k.startswith("algorithm.rollout_")] + [
        keys["bypass_mode"],
        keys["loss_type"],
    ]
    cap = f"{ACTOR}.tis_imp_ratio_cap"
    if draft.is_given(cap) and draft.number(cap) > 0:
        given, keys = {"rollout_is": "token", "rollout_is_threshold": draft.number(cap)}, {"rollout_is": cap}
        everywhere.append(cap)
    if not given or given == {"loss_type": given.get("loss_type")}:
        draft.explain(
            [*everywhere, cap], "same", "no correction: verl only measures the mismatch, as burnish always does"
        )
        return {}
    if given.get("bypass_mode") and given.get("loss_type", "ppo_clip") == "ppo_clip" and given.pop("rollout_is", None):
        given.pop("rollout_is_threshold", None)
        draft.same(keys["rollout_is"], "not used: with bypass_mode and ppo_clip the clipped ratio is the correction")
    correction = translate_correction(given)
    draft.explain(everywhere, "translated", f"algorithm.correction={show(correction)}")
    if any(key.endswith("k1") for key in correction.get("reject", {})):
        draft.notes.append(
            "bounds of k1 rejections are on the ratio trainer/engine, as verl documents them; its code bounds the inverse ratio"
        )
    if correction.get("loss") == "reinforce":
        return {"correction": correction, "ratio": "none", "clip": "none", "loss": "logprob"}
    return {"correction": correction}


def _router(draft: Draft, slots: dict[str, Any]) -> dict[str, Any]:
    """verl's router replay: R3 replays the engine's experts, R2 those of the learner's pass of old log-probs."""
    key, recording = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
    mode = str(draft.value(key, "disabled"))
    if mode == "R3":
        draft.say(key, "algorithm.router.engine_experts", "replay", is_always=True)
        draft.say(recording, "algorithm.router.engine_experts", "replay")
        return {"router": {"engine_experts": "replay"}}
    if mode != "R2":
        return {}
    if updates_per_step(draft) == 1:
        draft.differs(
            key, "R2 has no effect with one update per batch, whose own experts are those of the old log-probs"
        )
        return {}
    if slots.get("correction", {}).get("name") == "bypass":
        draft.differs(key, "there are no old log-probs of the learner with algorithm.correction=bypass")
        return {}
    draft.say(key, "algorithm.router.learner_experts", "replay", is_always=True)
    return {"router": {"learner_experts": "replay"}}


def updates_per_step(draft: Draft) -> int:
    """Optimizer steps of one training step: mini-batches times epochs."""
    return num_mini_batches(draft) * max(1, draft.integer(f"{ACTOR}.ppo_epochs"))


def num_mini_batches(draft: Draft) -> int:
    """Mini-batches of one epoch. verl gives their size in prompts."""
    prompts, size = draft.integer("data.train_batch_size"), draft.integer(f"{ACTOR}.ppo_mini_batch_size")
    return max(1, -(-prompts // max(1, size)))


def is_multi_turn(draft: Draft) -> bool:
    """Whether the script asks for episodes of several turns."""
    loops = draft.value(f"{ROLLOUT}.agent.default_agent_loop", "single_turn_agent")
    return draft.flag(f"{ROLLOUT}.multi_turn.enable") or loops != "single_turn_agent"
