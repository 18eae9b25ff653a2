"""What is allowed but probably not meant: said once when a run starts, and by --dry-run.

A combination that cannot do what it says is refused by the schema. Here is what does less than it seems to, or what a
paper would do otherwise.
"""

from __future__ import annotations

from burnish.config.load import from_preset
from burnish.config.schema import TrainConfig
from burnish.config.slots import Plugin

BY_TOKEN = ("gae", "otb")


def remarks(config: TrainConfig) -> list[str]:
    """One line each."""
    return [*_never_reached(config), *_algorithm(config), *_source(config), *_merged(config)]


def _never_reached(config: TrainConfig) -> list[str]:
    """Schedules that begin after the last step."""
    algorithm, steps = config.algorithm, config.training.steps
    starts = {
        f"algorithm.shaping: {shaper.name} begins after warmup_steps": getattr(shaper, "warmup_steps", 0)
        for shaper in algorithm.shaping
    }
    starts["algorithm.curriculum begins after warmup_steps"] = getattr(algorithm.curriculum, "warmup_steps", 0)
    starts["algorithm.curriculum hard_only begins at start"] = getattr(algorithm.curriculum, "start", 1) - 1
    if algorithm.kl.reference.name in ("hard_sync", "iterate"):
        starts["algorithm.kl.reference is renewed after every"] = algorithm.kl.reference.every
    late = {text: start for text, start in starts.items() if start >= steps}
    return [f"{text}={start}, but training.steps={steps}: it never comes to that" for text, start in late.items()]


def _algorithm(config: TrainConfig) -> list[str]:
    """Choices that cancel or double each other."""
    algorithm, training = config.algorithm, config.training
    found = []
    if algorithm.kl.loss.coef > 0 and algorithm.kl.reward.coef > 0:
        found.append(
            "algorithm.kl is both in the loss and in the reward: the policy pays twice for leaving the reference"
        )
    one_update = training.mini_batches * training.epochs == 1
    # A preset's own clip is part of what it is called; only one that was set by hand was meant to act.
    is_set = algorithm.clip != from_preset(algorithm.preset).clip
    clipped = (
        is_set and not isinstance(algorithm.clip, Plugin) and algorithm.clip.name in ("ppo", "log_geo", "is_weight")
    )
    is_old = (
        config.rollout.source.name != "sync" and algorithm.correction.name == "bypass"
    ) or algorithm.replay is not None  # the ratio to older weights
    if one_update and algorithm.ratio.name != "none" and clipped and not is_old:
        found.append(
            "algorithm.clip has no effect with one update a batch: the policy that learns is the one that sampled, so its ratio is 1 and never "
            "reaches the clip; training.mini_batches or training.epochs above 1 would use it"
        )
    if algorithm.ratio.name == "sequence" and algorithm.advantage.name in BY_TOKEN:
        found.append(
            f"advantage {algorithm.advantage.name} differs between the tokens of a sequence, and ratio sequence spreads every "
            "token's gradient over all of them; seq_token keeps it with its token"
        )
    return found


def _source(config: TrainConfig) -> list[str]:
    """Rollouts of older weights that are learnt from as if they were new."""
    source, correction = config.rollout.source, config.algorithm.correction
    oldest = getattr(source, "max_staleness", 1 if source.name == "ahead" else 0)
    paired = any(f.name == "pairs" for f in config.algorithm.filters)  # compares two answers, whoever wrote them
    if oldest == 0 or correction.acts or correction.name == "bypass" or paired:
        return []
    steps = "one step" if oldest == 1 else f"up to {oldest} steps"
    return [
        f"rollout.source={source.name} samples with weights {steps} old, and algorithm.correction={correction.name} does nothing about "
        "it: decoupled_token_is weighs every token by how likely it is now, bypass_ppo_clip takes the sampler's policy as the old one"
    ]


def _merged(config: TrainConfig) -> list[str]:
    """Adapters that a server gets as changes of weights of a half type."""
    model, rollout = config.model, config.rollout
    on_sglang = rollout.engine == "sglang" and (model.lora is not None or model.adapter is not None)
    in_4_bits = model.lora is not None and model.lora.base != "dtype"
    on_vllm = rollout.vllm is not None and rollout.vllm.url is not None and in_4_bits
    if model.dtype != "bfloat16" or not (on_sglang or on_vllm):
        return []
    unless = " unless it computes in float32" if on_vllm else ""
    return [
        f"the {rollout.engine} server is sent weights with the adapters added in, in bfloat16{unless}: a small change vanishes in their rounding, "
        "and the sampler is not the policy that is trained (mismatch/); the native engine and vLLM in this process have the adapters beside the weights"
    ]
