"""Loading and merging: precedence, presets, slots, overrides, files, and the round trip through YAML."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import SchemaValidator

from burnish.algorithms.advantages.spec import GrpoAdvantage, ReinforceAdvantage
from burnish.algorithms.losses.spec import PpoClip
from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import Algorithm
from burnish.config.default_correction import NO_CORRECTION_NOTE
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset, dump, load, merge_trees, set_key, with_defaults
from burnish.config.records import Plugin, Record, root_node
from burnish.config.schema import SftConfig, TrainConfig
from burnish.config.stages import StagesConfig

MINIMAL = ("model.new.num_layers=1", "data.train.task=sort_digits")


def train(*overrides: str, path: Path | None = None) -> TrainConfig:
    return load(TrainConfig, path, [*MINIMAL, *overrides]).config


def algorithm(*overrides: str) -> Algorithm:
    return train(*overrides).algorithm


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def error_of(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        train(*overrides)
    return str(caught.value)


# --- presets and slots ---------------------------------------------------------------------------------------------------


def test_no_algorithm_means_the_grpo_preset() -> None:
    assert algorithm() == algorithm_from_preset("grpo")
    assert algorithm().kl.loss.coef == 0.001


def test_a_preset_is_named_by_a_bare_word() -> None:
    assert algorithm("algorithm=dr_grpo").advantage == GrpoAdvantage(std="none")
    assert algorithm("algorithm.preset=dr_grpo") == algorithm("algorithm=dr_grpo")


def test_one_option_of_a_preset_can_be_changed() -> None:
    for override in ("algorithm={preset: grpo, clip: {high: .28}}", "algorithm.clip.high=0.28"):
        changed = algorithm(override)
        assert changed.clip == PpoClip(low=0.2, high=0.28)
        assert changed.model_copy(update={"clip": PpoClip()}) == algorithm_from_preset("grpo")


def test_another_choice_drops_the_options_of_the_old_one() -> None:
    assert algorithm("algorithm.advantage=reinforce").advantage == ReinforceAdvantage()
    assert algorithm("algorithm.advantage.name=reinforce").advantage == ReinforceAdvantage()
    changed = algorithm("algorithm.advantage={name: reinforce, gamma: 0.9}")
    assert changed.advantage == ReinforceAdvantage(gamma=0.9)


def test_one_option_keeps_the_rest_of_its_slot() -> None:
    assert algorithm("algorithm.advantage={std: group, eps: 0.5}", "algorithm.advantage.std=batch").advantage == (
        GrpoAdvantage(std="batch", eps=0.5)
    )
    kl = algorithm("algorithm.kl.loss={coef: 0, estimator: k2}", "algorithm.kl.reference=none").kl
    assert (kl.reference.name, kl.loss.estimator, kl.reward.estimator) == ("none", "k2", "k1")


def test_naming_the_same_choice_again_changes_nothing() -> None:
    assert algorithm("algorithm.advantage.std=none", "algorithm.advantage=grpo").advantage == GrpoAdvantage(std="none")


def test_another_preset_starts_afresh(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "algorithm: {preset: grpo, clip: {high: 0.5}}")
    assert train(path=path).algorithm.clip == PpoClip(high=0.5)
    assert train("algorithm=dr_grpo", path=path).algorithm == algorithm_from_preset("dr_grpo")


def test_order_of_overrides_does_not_matter_between_a_choice_and_its_options() -> None:
    one = algorithm("algorithm.clip.high=0.3", "algorithm=dr_grpo")
    assert one == algorithm("algorithm=dr_grpo", "algorithm.clip.high=0.3") != algorithm_from_preset("dr_grpo")
    assert algorithm("algorithm.advantage.gamma=0.5", "algorithm.advantage.name=reinforce").advantage == (
        ReinforceAdvantage(gamma=0.5)
    )


def test_a_plugin_fills_a_slot() -> None:
    assert algorithm("algorithm.advantage=mine.py:f", "algorithm.advantage.options.a=1").advantage == (
        Plugin(name="mine.py:f", options={"a": 1})
    )


# --- overrides -----------------------------------------------------------------------------------------------------------


def test_values_are_yaml_and_exponents_are_numbers() -> None:
    config = train("training.optimizer.lr=1e-6", "rollout.stop=[a, b]", "data.train.options.x=2e3")
    assert config.training.optimizer.lr == 1e-6
    assert config.rollout.stop == ["a", "b"]
    assert config.data.train[0].options == {"x": 2000.0}


def test_a_key_that_holds_text_takes_the_words_as_they_are() -> None:
    config = train("run.name=7", "data.template.text=Q: {prompt} [A", "data.template.system='7'")
    assert (config.run.name, config.data.template.text, config.data.template.system) == ("7", "Q: {prompt} [A", "7")
    assert train("run.name=null").run.name is None


def test_integer_parts_index_lists(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model: {path: m}\ndata: {train: [{path: a}, {path: b, limit: 3}]}")
    config = load(TrainConfig, path, ["data.train.1.path=c", "data.train.2.path=d"]).config
    assert [(s.path, s.limit) for s in config.data.train] == [("a", None), ("c", 3), ("d", None)]


def test_an_index_reaches_a_single_section_and_a_default_list() -> None:
    assert train("data.train.0.limit=5").data.train[0].limit == 5
    parts = train("reward.parts.0.weight=2").reward.parts
    assert [(p.name, p.weight) for p in parts] == [("task", 2.0)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.n", "expected key=value"),
        ("=3", "expected key=value"),
        ("a..b=3", "expected key=value"),
        ("--rollout.n=3", "write rollout.n=3"),
        ("data.train.3.path=x", "data.train has 1 items, so the next index is 1"),
        ("rollout.stop=[a", "line 1, column 3"),
        ("seed.x=1", "seed: got {'x': 1}, expected an integer of 0 or more"),
    ],
)
def test_a_bad_override_says_what_is_wrong_with_it(override: str, words: str) -> None:
    assert words in error_of(override)


def test_a_list_without_an_index_names_the_right_key(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "model: {path: m}\ndata: {train: [{path: a}]}")
    with pytest.raises(UserError, match=r"the first item's is data\.train\.0\.limit"):
        load(TrainConfig, path, ["data.train.limit=2"])


# --- defaults of a position ----------------------------------------------------------------------------------------------


def test_a_section_given_in_part_keeps_its_own_defaults() -> None:
    config = load(SftConfig, None, ["model.path=m", "sft.data.path=d", "sft.optimizer.eps=1e-9"]).config
    assert (config.sft.optimizer.lr, config.sft.optimizer.eps) == (1e-5, 1e-9)
    assert algorithm("algorithm.kl.reward.coef=0.1").kl.reward.estimator == "k1"
    assert (
        algorithm("algorithm=dr_grpo", "algorithm.aggregation.horizon=9").aggregation.name == "seq-mean-token-sum-norm"
    )


def test_validation_follows_rollout_unless_it_says_otherwise() -> None:
    modes = train("rollout.max_tokens=9", "validation.modes.long.max_tokens=50").validation.modes
    assert {name: mode.max_tokens for name, mode in modes.items()} == {"greedy": 9, "long": 50}


# --- files ---------------------------------------------------------------------------------------------------------------


def test_precedence_is_defaults_extended_file_file_overrides(tmp_path: Path) -> None:
    write(
        tmp_path,
        "base/parent.yaml",
        "seed: 1\nmodel: {path: m}\nrollout: {n: 2, prompts: 3, max_tokens: 4}\ndata: {train: {path: a}}",
    )
    path = write(tmp_path, "child.yaml", "extends: base/parent.yaml\nrollout: {prompts: 5, max_tokens: 6}")
    config = load(TrainConfig, path, ["rollout.max_tokens=7"]).config
    rollout = config.rollout
    assert (config.seed, rollout.n, rollout.prompts, rollout.max_tokens, rollout.top_k) == (1, 2, 5, 7, 0)


def test_a_child_may_change_a_slot_its_parent_names_only_by_default(tmp_path: Path) -> None:
    write(tmp_path, "parent.yaml", "model: {path: m}\ndata: {train: {path: a}}\nalgorithm: {advantage: {std: none}}")
    path = write(tmp_path, "child.yaml", "extends: parent.yaml\nalgorithm: {advantage: reinforce}")
    assert load(TrainConfig, path).config.algorithm.advantage == ReinforceAdvantage()


def test_base_is_the_folder_of_the_file_or_the_working_directory(tmp_path: Path) -> None:
    path = write(tmp_path, "recipes/a.yaml", "model: {path: m}\ndata: {train: {path: a}}")
    assert load(TrainConfig, path).base == (tmp_path / "recipes").resolve()
    assert load(TrainConfig, None, MINIMAL).base == Path.cwd()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nrun: {name: a}\nseed: 2\n", "line 3, column 1: key 'seed' is given twice, first in line 1"),
        ("run:\n  name: a\n  name: b\n", "line 3, column 3: key 'name' is given twice, first in line 2"),
        ("seed: [1\n", "a.yaml, line 2, column 1"),
        ("- 1\n", "expected `key: value` lines, found list"),
        ("1: 2\n", "key 1 is not text"),
        ("extends: [a]\n", "expected the path of one YAML file"),
        ("extends: a.yaml\n", "extends itself"),
        ("extends: b.yaml\n", "b.yaml: no such file"),
        ("when: 2024-99-99\n", "a.yaml: not valid YAML"),
    ],
)
def test_a_bad_file_names_the_place(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(UserError) as caught:
        load(TrainConfig, path)
    assert words in str(caught.value)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "sort_digits.yaml", "")
    with pytest.raises(UserError, match=r"no such file; did you mean 'sort_digits\.yaml'"):
        load(TrainConfig, tmp_path / "sort_digit.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load(TrainConfig, tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(UserError, match="byte 6 is not UTF-8"):
        load(TrainConfig, tmp_path / "a.yaml")


# --- round trip ----------------------------------------------------------------------------------------------------------


RECIPES = Path(__file__).parents[2] / "recipes"
RUN_BY_TRAIN = [name for name in PRESETS if algorithm_from_preset(name).loss.command == "train"]


@pytest.mark.parametrize("preset", RUN_BY_TRAIN)
def test_dump_loads_to_an_equal_config(tmp_path: Path, preset: str) -> None:
    recipe: Path | None = RECIPES / f"{preset}.yaml"
    overrides = ["run.name='1e-6'"]
    if recipe is not None and (preset == "sft" or "\nstages:\n" in recipe.read_text(encoding="utf-8")):
        recipe = None  # it is for another command
        more = ["algorithm.filters=[positives_only]"] if preset == "sft" else []
        overrides += [*MINIMAL, f"algorithm={preset}", *more, "training.steps=200", "warm_start.data.path=d"]
    first = load(TrainConfig, recipe, overrides)
    again = load(TrainConfig, write(tmp_path, "config.yaml", dump(first.config)))
    assert again.config == first.config
    assert again.resolved == first.resolved


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 64),
    lr=st.floats(1e-12, 1e3),
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
    options=st.dictionaries(
        st.text("abc.1e-6: {", min_size=1), st.one_of(st.none(), st.booleans(), st.text("1e-6.~no"))
    ),
    advantage=st.sampled_from(["grpo", "reinforce"]),
)
def test_round_trip_of_any_values(
    n: int, lr: float, text: str, options: dict, advantage: str, tmp_path_factory
) -> None:
    tree = {
        "seed": 3,
        "model": {"new": {}},
        "data": {"train": {"task": "t", "options": options}, "template": {"text": text}},
        "rollout": {"n": n},
        "training": {"optimizer": {"lr": lr}},
        "algorithm": {"preset": "grpo", "advantage": advantage},
    }
    config = TrainConfig.model_validate(tree)
    path = write(tmp_path_factory.mktemp("c"), "config.yaml", dump(config))
    assert load(TrainConfig, path).config == config


def test_the_context_grows_at_the_stated_steps() -> None:
    """DeepScaleR: 8K, then 16K and 24K."""
    stages = "rollout.stages=[{start: 1040, max_tokens: 16384, n: 16}, {start: 1520, max_tokens: 24576}]"
    rollout = train("rollout.max_tokens=8192", stages, "training.steps=2000").rollout
    found = [(rollout.at(step).max_tokens, rollout.at(step).n) for step in (1, 1039, 1040, 1519, 1600)]
    assert found == [(8192, 8), (8192, 8), (16384, 16), (16384, 16), (24576, 16)]


# --- merging trees ----------------------------------------------------------------------------------------------------

SHAPE = root_node(TrainConfig)
ADVANTAGES = st.one_of(
    st.sampled_from(["grpo", "reinforce"]),
    st.fixed_dictionaries(
        {"name": st.just("grpo")}, optional={"std": st.sampled_from(["none", "group"]), "eps": st.floats(0, 1)}
    ),
    st.fixed_dictionaries({"name": st.just("reinforce")}, optional={"gamma": st.floats(0, 1)}),
)
TREES = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 9),
        "rollout": st.fixed_dictionaries(
            {}, optional={"n": st.integers(2, 9), "stop": st.lists(st.text(max_size=2), max_size=2)}
        ),
        "algorithm": st.fixed_dictionaries(
            {}, optional={"preset": st.sampled_from(["grpo", "dr_grpo"]), "advantage": ADVANTAGES}
        ),
    },
)


@given(TREES, TREES)
def test_everything_laid_over_is_there_and_laying_it_again_changes_nothing(base: dict, over: dict) -> None:
    merged = merge_trees(SHAPE, base, over)
    # Completing writes bare words out, so that `grpo` and `{name: grpo}` compare equal.
    assert with_defaults(TrainConfig, merge_trees(SHAPE, merged, over)) == with_defaults(TrainConfig, merged)
    for key, value in over.get("rollout", {}).items():
        assert merged["rollout"][key] == value


@given(TREES, TREES)
def test_merging_changes_neither_tree(base: dict, over: dict) -> None:
    before = repr((base, over))
    merge_trees(SHAPE, base, over)
    with_defaults(TrainConfig, over)
    set_key(SHAPE, base, ["rollout", "n"], 3)
    assert repr((base, over)) == before


@given(TREES)
def test_completing_twice_is_completing_once(tree: dict) -> None:
    once = with_defaults(TrainConfig, tree)
    assert with_defaults(TrainConfig, once) == once


def test_a_changed_name_drops_options_but_not_what_every_choice_has() -> None:
    base = {"reward": {"parts": [{"name": "format", "weight": 0.5, "options": {"pattern": "x"}}]}}
    assert set_key(SHAPE, base, ["reward", "parts", "0"], "exact") == {
        "reward": {"parts": [{"name": "exact", "weight": 0.5}]}
    }


def test_a_default_correction_that_is_refused_is_said_when_all_else_is_right(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / "online_dpo.yaml"
    load(TrainConfig, recipe, ["rollout.weights=fp8"])
    assert NO_CORRECTION_NOTE in caplog.text
    caplog.clear()
    with pytest.raises(UserError, match="prompts"):
        load(TrainConfig, recipe, ["rollout.weights=fp8", "rollout.prompts=0"])
    assert NO_CORRECTION_NOTE not in caplog.text


def records(kind: type[Record] = Record) -> Iterator[type[Record]]:
    for record in kind.__subclasses__():
        yield record
        yield from records(record)


def test_every_section_has_a_validator_though_it_is_made_when_it_is_needed() -> None:
    """A mistake in a section would otherwise show in the first run that uses it."""
    ours = [record for record in records() if record.__module__.startswith("burnish.")]
    assert {TrainConfig, SftConfig, StagesConfig, GrpoAdvantage} < set(ours)
    for record in ours:
        record.model_rebuild(force=True)
        assert isinstance(record.__pydantic_validator__, SchemaValidator), record
