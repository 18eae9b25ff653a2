"""The slot records of the config against the functions: the same names, the same options, and none without effect.

`MOVES` says, for each option, which values to move it to and in which algorithm it can act. An option without a row
fails the test, and so does a value that changes nothing the learner would see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import combinations
from typing import Any, Literal, cast, get_args, get_origin

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from burnish.algorithms.advantages import ADVANTAGES
from burnish.algorithms.filters import GROUP_FILTERS, SAMPLE_FILTERS
from burnish.algorithms.losses import LOSSES, Outputs
from burnish.algorithms.policy import CLIPS, RATIOS
from burnish.config.algorithm import PRESETS, Algorithm
from burnish.config.slots import TABLE, Aggregation, Entropy, Kl, KlTerm, Plugin, Record, Slot
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.trainers.prepare import Recipe

FUNCTIONS: dict[str, dict[str, Any]] = {
    "advantage": dict(ADVANTAGES),
    "ratio": dict(RATIOS),
    "clip": dict(CLIPS),
    "loss": dict.fromkeys(LOSSES),
    "filters": {**GROUP_FILTERS, **SAMPLE_FILTERS},
}
WITH_OPTIONS = [
    (slot, record) for slot, records in TABLE.items() for record in records if set(record.model_fields) != {"name"}
]


def name_of(record: type[Slot]) -> str:
    return cast(str, record.model_fields["name"].default)


# --- names and defaults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", TABLE)
def test_every_record_has_its_function_and_every_function_its_record(slot: str) -> None:
    assert [name_of(r) for r in TABLE[slot]] == list(dict.fromkeys(name_of(r) for r in TABLE[slot]))
    assert {name_of(r) for r in TABLE[slot]} == set(FUNCTIONS[slot])


def test_group_and_sample_filters_do_not_share_a_name() -> None:
    assert not set(GROUP_FILTERS) & set(SAMPLE_FILTERS)


@pytest.mark.parametrize(("slot", "record"), WITH_OPTIONS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_options_are_the_functions_parameters_with_the_same_defaults(slot: str, record: type[Slot]) -> None:
    function: Callable[..., Any] = FUNCTIONS[slot][name_of(record)]
    parameters = inspect.signature(function).parameters.values()
    taken = {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    assert taken == {k: f.default for k, f in record.model_fields.items() if k != "name"}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_a_recipe(name: str) -> None:
    assert Recipe(Algorithm.model_validate(PRESETS[name]), horizon=8, num_updates=1).horizon == 8


# --- every option acts -------------------------------------------------------------------------------------------------


def make_batch() -> Batch:
    """Three mixed groups, one of one sample, one constant; one truncated sample; far from the old policy."""
    lengths = [3, 4, 2, 5, 3, 2, 4, 3]
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)])
    old = -0.2 - 3 * torch.rand(mask.numel(), generator=generator, dtype=torch.float64)
    drift = torch.randn(mask.numel(), generator=generator, dtype=torch.float64)
    return Batch(
        tokens=torch.arange(mask.numel()),
        offsets=offsets_from_lengths(torch.tensor(lengths) + 1),
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "new": old + drift,
            "old": old,
            "ref": old + 0.3 * torch.randn(mask.numel(), generator=generator, dtype=torch.float64),
            "entropy": torch.rand(mask.numel(), generator=generator, dtype=torch.float64),
        },
        sequence={
            "group_ids": torch.tensor([0, 0, 1, 1, 1, 2, 3, 3]),
            "reward": torch.tensor([1, 0, 0.3, 0.8, -1, 0.5, 1, 1], dtype=torch.float64),
            "truncated": torch.tensor([False, True, False, False, False, False, False, False]),
        },
    )


class Scorer:
    """Stands where the learner and the reference stand: log-probs are a column of the batch."""

    def __init__(self, column: str) -> None:
        self.column = column

    def logprobs(self, batch: Batch) -> Tensor:
        return batch.token[self.column]


def seen_by_the_learner(algorithm: Algorithm) -> list[float]:
    """Loss, gradients, weights, advantages and masks of one batch, in a row; rounded below what an option may do."""
    recipe = Recipe(algorithm, horizon=7, num_updates=2)
    reference = cast(Any, Scorer("ref")) if recipe.needs_reference else None
    batch, _ = recipe.prepare(recipe.select(make_batch()), cast(Any, Scorer("old")), reference)
    (mini,) = recipe.mini_batches(recipe.trim(batch), num=1, epochs=1)
    mask = mini.loss_mask
    logp, entropy = (mini.token[k][mask].clone().requires_grad_() for k in ("new", "entropy"))
    columns = {k: v[mask] for k, v in mini.token.items()}
    columns |= {k: v[mini.sequence_ids[mask]] for k, v in mini.sequence.items()}
    loss, _ = recipe.loss(Outputs(logp, entropy), columns)
    gradients = torch.autograd.grad(loss, [logp, entropy], allow_unused=True, materialize_grads=True)
    parts = [loss.detach().reshape(1), *gradients, columns["weight"], columns["advantages"], mini.tokens.double()]
    return [round(x, 9) for part in parts for x in part.tolist()]


KL_LOSS = {"kl": {"loss": {"coef": 0.5}, "reference": "frozen"}}
KL_REWARD = {"kl": {"reward": {"estimator": "k1", "coef": 0.5}, "reference": "frozen"}, "advantage": "reinforce"}
NORM = {"aggregation": "seq-mean-token-sum-norm"}
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

MOVES: dict[str, list[tuple[dict[str, Any], str, list[Any]]]] = {
    "GrpoAdvantage.std": [({}, "advantage.std", ["none", "batch"])],
    "GrpoAdvantage.eps": [({}, "advantage.eps", [0.1])],
    "GrpoAdvantage.singleton": [({}, "advantage.singleton", ["zero"])],
    "ReinforceAdvantage.gamma": [({"advantage": "reinforce"}, "advantage.gamma", [0.5])],
    "ReinforceAdvantage.baseline": [({"advantage": "reinforce"}, "advantage.baseline", [0.25])],
    "PpoClip.low": [({}, "clip.low", [0.1])],
    "PpoClip.high": [({}, "clip.high", [0.28])],
    "PpoClip.dual": [({}, "clip.dual", [1.5])],
    "Aggregation.name": [({}, "aggregation.name", MODES)],
    "Aggregation.horizon": [(NORM, "aggregation.horizon", [3])],
    "KlTerm.estimator": [
        (KL_LOSS, "kl.loss.estimator", ["k1", "abs", "k2", "k1+", "abs+", "k3+"]),
        (KL_REWARD, "kl.reward.estimator", ["abs", "k2", "k3"]),
    ],
    "KlTerm.coef": [(KL_LOSS, "kl.loss.coef", [0.25]), (KL_REWARD, "kl.reward.coef", [0.25])],
    "Kl.loss": [(KL_REWARD, "kl.loss", [{"coef": 0.5}])],
    "Kl.reward": [(KL_LOSS, "kl.reward", [{"coef": 0.5}])],
    "Kl.reference": [],  # cannot be moved alone: `test_a_reference_is_loaded_exactly_when_a_coefficient_uses_it`
    "Entropy.coef": [({}, "entropy.coef", [0.1])],
}
CHOICES: dict[str, dict[str, dict[str, Any]]] = {
    "advantage": {"grpo": {}, "reinforce": {"advantage": "reinforce"}},
    "ratio": {"token": {"clip": "none"}, "none": {"ratio": "none", "clip": "none", "loss": "logprob"}},
    "clip": {"ppo": {}, "none": {"clip": "none"}},
    "loss": {"surrogate": {"clip": "none"}, "logprob": {"ratio": "none", "clip": "none", "loss": "logprob"}},
    "filters": {"zero_signal": {"filters": ["zero_signal"]}, "overlong": {"filters": ["overlong"]}},
}


def moved(base: dict[str, Any], path: str, value: Any) -> Algorithm:
    """The algorithm with one option set, everything else as in `base`."""
    tree: dict[str, Any] = Algorithm.model_validate(base).model_dump()
    *parents, last = path.split(".")
    node = tree
    for part in parents:
        node = node[part]
    node[last] = value
    return Algorithm.model_validate(tree)


def current(base: dict[str, Any], path: str) -> Any:
    value: Any = Algorithm.model_validate(base)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def all_options() -> list[tuple[str, type[Record], str]]:
    records: list[type[Record]] = [r for records in TABLE.values() for r in records]
    records += [Aggregation, KlTerm, Kl, Entropy]
    return [
        (f"{r.__name__}.{f}", r, f)
        for r in records
        for f, info in r.model_fields.items()
        if not (f == "name" and len(get_args(info.annotation)) == 1)
    ]


def test_the_table_of_moves_has_every_option_and_nothing_else() -> None:
    assert set(MOVES) == {key for key, _, _ in all_options()}
    assert {s: set(c) for s, c in CHOICES.items()} == {s: {name_of(r) for r in rs} for s, rs in TABLE.items()}


@pytest.mark.parametrize(("key", "record", "field"), all_options(), ids=[key for key, _, _ in all_options()])
def test_every_option_changes_what_the_learner_sees(key: str, record: type[Record], field: str) -> None:
    for base, path, values in MOVES[key]:
        default = current(base, path)
        seen = {repr(v): seen_by_the_learner(moved(base, path, v)) for v in values}
        seen[repr(default)] = seen_by_the_learner(Algorithm.model_validate(base))
        assert len(seen) == len(values) + 1, f"{path}: one of {values} is the default"
        for one, other in combinations(seen, 2):
            assert seen[one] != seen[other], f"{path}: {one} and {other} give the same loss, gradient, batch and mask"
    annotation = record.model_fields[field].annotation
    if get_origin(annotation) is Literal and key != "Kl.reference":
        tried = {v for base, path, values in MOVES[key] for v in (*values, current(base, path))}
        assert tried == set(get_args(annotation))


@pytest.mark.parametrize("slot", TABLE)
def test_every_choice_of_a_slot_changes_what_the_learner_sees(slot: str) -> None:
    algorithms = list(CHOICES[slot].values())
    algorithms += [{}] if slot == "filters" else []
    for one, other in combinations(algorithms, 2):
        assert seen_by_the_learner(Algorithm.model_validate(one)) != seen_by_the_learner(
            Algorithm.model_validate(other)
        )


def test_a_reference_is_loaded_exactly_when_a_coefficient_uses_it() -> None:
    with pytest.raises(ValidationError, match="both kl coefficients are 0"):
        Algorithm.model_validate({"kl": {"reference": "frozen"}})
    with pytest.raises(ValidationError, match=r"kl\.reference is none"):
        Algorithm.model_validate({"kl": {"loss": {"coef": 0.5}}})
    without, with_reference = Algorithm(), Algorithm.model_validate(KL_LOSS)
    assert not Recipe(without, 7, 1).needs_reference
    assert Recipe(with_reference, 7, 1).needs_reference
    assert seen_by_the_learner(without) != seen_by_the_learner(with_reference)


def test_the_options_of_a_plug_in_reach_its_function(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert set(Plugin.model_fields) == {"name", "options"}
    path = tmp_path_factory.mktemp("plug_in") / "mine.py"
    path.write_text("def scaled(batch, scale=1.0):\n    return batch.sequence['reward'] * scale\n")
    seen = [
        seen_by_the_learner(Algorithm.model_validate({"advantage": {"name": f"{path}:scaled", "options": options}}))
        for options in ({}, {"scale": 2.0})
    ]
    assert seen[0] != seen[1]
    assert seen[0] != seen_by_the_learner(Algorithm())
