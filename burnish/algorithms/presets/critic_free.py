"""Presets without a critic: the baseline comes from the group, from the batch, or is constant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named algorithm: the slots that differ from the defaults, its paper and the problem it solves."""

    title: str
    paper: str
    solves: str
    """The problem it solves, in one line."""
    slots: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """Settings of the method that are not slots, such as rollout, rewards and schedule."""


PPO = {"name": "ppo", "low": 0.2, "high": 0.2}
TOKEN_MEAN, SEQUENCE_MEAN = "token-mean", "seq-mean-token-mean"
NO_RATIO = {"ratio": "none", "clip": "none", "loss": "logprob", "aggregation": "seq-mean-token-sum"}
KL_IN_REWARD = {"reward": {"estimator": "k1", "coef": 0.001}, "reference": "frozen"}
KL_IN_LOSS = {"loss": {"estimator": "k3", "coef": 0.001}, "reference": "frozen"}
CRITIC: dict[str, Any] = {}
"""A critic with its defaults."""


DYNAMIC_SAMPLING = {
    "filters": [{"name": "zero_signal", "metric": "accuracy"}],
    "refill": {"rounds": 10},
}

R1 = {
    "advantage": "grpo",
    "clip": {"name": "ppo", "low": 10.0, "high": 10.0},
    "aggregation": SEQUENCE_MEAN,
    "kl": {"loss": {"estimator": "k3", "coef": 0.001}, "reference": {"name": "hard_sync", "every": 400}},
}

CRITIC_FREE: dict[str, Preset] = {
    "reinforce": Preset(
        "REINFORCE",
        "Williams 1992",
        "the plainest unbiased estimator, the reference point for everything else",
        {"advantage": "reinforce", **NO_RATIO},
        note="meant for one update per batch",
    ),
    "grpo": Preset(
        "GRPO",
        "DeepSeekMath, Shao et al. 2024 (2402.03300)",
        "a baseline without a critic: the mean reward of the group",
        {"advantage": "grpo", "clip": PPO, "aggregation": SEQUENCE_MEAN, "kl": KL_IN_LOSS},
    ),
    "dr_grpo": Preset(
        "Dr.GRPO",
        "Understanding R1-Zero-like training, Liu et al. 2025 (2503.20783)",
        "token inefficiency: dividing by length favours long wrong answers, dividing by the deviation favours extreme prompts",
        {"advantage": {"name": "grpo", "std": "none"}, "clip": PPO, "aggregation": "seq-mean-token-sum-norm"},
    ),
    "dapo": Preset(
        "DAPO",
        "DAPO, Yu et al. 2025 (2503.14476)",
        "long chains of thought: entropy collapse, zero-signal groups, noisy truncation, length-diluted gradients",
        {
            "advantage": "grpo",
            "clip": {"name": "ppo", "low": 0.2, "high": 0.28, "dual": 10.0},
            "aggregation": TOKEN_MEAN,
            "filters": [{"name": "zero_signal", "metric": "accuracy"}],
            "refill": {"rounds": 10, "oversample": 3},
            "shaping": ["signed", "soft_overlong"],
        },
    ),
    "gpg": Preset(
        "GPG",
        "GPG, Chu et al. 2025 (2504.02546)",
        "the RL objective itself: no surrogate, no clip, no reference; corrects for groups without signal",
        {"advantage": "gpg", **NO_RATIO, "aggregation": TOKEN_MEAN},
    ),
    "gspo": Preset(
        "GSPO",
        "GSPO, Zheng et al. 2025 (2507.18071)",
        "unstable token ratios, most of all in mixtures of experts: the ratio is per sequence, like the reward",
        {
            "advantage": "grpo",
            "ratio": "sequence",
            "clip": {"name": "ppo", "low": 3e-4, "high": 4e-4},
            "aggregation": SEQUENCE_MEAN,
        },
        note="meant for several mini-batches per batch (training.mini_batches=4)",
    ),
    "gspo_token": Preset(
        "GSPO-token",
        "GSPO, Zheng et al. 2025 (2507.18071)",
        "a trust region per sequence with advantages per token (several turns)",
        {
            "advantage": "grpo",
            "ratio": "seq_token",
            "clip": {"name": "ppo", "low": 3e-4, "high": 4e-4},
            "aggregation": SEQUENCE_MEAN,
        },
    ),
    "luspo": Preset(
        "LUSPO",
        "length-unbiased sequence policy optimisation, 2026: GSPO times the length",
        "GSPO's bias towards short answers",
        {
            "advantage": "grpo",
            "ratio": "sequence",
            "clip": {"name": "ppo", "low": 3e-4, "high": 4e-4},
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "gmpo": Preset(
        "GMPO",
        "Geometric-mean policy optimisation, Zhao et al. 2025 (2507.20673)",
        "outlier ratios that dominate an arithmetic mean",
        {"advantage": "grpo", "ratio": "sequence", "clip": "log_geo", "aggregation": SEQUENCE_MEAN},
    ),
    "cispo": Preset(
        "CISPO",
        "MiniMax-M1, 2025 (2506.13585)",
        "rare but pivotal tokens that a clip would leave without a gradient",
        {"advantage": "grpo", "clip": "is_weight", "loss": "sg_logprob", "aggregation": TOKEN_MEAN},
    ),
    "scale_rl": Preset(
        "ScaleRL",
        "The art of scaling RL compute, Khatri et al. 2025 (2510.13786)",
        "a recipe whose returns are predictable as compute grows",
        {
            "advantage": {"name": "grpo", "std": "batch"},
            "clip": {"name": "is_weight", "cap": 5.0},
            "loss": "sg_logprob",
            "aggregation": TOKEN_MEAN,
            "filters": ["zero_signal"],
        },
        note="its output head in float32 needs model.dtype=float32; in bfloat16 the head's product is rounded first",
    ),
    "sapo": Preset(
        "SAPO",
        "Soft adaptive policy optimisation, 2025 (2511.20347)",
        "a hard clip is brittle: a smooth gate fades out off-policy tokens, negative ones sooner",
        {"advantage": "grpo", "clip": "soft", "aggregation": SEQUENCE_MEAN},
    ),
    "clip_cov": Preset(
        "Clip-Cov",
        "The entropy mechanism of RL, Cui et al. 2025 (2505.22617)",
        "entropy collapse, caused by the few tokens where log-prob and advantage move together: they lose their gradient",
        {"advantage": "grpo", "clip": "clip_cov", "aggregation": TOKEN_MEAN, **DYNAMIC_SAMPLING},
    ),
    "kl_cov": Preset(
        "KL-Cov",
        "The entropy mechanism of RL, Cui et al. 2025 (2505.22617)",
        "entropy collapse, with a penalty on these tokens instead of no gradient",
        {"advantage": "grpo", "clip": "kl_cov", "aggregation": TOKEN_MEAN, **DYNAMIC_SAMPLING},
    ),
    "rloo": Preset(
        "RLOO",
        "Back to basics, Ahmadian et al. 2024 (2402.14740)",
        "an unbiased baseline: the mean reward of the other samples",
        {"advantage": "rloo", **NO_RATIO, "kl": KL_IN_REWARD},
    ),
    "remax": Preset(
        "ReMax",
        "ReMax, Li et al. 2023 (2310.10505)",
        "less variance for one extra decode instead of a group of samples",
        {"advantage": "remax", "clip": PPO, "aggregation": TOKEN_MEAN, "kl": KL_IN_REWARD},
    ),
    "reinforce_plus_plus": Preset(
        "REINFORCE++",
        "REINFORCE++, Hu et al. 2025 (2501.03262)",
        "over-fitting to prompts: normalises over the whole batch",
        {"advantage": "reinforce_plus_plus", "clip": PPO, "aggregation": TOKEN_MEAN, "kl": KL_IN_REWARD},
    ),
    "reinforce_plus_plus_baseline": Preset(
        "REINFORCE++-baseline",
        "REINFORCE++, Hu et al. 2025 (2501.03262)",
        "REINFORCE++ where several samples of a prompt exist",
        {
            "advantage": "reinforce_plus_plus_baseline",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": {"loss": {"estimator": "k2", "coef": 0.001}, "reference": "frozen"},
        },
    ),
    "opo": Preset(
        "OPO",
        "On-policy RL with optimal reward baseline, Hao et al. 2025 (2505.23585)",
        "the minimum-variance baseline of exactly on-policy training",
        {"advantage": "opo", "clip": "none", "aggregation": TOKEN_MEAN},
        note="meant for exactly one update per batch",
    ),
    "r1_zero": Preset(
        "R1-Zero",
        "DeepSeek-R1, 2025 (2501.12948)",
        "reasoning from a base model with rule rewards alone",
        R1,
        note="rewards: task or math, and think_format; 16 samples per prompt",
    ),
    "r1": Preset(
        "R1",
        "DeepSeek-R1, 2025 (2501.12948)",
        "readable reasoning: a cold start, RL, rejection sampling, RL again",
        R1,
        note="rewards: task or math, think_format and language; the preset is the RL stage, recipes/r1.yaml has all stages (`burnish stages`)",
    ),
    "cppo": Preset(
        "CPPO",
        "CPPO, Lin et al. 2025 (2503.22342)",
        "the cost of the backward pass of samples with little signal",
        {
            "advantage": "grpo",
            "clip": PPO,
            "aggregation": SEQUENCE_MEAN,
            "kl": KL_IN_LOSS,
            "filters": [{"name": "cppo", "prune": 0.5}],
        },
        note="draw 1/(1-prune) times as many prompts for the same number of trained samples",
    ),
    "bae": Preset(
        "Online difficulty filtering",
        "Bae et al. 2025 (2504.03380)",
        "prompts too easy or too hard to learn from: the gain is bounded by the variance of the reward",
        {
            "advantage": "grpo",
            "clip": PPO,
            "aggregation": SEQUENCE_MEAN,
            "filters": [{"name": "difficulty_band", "low": 0.25, "high": 0.75}],
            "refill": {"rounds": 4},
        },
    ),
    "raft_plus_plus": Preset(
        "RAFT++",
        "A minimalist approach to LLM reasoning, Xiong et al. 2025 (2504.11343)",
        "a simple baseline: imitation of the policy's own right answers",
        {"advantage": "raft", "clip": PPO, "aggregation": TOKEN_MEAN, "filters": ["positives_only"]},
    ),
    "reinforce_rej": Preset(
        "Reinforce-Rej",
        "A minimalist approach to LLM reasoning, Xiong et al. 2025 (2504.11343)",
        "plain policy gradient without the prompts that are all right or all wrong",
        {"advantage": "reinforce_rej", "clip": PPO, "aggregation": TOKEN_MEAN, "filters": ["zero_signal"]},
    ),
    "deepscaler": Preset(
        "DeepScaleR",
        "DeepScaleR, Luo et al. 2025",
        "long windows waste tokens early: the context grows in stages (rollout.stages)",
        {"advantage": "grpo", "clip": PPO, "aggregation": TOKEN_MEAN, "kl": KL_IN_LOSS},
        note="rollout.stages: 8K, 16K from step 1041, 24K from step 1521",
    ),
    "lcpo": Preset(
        "LCPO-exact (L1)",
        "L1, Aggarwal and Welleck 2025 (2503.04697)",
        "answers of a length the user asks for",
        {
            "advantage": "grpo",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": KL_IN_LOSS,
            "shaping": ["lcpo_exact"],
        },
        note="needs data.budget, which asks for a length in the prompt",
    ),
    "lcpo_max": Preset(
        "LCPO-max (L1)",
        "L1, Aggarwal and Welleck 2025 (2503.04697)",
        "answers of at most the length the user asks for",
        {
            "advantage": "grpo",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": KL_IN_LOSS,
            "shaping": ["lcpo_max"],
        },
        note="needs data.budget, which asks for a length in the prompt",
    ),
    "t1": Preset(
        "T1",
        "T1, Hou et al. 2025 (2501.11651)",
        "exploration: oversampling at high temperature, an entropy bonus, a reference that follows the policy",
        {
            "advantage": "rloo",
            **NO_RATIO,
            "kl": {
                "reward": {"estimator": "k1", "coef": 2e-4, "center": "token"},
                "reference": {"name": "ema", "eta": 0.01},
            },
            "entropy": {"coef": 0.001},
            "shaping": ["t1_penalty"],
        },
        note="64 samples per prompt at temperature 1.2",
    ),
    "grpo_passk": Preset(
        "pass@k GRPO",
        "verl's grpo_passk",
        "the best of a group rather than its mean",
        {"advantage": "grpo_passk", "clip": PPO, "aggregation": TOKEN_MEAN},
    ),
    "gdpo": Preset(
        "GDPO",
        "Group reward-decoupled normalisation, 2026",
        "several rewards, of which one dominates if they are summed before normalisation",
        {"advantage": "gdpo", "clip": PPO, "aggregation": TOKEN_MEAN},
    ),
    "otb": Preset(
        "Optimal token baseline",
        "verl's optimal_token_baseline",
        "the variance of long answers: a baseline for every position",
        {"advantage": "otb", "clip": PPO, "aggregation": TOKEN_MEAN},
    ),
    "dppo_tv": Preset(
        "DPPO-TV",
        "Divergence PPO, 2026: total variation",
        "ratio clips that cut rare tokens and spare common ones: the trust region bounds the change of probability",
        {"advantage": "grpo", "clip": "dppo_tv", "loss": "sg_logprob", "aggregation": TOKEN_MEAN},
    ),
    "dppo_kl": Preset(
        "DPPO-KL",
        "Divergence PPO, 2026: binary KL",
        "like DPPO-TV, with the binary KL of the token against all others",
        {"advantage": "grpo", "clip": "dppo_kl", "loss": "sg_logprob", "aggregation": TOKEN_MEAN},
    ),
}
