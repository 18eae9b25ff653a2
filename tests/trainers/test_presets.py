"""Every preset, over three steps on the same rollouts, differs from GRPO in the way its slots say.

`FIRST` says of each slot what must be the first thing to differ where it is the earliest in the list to be filled
otherwise; then each slot must matter by itself, and every surrogate must be plain policy gradient at first. Every function of
the tables must be called by a preset, or by one of the few algorithms in `OTHERS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from burnish.algorithms.batch_columns import place_rewards
from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import SLOT_RECORDS, Algorithm
from burnish.algorithms.terms.spec import Kl
from burnish.core.batch import Batch
from tests.trainers.traces import BARE, BATCHES, OTHERS, STEPS, TABLES, Trace, algorithm_of, run, trace_of

FIRST = {
    "filters": "batch",
    "shaping": "rewards",
    "kl.reward": "rewards",
    "advantage": "advantages",
    "aggregation": "weights",
    "loss": "loss",
    "kl.advantage": "advantages",
    "kl.context": "loss",
    "kl.loss": "loss",
    "entropy": "loss",
    "auxiliary": "loss",
    "ratio": "later",  # the policy is still its own anchor: all ratios are 1
    "clip": "later",
    "kl.reference": "later",
    "correction": "loss",
}
STAGES = ("batch", "rewards", "advantages", "weights", "loss", "gradient", "later")


def slot(algorithm: Algorithm, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), algorithm)


def expected_difference(algorithm: Algorithm) -> str | None:
    """The first stage that a slot filled otherwise than in GRPO changes."""
    found = [stage for path, stage in FIRST.items() if slot(algorithm, path) != slot(algorithm_of("grpo"), path)]
    if algorithm.ratio.name == "seq_prod":  # its value is 1 too, its slope the sum of the tokens' and not their mean
        found.append("gradient")
    if algorithm.auxiliary.chord is not None:  # the weight of the policy loss is what demonstrations leave
        found.append("weights")
    return min(found, key=STAGES.index, default=None)


def first_difference(one: Trace, other: Trace) -> str | None:
    """The first stage at which two algorithms part on the first update, or `later`."""
    (batch, loss, gradient), (batch2, loss2, gradient2) = one.updates[0], other.updates[0]
    if in_the_loss(batch) != in_the_loss(batch2):
        return "batch"
    columns: dict[str, Callable[[Batch], Tensor]] = {
        "rewards": lambda b: b.token.get("token_rewards", place_rewards(b)),
        "advantages": lambda b: b.token["advantages"] if "advantages" in b.token else _spread(b, "advantages"),
        "weights": lambda b: _spread(b, "weight"),
    }
    for stage, column in columns.items():
        if differ(column(batch), column(batch2)):
            return stage
    if differ(torch.tensor([loss]), torch.tensor([loss2])):
        return "loss"
    if differ(gradient, gradient2):
        return "gradient"
    return "later" if differ(one.weights, other.weights) else None


def _spread(batch: Batch, name: str) -> Tensor:
    return torch.where(batch.action_mask, batch.sequence[name][batch.sequence_ids], 0.0)


def in_the_loss(batch: Batch) -> list[tuple[int, int]]:
    """Which tokens of which sequences."""
    keys = batch.sequence["key"][batch.sequence_ids]
    return list(zip(keys[batch.loss_mask].tolist(), batch.positions[batch.loss_mask].tolist(), strict=True))


def differ(one: Tensor, other: Tensor) -> bool:
    """By more than rounding; what is between rounding and a difference is a test that says nothing."""
    distance = float((one - other).abs().max())
    assert distance < 1e-11 or distance > 1e-7
    return distance > 1e-7


ELSEWHERE = ("mopd", "sdpo", "sdft", "opsd", "gold", "chord", "echo")
"""Presets that need teachers, contexts, demonstrations or observations, which these rollouts have not: `test_distillation_toys.py`,
`test_distillation_losses.py`, `test_observation_runs.py`."""


@pytest.mark.parametrize("name", [n for n in [*PRESETS, *OTHERS] if n not in ELSEWHERE])
def test_an_algorithm_parts_from_grpo_where_its_slots_say(name: str) -> None:
    kind = BATCHES.get(name, "")
    one, grpo = trace_of(name, kind), trace_of("grpo", kind)
    assert first_difference(one, grpo) == expected_difference(algorithm_of(name))
    assert differ(one.weights, grpo.weights) == (name != "grpo")


PARTS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in ("ratio", "clip", "loss", "aggregation", "kl", "entropy", "auxiliary", "shaping")},
    "policy": ("ratio", "clip", "loss"),
    "advantage": ("advantage", "critic", "process"),
    "filters": ("filters", "refill"),
}
"""Slots, with those that may not make sense without each other."""


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("grpo", *ELSEWHERE)])
def test_every_slot_of_a_preset_matters(name: str) -> None:
    """With one of them as in GRPO the second gradient is another; with the reference alone, that after its copy."""
    algorithm, grpo, kind = algorithm_of(name), algorithm_of("grpo"), BATCHES.get(name, "")
    for part, slots in PARTS.items():
        others = {s: slot(grpo, s) for s in slots if slot(algorithm, s) != slot(grpo, s)}
        if not others or (part == "policy" and len(others) == 1):
            continue
        if part == "filters" and any(f.name == "pairs" for f in algorithm.filters):
            continue  # without its pairs the loss cannot be computed
        try:
            changed = Algorithm.model_validate({**algorithm.model_dump(), **others})
        except ValidationError:
            # Ratio, clip and loss go together; some losses, rewards of single tokens and edges of trees go with some advantages.
            chosen = algorithm.loss.advantages is not None or any(s.dense for s in algorithm.shaping)
            chosen = chosen or any("tree" in f.needs for f in algorithm.filters)
            is_divergence = (
                algorithm.loss.name == "divergence"
            )  # it has no advantage, and with kl.loss the KL would count twice
            chosen = chosen or is_divergence
            fits = ("policy", "advantage", "kl") if is_divergence else ("policy", "advantage")
            assert part in ("ratio", "clip", "loss") or (chosen and part in fits)
            continue
        late = part == "kl" and (algorithm.kl.loss, algorithm.kl.reward) == (grpo.kl.loss, grpo.kl.reward)
        found = run(changed, kind, STEPS if late else STEPS[:1]).updates
        assert differ(trace_of(name, kind).updates[len(found) - 1][2], found[-1][2]), part


# --- on-policy ---------------------------------------------------------------------------------------------------------------


def plain(algorithm: Algorithm, **slots: Any) -> Algorithm:
    """The algorithm with the plain policy gradient as its loss."""
    return Algorithm.model_validate({**algorithm.model_dump(), **BARE, "loss": "logprob", "replay": None, **slots})


SURROGATES = [
    n for n in [*PRESETS, *OTHERS] if n not in ELSEWHERE and algorithm_of(n).loss.name in ("surrogate", "sg_logprob")
]
DROPS = ("clip_cov", "m2po", "topr")
"""Leave tokens out of the loss, or weigh them, from the first update on."""


@pytest.mark.parametrize("name", [n for n in SURROGATES if n not in (*DROPS, "seq_prod")])
def test_every_surrogate_is_plain_policy_gradient_at_the_first_update_and_not_at_the_second(name: str) -> None:
    kind = BATCHES.get(name, "")
    one, other = trace_of(name, kind), run(plain(algorithm_of(name)), kind, STEPS[:1])
    assert first_difference(one, other) in ("loss", "later")
    torch.testing.assert_close(one.updates[0][2], other.updates[0][2], atol=1e-11, rtol=0)
    assert differ(one.updates[1][2], other.updates[1][2])


def test_the_ratio_of_whole_sequences_is_plain_policy_gradient_summed_over_tokens() -> None:
    summed = run(plain(algorithm_of("seq_prod"), aggregation="seq-mean-token-sum", kl={}), "", STEPS[:1])
    product = run(Algorithm.model_validate({"ratio": "seq_prod"}), "", STEPS[:1])
    torch.testing.assert_close(product.updates[0][2], summed.updates[0][2], atol=1e-11, rtol=0)
    assert differ(product.updates[1][2], summed.updates[1][2])


def test_every_slot_has_its_place_in_the_table() -> None:
    nested = {f"kl.{name}" for name in Kl.model_fields}
    # What these act on is not here: draws and controllers.
    elsewhere = {"preset", "refill", "replay", "curriculum", "kl.adaptive", "router"}
    assert FIRST.keys() | elsewhere | {"critic", "process", "kl.context", "kl.advantage"} == nested | (
        Algorithm.model_fields.keys() - {"kl"}
    )


def test_the_same_slots_under_another_name_are_the_same_algorithm() -> None:
    assert torch.equal(trace_of("r1").weights, trace_of("r1_zero").weights)


# --- coverage ------------------------------------------------------------------------------------------------------------------


def test_every_function_is_called_by_a_preset_or_by_one_of_the_others() -> None:
    by_presets = set().union(
        *(trace_of(name, BATCHES.get(name, "")).called for name in PRESETS if name not in ELSEWHERE)
    )
    by_others = set().union(*(trace_of(name, BATCHES.get(name, "")).called for name in OTHERS))
    every = {(slot, name) for slot, tables in TABLES.items() for table in tables for name in table}
    every |= {
        (slot, record.model_fields["name"].default) for slot in ("ratio", "loss") for record in SLOT_RECORDS[slot]
    }
    taught = {("loss", name) for name in ("divergence", "teacher_surrogate", "gold")}
    taught |= {("reference", "policy"), ("reference", "teachers")}
    every -= taught  # of the presets in ELSEWHERE
    assert every - by_presets - by_others == set()
    assert {name for _, name in every - by_presets} == OTHERS.keys() - {"token-sum", "prompt-mean", "seq_prod"}
    modes = {algorithm_of(name).aggregation.name for name in PRESETS}
    assert not modes & {"token-sum", "prompt-mean"}
    assert len(modes) == 4
