"""The slot records of the config against the functions: the same names, the same options, and none without effect.

`MOVES` (`option_moves.py`) has the options that act in one step, `OVER_STEPS` those that act over several. An option in neither fails
the test, and so does a value that changes nothing the learner would see (`learners_view.py`).
"""

from __future__ import annotations

import inspect
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

import pytest
from pydantic import ValidationError

from burnish.algorithms.filters.filter_functions import GROUP_FILTERS, RESAMPLERS, SAMPLE_FILTERS
from burnish.algorithms.filters.spec import FILTER_RECORDS, Refill
from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import SLOT_RECORDS, Algorithm, Replay
from burnish.algorithms.terms.spec import (
    Aggregation,
    Auxiliary,
    Chord,
    Entropy,
    EntropyTarget,
    Kl,
    KlAdvantage,
    KlLoss,
    KlReward,
    KlTarget,
    Observations,
)
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import Critic, ProcessModel
from burnish.config.records import Plugin, Record, Slot, default_options
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from tests.algorithms.learners_view import Scorer, algorithm_of, make_batch, seen
from tests.algorithms.option_moves import BARE, CHOICES, FUNCTIONS, KL_LOSS, MOVES, PAIRS, PG, REFUSED, named
from tests.trainers.test_options_over_steps import OVER_STEPS

TESTS = Path(__file__).parents[1]
WITH_OPTIONS = [
    (slot, record)
    for slot, records in SLOT_RECORDS.items()
    for record in records
    if set(record.model_fields) != {"name"} and slot not in ("curriculum", "context")
]


def name_of(record: type[Slot]) -> str:
    return cast(str, record.model_fields["name"].default)


# --- names and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", FUNCTIONS)
def test_every_record_has_its_function_and_every_function_its_record(slot: str) -> None:
    assert [name_of(r) for r in SLOT_RECORDS[slot]] == list(dict.fromkeys(name_of(r) for r in SLOT_RECORDS[slot]))
    assert {name_of(r) for r in SLOT_RECORDS[slot]} == set(FUNCTIONS[slot])


def test_the_kinds_of_filters_do_not_share_a_name() -> None:
    names = [*GROUP_FILTERS, *SAMPLE_FILTERS, *RESAMPLERS]
    assert len(names) == len(set(names))
    assert {name_of(r) for r in FILTER_RECORDS if r.of_groups} == set(GROUP_FILTERS)


@pytest.mark.parametrize(("slot", "record"), WITH_OPTIONS, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_options_are_keyword_parameters_and_only_the_record_has_defaults(slot: str, record: type[Slot]) -> None:
    parameters = inspect.signature(FUNCTIONS[slot][name_of(record)]).parameters.values()
    options = {key for key in record.model_fields if key not in ("name", *record.rollout_options)}
    if (
        slot == "reference"
    ):  # classes of the learner, which tests also build without a record: the defaults must be the same
        taken = {p.name: p.default for p in parameters if p.name in options}
        assert taken == default_options(record)[name_of(record)]
        return
    keywords = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert {p.name for p in keywords} == options
    assert all(p.default is inspect.Parameter.empty for p in keywords)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_a_pipeline(name: str) -> None:
    algorithm = algorithm_from_preset(name)
    assert AlgorithmPipeline(algorithm, num_updates=1).loss.scope in ("token", "sequence", "group", "batch")


# --- every option acts -------------------------------------------------------------------------------------------------


def moved(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The algorithm with one option set, everything else as in `base`, as a tree."""
    tree: Any = {**algorithm_of(base).model_dump(), **({"batch": base["batch"]} if "batch" in base else {})}
    *parents, last = path.split(".")
    node = tree
    for part in parents:
        node = node[int(part)] if part.isdecimal() else node[part]
    node[last] = value
    return cast(dict[str, Any], tree)


def current(base: dict[str, Any], path: str) -> Any:
    value: Any = algorithm_of(base)
    for part in path.split("."):
        value = value[int(part)] if part.isdecimal() else getattr(value, part)
    return value


def all_options() -> list[tuple[str, type[Record], str]]:
    records: list[type[Record]] = [r for records in SLOT_RECORDS.values() for r in records]
    records += [
        Aggregation,
        Kl,
        KlLoss,
        KlReward,
        KlAdvantage,
        KlTarget,
        Entropy,
        EntropyTarget,
        Auxiliary,
        Chord,
        Observations,
        Refill,
        Critic,
    ]
    records += [ProcessModel, Replay]
    return [
        (f"{r.__name__}.{f}", r, f)
        for r in records
        for f, info in r.model_fields.items()
        if not (f == "name" and len(get_args(info.annotation)) == 1)
    ]


def test_every_option_is_in_one_of_the_tables_of_moves() -> None:
    assert not set(MOVES) & set(OVER_STEPS)
    assert {*MOVES, *OVER_STEPS} == {key for key, _, _ in all_options()}


@pytest.mark.parametrize("key", MOVES)
def test_every_option_changes_what_the_learner_sees(key: str) -> None:
    for base, path, values in MOVES[key]:
        default = current(base, path)
        found = {repr(v): seen(moved(base, path, v)) for v in values}
        found[repr(default)] = seen(base)
        assert len(found) == len(values) + 1, f"{path}: one of {values} is the default"
        for one, other in combinations(found, 2):
            assert found[one] != found[other], f"{path}: {one} and {other} give the same loss, gradient, batch and mask"


@pytest.mark.parametrize(("key", "record", "field"), all_options(), ids=[key for key, _, _ in all_options()])
def test_every_word_of_an_option_is_tried(key: str, record: type[Record], field: str) -> None:
    annotation = record.model_fields[field].annotation
    if get_origin(annotation) is Literal and key in MOVES:
        tried = {v for base, path, values in MOVES[key] for v in (*values, current(base, path))}
        assert tried | REFUSED.get(key, set()) == set(get_args(annotation))


@pytest.mark.parametrize("slot", CHOICES)
def test_every_choice_of_a_slot_changes_what_the_learner_sees(slot: str) -> None:
    found = {name: seen(base) for name, base in CHOICES[slot].items()}
    for one, other in combinations(found, 2):
        assert found[one] != found[other], f"{one} and {other} are the same"


def test_a_reference_is_loaded_exactly_when_something_uses_it() -> None:
    with pytest.raises(ValidationError, match="both kl coefficients are 0"):
        Algorithm.model_validate({"kl": {"reference": "frozen"}})
    with pytest.raises(ValidationError, match=r"kl\.reference is none"):
        Algorithm.model_validate({"kl": {"loss": {"coef": 0.5}}})
    with pytest.raises(ValidationError, match=r"loss dpo compares with a reference but kl\.reference is none"):
        algorithm_of({**PAIRS, "loss": "dpo"})
    assert seen({}) != seen(KL_LOSS)
    near = algorithm_of({"kl": {"loss": {"estimator": "k2", "coef": 0.5}, "reference": "rollout"}})
    pipeline, batch = AlgorithmPipeline(near, num_updates=2), make_batch()
    prepared = pipeline.prepare(batch, StepContext(cast(Any, Scorer("old"))))  # there is no reference to ask
    assert prepared.token["ref_logp"] is batch.token["behaviour_logp"]
    anchored = {**BARE, "loss": "omd_sq", "kl": {"reference": "iterate"}}
    assert seen(anchored) != seen({**BARE, "loss": "omd_sq"})


def test_bypass_takes_one_of_two_losses() -> None:
    clipped = named("correction", "bypass")
    assert seen(clipped) != seen(PG)
    with pytest.raises(ValidationError, match="takes the place of ratio, clip and loss"):
        algorithm_of({"correction": PG["correction"]})
    with pytest.raises(ValidationError, match=r"has none: set algorithm\.correction\.loss=reinforce"):
        algorithm_of({**BARE, "loss": "logprob", **clipped})


def test_the_options_of_a_plug_in_reach_its_function(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert set(Plugin.model_fields) == {"name", "options"}
    path = tmp_path_factory.mktemp("plug_in") / "mine.py"
    path.write_text("def scaled(batch, scale=1.0):\n    return batch.sequence['reward'] * scale\n")
    found = [seen({"advantage": {"name": f"{path}:scaled", "options": options}}) for options in ({}, {"scale": 2.0})]
    assert found[0] != found[1]
    assert found[0] != seen({})
