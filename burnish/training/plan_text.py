"""A memory plan in words: the table, the refusal of what cannot fit with what to change, and how wrong the plan was."""

from __future__ import annotations

from dataclasses import replace

from burnish.config.errors import UserError
from burnish.training.levers import advice, with_options
from burnish.training.planner import SAMPLING, Plan, Setup, gib, plan

DOUBT = 0.05
"""A plan this near to what there is may be wrong: it is not refused."""
CPU_SHARE = 0.5
"""On a CPU memory is taken as it is needed: the share of what depends on lengths that must fit beside what is always there."""


def text_of(made: Plan, room: int | None) -> str:
    """The plan for a person: a table at the peak, and the other phases in a line each."""
    device = "the GPU" if made.setup.on_gpu else "the process"
    there = "" if room is None else f" of {gib(room)}"
    lines = [f"memory: {gib(made.total)}{there} on {device} at the peak, {_when(made.phase)}"]
    width = max(len(part.name) for part in made.parts)
    lines += [f"  {part.name:<{width}}  {gib(part.bytes):>9}  {part.note}".rstrip() for part in made.parts]
    always = sum(part.bytes for part in made.resident) + made.outside.bytes
    for name, parts in made.phases.items():
        if name != made.phase:
            lines.append(f"  {gib(always + sum(part.bytes for part in parts))} {_when(name)}")
    if made.host:
        lines.append(f"  and {gib(made.host)} of host memory")
    return "\n".join(lines)


def line_of(made: Plan, room: int | None) -> str:
    """The plan in one line."""
    largest = sorted(made.parts, key=lambda part: -part.bytes)[:3]
    parts = ", ".join(f"{part.name} {gib(part.bytes)}" for part in largest)
    there = "" if room is None else f" of {gib(room)}"
    return f"memory: about {gib(made.total)}{there} at the peak ({parts})"


def _when(phase: str) -> str:
    return "while it samples" if phase == SAMPLING else f"while {phase}"


def advice_text(setup: Setup, room: int, host_room: int | None = None) -> str:
    """What to change, a line each."""
    pulled, after = advice(setup, room, host_room)
    lines = [f"  {lever.text} saves {gib(lever.saves)}" for lever in pulled]
    if after.total > room:
        lines.append(f"  even so it is {gib(after.total)}: a smaller model, or more devices")
    else:
        host = f", and {gib(after.host)} of host memory" if after.host else ""
        lines.append(f"  and it is {gib(after.total)}{host}")
    return "\n".join(lines)


def check(made: Plan, room: int, host_room: int | None = None) -> str | None:
    """Refuse what cannot fit; a warning for what is too near to tell, or fits unless a sequence is as long as it may be."""
    setup = made.setup
    safe = int(room * (1 - DOUBT))
    if not setup.on_gpu:
        return _check_on_cpu(made, room, safe)
    if host_room is not None and made.host > host_room:
        raise UserError(
            f"this run does not fit: {gib(made.host)} of optimizer state in host memory, of which {gib(host_room)} are free\n"
            f"to make it fit:\n{_with_state_here(setup, safe, host_room)}"
        )
    if made.total <= safe:
        return None
    words = advice_text(setup, safe, host_room)
    usual = plan(replace(setup, longest=min(setup.longest, setup.token_budget)))
    if usual.total > room * (1 + DOUBT):
        raise UserError(f"this run does not fit.\n{text_of(made, room)}\nto make it fit:\n{words}")
    reason = f" when a sequence has {setup.longest:,} tokens" if usual.total <= safe else ""
    return f"this run may not fit{reason}: {gib(made.total)} planned of {gib(room)}; if it does not:\n{words}"


def _check_on_cpu(made: Plan, room: int, safe: int) -> str | None:
    """The same on a CPU, whose plan is exact for weights and optimizer state, and an upper bound for the rest.

    The rest (activations, cache) is planned for sequences that are all as long as the config allows.
    """
    if made.total <= safe:
        return None
    least = plan(replace(made.setup, token_budget=1, longest=1, update_tokens=1, cache=0)).total
    words = advice_text(made.setup, safe)
    if least + (made.total - least) * CPU_SHARE > room:
        raise UserError(f"this run does not fit.\n{text_of(made, room)}\nto make it fit:\n{words}")
    return (
        f"this run may not fit: {gib(made.total)} planned of {gib(room)}, where all sequences have {made.setup.longest:,} tokens "
        f"({gib(least)} whatever their lengths); if it does not:\n{words}"
    )


def _with_state_here(setup: Setup, room: int, host_room: int) -> str:
    here = replace(setup, optimizer=with_options(setup.optimizer, offload=False, name="adam8bit"))
    return f"  {setup.section}.optimizer.offload=false and optimizer.name=adam8bit\n" + advice_text(
        here, room, host_room
    )


def error_text(planned: int, measured: int) -> tuple[float, str]:
    """How far a plan was off, as a share of what was measured and in words."""
    error = planned / measured - 1
    return error, f"memory: planned {gib(planned)}, measured {gib(measured)}: {error:+.0%}"
