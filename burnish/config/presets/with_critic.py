"""Rows with a critic."""

from __future__ import annotations

from burnish.config.presets.base import CRITIC, KL_IN_REWARD, PPO, TOKEN_MEAN, Preset

WITH_CRITIC: dict[str, Preset] = {
    "ppo": Preset(
        "PPO",
        "PPO, Schulman et al. 2017 (1707.06347)",
        "credit for every token from a learned value",
        {
            "advantage": "gae",
            "clip": {**PPO, "dual": 3.0},
            "aggregation": TOKEN_MEAN,
            "kl": KL_IN_REWARD,
            "critic": CRITIC,
        },
    ),
    "vc_ppo": Preset(
        "VC-PPO",
        "What's behind PPO's collapse in long-CoT, Yuan et al. 2025 (2503.01491)",
        "PPO's length collapse: a biased critic at the start, a reward that fades along a long answer",
        {
            "advantage": {"name": "gae", "lam": 0.95, "lam_critic": 1.0},
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "critic": {"warmup_steps": 100},
        },
    ),
    "vapo": Preset(
        "VAPO",
        "VAPO, Yue et al. 2025 (2504.05118)",
        "value-based RL for long chains of thought: one lambda does not fit all lengths, right answers are rare",
        {
            "advantage": {"name": "gae", "lam_critic": 1.0, "length_adaptive": 0.05},
            "clip": {"name": "ppo", "low": 0.2, "high": 0.28},
            "aggregation": TOKEN_MEAN,
            "auxiliary": {"positive_nll": 0.1},
            "critic": {"warmup_steps": 50, "optimizer": {"lr": 2e-6}},
        },
        note="512 prompts of 16 samples rather than 8192 of one",
    ),
    "orz": Preset(
        "Open-Reasoner-Zero",
        "Open-Reasoner-Zero, Hu et al. 2025 (2503.24290)",
        "plain PPO at scale: lambda 1, no KL, a critic trained hard",
        {
            "advantage": "gae",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "critic": {"updates": 12, "optimizer": {"lr": 5e-6, "warmup": 50}},
        },
        note="its last steps: algorithm.curriculum=hard_only, on prompts that were hardly ever solved",
    ),
    "pf_ppo": Preset(
        "PF-PPO",
        "Policy filtration in RLHF, Shen and Zhang 2024 (2409.06957)",
        "reward models that are only right at the extremes",
        {
            "advantage": "gae",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": KL_IN_REWARD,
            "filters": [{"name": "pf_ppo", "mode": "power"}],
            "replay": {"share": 0.5, "uses": 2, "max_age": 4},
            "critic": CRITIC,
        },
        note="a group that comes back gives the samples that were drawn from it the first time",
    ),
    "demystify": Preset(
        "Demystifying long CoT",
        "Yeo et al. 2025 (2502.03373)",
        "uncontrolled length, and rewards for length that repetition games",
        {
            "advantage": "gae",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": {"reward": {"estimator": "k1", "coef": 0.01}, "reference": "frozen"},
            "shaping": ["cosine", "repetition_dense"],
            "critic": CRITIC,
        },
    ),
    "limr": Preset(
        "LIMR",
        "LIMR, Li et al. 2025 (2502.11886)",
        "prompts that teach nothing: keep those whose rewards follow the average learning curve",
        {"advantage": "gae", "clip": PPO, "aggregation": TOKEN_MEAN, "critic": CRITIC},
        note="`burnish data impact` makes its file: the rows a finished run has learnt from",
    ),
}
