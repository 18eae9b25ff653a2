"""Merging trees."""

from hypothesis import given
from hypothesis import strategies as st

from burnish.config.loading import complete, merge, set_key
from burnish.config.schema import TrainConfig
from burnish.config.schema_walk import root_shape

SHAPE = root_shape(TrainConfig)
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
    merged = merge(SHAPE, base, over)
    # Completing writes bare words out, so that `grpo` and `{name: grpo}` compare equal.
    assert complete(TrainConfig, merge(SHAPE, merged, over)) == complete(TrainConfig, merged)
    for key, value in over.get("rollout", {}).items():
        assert merged["rollout"][key] == value


@given(TREES, TREES)
def test_merging_changes_neither_tree(base: dict, over: dict) -> None:
    before = repr((base, over))
    merge(SHAPE, base, over)
    complete(TrainConfig, over)
    set_key(SHAPE, base, ["rollout", "n"], 3)
    assert repr((base, over)) == before


@given(TREES)
def test_completing_twice_is_completing_once(tree: dict) -> None:
    once = complete(TrainConfig, tree)
    assert complete(TrainConfig, once) == once


def test_a_changed_name_drops_options_but_not_what_every_choice_has() -> None:
    base = {"reward": {"parts": [{"name": "format", "weight": 0.5, "options": {"pattern": "x"}}]}}
    assert set_key(SHAPE, base, ["reward", "parts", "0"], "exact") == {
        "reward": {"parts": [{"name": "exact", "weight": 0.5}]}
    }
