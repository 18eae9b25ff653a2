"""The optimizer of a verl config: that of the policy, of the critic, or of supervised training."""

from __future__ import annotations

from typing import Any

from burnish.config.importing.draft import Draft

SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "wsd"}


def verl_optimizer(draft: Draft, section: str, ours: str, updates_per_step: int) -> dict[str, Any]:
    """The optimizer in the section that holds `optim` (empty for the top). verl counts warm-up in steps, burnish in updates."""
    prefix = f"{section}." if section else ""
    optim, values = f"{prefix}optim", dict[str, Any]()

    def take(key: str, option: str, value: Any, remark: str = "") -> None:
        values[option] = value
        draft.say(key, f"{ours}.optimizer.{option}", value, remark, is_always=True)

    take(f"{optim}.lr", "lr", draft.number(f"{optim}.lr"))
    take(f"{optim}.weight_decay", "weight_decay", draft.number(f"{optim}.weight_decay"))
    clip = draft.first_given(f"{prefix}grad_clip", f"{optim}.clip_grad")
    if draft.is_given(clip):
        take(clip, "clip_norm", draft.number(clip, 1.0))
    draft.explain([f"{optim}.clip_grad"], "same", f"{prefix}grad_clip counts")
    if draft.is_given(f"{optim}.betas"):
        take(f"{optim}.betas", "betas", list(draft.value(f"{optim}.betas")))
    names = [f"{optim}.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style", "lr_scheduler")]
    schedule = draft.first_given(*names)
    chosen = SCHEDULES.get(str(draft.value(schedule, "constant")).lower())
    if chosen is None:
        draft.differs(schedule, f"{ours}.optimizer.schedule=constant; there are {', '.join(SCHEDULES)}")
    elif chosen != "constant" or draft.is_given(schedule):
        take(schedule, "schedule", chosen)
    draft.explain(names, "same", f"{schedule} counts")
    steps = draft.integer(f"{optim}.lr_warmup_steps", -1)
    share_key = draft.first_given(f"{optim}.lr_warmup_steps_ratio", f"{optim}.warmup_steps_ratio")
    share = draft.number(share_key, 0.0)
    if steps > 0:
        remark = "in updates; verl counts steps" if updates_per_step > 1 else ""
        take(f"{optim}.lr_warmup_steps", "warmup", steps * updates_per_step, remark)
    elif share > 0:
        take(share_key, "warmup", share)
    draft.explain([f"{optim}.lr_warmup_steps", share_key], "same", "no warm-up, or the other key counts")
    final = draft.number(f"{optim}.min_lr_ratio", 0.0)
    if values.get("schedule", "constant") != "constant" and final:
        take(f"{optim}.min_lr_ratio", "final", final)
    draft.explain([f"{optim}.min_lr_ratio"], "same", "the learning rate ends at 0, or stays constant")
    name = str(draft.value(f"{optim}.optimizer", "AdamW")).lower()
    if name in ("adamw", "adam"):
        draft.explain([f"{optim}.optimizer"], "translated", f"{ours}.optimizer.name=adamw")
    else:
        draft.differs(f"{optim}.optimizer", f"{ours}.optimizer.name has adamw, adam8bit and muon; adamw is used")
    return values
