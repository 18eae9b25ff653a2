"""Presets of agents: credit for turns, baselines for the roles of games and of tasks that the model proposes itself, and observations."""

from __future__ import annotations

from burnish.algorithms.presets.critic_free import CRITIC, KL_IN_REWARD, NO_RATIO, PPO, TOKEN_MEAN, Preset

AGENTS: dict[str, Preset] = {
    "rae": Preset(
        "RAE",
        "SPIRAL, Liu et al. 2025 (2506.24119)",
        "self-play in zero-sum games: the mean of both sides is always 0, and one side may be better off by the rules",
        {"advantage": "rae", **NO_RATIO},
        note="needs an environment with roles; the baselines are in the checkpoint; opponents from earlier steps: rollout.opponents",
    ),
    "hierarchical_grpo": Preset(
        "Hierarchical GRPO",
        "prime-rl's proposer and solvers",
        "tasks that the model proposes itself: neither roles nor problems of different difficulty may share a baseline",
        {
            "advantage": {"name": "hierarchical_grpo", "episode_roles": ["solver"]},
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
        },
        note="needs an environment with these roles, such as propose_sum",
    ),
    "bilevel_gae": Preset(
        "Bi-level GAE",
        "RAGEN, Wang et al. 2025 (2504.20073)",
        "one lambda over thousands of tokens leaves no credit between turns, and a discount per token shortens answers",
        {
            "advantage": "bilevel_gae",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": KL_IN_REWARD,
            "critic": CRITIC,
        },
    ),
    "rebn": Preset(
        "ReBN",
        "GEM, Liu et al. 2025 (2510.01051)",
        "rewards of single turns and a discount, without a group that begins in one state",
        {"advantage": "rebn", **NO_RATIO, "aggregation": TOKEN_MEAN},
        note="meant for one update per batch; one sample per prompt is enough",
    ),
    "hgpo": Preset(
        "HGPO",
        "history-aware group policy optimisation, a recipe of verl-agent",
        "turns of the same state whose histories, which the model reads, differ",
        {
            "advantage": "hgpo",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": {"loss": {"estimator": "k3", "coef": 0.01}, "reference": "frozen"},
        },
        note="advantage.history is the number of earlier turns in the prompt",
    ),
    "multi_conversation": Preset(
        "Multi-conversation GRPO",
        "MemAgent, Yu et al. 2025 (2507.02259)",
        "an answer that takes several separate conversations, of which only the last is rewarded",
        {"advantage": {"name": "grpo", "std": "none"}, "clip": PPO, "aggregation": TOKEN_MEAN},
        note="every sample counts once in its group, however many conversations it has; KL belongs in the loss",
    ),
    "step_broadcast": Preset(
        "Step-wise GRPO",
        "Trinity-RFT and rLLM: the last step's advantage in all steps of a run",
        "runs of many steps with one reward at the end, of which long ones would count more",
        {
            "advantage": {"name": "step_broadcast", "step_norm": True},
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
        },
    ),
    "trr_plus_plus": Preset(
        "TRR++",
        "Absolute Zero, Zhao et al. 2025 (2505.03335)",
        "a batch mixes roles or types of tasks whose rewards have different scales",
        {"advantage": "trr_plus_plus", "clip": PPO, "aggregation": TOKEN_MEAN},
        note="recipes/absolute_zero.yaml is the system: environment absolute_zero, n=1, no KL",
    ),
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
