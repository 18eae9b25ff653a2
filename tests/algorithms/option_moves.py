"""The values that each option of an algorithm is moved to, in which algorithm it can act, and an algorithm for each choice of a slot."""

from __future__ import annotations

from typing import Any

from burnish.algorithms.advantages.advantage_functions import ADVANTAGES
from burnish.algorithms.correction.corrections import CORRECTIONS
from burnish.algorithms.filters.filter_functions import GROUP_FILTERS, RESAMPLERS, SAMPLE_FILTERS
from burnish.algorithms.losses.loss_functions import LOSSES
from burnish.algorithms.losses.ratios_and_clips import CLIPS, RATIOS
from burnish.algorithms.shaping.shapers import SHAPERS
from burnish.training.reference import REFERENCES

FUNCTIONS: dict[str, dict[str, Any]] = {
    "advantage": dict(ADVANTAGES),
    "ratio": dict(RATIOS),
    "clip": dict(CLIPS),
    "loss": dict(LOSSES),
    "filters": {**GROUP_FILTERS, **SAMPLE_FILTERS, **RESAMPLERS},
    "shaping": dict(SHAPERS),
    "correction": dict(CORRECTIONS),
    "reference": {"none": None, "rollout": None, **REFERENCES},  # the engine's log-probs are a column
}
KL_LOSS = {"kl": {"loss": {"coef": 0.5}, "reference": "frozen"}}
KL_REWARD = {"kl": {"reward": {"estimator": "k1", "coef": 0.5}, "reference": "frozen"}, "advantage": "reinforce"}
TAUGHT = {"reward": {"coef": 0.5}, "reference": "teacher"}
SAMPLED = {"name": "divergence", "support": "sampled"}
DISTILLED = {"ratio": "none", "clip": "none", "advantage": "none", "kl": {"reference": "teacher"}}
FROZEN = {"kl": {"reference": "frozen"}}
NORM = {"aggregation": "seq-mean-token-sum-norm"}
BARE = {"ratio": "none", "clip": "none"}
WEIGHTS = {"loss": "sg_logprob"}
GAE = {"advantage": {"name": "gae", "lam": 0.9, "gamma": 0.9}, "critic": {}}
BILEVEL = {"advantage": {"name": "bilevel_gae", "lam": 0.9, "gamma": 0.9}, "critic": {}, "batch": "turns"}
FADING = {"advantage": {"name": "reinforce", "gamma": 0.5}}
TREES, SEGMENTS = {"batch": "trees"}, {"batch": "segments"}
PAIRS = {**BARE, "advantage": "none", "batch": "pairs"}
COV = {"clip": {"name": "clip_cov", "share": 0.2, "low_cov": 0.05, "high_cov": 5.0, "low": 0.5, "high": 0.5}}
REPEATS = {"shaping": [{"name": "repetition", "ngram": 2}]}
DENSE = {"shaping": [{"name": "repetition_dense", "ngram": 2}], "advantage": "reinforce"}
PG = {**BARE, "loss": "logprob", "correction": {"name": "bypass", "loss": "reinforce"}}
PG_WEIGHTS = {"correction": {"name": "bypass", "loss": "reinforce", "weights": "token"}}
T1_REPEATS = {"shaping": [{"name": "t1_penalty", "ngram": 2}]}
T1 = {"shaping": [{"name": "t1_penalty", "ngram": 2, "script_part": "b", "script_low": 0.35}]}


def named(slot: str, name: str, **options: Any) -> dict[str, Any]:
    return {slot: {"name": name, **options}}


REFUSED = {
    "BypassCorrection.loss": {"ppo_clip", "reinforce"},  # by other slots: `test_bypass_takes_one_of_two_losses`
    "KlReward.estimator": {"k1+", "abs+", "k3+"},  # by the record
    "Refill.short": {"error"},  # stops the run: tests/trainers/test_rl.py
}
Move = tuple[dict[str, Any], str, list[Any]]


def advantage(name: str, option: str, *values: Any, **base: Any) -> list[Move]:
    options = base.pop("options", {})
    return [({**named("advantage", name, **options), **base}, f"advantage.{option}", list(values))]


def correction(name: str, option: str, *values: Any, **options: Any) -> list[Move]:
    return [(named("correction", name, **options), f"correction.{option}", list(values))]


def listed(slot: str, name: str, option: str, *values: Any, **base: Any) -> list[Move]:
    options = base.pop("options", {})
    return [({slot: [{"name": name, **options}], **base}, f"{slot}.0.{option}", list(values))]


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"]
RIGHT = {"shaping": [{"name": "signed", "wrong": 0.0}]}
GAMMA = {"clip": "gamma", "loss": "sg_logprob"}
ASTAR = {**BARE, **FROZEN, "advantage": "offline_value", "loss": "astar_sq"}
M2 = {"clip": {"name": "second_moment", "tau": 0.1}}


def rec(option: str, *values: Any, **options: Any) -> list[Move]:
    return [({"ratio": "none", "clip": "none", "loss": {"name": "rec", **options}}, f"loss.{option}", list(values))]


MOVES: dict[str, list[Move]] = {
    "GrpoAdvantage.std": advantage("grpo", "std", "none", "batch"),
    "GrpoAdvantage.eps": advantage("grpo", "eps", 0.1),
    "GrpoAdvantage.singleton": advantage("grpo", "singleton", "zero"),
    "GrpoAdvantage.ddof": advantage("grpo", "ddof", 0),
    "ReinforceAdvantage.gamma": advantage("reinforce", "gamma", 0.5),
    "ReinforceAdvantage.baseline": advantage("reinforce", "baseline", 0.25),
    "RlooAdvantage.singleton": advantage("rloo", "singleton", "zero"),
    "ReinforcePlusPlusAdvantage.gamma": advantage("reinforce_plus_plus", "gamma", 0.5),
    "ReinforcePlusPlusAdvantage.ddof": advantage("reinforce_plus_plus", "ddof", 0),
    "ReinforcePlusPlusBaselineAdvantage.ddof": advantage("reinforce_plus_plus_baseline", "ddof", 0),
    "ReinforcePlusPlusBaselineAdvantage.singleton": advantage("reinforce_plus_plus_baseline", "singleton", "zero"),
    "OpoAdvantage.singleton": advantage("opo", "singleton", "zero"),
    "GpgAdvantage.normalise": advantage("gpg", "normalise", "std"),
    "GpgAdvantage.eps": advantage("gpg", "eps", 0.1, options={"normalise": "std"}),
    "GrpoPasskAdvantage.std": advantage("grpo_passk", "std", "none", batch="pairs"),
    "GrpoPasskAdvantage.eps": advantage("grpo_passk", "eps", 0.1, batch="pairs"),
    "GaeAdvantage.gamma": [(GAE, "advantage.gamma", [0.5])],
    "GaeAdvantage.lam": [(GAE, "advantage.lam", [0.5])],
    "GaeAdvantage.lam_critic": [(GAE, "advantage.lam_critic", [1.0])],
    "GaeAdvantage.length_adaptive": [
        ({"advantage": "gae", "critic": {}}, "advantage.length_adaptive", [0.5]),
    ],
    "GaeAdvantage.whiten": [(GAE, "advantage.whiten", [False])],
    "GaeAdvantage.ddof": [(GAE, "advantage.ddof", [0])],
    "GdpoAdvantage.std": advantage("gdpo", "std", "none"),
    "GdpoAdvantage.eps": advantage("gdpo", "eps", 0.1),
    "GdpoAdvantage.weights": advantage("gdpo", "weights", {"a": 2.0}, {"b": 3.0}),
    "GdpoAdvantage.ddof": advantage("gdpo", "ddof", 0),
    "OtbAdvantage.tail": advantage("otb", "tail", "zero"),
    "SoftmeanAdvantage.beta": advantage("softmean", "beta", 3.0),
    "PrimeRlooAdvantage.process_coef": advantage("prime_rloo", "process_coef", 1.0, process={}),
    "PrimeRlooAdvantage.outcome_coef": advantage("prime_rloo", "outcome_coef", 1.0, process={}),
    "PrimeRlooAdvantage.norm": advantage("prime_rloo", "norm", "none", process={}),
    "PrimeRlooAdvantage.whiten": advantage("prime_rloo", "whiten", False, process={}),
    "PrimeRlooAdvantage.ddof": advantage("prime_rloo", "ddof", 0, process={}),
    "GigpoAdvantage.omega": advantage("gigpo", "omega", 0.5, batch="turns"),
    "GigpoAdvantage.gamma": advantage("gigpo", "gamma", 0.5, batch="turns"),
    "GigpoAdvantage.normalise": advantage("gigpo", "normalise", "std", batch="turns"),
    "HgpoAdvantage.history": advantage("hgpo", "history", 0, batch="turns"),
    "HgpoAdvantage.alpha": advantage("hgpo", "alpha", 0.0, batch="turns"),
    "HgpoAdvantage.gamma": advantage("hgpo", "gamma", 0.5, batch="turns"),
    "HgpoAdvantage.normalise": advantage("hgpo", "normalise", "none", batch="turns"),
    "HgpoAdvantage.episode": advantage("hgpo", "episode", True, batch="turns"),
    "MtGrpoAdvantage.outcome": advantage("mt_grpo", "outcome", 0.5, batch="turns"),
    "MtGrpoAdvantage.std": advantage("mt_grpo", "std", "none", batch="turns"),
    "TrrPlusPlusAdvantage.eps": advantage("trr_plus_plus", "eps", 0.1),
    "TrrPlusPlusAdvantage.ddof": advantage("trr_plus_plus", "ddof", 0),
    "RebnAdvantage.gamma": advantage("rebn", "gamma", 0.5, batch="turns"),
    "StepBroadcastAdvantage.std": advantage("step_broadcast", "std", "none", "batch", batch="turns"),
    "StepBroadcastAdvantage.eps": advantage("step_broadcast", "eps", 0.1, batch="turns"),
    "StepBroadcastAdvantage.step_norm": advantage("step_broadcast", "step_norm", True, batch="turns"),
    "StepBroadcastAdvantage.min_std": advantage("step_broadcast", "min_std", 0.8, batch="turns"),
    "RaeAdvantage.alpha": advantage("rae", "alpha", 0.5),
    "HierarchicalGrpoAdvantage.episode_roles": advantage(
        "hierarchical_grpo",
        "episode_roles",
        ["proposer"],
        ["proposer", "solver"],
        options={"episode_roles": ["solver"]},
    ),
    "BilevelGaeAdvantage.gamma": [(BILEVEL, "advantage.gamma", [0.5])],
    "BilevelGaeAdvantage.lam": [(BILEVEL, "advantage.lam", [0.5])],
    "BilevelGaeAdvantage.turn_gamma": [(BILEVEL, "advantage.turn_gamma", [0.5])],
    "BilevelGaeAdvantage.turn_lam": [(BILEVEL, "advantage.turn_lam", [0.5])],
    "BilevelGaeAdvantage.lam_critic": [(BILEVEL, "advantage.lam_critic", [1.0])],
    "BilevelGaeAdvantage.whiten": [(BILEVEL, "advantage.whiten", [False])],
    "BilevelGaeAdvantage.ddof": [(BILEVEL, "advantage.ddof", [0])],
    "SpoTreeAdvantage.normalise": advantage("spo_tree", "normalise", "std", **TREES),
    "PpoClip.low": [({}, "clip.low", [0.1])],
    "PpoClip.high": [({}, "clip.high", [0.28])],
    "PpoClip.dual": [({}, "clip.dual", [1.5])],
    "PpoClip.drift": [(named("advantage", "reinforce", baseline=2.0), "clip.drift", [0.1])],
    "LogGeoClip.low": [({**named("clip", "log_geo"), "ratio": "sequence"}, "clip.low", [0.1])],
    "LogGeoClip.high": [({**named("clip", "log_geo"), "ratio": "sequence"}, "clip.high", [0.1])],
    "ImportanceWeightClip.low": [({**WEIGHTS, "clip": "is_weight"}, "clip.low", [0.2])],
    "ImportanceWeightClip.cap": [({**WEIGHTS, "clip": "is_weight"}, "clip.cap", [5.0])],
    "SoftClip.tau_positive": [({"clip": "soft"}, "clip.tau_positive", [2.0])],
    "SoftClip.tau_negative": [({"clip": "soft"}, "clip.tau_negative", [2.0])],
    "CovarianceClip.share": [(COV, "clip.share", [0.05])],
    "CovarianceClip.low_cov": [(COV, "clip.low_cov", [0.6])],
    "CovarianceClip.high_cov": [(COV, "clip.high_cov", [0.06])],
    "CovarianceClip.low": [(COV, "clip.low", [0.1])],
    "CovarianceClip.high": [(COV, "clip.high", [0.1])],
    "CovarianceKl.share": [(named("clip", "kl_cov"), "clip.share", [0.3])],
    "CovarianceKl.coef": [(named("clip", "kl_cov"), "clip.coef", [0.1])],
    "TotalVariationClip.low": [({**WEIGHTS, "clip": "dppo_tv"}, "clip.low", [0.01])],
    "TotalVariationClip.high": [({**WEIGHTS, "clip": "dppo_tv"}, "clip.high", [0.01])],
    "TotalVariationClip.cap": [({**WEIGHTS, "clip": "dppo_tv"}, "clip.cap", [1.0])],
    "TotalVariationClip.symmetric": [({**WEIGHTS, "clip": "dppo_tv"}, "clip.symmetric", [True])],
    "BinaryKlClip.low": [({**WEIGHTS, "clip": "dppo_kl"}, "clip.low", [1.0])],
    "BinaryKlClip.high": [({**WEIGHTS, "clip": "dppo_kl"}, "clip.high", [0.001])],
    "BinaryKlClip.cap": [({**WEIGHTS, "clip": "dppo_kl"}, "clip.cap", [1.0])],
    "OmdLoss.tau": [({**BARE, "loss": "omd_sq"}, "loss.tau", [0.5])],
    "SppoLoss.eta": [({**BARE, "advantage": "win_rate", "loss": "sppo_sq"}, "loss.eta", [3.0])],
    "DroLoss.beta": [({**BARE, "loss": "dro"}, "loss.beta", [0.5])],
    "BceLoss.beta": [({**BARE, "advantage": "none", "loss": "bce"}, "loss.beta", [2.0])],
    "BceLoss.normalise": [({**BARE, "advantage": "none", "loss": "bce"}, "loss.normalise", ["grpo", "naive"])],
    "BceLoss.class_weights": [({**BARE, "advantage": "none", "loss": "bce"}, "loss.class_weights", [False])],
    "BceLoss.per_token": [({**BARE, "advantage": "none", "loss": "bce"}, "loss.per_token", [True])],
    "MixedLoss.gamma": [({**BARE, "loss": "mixed_offpolicy"}, "loss.gamma", [0.5])],
    "MixedLoss.weight": [({**BARE, "loss": "mixed_offpolicy"}, "loss.weight", ["author", "mixture"])],
    "MixedLoss.focus": [({**BARE, "loss": "mixed_offpolicy"}, "loss.focus", [0.5])],
    "MixedLoss.clip": [({**BARE, "loss": "mixed_offpolicy"}, "loss.clip", [0.2])],
    "DpoLoss.beta": [({**PAIRS, **FROZEN, "loss": "dpo"}, "loss.beta", [0.5])],
    "DpoLoss.smoothing": [({**PAIRS, **FROZEN, "loss": "dpo"}, "loss.smoothing", [0.1])],
    "DpoLoss.average": [({**PAIRS, **FROZEN, "loss": "dpo"}, "loss.average", [True])],
    "IpoLoss.beta": [({**PAIRS, **FROZEN, "loss": "ipo"}, "loss.beta", [0.5])],
    "IpoLoss.average": [({**PAIRS, **FROZEN, "loss": "ipo"}, "loss.average", [False])],
    "SimpoLoss.beta": [({**PAIRS, "loss": "simpo"}, "loss.beta", [1.0])],
    "SimpoLoss.margin": [({**PAIRS, "loss": "simpo"}, "loss.margin", [0.1])],
    "OrpoLoss.coef": [({**PAIRS, "loss": "orpo"}, "loss.coef", [0.5])],
    "KtoLoss.beta": [({**PAIRS, **FROZEN, "loss": "kto"}, "loss.beta", [0.5])],
    "KtoLoss.desirable": [({**PAIRS, **FROZEN, "loss": "kto"}, "loss.desirable", [2.0])],
    "KtoLoss.undesirable": [({**PAIRS, **FROZEN, "loss": "kto"}, "loss.undesirable", [2.0])],
    "MaxRlAdvantage.singleton": advantage("max_rl", "singleton", "raw", **RIGHT),
    "AsymreAdvantage.delta": advantage("asymre", "delta", -0.5),
    "OpmdAdvantage.baseline": advantage("opmd", "baseline", "logavgexp"),
    "OpmdAdvantage.tau": advantage("opmd", "tau", 0.5, options={"baseline": "logavgexp"}),
    **{
        f"GammaClip.{name}": [(GAMMA, f"clip.{name}", [1.5])]
        for name in ("k_positive", "lam_positive", "k_negative", "lam_negative")
    },
    "TaperClip.threshold": [({"clip": "taper", "ratio": "token", **WEIGHTS}, "clip.threshold", [-0.8])],
    "SecondMomentClip.tau": [(M2, "clip.tau", [0.01])],
    "SecondMomentClip.denominator": [(M2, "clip.denominator", ["kept"])],
    "SecondMomentClip.low": [({"clip": {**M2["clip"], "low": 0.2, "high": 0.2}}, "clip.low", [0.9])],
    "SecondMomentClip.high": [({"clip": {**M2["clip"], "low": 0.2, "high": 0.2}}, "clip.high", [0.9])],
    "RecLoss.keep": rec("keep", "one_side", "two_side", "ring"),
    "RecLoss.low": rec("low", 0.5, keep="two_side"),
    "RecLoss.high": rec("high", 0.5, keep="two_side"),
    "RecLoss.outer_low": rec("outer_low", 0.9, keep="ring"),
    "RecLoss.outer_high": rec("outer_high", 0.3, keep="ring"),
    "RecLoss.weight": rec("weight", "ratio", "advantage"),
    "RecLoss.temperature": rec("temperature", 0.5, weight="advantage"),
    "RecLoss.square": rec("square", 0.1),
    "RecLoss.imitation": rec("imitation", 0.1),
    "OpmdLoss.tau": [({**BARE, "loss": "opmd"}, "loss.tau", [0.5])],
    "AstarLoss.beta": [(ASTAR, "loss.beta", [0.1])],
    "SeqErrorFilter.threshold": listed("filters", "seq_error", "threshold", 1.5),
    "ClipBFilter.mu": listed("filters", "clip_b", "mu", 0.0),
    "LinearLengthShaper.output": listed("shaping", "linear_length", "output", 0.5),
    "LinearLengthShaper.input": listed("shaping", "linear_length", "input", 0.5, batch="turns"),
    "LinearLengthShaper.turns": listed("shaping", "linear_length", "turns", 0.5, advantage="reinforce"),
    "ZeroSignalFilter.metric": listed("filters", "zero_signal", "metric", "accuracy", shaping=["lcpo_exact"]),
    "DifficultyBandFilter.low": listed("filters", "difficulty_band", "low", 0.4),
    "DifficultyBandFilter.high": listed("filters", "difficulty_band", "high", 0.4),
    "SnrFilter.mode": [
        move
        for mode in (
            "softmax",
            "top",
            "relative",
        )  # there are two groups with a spread, so each differs from linear alone
        for move in listed("filters", "snr", "mode", mode, options={"share": 0.55})
    ],
    "SnrFilter.share": listed("filters", "snr", "share", 0.5),
    "SnrFilter.include_zero": listed("filters", "snr", "include_zero", False, options={"share": 1.0}),
    "SnrFilter.scale": listed("filters", "snr", "scale", "share", "sqrt", options={"share": 0.5}),
    "SnrFilter.slack": listed("filters", "snr", "slack", 1.0),
    "CppoFilter.prune": listed("filters", "cppo", "prune", 0.25),
    "TreeEdgesFilter.most": listed("filters", "tree_edges", "most", 2, 3, advantage="spo_tree", **TREES),
    "ProbMaskFilter.below": listed("filters", "prob_mask", "below", 0.2),
    "PfPpoFilter.mode": listed("filters", "pf_ppo", "mode", "best_worst", "best_random", "best"),
    "PfPpoFilter.power": listed("filters", "pf_ppo", "power", 0.0),
    "SoftOverlongShaper.max_tokens": listed("shaping", "soft_overlong", "max_tokens", 4),
    "SoftOverlongShaper.cache": listed("shaping", "soft_overlong", "cache", 6),
    "SoftOverlongShaper.factor": listed("shaping", "soft_overlong", "factor", 0.5, options={"cache": 6}),
    "KimiLengthShaper.weight": listed("shaping", "kimi_length", "weight", 0.5),
    "KimiLengthShaper.warmup_steps": listed("shaping", "kimi_length", "warmup_steps", 5),
    "CosineShaper.max_tokens": listed("shaping", "cosine", "max_tokens", 20),
    "CosineShaper.correct": listed("shaping", "cosine", "correct", (3.0, 1.0)),
    "CosineShaper.wrong": listed("shaping", "cosine", "wrong", (-5.0, 0.0)),
    "CosineShaper.exceeded": listed("shaping", "cosine", "exceeded", -1.0, options={"max_tokens": 4}),
    "CosineShaper.margin": listed("shaping", "cosine", "margin", 4),
    "RepetitionShaper.ngram": [(REPEATS, "shaping.0.ngram", [1])],
    "RepetitionShaper.penalty": [(REPEATS, "shaping.0.penalty", [-0.5])],
    "RepetitionDenseShaper.ngram": [(DENSE, "shaping.0.ngram", [1])],
    "RepetitionDenseShaper.penalty": [(DENSE, "shaping.0.penalty", [-0.5])],
    "RepetitionDenseShaper.gamma": [(DENSE, "shaping.0.gamma", [0.5])],
    "InformationGainShaper.weight": listed(
        "shaping", "information_gain", "weight", 0.5, advantage="rebn", batch="turns"
    ),
    "LcpoExactShaper.alpha": listed("shaping", "lcpo_exact", "alpha", 0.1),
    "LcpoMaxShaper.alpha": listed("shaping", "lcpo_max", "alpha", 0.1),
    "LcpoMaxShaper.delta": listed("shaping", "lcpo_max", "delta", 0.1),
    "StopProperlyShaper.coef": listed("shaping", "stop_properly", "coef", -0.5, options={"coef": 0.5}),
    "T1PenaltyShaper.ngram": [(T1_REPEATS, "shaping.0.ngram", [1])],
    "T1PenaltyShaper.share": [(T1_REPEATS, "shaping.0.share", [0.9])],
    "T1PenaltyShaper.script_part": [(T1, "shaping.0.script_part", ["a"])],
    "T1PenaltyShaper.script_low": [(T1, "shaping.0.script_low", [0.65])],
    "SignedShaper.right": listed("shaping", "signed", "right", 2.0),
    "SignedShaper.wrong": listed("shaping", "signed", "wrong", 0.0),
    "CoupledCorrection.apply": correction("seed", "apply", False),
    "CoupledCorrection.threshold": correction("seed", "threshold", 1.2),
    "CoupledCorrection.lower": correction("seed", "lower", 0.9, mode="mask"),
    "CoupledCorrection.level": correction("seed", "level", "sequence", "geometric"),
    "CoupledCorrection.mode": correction("seed", "mode", "mask"),
    "CoupledCorrection.veto": correction("seed", "veto", 0.9, None, veto=0.7),
    "CoupledCorrection.target": correction("seed", "target", "mask", mode="mask"),
    "DecoupledCorrection.weights": correction("decoupled", "weights", "token", "sequence"),
    "DecoupledCorrection.threshold": correction("decoupled", "threshold", 1.2, (0.8, 1.2), weights="token"),
    "DecoupledCorrection.batch_normalise": correction("decoupled", "batch_normalise", True, weights="token"),
    "DecoupledCorrection.reject": correction("decoupled", "reject", {"token_k2": 0.05}, {"seq_mean_k3": 0.1}),
    "BypassCorrection.weights": [(PG, "correction.weights", ["token", "sequence"])],
    "BypassCorrection.threshold": [({**PG, **PG_WEIGHTS}, "correction.threshold", [1.2, (0.8, 1.2)])],
    "BypassCorrection.batch_normalise": [({**PG, **PG_WEIGHTS}, "correction.batch_normalise", [True])],
    "BypassCorrection.reject": correction("bypass", "reject", {"token_k2": 0.05}, {"seq_mean_k3": 0.1}),
    "BypassCorrection.loss": [],  # takes the place of other slots: `test_bypass_takes_one_of_two_losses`
    "BudgetCorrection.k3_kl": correction("budget", "k3_kl", 0.001, k3_kl=1.0),
    "BudgetCorrection.ess": correction("budget", "ess", 0.8, k3_kl=1.0),
    "Aggregation.name": [({}, "aggregation.name", MODES)],
    "Aggregation.horizon": [(NORM, "aggregation.horizon", [3])],
    "KlLoss.estimator": [(KL_LOSS, "kl.loss.estimator", ["k1", "abs", "k2", "k1+", "abs+", "k3+"])],
    "KlLoss.coef": [(KL_LOSS, "kl.loss.coef", [0.25])],
    "KlLoss.clamp": [(KL_LOSS, "kl.loss.clamp", [0.05])],
    "KlReward.clamp": [(KL_REWARD, "kl.reward.clamp", [0.05])],
    "KlReward.policy": [(KL_REWARD, "kl.reward.policy", ["rollout"])],
    "KlAdvantage.coef": [({"kl": {"advantage": {"coef": 0.5}, "reference": "teacher"}}, "kl.advantage.coef", [0.25])],
    "KlAdvantage.clamp": [({"kl": {"advantage": {"coef": 0.5}, "reference": "teacher"}}, "kl.advantage.clamp", [0.05])],
    "Kl.advantage": [(KL_LOSS, "kl.advantage", [{"coef": 0.5}])],
    "DivergenceLoss.cap": [({**DISTILLED, "loss": SAMPLED}, "loss.cap", [0.5, 2.0])],
    "DivergenceLoss.weight": [
        ({**DISTILLED, "advantage": "grpo", "loss": {**SAMPLED, "weight": 0.5}}, "loss.weight", [0.25])
    ],
    "DivergenceLoss.clip": [
        ({**DISTILLED, "advantage": "grpo", "loss": {**SAMPLED, "weight": 0.5}}, "loss.clip", [0.01])
    ],
    "TeacherSurrogateLoss.fall": [({**DISTILLED, "loss": "teacher_surrogate"}, "loss.fall", [0.0, None])],
    "TeacherSurrogateLoss.anchor_coef": [({**DISTILLED, "loss": "teacher_surrogate"}, "loss.anchor_coef", [0.5])],
    "SuccessContext.feedback": [],  # what an environment says at the end: `tests/trainers/test_teacher_columns.py`
    "NonStubFilter.min_chars": listed("filters", "non_stub", "min_chars", 4, 20),
    "TeachersReference.paths": [],  # directories: `tests/trainers/test_distillation_toys.py`
    "TeachersReference.column": [],  # the same
    "TeacherReference.url": [],  # a server: `tests/distributed/test_server_teacher.py`
    "TeacherReference.served_model": [],  # the same
    "TeacherReference.path": [],  # a directory: `tests/training/test_reference.py`
    "DistillationAdvantage.outcome": advantage("distillation", "outcome", 0.5, kl=TAUGHT),
    "DistillationAdvantage.prefix_weight": advantage("distillation", "prefix_weight", 0.5, kl=TAUGHT),
    "KlLoss.is_corrected": [(KL_LOSS, "kl.loss.is_corrected", [True])],
    "KlReward.estimator": [(KL_REWARD, "kl.reward.estimator", ["abs", "k2", "k3"])],
    "KlReward.coef": [(KL_REWARD, "kl.reward.coef", [0.25])],
    "KlReward.center": [(KL_REWARD, "kl.reward.center", ["token", "sequence"])],
    "Kl.loss": [(KL_REWARD, "kl.loss", [{"coef": 0.5}])],
    "Kl.reward": [(KL_LOSS, "kl.reward", [{"coef": 0.5}])],
    "Entropy.coef": [({}, "entropy.coef", [0.1])],
    "Entropy.top_share": [({}, "entropy.top_share", [0.3])],
    "Auxiliary.positive_nll": [({}, "auxiliary.positive_nll", [0.1])],
    "Auxiliary.observations": [({}, "auxiliary.observations", [{}])],
    "Observations.tool": [({"auxiliary": {"observations": {"user": 0.2}}}, "auxiliary.observations.tool", [0.0, 0.5])],
    "Observations.user": [({"auxiliary": {"observations": {}}}, "auxiliary.observations.user", [0.1])],
    "Observations.system": [({"auxiliary": {"observations": {}}}, "auxiliary.observations.system", [0.1])],
    "Refill.short": [({"filters": ["difficulty_band"], "refill": {"rounds": 2}}, "refill.short", ["fill"])],
}
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "advantage": {
        name: {"advantage": name}
        for name in ADVANTAGES
        if name
        not in (
            "max_rl",
            "opmd",
            "gae",
            "bilevel_gae",
            "prime_rloo",
            "none",
            "gigpo",
            "hgpo",
            "mt_grpo",
            "step_broadcast",
            "hierarchical_grpo",
            "spo_tree",
            "spo_chain",
            "grpo_passk",
            "opo",
        )
    }
    | {name: {"advantage": name, "batch": "turns"} for name in ("gigpo", "hgpo", "mt_grpo")}
    | {
        "max_rl": {"advantage": "max_rl", **RIGHT},
        "opmd": {"advantage": {"name": "opmd", "baseline": "logavgexp", "tau": 0.5}},
    }
    | {"step_broadcast": {"advantage": {"name": "step_broadcast", "step_norm": True}, "batch": "turns"}}
    | {"hierarchical_grpo": {"advantage": {"name": "hierarchical_grpo", "episode_roles": ["solver"]}}}
    | {"bilevel_gae": BILEVEL}
    | {"gae": GAE, "opo": {"advantage": "opo"}, "prime_rloo": {"advantage": "prime_rloo", "process": {}}},
    "ratio": {name: {"clip": "none", "ratio": name, **FADING} for name in RATIOS if name != "none"}
    | {"none": {**BARE, "loss": "logprob"}},
    "clip": {
        "ppo": {},
        "none": {"clip": "none"},
        "log_geo": {"clip": "log_geo", "ratio": "sequence"},
        "is_weight": {"clip": "is_weight", **WEIGHTS},
        "soft": {"clip": "soft"},
        "clip_cov": COV,
        "kl_cov": {"clip": "kl_cov"},
        "dppo_tv": {"clip": "dppo_tv", **WEIGHTS},
        "dppo_kl": {"clip": "dppo_kl", **WEIGHTS},
        "gamma": GAMMA,
        "taper": {"clip": "taper", "ratio": "seq_prod", **WEIGHTS},
        "second_moment": M2,
    },
    "loss": {
        "surrogate": {"clip": "none"},
        "sg_logprob": {"clip": "is_weight", **WEIGHTS},
        "logprob": {**BARE, "loss": "logprob"},
        "omd_sq": {**BARE, "loss": "omd_sq"},
        "sppo_sq": {**BARE, "advantage": "win_rate", "loss": "sppo_sq"},
        "dro": {**BARE, "loss": "dro"},
        "bce": {**BARE, "advantage": "none", "loss": "bce"},
        "mixed_offpolicy": {**BARE, "loss": "mixed_offpolicy"},
        "nll": {**BARE, "advantage": "none", "loss": "nll"},
        "divergence": {**DISTILLED, "loss": SAMPLED},
        "teacher_surrogate": {**DISTILLED, "loss": "teacher_surrogate"},
        "rec": rec("keep", keep="one_side")[0][0],
        "opmd": {**BARE, "loss": "opmd"},
        "astar_sq": ASTAR,
        **{name: {**PAIRS, "loss": name} for name in ("simpo", "orpo")},
        **{name: {**PAIRS, **FROZEN, "loss": name} for name in ("dpo", "ipo", "kto")},
    },
    "correction": {
        "none": named("correction", "none"),
        "seed": named("correction", "seed"),
        "decoupled": named("correction", "decoupled", weights="sequence"),
        "bypass": named("correction", "bypass"),
        "budget": named("correction", "budget", k3_kl=0.001),
    },
    "filters": {name: {"filters": [name]} for name in FUNCTIONS["filters"]}
    | {"prob_mask": {"filters": [{"name": "prob_mask", "below": 0.5}]}, "-": {}}
    | {"clip_b": {"filters": [{"name": "clip_b", "mu": 0.2}]}}
    | {"seq_error": {"filters": [{"name": "seq_error", "threshold": 1.5}]}}
    | {"balance": {"filters": ["balance"], "shaping": ["signed"]}}
    | {"snr": {"filters": [{"name": "snr", "share": 0.5}]}}
    | {"tree_edges": {"filters": ["tree_edges"], "advantage": "spo_tree", **TREES}}
    | {"pairs": {**BARE, "advantage": "none", "loss": "simpo", "filters": ["pairs"]}},
    "shaping": {name: {"shaping": [name], "advantage": "reinforce"} for name in SHAPERS if name != "stop_properly"}
    | {"stop_properly": listed("shaping", "stop_properly", "", options={"coef": -0.5}, advantage="reinforce")[0][0]}
    | {"information_gain": {"shaping": ["information_gain"], "advantage": "reinforce", "batch": "turns"}}
    | {"repetition": {**REPEATS, "advantage": "reinforce"}, "repetition_dense": DENSE}
    | {"soft_overlong": {"shaping": [{"name": "soft_overlong", "max_tokens": 4}], "advantage": "reinforce"}}
    | {"-": {"advantage": "reinforce"}},
}
