"""The correction that a run has where its samples are computed with rounded numbers and the user chose none."""

from __future__ import annotations

from typing import Any

from burnish.config.foreign_keys import translate_verl_keys

ROUNDED_CORRECTION = "decoupled_token_is"
"""Truncated importance weights of tokens."""
NO_CORRECTION_NOTE = "sampler or learner computes in 8 bits, and this algorithm takes no algorithm.correction: the gap is measured (mismatch/mean) and not corrected"


def chooses_correction(written: Any) -> bool:
    """Whether a tree without defaults sets `algorithm.correction`, to `none` or another, by that name or by verl's."""
    if not isinstance(written, dict):
        return False
    algorithm = translate_verl_keys(written)[0].get("algorithm")
    return isinstance(algorithm, dict) and "correction" in algorithm


def with_default_correction(tree: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The tree with the default correction, and a note that says so; the tree and None where nothing rounds."""
    algorithm, setting = tree.get("algorithm"), rounding_setting(tree)
    if setting is None or not isinstance(algorithm, dict) or algorithm.get("correction") != {"name": "none"}:
        return tree, None
    note = (
        f"{setting} rounds numbers on one side of sampler and learner: algorithm.correction={ROUNDED_CORRECTION} corrects the gap (set "
        "algorithm.correction=none to only measure it)"
    )
    return {**tree, "algorithm": {**algorithm, "correction": {"name": ROUNDED_CORRECTION}}}, note


def rounding_setting(tree: dict[str, Any]) -> str | None:
    """The setting that makes either the sampler or the learner compute in 8 bits."""
    rollout, training = (
        section if isinstance(section, dict) else {} for section in (tree.get("rollout"), tree.get("training"))
    )
    weights, vllm = rollout.get("weights"), rollout.get("vllm")
    options = vllm.get("engine") if isinstance(vllm, dict) else None
    if isinstance(options, dict) and options.get("quantization"):
        return f"rollout.vllm.engine.quantization={options['quantization']}"
    if isinstance(weights, dict) and weights.get("name") == "fp8":
        return "rollout.weights=fp8"
    if rollout.get("cache_dtype") == "fp8":
        return "rollout.cache_dtype=fp8"
    return "training.layers=fp8" if training.get("layers") == "fp8" else None
