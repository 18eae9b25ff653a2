"""verl's rollout-correction keys, understood: translated to `algorithm.correction`, with a note of what they became.

First form (2025-10): `algorithm.rollout_is_threshold` (null: nothing is corrected), `rollout_is` (true multiplies the
loss, false only measures), `rollout_is_threshold_lower`, `rollout_is_level`, `rollout_is_mode`, `rollout_is_veto_threshold`.
Second form: `rollout_is` (token, sequence or null), `rollout_is_threshold` (a number or "lo_hi"), `rollout_is_batch_normalize`,
`rollout_rs`, `rollout_rs_threshold`, `bypass_mode`, `loss_type`, flat or inside `algorithm.rollout_correction`. A boolean
`rollout_is` is the first form, a word the second.
"""

from __future__ import annotations

from typing import Any

from burnish.algorithms.correction.spec import NoCorrection, rejections
from burnish.config.errors import UserError

SEED_KEYS = {
    "rollout_is_threshold_lower": "lower",
    "rollout_is_level": "level",
    "rollout_is_mode": "mode",
    "rollout_is_veto_threshold": "veto",
}
LATER_KEYS = ("rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
KEYS = ("rollout_is", "rollout_is_threshold", *SEED_KEYS, *LATER_KEYS)
DEFAULT = NoCorrection().model_dump()


def translate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree with verl's keys replaced by ours, and what to tell the user about it."""
    _refuse_old(tree)
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict):
        return tree, []
    nested = algorithm.get("rollout_correction")
    flat = {key: algorithm[key] for key in KEYS if key in algorithm}
    given = {**flat, **nested} if isinstance(nested, dict) else flat
    if not given:
        return tree, []
    if unknown := [key for key in given if key not in KEYS]:
        raise UserError(f"algorithm.rollout_correction.{unknown[0]} is not a key of verl's rollout correction")
    own = algorithm.get("correction", {})
    if not isinstance(own, dict) or {**DEFAULT, **own} != DEFAULT:
        raise UserError(
            f"algorithm.correction and verl's algorithm.{next(iter(given))} are both given; give one of them"
        )
    correction = _translated(given)
    kept = {key: value for key, value in algorithm.items() if key not in (*KEYS, "rollout_correction")}
    said = ", ".join(f"{key}={value}" for key, value in given.items())
    notes = [f"verl's algorithm.{said} is read as algorithm.correction={correction}"]
    if any(key.endswith("k1") for key in correction.get("reject", {})):
        notes.append(
            "bounds of k1 rejections are on the ratio trainer/engine, as verl documents them; its code bounds the inverse ratio"
        )
    return {**tree, "algorithm": {**kept, "correction": correction}}, notes


def _refuse_old(tree: dict[str, Any]) -> None:
    actor = tree.get("actor_rollout_ref")
    actor = actor.get("actor") if isinstance(actor, dict) else None
    if isinstance(actor, dict) and "tis_imp_ratio_cap" in actor:
        raise UserError(
            "actor_rollout_ref.actor.tis_imp_ratio_cap was replaced: set algorithm.rollout_is_threshold to the cap and "
            "algorithm.rollout_is=true (or algorithm.correction={name: seed, threshold: ...})"
        )


def _translated(given: dict[str, Any]) -> dict[str, Any]:
    form = given.get("rollout_is")
    early, later = [k for k in SEED_KEYS if k in given], [k for k in LATER_KEYS if k in given]
    is_second = isinstance(form, str) or bool(later)
    if is_second and (early or isinstance(form, bool)):
        one = early[0] if early else f"rollout_is={str(form).lower()}"
        other = later[0] if later else f"rollout_is={form}"
        raise UserError(
            f"algorithm.{one} belongs to verl's first form of rollout correction and algorithm.{other} to the second; use one form"
        )
    return _second(given) if is_second else _first(given)


def _first(given: dict[str, Any]) -> dict[str, Any]:
    threshold = given.get("rollout_is_threshold")
    options = {ours: given[theirs] for theirs, ours in SEED_KEYS.items() if theirs in given}
    if threshold is None:  # the master switch: nothing is corrected, and metrics have the bound they always have
        return {"name": "none"}
    return {"name": "seed", "apply": bool(given.get("rollout_is", False)), "threshold": threshold, **options}


def _second(given: dict[str, Any]) -> dict[str, Any]:
    weights, bypass = given.get("rollout_is"), bool(given.get("bypass_mode", False))
    options: dict[str, Any] = {"name": "bypass" if bypass else "decoupled", "weights": weights}
    if weights is not None:
        options["threshold"] = given.get("rollout_is_threshold", 2.0)
        options["batch_normalise"] = bool(given.get("rollout_is_batch_normalize", False))
    if given.get("rollout_rs") is not None:
        if given.get("rollout_rs_threshold") is None:
            raise UserError(f"algorithm.rollout_rs={given['rollout_rs']} needs algorithm.rollout_rs_threshold")
        try:
            options["reject"] = rejections(given["rollout_rs"], given["rollout_rs_threshold"])
        except ValueError as error:
            raise UserError(f"algorithm.rollout_rs: {error}") from error
    if "loss_type" in given and not bypass:
        raise UserError(
            "algorithm.loss_type chooses the loss of bypass_mode, which is off: set algorithm.bypass_mode=true"
        )
    if bypass:
        options["loss"] = given.get("loss_type", "ppo_clip")
    return options
