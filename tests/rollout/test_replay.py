"""The replay store: how often groups are used, how old they get, which are picked, and resuming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.spec import Replay
from burnish.config.errors import UserError
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.rollout.replay import REPLAY_FILE, ReplayStore, group_id_of
from burnish.rollout.scoring import RolloutBatch, interleave_groups


def sample(prompt: str, number: int, version: int, reward: float | None = 1.0) -> Trajectory:
    written = np.array([False, True, True])
    return Trajectory(
        prompt_id=prompt,
        visit=0,
        sample=number,
        nodes=chain_nodes(
            np.array([7, 8, 9 + number]),
            written,
            np.array([0.0, -0.5, -0.25], dtype=np.float32),
            np.where(written, version, -1).astype(np.int32),
        ),
        finish="stop",
        completion="89",
        reward=reward,
        metadata={"use": 0},
    )


def group(prompt: str, version: int, n: int = 2) -> list[Trajectory]:
    return [sample(prompt, k, version) for k in range(n)]


def scored(fresh: Sequence[Trajectory], replayed: Sequence[Trajectory] = ()) -> RolloutBatch:
    return RolloutBatch([], list(fresh), 0.0, 0.0, replayed=list(replayed))


def step(store: ReplayStore, number: int, prompts: Sequence[str], wanted: int, unused: Sequence[str] = ()) -> list[str]:
    """One step that draws groups of these prompts and learns from all but some; the groups that came back."""
    back = store.take(number, wanted)
    rollouts = scored([t for p in prompts for t in group(p, number - 1)], back)
    used = [t.id for t in rollouts.usable if t.prompt_id not in unused]
    store.after_step(number, rollouts, used)
    return list(dict.fromkeys(t.prompt_id for t in back))


def test_a_group_comes_back_until_its_uses_are_spent() -> None:
    store = ReplayStore(Replay(share=1.0, uses=3, max_age=9), seed=0)
    assert [step(store, k, ["a"] if k == 1 else [], 4) for k in range(1, 6)] == [[], ["a"], ["a"], [], []]


def test_a_group_that_is_too_old_never_comes_back() -> None:
    store = ReplayStore(Replay(share=1.0, uses=3, max_age=2), seed=0)
    step(store, 1, ["a"], 0)
    assert [step(store, k, [], 0 if k < 4 else 4) for k in (2, 3, 4)] == [[], [], []]
    assert store.entries == []


def test_age_counts_from_the_oldest_token_not_from_the_step_that_was_given_it() -> None:
    store = ReplayStore(Replay(uses=2, max_age=2), seed=0)
    store.after_step(5, scored(group("a", 2) + group("b", 4)), ["a#0.0", "b#0.0"])
    assert [entry.id for entry in store.entries] == ["b#0"]


def test_each_sample_is_told_for_which_time_it_comes_back_and_a_batch_has_it_as_a_column() -> None:
    store = ReplayStore(Replay(share=1.0, uses=3, max_age=9), seed=0)
    step(store, 1, ["a"], 4)
    for use in (1, 2):
        back = store.take(use + 1, 4)
        batch = pack(scored(group("b", use), back).usable)
        assert sorted(batch.sequence["use"].tolist()) == [0, 0, use, use]
        store.after_step(use + 1, scored([], back), [t.id for t in back])


def test_what_a_filter_leaves_out_of_the_loss_neither_enters_nor_stays() -> None:
    store = ReplayStore(Replay(share=1.0, uses=5, max_age=9), seed=0)
    step(store, 1, ["a", "b"], 4, unused=["b"])
    assert [entry.id for entry in store.entries] == ["a#0"]
    step(store, 2, [], 4, unused=["a"])
    assert store.entries == []


def test_a_tree_whose_edges_of_this_time_are_all_masked_is_used_and_stays_for_the_others() -> None:
    store = ReplayStore(Replay(share=1.0, uses=3, max_age=9), seed=0)
    new = [*group("a", 0), *group("b", 0)]
    store.after_step(1, scored(new), [], unfinished=["a#0.0"])
    assert [(entry.id, entry.uses) for entry in store.entries] == [("a#0", 1)]
    store.after_step(2, scored([], store.take(2, 4)), [], unfinished=["a#0.1"])
    assert [(entry.id, entry.uses) for entry in store.entries] == [("a#0", 2)]
    assert store.metrics()["replay/groups"] == 0
    store.after_step(3, scored([], store.take(3, 4)), [], unfinished=["a#0.1"])
    assert store.entries == []


def test_a_tree_whose_edges_are_all_used_neither_enters_nor_stays() -> None:
    store = ReplayStore(Replay(share=1.0, uses=5, max_age=9), seed=0)
    store.after_step(1, scored([*group("a", 0), *group("b", 0)]), ["a#0.0", "b#0.0"], unfinished=["a#0.0"])
    assert [entry.id for entry in store.entries] == ["a#0"]
    store.after_step(2, scored([], store.take(2, 4)), ["a#0.0"], unfinished=[])
    assert store.entries == []
    assert store.metrics()["replay/groups"] == 1


def test_a_sample_that_could_not_be_scored_stays_out_of_its_group() -> None:
    store = ReplayStore(Replay(), seed=0)
    store.after_step(1, scored([sample("a", 0, 0), sample("a", 1, 0, reward=None)]), ["a#0.0"])
    assert [t.sample for t in store.take(2, 1)] == [0]


def test_no_more_than_the_capacity_is_held_and_the_oldest_leave() -> None:
    store = ReplayStore(Replay(capacity=3, uses=2, max_age=9), seed=0)
    for number in range(1, 5):
        step(store, number, [f"{number}a", f"{number}b"], 0)
    assert [entry.id for entry in store.entries] == ["3b#0", "4a#0", "4b#0"]
    assert store.metrics()["replay/size"] == 3
    assert store.metrics()["replay/tokens"] == 3 * 2 * 3


def test_the_oldest_come_first_or_the_newest_or_any_by_the_seed_alone() -> None:
    names = [f"p{k}" for k in range(8)]

    def taken(seed: int, **options: str) -> list[str]:
        store = ReplayStore(Replay.model_validate({"uses": 2, "max_age": 9, **options}), seed)
        step(store, 1, names, 0)
        return list(dict.fromkeys(t.prompt_id for t in store.take(2, 3)))

    assert taken(0, pick="oldest") == taken(1, pick="oldest") == names[:3]
    assert taken(0, pick="newest") == taken(1, pick="newest") == names[:-4:-1]
    assert taken(0) == taken(0) not in (names[:3], names[:-4:-1])
    assert taken(0) != taken(1)


def test_metrics_are_of_the_groups_that_came_back_into_the_loss() -> None:
    store = ReplayStore(Replay(share=1.0, uses=4, max_age=9), seed=0)
    step(store, 1, ["a"], 4)
    step(store, 2, ["b"], 4)
    step(store, 3, ["c"], 4, unused=["c"])
    values = store.metrics()
    assert (values["replay/groups"], values["replay/age_mean"], values["replay/age_max"]) == (2, 1.5, 2)
    assert values["replay/fraction"] == 1.0
    step(store, 4, ["d"], 1)
    assert store.metrics()["replay/fraction"] == 0.5


def test_a_checkpoint_gives_the_store_back_bit_for_bit(tmp_path: Path) -> None:
    store = ReplayStore(Replay(share=1.0, uses=4, max_age=9), seed=0)
    for number in (1, 2, 3):
        step(store, number, [f"p{number}"], 1)
    for content in store.contents():
        content.write(tmp_path)
    other = ReplayStore(store.settings, seed=0)
    other.load(tmp_path)
    assert [(e.id, e.oldest, e.uses) for e in other.entries] == [(e.id, e.oldest, e.uses) for e in store.entries]
    one, two = (pack(s.take(4, 9)) for s in (store, other))
    assert all((one.token[name] == two.token[name]).all() for name in one.token)
    assert all((one.sequence[n] == two.sequence[n]).all() for n in one.sequence if n != "accuracy")
    assert store.contents() == other.contents()


def test_an_empty_store_is_saved_and_a_checkpoint_without_one_is_an_error(tmp_path: Path) -> None:
    store = ReplayStore(Replay(), seed=0)
    with pytest.raises(UserError, match="saved by a run without replay"):
        store.load(tmp_path)
    for content in store.contents():
        content.write(tmp_path)
    assert (tmp_path / REPLAY_FILE).is_file()
    store.load(tmp_path)
    assert store.entries == []


@settings(max_examples=60, deadline=None)
@given(
    uses=st.integers(2, 5),
    extra=st.integers(0, 3),
    capacity=st.integers(1, 6),
    pick=st.sampled_from(["oldest", "newest", "random"]),
    drawn=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    wanted=st.integers(0, 5),
)
def test_whatever_happens_nothing_is_used_more_often_or_older_than_was_said(
    uses: int, extra: int, capacity: int, pick: str, drawn: list[int], wanted: int
) -> None:
    rules = Replay.model_validate({"uses": uses, "max_age": uses - 1 + extra, "capacity": capacity, "pick": pick})
    store, used = ReplayStore(rules, seed=3), Counter[str]()
    for number, count in enumerate(drawn, 1):
        back = store.take(number, wanted)
        fresh = [t for k in range(count) for t in group(f"{number}-{k}", number - 1)]
        assert len({group_id_of(t.id) for t in back}) <= wanted
        assert all(number - 1 - int(t.sequences[0].version[1]) <= rules.max_age for t in back)
        assert all(t.metadata["use"] == used[group_id_of(t.id)] for t in back)
        used.update({group_id_of(t.id) for t in [*fresh, *back]})
        store.after_step(number, scored(fresh, back), [t.id for t in [*fresh, *back]])
        assert len(store.entries) <= capacity
    assert max(used.values(), default=0) <= uses


def test_groups_that_come_back_are_spread_evenly_and_stay_whole() -> None:
    fresh = [t for p in "abcdef" for t in group(p, 0)]
    back = [t for p in "xyz" for t in group(p, 0)]
    order = [t.prompt_id for t in interleave_groups(fresh, back)]
    assert order == [p for p in "axbcydezf" for _ in range(2)]
    assert interleave_groups(fresh, []) == fresh
    assert interleave_groups([], back) == back
