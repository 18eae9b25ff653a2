"""Config changes for a run that does not fit into memory, in the order of their cost, and the plan as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from burnish.config.errors import UserError
from burnish.config.model import Lora, Optimizer
from burnish.memory_plan.planner import GIB, SAMPLING, MemoryPlan, RunSetup, gib, plan_memory

PLAN_TOLERANCE = 0.05
"""Relative error of a plan. A plan this near to the capacity is not refused."""
CPU_LENGTH_SHARE = 0.5
"""On a CPU memory is allocated as needed: the share of length-dependent memory that must fit."""


@dataclass(frozen=True)
class Suggestion:
    """A config change, and the bytes that it saves."""

    text: str
    saves: int
    changes: dict[str, Any]
    keeps_results: bool
    """Whether the results stay the same and only the speed changes."""

    def apply(self, setup: RunSetup) -> RunSetup:
        return replace(setup, **self.changes)


def _possible_changes(setup: RunSetup) -> list[tuple[str, dict[str, Any], bool]]:
    """Possible changes, the cheapest first: little time, more time, other arithmetic, another method."""
    section, optimizer, critic = setup.section, setup.optimizer, setup.critic
    order = ("keep", "selective", "recompute", "offload")
    less = order[order.index(setup.activations) + 1 :]
    smaller = max(setup.longest, setup.token_budget // 4, 1024)
    found: list[tuple[str, dict[str, Any], bool]] = []
    if "selective" in less:
        found.append((f"{section}.activations=selective", {"activations": "selective"}, True))
    if smaller < setup.token_budget:
        found.append((f"{section}.token_budget={smaller}", {"token_budget": smaller}, True))
    if setup.on_gpu and not optimizer.offload:
        found.append((f"{section}.optimizer.offload=true", {"optimizer": with_options(optimizer, offload=True)}, True))
    if setup.on_gpu and critic is not None and not critic.offload:
        found.append(("algorithm.critic.optimizer.offload=true", {"critic": with_options(critic, offload=True)}, True))
    found += [(f"{section}.activations={p}", {"activations": p}, True) for p in less if p in ("recompute", "offload")]
    for part in (2,) if setup.on_gpu else (2, 4, 8, 16):
        if setup.cache:
            less_cache = setup.cache // part
            found.append((f"rollout.cache_gib={less_cache / GIB:.3g}", {"cache": less_cache}, True))
    if setup.on_gpu and setup.dtype in ("float32", "float64"):
        found.append(("model.dtype=bfloat16", {"dtype": "bfloat16"}, False))
    if optimizer.name == "adamw" and not optimizer.offload:
        found.append(
            (f"{section}.optimizer.name=adam8bit", {"optimizer": with_options(optimizer, name="adam8bit")}, False)
        )
    if optimizer.precision == "master" and setup.dtype == "bfloat16":
        rounded = with_options(optimizer, precision="stochastic")
        found.append((f"{section}.optimizer.precision=stochastic", {"optimizer": rounded}, False))
    if setup.lora is None:
        reference = setup.reference if setup.reference in ("none", "teacher") else "off"
        found.append(("model.lora={}", {"lora": Lora(), "reference": reference}, False))
    elif setup.lora.base == "dtype" and setup.may_quantise:
        found.append(("model.lora.base=nf4", {"lora": setup.lora.model_copy(update={"base": "nf4"})}, False))
    return found


def with_options(optimizer: Optimizer, **changes: Any) -> Optimizer:
    return optimizer.model_copy(update=changes)


def suggestions(setup: RunSetup) -> list[Suggestion]:
    """The changes that save at least 1% by themselves in some phase, the cheapest first."""
    start = plan_memory(setup)
    total = start.total
    found = []
    for text, changes, keeps_results in _possible_changes(setup):
        changed = _try_plan(replace(setup, **changes))
        if changed is not None:
            saved = [_phase_bytes(start, phase) - _phase_bytes(changed, phase) for phase in start.phases]
            if max(saved) >= total / 100:
                found.append(Suggestion(text, total - changed.total, changes, keeps_results))
    return found


def _phase_bytes(made: MemoryPlan, phase: str) -> int:
    """All bytes of a phase."""
    return sum(part.bytes for part in [*made.resident, *made.phases.get(phase, [])])


def _try_plan(setup: RunSetup) -> MemoryPlan | None:
    """The plan of a changed setup; None if the model does not allow the change (8-bit moments need large enough matrices)."""
    try:
        return plan_memory(setup)
    except UserError:
        return None


def enough_suggestions(
    setup: RunSetup, capacity: int, host_capacity: int | None = None
) -> tuple[list[Suggestion], MemoryPlan]:
    """The changes that make a plan fit, with the plan then: a single one if that is enough, else the cheapest combination.

    Changes of the results are suggested only if the others are not enough. If nothing is enough, all are returned.
    """

    def fits(made: MemoryPlan) -> bool:
        return made.total <= capacity and (host_capacity is None or made.host <= host_capacity)

    known = suggestions(setup)
    if host_capacity is not None:
        known = [change for change in known if plan_memory(change.apply(setup)).host <= host_capacity]
    harmless = [change for change in known if change.keeps_results]
    for change in harmless:
        made = plan_memory(change.apply(setup))
        if fits(made):
            return [change], made
    applied, made = _minimal_set(setup, harmless, fits)
    return (applied, made) if fits(made) else _minimal_set(setup, known, fits)


def _accumulate(
    setup: RunSetup, known: list[Suggestion], fits: Callable[[MemoryPlan], bool]
) -> tuple[list[Suggestion], MemoryPlan]:
    """Apply changes in order until the plan fits. Each has the bytes it saves after those before it."""
    applied: list[Suggestion] = []
    now = plan_memory(setup)
    for change in [
        *known,
        *known,
    ]:  # twice: a change that saves nothing at first may do so once another phase is the largest
        if fits(now):
            break
        if any(other.text == change.text for other in applied):
            continue
        # Merge changes of the same optimizer instead of replacing the earlier one.
        changes = {k: _merge_change(now.setup, setup, k, v) for k, v in change.changes.items()}
        after = _try_plan(replace(now.setup, **changes))
        if after is not None and after.total < now.total:
            applied.append(replace(change, saves=now.total - after.total))
            now = after
    return applied, now


def _minimal_set(
    setup: RunSetup, known: list[Suggestion], fits: Callable[[MemoryPlan], bool]
) -> tuple[list[Suggestion], MemoryPlan]:
    """Changes that are enough together, without those that the others make unnecessary."""
    applied, made = _accumulate(setup, known, fits)
    for change in list(applied):
        fewer, less = _accumulate(setup, [other for other in applied if other.text != change.text], fits)
        if fits(less):
            applied, made = fewer, less
    return applied, made


def _merge_change(now: RunSetup, start: RunSetup, key: str, value: Any) -> Any:
    """A change of the initial setup, applied to the present one."""
    if not isinstance(value, Optimizer):
        return value
    before = getattr(start, key)
    changed = {k: v for k, v in value.model_dump().items() if getattr(before, k) != getattr(value, k)}
    return getattr(now, key).model_copy(update=changed)


def plan_text(made: MemoryPlan, capacity: int | None) -> str:
    """The plan as text: a table of the peak, and a line for each other phase."""
    device = "the GPU" if made.setup.on_gpu else "the process"
    there = "" if capacity is None else f" of {gib(capacity)}"
    lines = [f"memory: {gib(made.total)}{there} on {device} at the peak, {_phase_text(made.phase)}"]
    width = max(len(part.name) for part in made.parts)
    lines += [f"  {part.name:<{width}}  {gib(part.bytes):>9}  {part.note}".rstrip() for part in made.parts]
    always = sum(part.bytes for part in made.resident) + made.outside.bytes
    for name, parts in made.phases.items():
        if name != made.phase:
            lines.append(f"  {gib(always + sum(part.bytes for part in parts))} {_phase_text(name)}")
    if made.host:
        lines.append(f"  and {gib(made.host)} of host memory")
    return "\n".join(lines)


def plan_line(made: MemoryPlan, capacity: int | None) -> str:
    """The plan in one line."""
    largest = sorted(made.parts, key=lambda part: -part.bytes)[:3]
    parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in largest)
    there = "" if capacity is None else f" of {gib(capacity)}"
    return f"memory: about {gib(made.total)}{there} at the peak ({parts})"


def _phase_text(phase: str) -> str:
    return "while it samples" if phase == SAMPLING else f"while {phase}"


def suggestions_text(setup: RunSetup, capacity: int, host_capacity: int | None = None) -> str:
    """The suggested changes, one a line."""
    applied, after = enough_suggestions(setup, capacity, host_capacity)
    lines = [f"  {change.text} saves {gib(change.saves)}" for change in applied]
    if after.total > capacity:
        lines.append(f"  even so it is {gib(after.total)}: a smaller model, or more devices")
    else:
        host = f", and {gib(after.host)} of host memory" if after.host else ""
        lines.append(f"  and it is {gib(after.total)}{host}")
    return "\n".join(lines)


def check_plan(made: MemoryPlan, capacity: int, host_capacity: int | None = None) -> str | None:
    """Raise for a plan that cannot fit. Return a warning if it is too near to tell, or fits unless sequences are at their longest."""
    setup = made.setup
    safe = int(capacity * (1 - PLAN_TOLERANCE))
    if not setup.on_gpu:
        return _check_cpu_plan(made, capacity, safe)
    if host_capacity is not None and made.host > host_capacity:
        raise UserError(
            f"this run does not fit: {gib(made.host)} of optimizer state in host memory, of which {gib(host_capacity)} are free\n"
            f"to make it fit:\n{_on_device_text(setup, safe, host_capacity)}"
        )
    if made.total <= safe:
        return None
    words = suggestions_text(setup, safe, host_capacity)
    usual = plan_memory(replace(setup, longest=min(setup.longest, setup.token_budget)))
    if usual.total > capacity * (1 + PLAN_TOLERANCE):
        raise UserError(f"this run does not fit.\n{plan_text(made, capacity)}\nto make it fit:\n{words}")
    reason = f" when a sequence has {setup.longest:,} tokens" if usual.total <= safe else ""
    return f"this run may not fit{reason}: {gib(made.total)} planned of {gib(capacity)}; if it does not:\n{words}"


def _check_cpu_plan(made: MemoryPlan, capacity: int, safe: int) -> str | None:
    """`check_plan` on a CPU. The plan is exact for weights and optimizer state, and an upper bound for activations and cache.

    These are planned for sequences that are all as long as the config allows.
    """
    if made.total <= safe:
        return None
    least = plan_memory(replace(made.setup, token_budget=1, longest=1, update_tokens=1, cache=0)).total
    words = suggestions_text(made.setup, safe)
    if least + (made.total - least) * CPU_LENGTH_SHARE > capacity:
        raise UserError(f"this run does not fit.\n{plan_text(made, capacity)}\nto make it fit:\n{words}")
    return (
        f"this run may not fit: {gib(made.total)} planned of {gib(capacity)}, where all sequences have {made.setup.longest:,} tokens "
        f"({gib(least)} whatever their lengths); if it does not:\n{words}"
    )


def _on_device_text(setup: RunSetup, capacity: int, host_capacity: int) -> str:
    here = replace(setup, optimizer=with_options(setup.optimizer, offload=False, name="adam8bit"))
    return f"  {setup.section}.optimizer.offload=false and optimizer.name=adam8bit\n" + suggestions_text(
        here, capacity, host_capacity
    )


def plan_error(planned: int, measured: int) -> tuple[float, str]:
    """The error of a plan as a share of the measured memory, and as text."""
    error = planned / measured - 1
    return error, f"memory: planned {gib(planned)}, measured {gib(measured)}: {error:+.0%}"
