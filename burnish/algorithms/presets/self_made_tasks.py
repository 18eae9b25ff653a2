"""Presets for tasks that the model makes itself."""

from __future__ import annotations

from burnish.algorithms.presets.critic_free import PPO, TOKEN_MEAN, Preset

SELF_MADE_TASKS: dict[str, Preset] = {
    "trr_plus_plus": Preset(
        "TRR++",
        "Absolute Zero, Zhao et al. 2025 (2505.03335)",
        "a batch mixes roles or types of tasks whose rewards have different scales",
        {"advantage": "trr_plus_plus", "clip": PPO, "aggregation": TOKEN_MEAN},
        note="recipes/absolute_zero.yaml is the system: environment absolute_zero, n=1, no KL",
    ),
}
