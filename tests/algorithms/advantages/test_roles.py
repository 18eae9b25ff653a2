"""Advantages of roles on the worked examples of ALGORITHMS-2026.md N1.4 and N1.5, and runs of several steps (N5.5, N5.6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from burnish.algorithms.advantages.spec import HierarchicalGrpoAdvantage, RaeAdvantage
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.trajectory import EPISODE, ROLE, TokenNode, Trajectory, chain_nodes, pack, role_key
from tests.algorithms.advantages.test_turns_and_gigpo import Episode, batch_of, by_turn, close
from tests.algorithms.functions_with_defaults import grpo, hierarchical_grpo, rae, step_broadcast


def played(rows: list[tuple[str, int, float]]) -> Batch:
    """One sample for each (player, episode, reward), with a prompt token and two of the answer."""
    mask, zeros = np.array([False, True, True]), np.zeros(3, np.float32)
    made = []
    for k, (role, episode, reward) in enumerate(rows):
        nodes = chain_nodes(np.arange(3), mask, zeros, np.where(mask, 0, -1).astype(np.int32))
        known = {ROLE: role, EPISODE: episode}
        made.append(Trajectory("p", 0, k, nodes, "stop", "", reward, metadata=known))
    return pack(made)


GAMES = [("p0", 0, 1.0), ("p1", 0, -1.0), ("p0", 1, 1.0), ("p1", 1, -1.0), ("p0", 2, -1.0), ("p1", 2, 1.0)]


def test_rae_on_the_worked_example() -> None:
    found = rae(played(GAMES))
    close(found.advantages.tolist(), [1, -1, 0.95, -0.95, -1.0975, 1.0975])
    close([found.baselines[role_key(name)] for name in ("p0", "p1")], [0.042625, -0.042625])
    assert (
        abs(float(found.advantages[0]) - 0.95) > 0.01
    )  # an update before the advantage would give 0.95, -0.95, 0.9025


def test_rae_goes_on_from_batch_to_batch_and_follows_the_order_of_sampling() -> None:
    whole, batch = rae(played(GAMES)), played(GAMES)
    first = rae(batch.select(torch.arange(4)))
    second = rae(
        batch.select(torch.tensor([5, 4])), first.baselines
    )  # rows of another order, the same order of sampling
    close(torch.cat([first.advantages, second.advantages.flip(0)]).tolist(), whole.advantages.tolist())
    assert second.baselines == whole.baselines
    turned = rae(played([*GAMES[4:], *GAMES[:4]]))  # sampled in another order
    assert abs(float(turned.advantages[2]) - float(whole.advantages[0])) > 0.04
    assert rae(played(GAMES), alpha=0.0).advantages.tolist() == [1, -1, 0, 0, -2, 2]


def test_rae_counts_a_replayed_game_against_the_baseline_and_does_not_move_it() -> None:
    batch = played(GAMES[:4]).with_sequence(use=torch.tensor([0.0, 0.0, 1.0, 1.0]))
    found = rae(batch)
    close(found.advantages.tolist(), [1, -1, 0.95, -0.95])
    close([found.baselines[role_key("p0")]], [0.05])


def test_rae_of_a_batch_without_roles_has_one_baseline() -> None:
    batch = played(GAMES)
    del batch.sequence["role_ids"]
    close(rae(batch).advantages.tolist()[:3], [1, -1.05, 1 + 0.0025])


PROPOSALS = [
    ("proposer", 0, 2 / 3),
    *((f"solver#{k}", 0, r) for k, r in enumerate([1.0, 0.0, 0.0])),
    ("proposer", 1, 1 / 3),
    *((f"solver#{k}", 1, r) for k, r in enumerate([1.0, 1.0, 0.0])),
]


def test_hierarchical_grpo_on_the_worked_example() -> None:
    third = 1 / 3
    batch = played(PROPOSALS)
    got = hierarchical_grpo(batch, episode_roles=["solver"])
    expected = [0.166667, 2 * third, -third, -third, -0.166667, third, third, -2 * third]
    close(got.tolist(), expected)
    order = torch.tensor([7, 0, 3, 1, 2, 6, 4, 5])
    close(hierarchical_grpo(batch.select(order), episode_roles=["solver"]).tolist(), [expected[k] for k in order])
    alone = hierarchical_grpo(batch, episode_roles=["proposer", "solver"])
    assert (float(alone[0]), float(alone[4])) == (0, 0)  # one proposal an episode has no peer
    plain = grpo(batch, std="none")  # one group for each role, whatever its episodes
    close(plain[[0, 4]].tolist(), [0.166667, -0.166667])
    close(plain[[1, 5]].tolist(), [0.5, 0.5])


def test_roles_that_are_missing_are_named() -> None:
    batch = played(PROPOSALS)
    del batch.sequence["episode_ids"]
    with pytest.raises(UserError, match="this environment has no roles: use grpo"):
        hierarchical_grpo(batch, episode_roles=["solver"])
    with pytest.raises(ValidationError, match="episode_roles"):
        HierarchicalGrpoAdvantage(episode_roles=[])
    with pytest.raises(ValidationError, match="alpha"):
        RaeAdvantage(alpha=1.0)  # the baseline would stay 0 for ever


def conversations(rewards: list[float], counts: list[int]) -> Batch:
    """Samples of several separate conversations, as MemAgent's."""
    made = []
    for k, (reward, count) in enumerate(zip(rewards, counts, strict=True)):
        nodes = list[TokenNode]()
        for _ in range(count):
            nodes.append(TokenNode(-1, np.arange(2)))
            nodes.append(TokenNode(len(nodes) - 1, np.arange(3), np.zeros(3, np.float32), np.zeros(3, np.int32)))
        made.append(Trajectory("p", 0, k, nodes, "stop", "", reward))
    return pack(made)


def test_multi_conversation_counts_samples_and_not_conversations() -> None:
    batch = conversations([1, 0, 0, 1], [3, 2, 2, 1])
    close(grpo(batch, std="none").tolist(), [0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5, 0.5])
    uneven = grpo(conversations([1, 0, 0, 0], [3, 2, 2, 1]), std="none")
    close(uneven.tolist(), [0.75] * 3 + [-0.25] * 5)  # a mean over conversations would be 0.375


RUNS: list[Episode] = [[("a", 1, 0.5), ("b", 2, 1)], [("a", 2, 0.7)], [("a", 1, 0), ("b", 1, 0.9), ("c", 1, 0)]]
"""Last rewards 1, .7, 0: mean .566667, deviation .513160. Earlier rewards do not count."""


def test_step_broadcast_by_hand() -> None:
    batch = batch_of(RUNS)
    centred, deviation = [1 - 1.7 / 3, 0.7 - 1.7 / 3, -1.7 / 3], 0.513160
    spread = [k for k, run in enumerate(RUNS) for _ in run]
    close(by_turn(batch, step_broadcast(batch, std="none")), [centred[k] for k in spread])
    close(by_turn(batch, step_broadcast(batch)), [centred[k] / deviation for k in spread], atol=1e-5)
    halves = [centred[k] / len(RUNS[k]) for k in spread]
    close(by_turn(batch, step_broadcast(batch, std="none", step_norm=True)), halves)
    assert by_turn(batch, step_broadcast(batch, std="none", min_std=0.52)) == [0] * 6
    close(by_turn(batch, step_broadcast(batch, std="none", min_std=0.5)), [centred[k] for k in spread])


def test_step_broadcast_of_single_steps_is_grpo() -> None:
    batch = batch_of([[("a", 2, 1.0)], [("a", 1, 0.0)], [("a", 3, 0.5)]])
    close(by_turn(batch, step_broadcast(batch, step_norm=True)), grpo(batch).tolist())
