"""Presets that also learn from what the environment says."""

from __future__ import annotations

from burnish.algorithms.presets.critic_free import TOKEN_MEAN, Preset

OBSERVATIONS: dict[str, Preset] = {
    "echo": Preset(
        "ECHO",
        "cross-entropy on observations, as in prime-rl",
        "an agent's transcript holds free supervision: predicting what tools return teaches a model of the environment",
        {
            "advantage": {"name": "grpo", "std": "none"},
            "clip": "dppo_tv",
            "loss": "sg_logprob",
            "aggregation": TOKEN_MEAN,
            "kl": {"loss": {"estimator": "k2", "coef": 0.002}, "reference": "rollout"},
            "correction": "bypass",
            "auxiliary": {"observations": {}},
        },
        note="an environment of several turns; weights by role: algorithm.auxiliary.observations={tool: 0.1, user: 0.1}. The clip and the squared "
        "anchor 0.001 compare with the engine's probabilities",
    ),
}
