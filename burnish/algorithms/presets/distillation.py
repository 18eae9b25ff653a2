"""Presets of the distillation family: a teacher, a context and a loss (docs/distillation.md)."""

from __future__ import annotations

from burnish.algorithms.presets.critic_free import PPO, SEQUENCE_MEAN, TOKEN_MEAN, Preset

BARE = {"ratio": "none", "clip": "none"}

DISTILLATION: dict[str, Preset] = {
    "mopd": Preset(
        "Multi-teacher on-policy distillation",
        "verl, 2026; slime's form: algorithm.kl.advantage",
        "several experts and one student: each row is judged by the teacher of its kind",
        {
            "advantage": "distillation",
            "clip": "none",
            "aggregation": TOKEN_MEAN,
            "kl": {"reward": {"estimator": "k1", "coef": 1.0}, "reference": "teachers"},
        },
        note="the teachers: algorithm.kl.reference.paths, by the values of algorithm.kl.reference.column; with rewards of the task: "
        "another advantage with algorithm.kl.advantage.coef",
    ),
    "iw_opd": Preset(
        "IW-OPD",
        "Importance-weighted on-policy distillation, 2026 (2606.22600)",
        "late tokens are judged by a teacher behind a prefix it would not have written: early tokens count more",
        {
            **BARE,
            "advantage": {"name": "distillation", "prefix_weight": 0.5},
            "loss": "logprob",
            "aggregation": TOKEN_MEAN,
            "kl": {"reward": {"estimator": "k1", "coef": 1.0, "policy": "rollout"}, "reference": "teacher"},
        },
        note="the teacher: algorithm.kl.reference.path",
    ),
    "kdrl": Preset(
        "KDRL",
        "joint distillation and RL (AReaL's form)",
        "a teacher that is right more often than the student, and a verifier that is right always: learn from both",
        {
            "advantage": "grpo",
            "clip": PPO,
            "aggregation": TOKEN_MEAN,
            "kl": {"loss": {"estimator": "k2", "coef": 0.005}, "reference": "teacher"},
        },
        note="the teacher: algorithm.kl.reference.path. AReaL's k1 in the loss has a gradient of zero in expectation; k2 has that of the KL",
    ),
    "sdpo": Preset(
        "SDPO",
        "Self-distillation policy optimisation, 2026 (2601.20802)",
        "a scalar reward says little: the same model, shown a success of its group, judges every token of the other samples",
        {
            **BARE,
            "advantage": "none",
            "loss": {"name": "divergence", "support": "sampled", "cap": 2.0},
            "aggregation": SEQUENCE_MEAN,
            "kl": {"reference": {"name": "ema", "eta": 0.05}, "context": "success"},
        },
        note="with the policy loss beside it: algorithm.loss.weight below 1 and algorithm.advantage=grpo",
    ),
    "sdft": Preset(
        "SDFT",
        "Self-distillation fine-tuning, 2026 (2601.19897), as in TRL",
        "learn from demonstrations without leaving one's own distribution: the teacher is the starting model that reads one",
        {
            **BARE,
            "advantage": "none",
            "loss": {"name": "divergence", "alpha": 0.5, "support": "student", "top": 100, "cap": 2.0},
            "aggregation": SEQUENCE_MEAN,
            "kl": {"reference": "frozen", "context": "demonstration"},
        },
        note="the demonstrations: algorithm.kl.context.column. The teacher has the weights that the run started from; ema or policy follow it",
    ),
    "opsd": Preset(
        "OPSD",
        "On-policy self-distillation, 2026 (2601.19897), as in prime-rl",
        "as SDFT, by policy gradient on the sampled tokens, with the live policy as its own teacher",
        {
            **BARE,
            "advantage": "none",
            "loss": "teacher_surrogate",
            "aggregation": TOKEN_MEAN,
            "kl": {"reference": "policy", "context": {"name": "demonstration", "place": "system"}},
        },
        note="the demonstrations: algorithm.kl.context.column. The teacher has the policy's weights at the start of each step",
    ),
    "gold": Preset(
        "GOLD",
        "General on-policy logit distillation, 2025 (TRL); ULD (2402.12030)",
        "the best teacher is of another family: groups of tokens that spell the same in both tokenizers are compared",
        {
            **BARE,
            "advantage": "none",
            "loss": "gold",
            "aggregation": TOKEN_MEAN,
            "kl": {"reference": "teacher"},
        },
        note="the teacher: algorithm.kl.reference.path. It reads the prompt in its own chat template and tokens; a group counts as one token "
        "in the mean",
    ),
    "ssd": Preset(
        "SSD",
        "Simple self-distillation, 2026 (2604.01193)",
        "no verifier and no teacher: what the policy writes at another temperature or truncation is imitated at temperature 1",
        {
            **BARE,
            "advantage": "none",
            "loss": {"name": "nll", "temperature": 1.0},
            "aggregation": TOKEN_MEAN,
            "filters": ["non_stub"],
        },
        note="the effect comes from rollout.temperature, rollout.top_p and rollout.top_k; one sample a prompt (rollout.n=1), one update a batch",
    ),
    "chord": Preset(
        "CHORD",
        "CHORD (Trinity-RFT), phi-weighted demonstrations",
        "imitation disturbs the policy where it is sure and where it has no idea: each demonstrated token is weighted by p (1 - p)",
        {"advantage": "grpo", "clip": PPO, "aggregation": TOKEN_MEAN, "auxiliary": {"chord": {}}},
        note="the rows to imitate: data.demonstrations; the schedule of their share: algorithm.auxiliary.chord",
    ),
}
