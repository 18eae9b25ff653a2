"""What to change where a run's memory does not fit, in the order of what it costs, and what each change saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from burnish.config.errors import UserError
from burnish.config.model import Lora, Optimizer
from burnish.memory_plan.planner import GIB, SAMPLING, MemoryPlan, RunSetup, gib, plan_memory


@dataclass(frozen=True)
class Suggestion:
    """A key to set, and how many bytes that saves."""

    text: str
    saves: int
    changes: dict[str, Any]
    is_gentle: bool
    """Whether the run computes the same, only more slowly."""

    def pull(self, setup: RunSetup) -> RunSetup:
        return replace(setup, **self.changes)


def _possible_changes(setup: RunSetup) -> list[tuple[str, dict[str, Any], bool]]:
    """What can be changed, the cheapest first: little time, more time, other arithmetic, another method."""
    where, optimizer, critic = setup.section, setup.optimizer, setup.critic
    order = ("keep", "selective", "recompute", "offload")
    less = order[order.index(setup.activations) + 1 :]
    smaller = max(setup.longest, setup.token_budget // 4, 1024)
    found: list[tuple[str, dict[str, Any], bool]] = []
    if "selective" in less:
        found.append((f"{where}.activations=selective", {"activations": "selective"}, True))
    if smaller < setup.token_budget:
        found.append((f"{where}.token_budget={smaller}", {"token_budget": smaller}, True))
    if setup.on_gpu and not optimizer.offload:
        found.append((f"{where}.optimizer.offload=true", {"optimizer": with_options(optimizer, offload=True)}, True))
    if setup.on_gpu and critic is not None and not critic.offload:
        found.append(("algorithm.critic.optimizer.offload=true", {"critic": with_options(critic, offload=True)}, True))
    found += [(f"{where}.activations={p}", {"activations": p}, True) for p in less if p in ("recompute", "offload")]
    for part in (2,) if setup.on_gpu else (2, 4, 8, 16):
        if setup.cache:
            less_cache = setup.cache // part
            found.append((f"rollout.cache_gib={less_cache / GIB:.3g}", {"cache": less_cache}, True))
    if setup.on_gpu and setup.dtype in ("float32", "float64"):
        found.append(("model.dtype=bfloat16", {"dtype": "bfloat16"}, False))
    if optimizer.name == "adamw" and not optimizer.offload:
        found.append(
            (f"{where}.optimizer.name=adam8bit", {"optimizer": with_options(optimizer, name="adam8bit")}, False)
        )
    if optimizer.precision == "master" and setup.dtype == "bfloat16":
        rounded = with_options(optimizer, precision="stochastic")
        found.append((f"{where}.optimizer.precision=stochastic", {"optimizer": rounded}, False))
    if setup.lora is None:
        reference = setup.reference if setup.reference in ("none", "teacher") else "off"
        found.append(("model.lora={}", {"lora": Lora(), "reference": reference}, False))
    elif setup.lora.base == "dtype" and setup.may_quantise:
        found.append(("model.lora.base=nf4", {"lora": setup.lora.model_copy(update={"base": "nf4"})}, False))
    return found


def with_options(optimizer: Optimizer, **changes: Any) -> Optimizer:
    return optimizer.model_copy(update=changes)


def suggestions(setup: RunSetup) -> list[Suggestion]:
    """Those that save a hundredth or more by themselves, in the largest phase or in another, the cheapest first."""
    start = plan_memory(setup)
    total = start.total
    found = []
    for text, changes, is_gentle in _possible_changes(setup):
        made = _try_plan(replace(setup, **changes))
        if made is not None:
            saved = [_phase_bytes(start, phase) - _phase_bytes(made, phase) for phase in start.phases]
            if max(saved) >= total / 100:
                found.append(Suggestion(text, total - made.total, changes, is_gentle))
    return found


def _phase_bytes(made: MemoryPlan, phase: str) -> int:
    """All that is there in a phase."""
    return sum(part.bytes for part in [*made.resident, *made.phases.get(phase, [])])


def _try_plan(setup: RunSetup) -> MemoryPlan | None:
    """The plan of a changed setup; None where the model does not take the change (8-bit moments need matrices of some size)."""
    try:
        return plan_memory(setup)
    except UserError:
        return None


def enough_suggestions(setup: RunSetup, room: int, host_room: int | None = None) -> tuple[list[Suggestion], MemoryPlan]:
    """The levers to pull for a plan to fit, and the plan then: one where one is enough, else the cheapest that are together.

    Those that change what is computed come in only where the others are not enough. Where nothing is, all of them.
    """

    def fits(made: MemoryPlan) -> bool:
        return made.total <= room and (host_room is None or made.host <= host_room)

    known = suggestions(setup)
    if host_room is not None:
        known = [lever for lever in known if plan_memory(lever.pull(setup)).host <= host_room]
    gentle = [lever for lever in known if lever.is_gentle]
    for lever in gentle:
        made = plan_memory(lever.pull(setup))
        if fits(made):
            return [lever], made
    pulled, made = _minimal_set(setup, gentle, fits)
    return (pulled, made) if fits(made) else _minimal_set(setup, known, fits)


def _accumulate(
    setup: RunSetup, known: list[Suggestion], fits: Callable[[MemoryPlan], bool]
) -> tuple[list[Suggestion], MemoryPlan]:
    """Levers one after the other until the plan fits, each with what it saves after those before it."""
    pulled: list[Suggestion] = []
    now = plan_memory(setup)
    for lever in [*known, *known]:  # one that saves nothing in the largest phase may do so once that is smaller
        if fits(now):
            break
        if any(other.text == lever.text for other in pulled):
            continue
        # A later lever on the same key takes the earlier one's place: an optimizer's options are changed one by one.
        changes = {k: _merge_change(now.setup, setup, k, v) for k, v in lever.changes.items()}
        after = _try_plan(replace(now.setup, **changes))
        if after is not None and after.total < now.total:
            pulled.append(replace(lever, saves=now.total - after.total))
            now = after
    return pulled, now


def _minimal_set(
    setup: RunSetup, known: list[Suggestion], fits: Callable[[MemoryPlan], bool]
) -> tuple[list[Suggestion], MemoryPlan]:
    """Levers that are enough together, without those that the others make needless."""
    pulled, made = _accumulate(setup, known, fits)
    for lever in list(pulled):
        fewer, less = _accumulate(setup, [other for other in pulled if other.text != lever.text], fits)
        if fits(less):
            pulled, made = fewer, less
    return pulled, made


def _merge_change(now: RunSetup, start: RunSetup, key: str, value: Any) -> Any:
    """A changed value of the start as a change of what there is now."""
    if not isinstance(value, Optimizer):
        return value
    before = getattr(start, key)
    changed = {k: v for k, v in value.model_dump().items() if getattr(before, k) != getattr(value, k)}
    return getattr(now, key).model_copy(update=changed)


# --- A memory plan in words: the table, the refusal of what cannot fit with what to change, and how wrong the plan was.

PLAN_TOLERANCE = 0.05
"""A plan this near to what there is may be wrong: it is not refused."""
CPU_LENGTH_SHARE = 0.5
"""On a CPU memory is taken as it is needed: the share of what depends on lengths that must fit beside what is always there."""


def plan_text(made: MemoryPlan, room: int | None) -> str:
    """The plan for a person: a table at the peak, and the other phases in a line each."""
    device = "the GPU" if made.setup.on_gpu else "the process"
    there = "" if room is None else f" of {gib(room)}"
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


def plan_line(made: MemoryPlan, room: int | None) -> str:
    """The plan in one line."""
    largest = sorted(made.parts, key=lambda part: -part.bytes)[:3]
    parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in largest)
    there = "" if room is None else f" of {gib(room)}"
    return f"memory: about {gib(made.total)}{there} at the peak ({parts})"


def _phase_text(phase: str) -> str:
    return "while it samples" if phase == SAMPLING else f"while {phase}"


def suggestions_text(setup: RunSetup, room: int, host_room: int | None = None) -> str:
    """What to change, a line each."""
    pulled, after = enough_suggestions(setup, room, host_room)
    lines = [f"  {lever.text} saves {gib(lever.saves)}" for lever in pulled]
    if after.total > room:
        lines.append(f"  even so it is {gib(after.total)}: a smaller model, or more devices")
    else:
        host = f", and {gib(after.host)} of host memory" if after.host else ""
        lines.append(f"  and it is {gib(after.total)}{host}")
    return "\n".join(lines)


def check_plan(made: MemoryPlan, room: int, host_room: int | None = None) -> str | None:
    """Refuse what cannot fit; a warning for what is too near to tell, or fits unless a sequence is as long as it may be."""
    setup = made.setup
    safe = int(room * (1 - PLAN_TOLERANCE))
    if not setup.on_gpu:
        return _check_cpu_plan(made, room, safe)
    if host_room is not None and made.host > host_room:
        raise UserError(
            f"this run does not fit: {gib(made.host)} of optimizer state in host memory, of which {gib(host_room)} are free\n"
            f"to make it fit:\n{_on_device_text(setup, safe, host_room)}"
        )
    if made.total <= safe:
        return None
    words = suggestions_text(setup, safe, host_room)
    usual = plan_memory(replace(setup, longest=min(setup.longest, setup.token_budget)))
    if usual.total > room * (1 + PLAN_TOLERANCE):
        raise UserError(f"this run does not fit.\n{plan_text(made, room)}\nto make it fit:\n{words}")
    reason = f" when a sequence has {setup.longest:,} tokens" if usual.total <= safe else ""
    return f"this run may not fit{reason}: {gib(made.total)} planned of {gib(room)}; if it does not:\n{words}"


def _check_cpu_plan(made: MemoryPlan, room: int, safe: int) -> str | None:
    """The same on a CPU, whose plan is exact for weights and optimizer state, and an upper bound for the rest.

    The rest (activations, cache) is planned for sequences that are all as long as the config allows.
    """
    if made.total <= safe:
        return None
    least = plan_memory(replace(made.setup, token_budget=1, longest=1, update_tokens=1, cache=0)).total
    words = suggestions_text(made.setup, safe)
    if least + (made.total - least) * CPU_LENGTH_SHARE > room:
        raise UserError(f"this run does not fit.\n{plan_text(made, room)}\nto make it fit:\n{words}")
    return (
        f"this run may not fit: {gib(made.total)} planned of {gib(room)}, where all sequences have {made.setup.longest:,} tokens "
        f"({gib(least)} whatever their lengths); if it does not:\n{words}"
    )


def _on_device_text(setup: RunSetup, room: int, host_room: int) -> str:
    here = replace(setup, optimizer=with_options(setup.optimizer, offload=False, name="adam8bit"))
    return f"  {setup.section}.optimizer.offload=false and optimizer.name=adam8bit\n" + suggestions_text(
        here, room, host_room
    )


def plan_error(planned: int, measured: int) -> tuple[float, str]:
    """How far a plan was off, as a share of what was measured and in words."""
    error = planned / measured - 1
    return error, f"memory: planned {gib(planned)}, measured {gib(measured)}: {error:+.0%}"
