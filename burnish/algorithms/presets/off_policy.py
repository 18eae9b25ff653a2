"""Presets for samples of an older policy, and for prompts and tokens that a plain group-relative gradient treats badly."""

from __future__ import annotations

from burnish.algorithms.presets.critic_free import PPO, SEQUENCE_MEAN, TOKEN_MEAN, Preset

CENTRED = {"name": "grpo", "std": "none"}

OFF_POLICY: dict[str, Preset] = {
    "max_rl": Preset(
        "MaxRL",
        "Maximum-likelihood reinforcement learning, 2026 (2602.02710)",
        "the expected reward is only the first-order term of log p: prompts that are rarely solved deserve a weight of about 1/p",
        {"advantage": "max_rl", "clip": PPO, "aggregation": TOKEN_MEAN},
        note="rewards of 0 or more; the clip is that of grpo, which the paper leaves open",
    ),
    "asymre": Preset(
        "AsymRE",
        "AsymRE, as in Trinity-RFT",
        "REINFORCE on stale samples is stable only with a baseline below the mean reward of the policy that sampled",
        {"advantage": "asymre", "ratio": "none", "clip": "none", "loss": "logprob", "aggregation": TOKEN_MEAN},
        note="stale samples: rollout.source.name=async, or algorithm.replay",
    ),
    "opmd": Preset(
        "OPMD",
        "online policy mirror descent in its simple form, as in Trinity-RFT",
        "a mirror-descent step of Kimi's kind that needs no reference and stays valid on stale samples",
        {"advantage": "opmd", "ratio": "none", "clip": "none", "loss": "opmd", "aggregation": TOKEN_MEAN},
        note="stale samples: rollout.source.name=async, or algorithm.replay",
    ),
    "vespo": Preset(
        "VESPO",
        "Variational sequence-level soft policy optimisation, 2026 (2602.10693), as in TRL",
        "ratios of whole sequences explode with length and hard clips waste samples: a smooth weight replaces both",
        {"advantage": "grpo", "clip": "gamma", "loss": "sg_logprob", "aggregation": TOKEN_MEAN},
        note="a rollout correction of tokens (algorithm.correction=decoupled_token_is) becomes part of the weight",
    ),
    "topr": Preset(
        "TOPR",
        "Tapered off-policy REINFORCE, Le Roux et al. 2025 (2503.14286)",
        "good answers can be imitated however old; bad ones blow up unless their weight falls with their probability",
        {
            "advantage": CENTRED,
            "ratio": "seq_prod",
            "clip": "taper",
            "loss": "sg_logprob",
            "aggregation": "seq-mean-token-sum",
            "correction": "bypass",
        },
        note="algorithm.ratio=token and algorithm.aggregation=token-mean are Trinity-RFT's code",
    ),
    "m2po": Preset(
        "M2PO",
        "Second-moment trust policy optimisation, 2025 (2510.01161), as in AReaL",
        "very stale samples: a clip cuts too many tokens, while only a few outliers carry the variance",
        {"advantage": "grpo", "clip": "second_moment", "aggregation": TOKEN_MEAN},
        note="AReaL's code: algorithm.clip={name: second_moment, denominator: kept, low: 0.2, high: 0.2}",
    ),
    "clip_b": Preset(
        "CLIP_B",
        "as in Trinity-RFT",
        "entropy collapse: tokens that the policy finds unlikely already are not pushed down further",
        {"advantage": "grpo", "clip": PPO, "aggregation": TOKEN_MEAN, "filters": ["clip_b"]},
    ),
    "astar_po": Preset(
        "A*-PO",
        "Accelerating RL for LLM reasoning with optimal advantage regression, Brantley et al. 2025 (2505.20686)",
        "groups of samples are expensive: the optimal value of a prompt is estimated once before training, then one sample is enough",
        {
            "advantage": "offline_value",
            "ratio": "none",
            "clip": "none",
            "loss": "astar_sq",
            "aggregation": SEQUENCE_MEAN,
            "kl": {"reference": "frozen"},
        },
        note="rollout.n=1; the value pass needs finite data and is kept in the run's prompt_values.jsonl",
    ),
    "rec": Preset(
        "REC",
        "REINFORCE with clipping, 2025 (2509.24203), as in Trinity-RFT",
        "the clip, not the ratio, keeps group-relative REINFORCE stable on stale samples: a family to ablate",
        {
            "advantage": CENTRED,
            "ratio": "none",
            "clip": "none",
            "loss": {"name": "rec", "keep": "one_side"},
            "aggregation": TOKEN_MEAN,
        },
        note="its option to drop surplus negative answers: algorithm.filters=[balance]",
    ),
}
