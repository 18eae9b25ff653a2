"""Presets with a critic, and presets whose loss or rollouts are not those of a policy gradient on independent samples."""

from __future__ import annotations

from burnish.algorithms.presets.critic_free import (
    CRITIC,
    KL_IN_LOSS,
    KL_IN_REWARD,
    PPO,
    SEQUENCE_MEAN,
    TOKEN_MEAN,
    Preset,
)

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
        note="the annealing phase at the end of its run: algorithm.curriculum=hard_only",
    ),
    "pf_ppo": Preset(
        "PF-PPO",
        "Policy filtration in RLHF, Shen and Zhang 2024 (2409.06957)",
        "reward models that are reliable only at the extremes",
        {
            "advantage": "gae",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": KL_IN_REWARD,
            "filters": [{"name": "pf_ppo", "mode": "power"}],
            "replay": {"share": 0.5, "uses": 2, "max_age": 4},
            "critic": CRITIC,
        },
        note="a replayed group is not resampled: it has the samples that the filter drew the first time",
    ),
    "demystify": Preset(
        "Demystifying long CoT",
        "Yeo et al. 2025 (2502.03373)",
        "uncontrolled length, and length rewards that repetition exploits",
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
        "prompts without learning impact: keep those whose rewards follow the average learning curve",
        {"advantage": "gae", "clip": PPO, "aggregation": TOKEN_MEAN, "critic": CRITIC},
        note="`burnish data impact` writes its data file: the rows that a finished run has learnt from",
    ),
}


# --- Other objectives and rollouts

ITERATE = {"reference": {"name": "iterate", "every": 1}}
OMD = {
    "advantage": {"name": "grpo", "std": "none"},
    "ratio": "none",
    "clip": "none",
    "loss": {"name": "omd_sq", "tau": 0.1},
    "aggregation": SEQUENCE_MEAN,
    "kl": ITERATE,
}
SUPERVISED = {"advantage": "none", "ratio": "none", "clip": "none"}
PAIRS = {**SUPERVISED, "aggregation": SEQUENCE_MEAN}
PROB_MASK = {"name": "prob_mask", "below": 0.9}
SEGMENTS = {"clip": PPO, "aggregation": TOKEN_MEAN, "filters": [PROB_MASK]}

OTHER_OBJECTIVES: dict[str, Preset] = {
    "kimi_k15": Preset(
        "Kimi k1.5",
        "Kimi k1.5, 2025 (2501.12599)",
        "policy optimisation without a value model that stays valid on samples from the start of the iteration",
        {**OMD, "shaping": [{"name": "kimi_length", "warmup_steps": 200}]},
        note="several updates per iteration (training.mini_batches); algorithm.curriculum=prioritised, which needs finite data; "
        "partial rollouts: rollout.source.name=async",
    ),
    "long2short": Preset(
        "long2short RL",
        "Kimi k1.5, 2025 (2501.12599)",
        "a second phase that makes answers short",
        {**OMD, "shaping": ["kimi_length"]},
        note="start from the checkpoint with the best accuracy for its length, with a smaller rollout.max_tokens",
    ),
    "sppo": Preset(
        "SPPO",
        "Self-play preference optimisation, Wu et al. 2024 (2405.00675)",
        "preferences that no single reward expresses",
        {
            "advantage": "win_rate",
            "ratio": "none",
            "clip": "none",
            "loss": {"name": "sppo_sq", "eta": 1000.0},
            "aggregation": SEQUENCE_MEAN,
            "kl": ITERATE,
        },
        note="wins are comparisons of rewards within a group; without a verifier, use the reward of a judge or a reward model",
    ),
    "pacs": Preset(
        "PACS",
        "PACS, Li et al. 2025 (2509.02522)",
        "noisy policy gradients of a 0/1 reward: classifies outcomes instead",
        {**PAIRS, "loss": "bce"},
    ),
    "dro": Preset(
        "DRO",
        "Direct reward optimisation, Richemond et al. 2024 (2405.19107), by token",
        "off-policy samples without ratios: a quadratic penalty on the log-ratio",
        {"advantage": "grpo", "ratio": "none", "clip": "none", "loss": "dro", "aggregation": TOKEN_MEAN},
    ),
    "prime": Preset(
        "PRIME",
        "PRIME, Cui et al. 2025 (2502.01456)",
        "dense rewards without step labels",
        {
            "advantage": "prime_rloo",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "entropy": {"coef": 0.001},
            "filters": [{"name": "difficulty_band", "low": 0.2, "high": 0.8}, "truncation"],
            "refill": {"oversample": 4, "short": "fill"},
            "process": {},
        },
    ),
    "gigpo": Preset(
        "GiGPO",
        "Group-in-group policy optimisation, Feng et al. 2025 (2505.10978)",
        "credit for single turns of an agent without a critic or extra rollouts",
        {
            "advantage": "gigpo",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": {"loss": {"estimator": "k3", "coef": 0.01}, "reference": "frozen"},
        },
    ),
    "mt_grpo": Preset(
        "MT-GRPO",
        "Turn-level credit assignment, Zeng et al. 2025 (2505.11821)",
        "tool calls that are right or wrong by themselves: a reward of their turn beside that of the final answer",
        {"advantage": "mt_grpo", "clip": PPO, "aggregation": SEQUENCE_MEAN, "kl": KL_IN_LOSS},
    ),
    "spo_chain": Preset(
        "SPO-chain",
        "Segment policy optimisation, Guo et al. 2025 (2505.23564)",
        "credit for segments, between tokens and whole answers, by Monte-Carlo values at their borders",
        {"advantage": "spo_chain", **SEGMENTS},
    ),
    "spo_tree": Preset(
        "SPO-tree",
        "Segment policy optimisation, Guo et al. 2025 (2505.23564)",
        "cheaper Monte-Carlo values for long answers: every node of a tree is a sample too",
        {
            "advantage": "spo_tree",
            **SEGMENTS,
            "filters": [PROB_MASK, {"name": "tree_edges", "most": 32}],
            "replay": {"share": 7.0, "uses": 8, "max_age": 7, "pick": "oldest"},
        },
        note="rollout.n is the first level of the tree: 6 samples and branches [6, 6] are 6-6-6",
    ),
    "luffy": Preset(
        "LUFFY",
        "LUFFY, Yan et al. 2025 (2504.14945)",
        "solutions that the policy does not find: answers of a stronger model join the group",
        {
            "advantage": {"name": "grpo", "std": "none"},
            "clip": "none",
            "ratio": "none",
            "loss": "mixed_offpolicy",
            "aggregation": "seq-mean-token-sum-norm",
            "entropy": {"coef": 0.001},
        },
        note="demonstrations in the groups: data.demonstrations_per_group=1, and data.demonstrations or data.demonstration_column",
    ),
    "rl_plus": Preset(
        "RL-PLUS",
        "RL-PLUS, Dong et al. 2025 (2508.00222)",
        "demonstrations of unknown authors, weighted towards tokens the policy does not know yet",
        {
            "clip": "none",
            "ratio": "none",
            "loss": {"name": "mixed_offpolicy", "weight": "mixture", "focus": 0.5, "clip": 0.2},
            "aggregation": TOKEN_MEAN,
        },
        note="demonstrations in the groups: data.demonstrations_per_group=1, and data.demonstrations or data.demonstration_column",
    ),
    "on_policy_distillation": Preset(
        "On-policy distillation",
        "GKD, Agarwal et al. 2023 (2306.13649); as a reward: Thinking Machines, 2025",
        "sparse rewards: a teacher scores every token that the policy samples",
        {
            "advantage": "distillation",
            "clip": "none",
            "aggregation": TOKEN_MEAN,
            "kl": {"reward": {"estimator": "k1", "coef": 1.0}, "reference": "teacher"},
        },
        note="the teacher: algorithm.kl.reference.path; as a loss: kl.reward.coef=0 and kl.loss={estimator: full, coef: 1}",
    ),
    "rl_sft": Preset(
        "RL + SFT",
        "the multitask baseline of LUFFY, Yan et al. 2025 (2504.14945)",
        "rare successes: demonstrations are imitated in addition to the policy loss, outside the group statistics",
        {"clip": PPO, "aggregation": TOKEN_MEAN, "auxiliary": {"sft": 0.1}},
        note="the rows to imitate: data.demonstrations",
    ),
    "dpo": Preset(
        "DPO",
        "Direct preference optimisation, Rafailov et al. 2023 (2305.18290)",
        "preferences without a reward model or rollouts",
        {**PAIRS, "loss": "dpo", "kl": {"reference": "frozen"}},
        note="`burnish prefer` runs it",
    ),
    "online_dpo": Preset(
        "Online DPO",
        "Direct language model alignment from online AI feedback, Guo et al. 2024 (2402.04792)",
        "off-policy preference pairs: every step makes pairs of the policy's own samples",
        {**PAIRS, "loss": "dpo", "filters": ["pairs"], "kl": {"reference": "frozen"}},
        note="the paper's judge is a reward part; ipo, simpo and orpo learn from the same pairs (algorithm.loss)",
    ),
    "ipo": Preset(
        "IPO",
        "A general theoretical paradigm, Azar et al. 2023 (2310.12036)",
        "DPO's over-fitting to near-certain preferences",
        {**PAIRS, "loss": "ipo", "kl": {"reference": "frozen"}},
        note="`burnish prefer` runs it",
    ),
    "kto": Preset(
        "KTO",
        "KTO, Ethayarajh et al. 2024 (2402.01306)",
        "good and bad answers that do not come in pairs",
        {**PAIRS, "loss": "kto", "kl": {"reference": "frozen"}},
        note="`burnish prefer` runs it",
    ),
    "simpo": Preset(
        "SimPO",
        "SimPO, Meng et al. 2024 (2405.14734)",
        "preferences without a reference, by mean log-prob",
        {**PAIRS, "loss": "simpo"},
        note="`burnish prefer` runs it",
    ),
    "orpo": Preset(
        "ORPO",
        "ORPO, Hong et al. 2024 (2403.07691)",
        "supervised training and preferences in one stage",
        {**PAIRS, "loss": "orpo"},
        note="`burnish prefer` runs it",
    ),
    "sft": Preset(
        "SFT",
        "supervised fine-tuning",
        "a cold start",
        {**SUPERVISED, "loss": "nll", "aggregation": TOKEN_MEAN},
        note="`burnish sft` runs it, and warm_start before RL",
    ),
}
