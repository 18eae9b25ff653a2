"""Translation of verl's rollout-correction keys to `algorithm.correction`, with a note.

They have two forms:

- First form (2025-10): `algorithm.rollout_is_threshold` (null: no correction), `rollout_is` (true multiplies the loss, false only
  measures), `rollout_is_threshold_lower`, `rollout_is_level`, `rollout_is_mode`, `rollout_is_veto_threshold`.
- Second form: `rollout_is` (token, sequence or null), `rollout_is_threshold` (a number or "lo_hi"), `rollout_is_batch_normalize`,
  `rollout_rs`, `rollout_rs_threshold`, `bypass_mode`, `loss_type`, flat or inside `algorithm.rollout_correction`.

A boolean `rollout_is` belongs to the first form, a string to the second.
"""

from __future__ import annotations

from typing import Any

from burnish.algorithms.correction.spec import NoCorrection, parse_verl_rejections
from burnish.config.errors import UserError

FIRST_FORM_KEYS = {
    "rollout_is_threshold_lower": "lower",
    "rollout_is_level": "level",
    "rollout_is_mode": "mode",
    "rollout_is_veto_threshold": "veto",
}
SECOND_FORM_KEYS = ("rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold", "bypass_mode", "loss_type")
CORRECTION_KEYS = ("rollout_is", "rollout_is_threshold", *FIRST_FORM_KEYS, *SECOND_FORM_KEYS)
DEFAULT_CORRECTION = NoCorrection().model_dump()


def translate_verl_keys(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree with verl's rollout-correction keys replaced by ours, and notes for the user."""
    _refuse_removed_key(tree)
    algorithm = tree.get("algorithm")
    if not isinstance(algorithm, dict):
        return tree, []
    nested = algorithm.get("rollout_correction")
    flat = {key: algorithm[key] for key in CORRECTION_KEYS if key in algorithm}
    given = {**flat, **nested} if isinstance(nested, dict) else flat
    if not given:
        return tree, []
    if unknown := [key for key in given if key not in CORRECTION_KEYS]:
        raise UserError(f"algorithm.rollout_correction.{unknown[0]} is not a key of verl's rollout correction")
    own = algorithm.get("correction", {})
    if not isinstance(own, dict) or {**DEFAULT_CORRECTION, **own} != DEFAULT_CORRECTION:
        raise UserError(
            f"algorithm.correction and verl's algorithm.{next(iter(given))} are both given; give one of them"
        )
    correction = translate_correction(given)
    kept = {key: value for key, value in algorithm.items() if key not in (*CORRECTION_KEYS, "rollout_correction")}
    said = ", ".join(f"{key}={value}" for key, value in given.items())
    notes = [f"verl's algorithm.{said} is read as algorithm.correction={correction}"]
    if any(key.endswith("k1") for key in correction.get("reject", {})):
        notes.append(
            "bounds of k1 rejections are on the ratio trainer/engine, as verl documents them; its code bounds the inverse ratio"
        )
    return {**tree, "algorithm": {**kept, "correction": correction}}, notes


def _refuse_removed_key(tree: dict[str, Any]) -> None:
    actor = tree.get("actor_rollout_ref")
    actor = actor.get("actor") if isinstance(actor, dict) else None
    if isinstance(actor, dict) and "tis_imp_ratio_cap" in actor:
        raise UserError(
            "actor_rollout_ref.actor.tis_imp_ratio_cap was replaced: set algorithm.rollout_is_threshold to the cap and "
            "algorithm.rollout_is=true (or algorithm.correction={name: seed, threshold: ...})"
        )


def translate_correction(given: dict[str, Any]) -> dict[str, Any]:
    form = given.get("rollout_is")
    early, later = [k for k in FIRST_FORM_KEYS if k in given], [k for k in SECOND_FORM_KEYS if k in given]
    is_second = isinstance(form, str) or bool(later)
    if is_second and (early or isinstance(form, bool)):
        one = early[0] if early else f"rollout_is={str(form).lower()}"
        other = later[0] if later else f"rollout_is={form}"
        raise UserError(
            f"algorithm.{one} belongs to verl's first form of rollout correction and algorithm.{other} to the second; use one form"
        )
    return _translate_second_form(given) if is_second else _translate_first_form(given)


def _translate_first_form(given: dict[str, Any]) -> dict[str, Any]:
    threshold = given.get("rollout_is_threshold")
    options = {ours: given[theirs] for theirs, ours in FIRST_FORM_KEYS.items() if theirs in given}
    if threshold is None:  # null is verl's master switch: no correction
        return {"name": "none"}
    return {"name": "seed", "apply": bool(given.get("rollout_is", False)), "threshold": threshold, **options}


def _translate_second_form(given: dict[str, Any]) -> dict[str, Any]:
    weights, bypass = given.get("rollout_is"), bool(given.get("bypass_mode", False))
    options: dict[str, Any] = {"name": "bypass" if bypass else "decoupled", "weights": weights}
    if weights is not None:
        options["threshold"] = given.get("rollout_is_threshold", 2.0)
        options["batch_normalise"] = bool(given.get("rollout_is_batch_normalize", False))
    if given.get("rollout_rs") is not None:
        if given.get("rollout_rs_threshold") is None:
            raise UserError(f"algorithm.rollout_rs={given['rollout_rs']} needs algorithm.rollout_rs_threshold")
        try:
            options["reject"] = parse_verl_rejections(given["rollout_rs"], given["rollout_rs_threshold"])
        except ValueError as error:
            raise UserError(f"algorithm.rollout_rs: {error}") from error
    if "loss_type" in given and not bypass:
        raise UserError(
            "algorithm.loss_type chooses the loss of bypass_mode, which is off: set algorithm.bypass_mode=true"
        )
    if bypass:
        options["loss"] = given.get("loss_type", "ppo_clip")
    return options
