"""Trajectories become one batch: the columns, the groups, and what cannot be packed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.core.random_keys import fold, hash_text, to_int64
from burnish.core.trajectory import TokenNode, Trajectory, TurnSpan, chain_nodes, pack
from tests.core import token_forests


def sequence(tokens: list[int], prompt: int, version: int = 3) -> list[TokenNode]:
    written = np.arange(len(tokens)) >= prompt
    return chain_nodes(
        tokens=np.array(tokens, dtype=np.int64),
        action_mask=written,
        behaviour_logp=np.where(written, -0.25 * np.array(tokens), 0).astype(np.float32),
        version=np.where(written, version, -1).astype(np.int32),
    )


def trajectory(prompt_id: str, visit: int, sample: int, *chains: list[TokenNode], **fields: Any) -> Trajectory:
    defaults: dict[str, Any] = {"finish": "stop", "completion": "", "reward": 1.0}
    nodes: list[TokenNode] = []
    for chain in chains:
        nodes += [replace(one, parent=one.parent + len(nodes) if one.parent >= 0 else -1) for one in chain]
    return Trajectory(prompt_id, visit, sample, nodes, **(defaults | fields))


def test_packing_lays_sequences_end_to_end_with_their_columns() -> None:
    batch = pack(
        [
            trajectory("p", 0, 0, sequence([5, 6, 7], 1), reward=0.5, accuracy=1.0),
            trajectory("p", 0, 1, sequence([5, 8], 1), reward=-1.0, finish="length"),
            trajectory("q", 0, 0, sequence([9, 2, 4], 2), accuracy=0.0, finish="turns"),
        ]
    )
    assert batch.tokens.tolist() == [5, 6, 7, 5, 8, 9, 2, 4]
    assert batch.offsets.tolist() == [0, 3, 5, 8]
    assert batch.action_mask.tolist() == [False, True, True, False, True, False, False, True]
    assert torch.equal(batch.loss_mask, batch.action_mask)
    assert batch.loss_mask is not batch.action_mask
    assert batch.token["behaviour_logp"].tolist() == [0, -1.5, -1.75, 0, -2, 0, 0, -1]
    assert batch.token["version"].tolist() == [-1, 3, 3, -1, 3, -1, -1, 3]
    assert batch.sequence["reward"].tolist() == [0.5, -1.0, 1.0]
    assert batch.sequence["reward"].dtype == torch.float64
    assert batch.sequence["truncated"].tolist() == [False, True, True]
    accuracy = batch.sequence["accuracy"].tolist()
    assert accuracy[0] == 1
    assert math.isnan(accuracy[1])
    assert accuracy[2] == 0


def test_a_group_is_one_visit_of_one_prompt() -> None:
    def one(prompt_id: str, visit: int, sample: int) -> Trajectory:
        return trajectory(prompt_id, visit, sample, sequence([1, 2], 1))

    batch = pack([one("p", 0, 0), one("q", 0, 0), one("p", 1, 0), one("q", 0, 1), one("p", 0, 1)])
    assert batch.sequence["group_ids"].tolist() == [0, 1, 2, 1, 0]
    assert batch.sequence["trajectory_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_rewritten_context_gives_several_sequences_of_one_trajectory() -> None:
    batch = pack(
        [
            trajectory("p", 0, 0, sequence([1, 2], 1), sequence([3, 4, 5], 2), reward=0.25),
            trajectory("p", 0, 1, sequence([6, 7], 1), reward=0.75),
        ]
    )
    assert batch.offsets.tolist() == [0, 2, 5, 7]
    assert batch.sequence["trajectory_ids"].tolist() == [0, 0, 1]
    assert batch.sequence["group_ids"].tolist() == [0, 0, 0]
    assert batch.sequence["reward"].tolist() == [0.25, 0.25, 0.75]


def test_every_sequence_has_a_key_of_its_own_whatever_it_is_packed_with() -> None:
    a = trajectory("p", 0, 0, sequence([1, 2], 1), sequence([3, 4, 5], 2))
    b = trajectory("p", 0, 1, sequence([6, 7], 1))
    c = trajectory("p", 1, 0, sequence([6, 7], 1))
    keys = pack([a, b, c]).sequence["key"]
    assert keys.dtype == torch.int64
    assert keys.tolist() == [to_int64(fold(0, "p", *rest)) for rest in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert len(set(keys.tolist())) == 4
    assert pack([c, a]).sequence["key"].tolist() == [keys[3], keys[0], keys[1]]


def test_reward_parts_become_columns_with_nan_where_a_trajectory_has_none() -> None:
    batch = pack(
        [
            trajectory("p", 0, 0, sequence([1, 2], 1), sequence([3, 4], 1), parts={"math": 1.0, "format": 0.25}),
            trajectory("q", 0, 0, sequence([1, 2], 1), parts={"math": 0.0}),
        ]
    )
    assert batch.sequence["part/math"].tolist() == [1.0, 1.0, 0.0]
    formats = batch.sequence["part/format"]
    assert formats.dtype == torch.float64
    assert formats.tolist()[:2] == [0.25, 0.25]
    assert math.isnan(formats[2])


@pytest.mark.parametrize("name", ["greedy_reward", "budget"])
def test_numbers_of_the_metadata_become_columns_where_any_trajectory_has_them(name: str) -> None:
    plain = trajectory("p", 0, 0, sequence([1, 2], 1))
    given = trajectory("q", 0, 0, sequence([1, 2], 1), metadata={name: 7})
    column = pack([given, plain]).sequence[name]
    assert column.dtype == torch.float64
    assert column[0] == 7
    assert math.isnan(column[1])
    assert set(pack([plain]).sequence) == {"group_ids", "trajectory_ids", "key", "reward", "accuracy", "truncated"}


def test_a_trajectory_without_a_reward_cannot_be_packed_and_is_named() -> None:
    good = trajectory("p", 0, 0, sequence([1, 2], 1))
    failed = trajectory("p", 2, 1, sequence([1, 2], 1), reward=None)
    with pytest.raises(ValueError, match=r"1 trajectories have no reward.*p#2\.1"):
        pack([good, failed])


def test_counts_and_names() -> None:
    one = trajectory("p", 4, 2, sequence([1, 2, 3], 1), sequence([1, 2], 1), finish="aborted")
    assert (one.id, one.num_actions, one.truncated) == ("p#4.2", 3, True)
    assert not trajectory("p", 0, 0, finish="stop").truncated


# --- forests of nodes -----------------------------------------------------------------------------------------------------


def node(parent: int, *tokens: int, sampled: bool = False) -> TokenNode:
    found = TokenNode(parent, np.array(tokens, dtype=np.int64))
    if sampled:
        found.logp, found.version = -np.array(tokens, dtype=np.float32), np.full(len(tokens), 7, dtype=np.int32)
    return found


def forked() -> Trajectory:
    """A prompt; a turn and an observation, after which a turn; then the first turn is rewritten, and a last turn follows."""
    nodes = [
        node(-1, 1, 2),
        node(0, 3, 4, sampled=True),
        node(1, 5),
        node(2, 6, sampled=True),
        node(0, 4),
        node(4, 8, 9, sampled=True),
    ]
    turns = [TurnSpan(1, "a", 0.5), TurnSpan(3, "b"), TurnSpan(5, "a", 1.0)]
    return Trajectory("p", 0, 0, nodes, "stop", "", 1.5, turns=turns)


def test_a_fork_gives_a_second_sequence_in_which_only_its_own_turn_is_an_action() -> None:
    batch = pack([forked()])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 4, 8, 9]
    assert batch.offsets.tolist() == [0, 6, 11]
    assert batch.action_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    assert batch.token["behaviour_logp"].tolist() == [0, 0, -3, -4, 0, -6, 0, 0, 0, -8, -9]
    assert batch.token["version"].tolist() == [-1, -1, 7, 7, -1, 7, -1, -1, -1, 7, 7]
    assert batch.sequence["trajectory_ids"].tolist() == [0, 0]
    starts = batch.ragged["turn_start"]
    assert (starts.values.tolist(), starts.offsets.tolist()) == ([2, 5, 3], [0, 2, 3])
    assert batch.ragged["turn_reward"].values.tolist() == [0.5, 0.0, 1.0]
    states = batch.ragged["turn_state"].values.tolist()
    assert states[0] == states[2] != states[1]


def test_a_turn_that_two_branches_continue_is_trained_in_the_first() -> None:
    nodes = [node(-1, 1), node(0, 2, sampled=True), node(1, 3), node(2, 4, sampled=True), node(1, 5), node(4, 6, sampled=True)]  # fmt: skip
    first, second = Trajectory("p", 0, 0, nodes, "stop", "").sequences
    assert (first.tokens.tolist(), first.action_mask.tolist()) == ([1, 2, 3, 4], [False, True, False, True])
    assert (second.tokens.tolist(), second.action_mask.tolist()) == ([1, 2, 5, 6], [False, False, False, True])
    assert (second.behaviour_logp.tolist(), second.version.tolist()) == ([0, 0, 0, -6], [-1, -1, -1, 7])


def test_a_sampled_node_that_is_not_trained_is_an_action_without_a_loss() -> None:
    found = forked()
    found.nodes[1].is_trained = False
    batch = pack([found])
    assert batch.action_mask.int().tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    assert batch.loss_mask.int().tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 1]
    assert batch.token["behaviour_logp"].tolist()[2:4] == [-3, -4]


def test_a_branch_without_a_sampled_token_of_its_own_is_no_sequence() -> None:
    nodes = [node(-1, 1), node(0, 2, sampled=True), node(1, 3), node(0, 4), node(-1, 5)]
    assert [s.tokens.tolist() for s in Trajectory("p", 0, 0, nodes, "stop", "").sequences] == [[1, 2, 3]]
    assert [s.tokens.tolist() for s in Trajectory("p", 0, 0, [nodes[0], nodes[4]], "stop", "").sequences] == [[1]]
    assert [s.tokens.tolist() for s in Trajectory("p", 0, 0, [], "error", "").sequences] == [[]]


def test_wrong_forests_are_named() -> None:
    with pytest.raises(ValueError, match=r"p#0\.0: node 0 has the parent 1, which does not come before it"):
        _ = Trajectory("p", 0, 0, [node(1, 1), node(-1, 2), node(0, 3)], "stop", "").sequences
    with pytest.raises(ValueError, match=r"node 1 has the parent 1"):
        _ = Trajectory("p", 0, 0, [node(-1, 1), node(1, 2)], "stop", "").sequences
    with pytest.raises(ValueError, match=r"node 1 was sampled but has no tokens"):
        _ = Trajectory("p", 0, 0, [node(-1, 1), node(0, sampled=True)], "stop", "").sequences


def test_rewards_of_steps_and_segments_refuse_a_rewritten_context() -> None:
    for metadata in ({"step_rewards": [[3, 0.5]]}, {"borders": [2], "border_values": [0.0]}):
        one = replace(forked(), metadata=metadata)
        with pytest.raises(UserError, match=r"the context of p#0\.0 was rewritten and it has 2"):
            pack([one])


def test_players_of_a_game_are_groups_of_their_own() -> None:
    samples = [
        trajectory("p", 0, k, sequence([1, 2], 1), metadata={"role": role}) for k in range(2) for role in ("x", "o")
    ]
    batch = pack(samples)
    assert batch.sequence["group_ids"].tolist() == [0, 1, 0, 1]
    assert len(set(batch.sequence["key"].tolist())) == 4
    assert [t.id for t in samples] == ["p#0/x.0", "p#0/o.0", "p#0/x.1", "p#0/o.1"]
    assert [t.id for t in sorted(samples, key=lambda t: t.place_in_draw)] == [
        "p#0/o.0",
        "p#0/o.1",
        "p#0/x.0",
        "p#0/x.1",
    ]


def test_a_sequence_becomes_a_chain_that_is_cut_where_asked() -> None:
    mask = np.array([False, True, True, True, False])
    nodes = chain_nodes(np.arange(5), mask, np.zeros(5), np.zeros(5), starts=[0, 3, 5])
    assert [(n.parent, n.tokens.tolist(), n.is_sampled) for n in nodes] == [
        (-1, [0], False),
        (0, [1, 2], True),
        (1, [3], True),
        (2, [4], False),
    ]
    assert chain_nodes(np.zeros(0), np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(token_forests.nodes(), min_size=1, max_size=3))
def test_a_batch_of_forests_has_each_sampled_token_as_an_action_once(forests: list[list[TokenNode]]) -> None:
    trajectories = [
        Trajectory("p", 0, k, nodes, "stop", "", 1.0, turns=token_forests.turns_of(nodes))
        for k, nodes in enumerate(forests)
    ]
    batch = pack(trajectories)
    expected = [(k, *one) for k, t in enumerate(trajectories) for one in token_forests.expected_rows(t)]
    assert batch.sequence["trajectory_ids"].tolist() == [k for k, *_ in expected]
    assert batch.offsets.diff().tolist() == [len(rows) for _, rows, _, _ in expected]
    columns = [batch.tokens, batch.action_mask, batch.token["behaviour_logp"], batch.token["version"]]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == [row for _, rows, _, _ in expected for row in rows]
    assert int(batch.action_mask.sum()) == sum(t.num_actions for t in trajectories)
    spans, starts = [s for *_, spans, _ in expected for s in spans], [s for *_, starts in expected for s in starts]
    if batch.ragged:
        assert batch.ragged["turn_start"].values.tolist() == starts
        assert batch.ragged["turn_start"].offsets.diff().tolist() == [len(own) for *_, own in expected]
        assert batch.ragged["turn_state"].values.tolist() == [to_int64(hash_text(str(s.state))) for s in spans]
    else:
        assert not spans
