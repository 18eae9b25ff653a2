"""Turns of agents: where their tokens are, what they earned, and the advantages of turns on their worked examples."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages.turns import turn_returns
from burnish.algorithms.batch_columns import place_rewards, turns_of
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory, TurnSpan, chain_nodes, pack
from tests.algorithms.branches import branched
from tests.algorithms.functions_with_defaults import bilevel_gae, gae, gigpo, hgpo, mt_grpo, rebn

Episode = list[tuple[str, int, float]]
"""Turns: the state, how many tokens were written, what they earned."""
WORKED: list[Episode] = [[("s0", 2, 0), ("s1", 1, 1)], [("s0", 1, 0), ("s2", 3, 0), ("s0", 2, 0)]]


def trajectory(sample: int, episode: Episode, beyond: float = 0.0, prompt: str = "p") -> Trajectory:
    """A prompt of two tokens, then turns with an observation of two tokens between."""
    mask, turns = [False, False], []
    for k, (state, count, reward) in enumerate(episode):
        mask += [False, False] if k else []
        turns.append(TurnSpan(2 * k + 1, state, float(reward)))
        mask += [True] * count
    size, actions = len(mask), np.array(mask)
    nodes = chain_nodes(np.arange(size), actions, np.zeros(size, np.float32), np.where(actions, 0, -1).astype(np.int32))
    reward = math.fsum(turn.reward for turn in turns) + beyond
    return Trajectory(prompt, 0, sample, nodes, "stop", "", reward, float(reward >= 1), turns=turns)


def batch_of(episodes: list[Episode], beyond: float = 0.0) -> Batch:
    return pack([trajectory(k, episode, beyond) for k, episode in enumerate(episodes)])


def by_turn(batch: Batch, values: Tensor) -> list[float]:
    """The one value of each turn; all other tokens must be 0."""
    turns = turns_of(batch)
    assert (values[~batch.action_mask] == 0).all()
    found = [set(values[turns.token_indices][turns.turn_of_token == k].tolist()) for k in range(turns.num_turns)]
    assert all(len(one) == 1 for one in found)
    return [one.pop() for one in found]


def close(got: list[float], expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)  # fmt: skip


def test_gigpo_on_the_worked_example() -> None:
    batch = batch_of(WORKED)
    close(by_turn(batch, gigpo(batch)), [1.133333, 0.5, -0.816667, -0.5, -0.816667])
    e, anchor = 0.707106, [1.154698, -0.577349, -0.577349]
    expected = [e + anchor[0], e, -e + anchor[1], -e, -e + anchor[2]]
    close(by_turn(batch, gigpo(batch, normalise="std")), expected, atol=1e-5)


def test_gigpo_weighs_the_turns_and_discounts_them() -> None:
    batch = batch_of(WORKED)
    close(by_turn(batch, gigpo(batch, omega=0.0)), [0.5, 0.5, -0.5, -0.5, -0.5])
    expected = [0.5 + 4 / 3, 0.5, -0.5 - 2 / 3, -0.5, -0.5 - 2 / 3]
    close(by_turn(batch, gigpo(batch, omega=2.0, gamma=1.0)), expected)


def test_a_state_is_shared_within_a_group_only() -> None:
    apart = batch_of(WORKED).with_sequence(group_ids=torch.tensor([1, 2]))
    close(by_turn(apart, gigpo(apart)), [1, 1, 0, 0, 0])


def test_gigpo_does_not_depend_on_the_order_of_the_trajectories() -> None:
    batch = batch_of([*WORKED, [("s2", 1, 0.5)]])
    order = torch.tensor([2, 0, 1])
    turned = batch.select(order)
    values = by_turn(batch, gigpo(batch))
    close(by_turn(turned, gigpo(turned)), values[5:] + values[:5])


def test_a_reward_that_no_turn_earned_is_the_last_ones() -> None:
    """The configured reward, or a shaper's, instead of the environment's."""
    silent: list[Episode] = [[(state, count, 0.0) for state, count, _ in episode] for episode in WORKED]
    batch = batch_of(silent).with_sequence(reward=torch.tensor([1.0, 0.0], dtype=torch.float64))
    close(by_turn(batch, gigpo(batch)), by_turn(batch, gigpo(batch_of(WORKED))))


def test_rewards_stand_where_they_were_earned() -> None:
    batch = batch_of([[("a", 2, 0.25), ("b", 1, 0.5)], [("a", 1, 0.0)]], beyond=2.0)
    placed = place_rewards(batch)
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    expected[3], expected[6], expected[9] = 0.25, 2.5, 2.0
    torch.testing.assert_close(placed, expected)
    values = batch.with_token(values=torch.zeros(batch.num_tokens, dtype=torch.float64), token_rewards=placed)
    returns = gae(values, lam=1.0, gamma=0.5, whiten=False).returns
    # Three written tokens: 0, 0.25, 2.5; then one of another trajectory.
    close(returns[batch.action_mask].tolist(), [0.5 * (0.25 + 1.25), 0.25 + 1.25, 2.5, 2.0])


def test_a_kl_in_the_reward_is_of_the_turn_whose_tokens_it_is_on() -> None:
    batch = batch_of(WORKED)
    kl = torch.where(batch.action_mask, -0.1, 0.0).double()
    got = gigpo(batch.with_token(token_rewards=place_rewards(batch) + kl), gamma=1.0)
    # R = 1 - .3 and -.6; Rs = [.7, .9], [-.6, -.5, -.2]; s0: .7, -.6, -.2
    anchor = [0.7 + 0.1 / 3, -0.6 + 0.1 / 3, -0.2 + 0.1 / 3]
    close(by_turn(batch, got), [0.65 + anchor[0], 0.65, -0.65 + anchor[1], -0.65, -0.65 + anchor[2]])


def test_an_environment_without_states_is_told_what_is_missing() -> None:
    episodes: list[Episode] = [[("", 1, 0.5), ("", 2, 1.0)], [("", 1, 0.0)]]
    trajectories = [trajectory(k, episode) for k, episode in enumerate(episodes)]
    for t in trajectories:
        t.turns = [TurnSpan(span.node, None, span.reward) for span in t.turns]
    batch = pack(trajectories)
    assert set(batch.ragged) == {"turn_start", "turn_reward"}
    with pytest.raises(UserError, match="the environment reports none: give every Turn a state"):
        gigpo(batch)
    for t in trajectories:
        t.turns = [TurnSpan(span.node) for span in t.turns]
    assert pack(trajectories).ragged == {}


states = st.sampled_from("abc")
episodes = st.lists(st.tuples(states, st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.lists(episodes, min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 2))
def test_gigpo_equals_a_loop_over_turns(group: list[Episode], gamma: float, omega: float) -> None:
    batch = batch_of(group)
    rewards = [sum(r for *_, r in episode) for episode in group]
    returns = [
        [sum(gamma ** (j - k) * episode[j][2] for j in range(k, len(episode))) for k in range(len(episode))]
        for episode in group
    ]
    anchors: dict[str, list[float]] = {}
    for episode, own in zip(group, returns, strict=True):
        for (state, *_), value in zip(episode, own, strict=True):
            anchors.setdefault(state, []).append(value)
    expected = []
    for k, episode in enumerate(group):
        whole = rewards[k] - sum(rewards) / len(rewards) if len(group) > 1 else rewards[k]
        for (state, *_), value in zip(episode, returns[k], strict=True):
            mates = anchors[state]
            expected.append(whole + omega * (value - sum(mates) / len(mates) if len(mates) > 1 else 0.0))
    close(by_turn(batch, gigpo(batch, omega=omega, gamma=gamma)), expected, atol=1e-9)


def test_returns_of_turns_follow_their_trajectories() -> None:
    earned = torch.tensor([1.0, 0, 2, 0, 4], dtype=torch.float64)
    close(turn_returns(earned, torch.tensor([1, 0, 1, 0, 1]), 0.5).tolist(), [3.0, 0, 4, 0, 4])


# --- Bi-level GAE, on the worked example of ALGORITHMS-2026.md N5.2 ---------------------------------------------------------


def two_turns() -> Batch:
    """Turns of three and two tokens with an observation between; values .5, .6, .4 and .3, .8; rewards .2 and 1."""
    batch = pack([trajectory(0, [("a", 3, 0.2), ("b", 2, 1.0)])])
    values = torch.full((batch.num_tokens,), math.nan, dtype=torch.float64)
    values[batch.action_mask] = torch.tensor([0.5, 0.6, 0.4, 0.3, 0.8], dtype=torch.float64)
    return batch.with_token(values=values)


def at_actions(batch: Batch, values: Tensor) -> list[float]:
    assert (values[~batch.action_mask] == 0).all()
    return values[batch.action_mask].tolist()


def test_bilevel_gae_on_the_worked_example() -> None:
    batch = two_turns()
    found = bilevel_gae(batch, lam=0.95, turn_gamma=0.9, whiten=False)
    close(at_actions(batch, found.advantages), [0.533628, 0.45645, 0.691, 0.69, 0.2])
    close(at_actions(batch, found.returns), [1.033628, 1.05645, 1.091, 0.99, 1])
    whitened = bilevel_gae(batch, lam=0.95, turn_gamma=0.9).advantages
    close(at_actions(batch, whitened), [0.095695, -0.284765, 0.871489, 0.866559, -1.548978])
    monte_carlo = bilevel_gae(batch, turn_gamma=1.0, whiten=False)
    close(at_actions(batch, monte_carlo.advantages), [0.7, 0.6, 0.8, 0.7, 0.2])
    close(at_actions(batch, monte_carlo.returns), [1.2, 1.2, 1.2, 1, 1])
    close(at_actions(batch, bilevel_gae(batch).returns), [1.15, 1.15, 1.15, 1, 1])
    targets = bilevel_gae(batch, lam=0.95, turn_gamma=0.95, lam_critic=1.0).returns
    close(at_actions(batch, targets), [1.15, 1.15, 1.15, 1, 1])


turn = st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(turn, min_size=1, max_size=4), min_size=1, max_size=3), *[st.floats(0, 1)] * 4)
def test_bilevel_gae_equals_a_loop_over_turns_and_tokens(
    played: list[list[list[tuple[float, float]]]], gamma: float, lam: float, turn_gamma: float, turn_lam: float
) -> None:
    """Tokens are (value, reward): rewards, such as a KL, may be on any token."""
    batch = pack([trajectory(k, [("s", len(t), 0.0) for t in turns]) for k, turns in enumerate(played)])
    cells = [cell for turns in played for tokens in turns for cell in tokens]
    values, rewards = (torch.zeros(batch.num_tokens, dtype=torch.float64) for _ in range(2))
    values[batch.action_mask] = torch.tensor([v for v, _ in cells], dtype=torch.float64)
    rewards[batch.action_mask] = torch.tensor([r for _, r in cells], dtype=torch.float64)
    expected = []
    for turns in played:
        following, found = (0.0, 0.0), []
        for tokens in reversed(turns):
            earned, own = sum(r for _, r in tokens), tokens[-1][0]
            between = earned + turn_gamma * following[0] - own + turn_gamma * turn_lam * following[1]
            following = (own, between)
            ahead, later = 0.0, 0.0
            for k in reversed(range(len(tokens))):
                value, reward = tokens[k]
                y = reward + (between + own - earned if k == len(tokens) - 1 else 0.0)
                later = y + gamma * ahead - value + gamma * lam * later
                ahead = value
                found.append(later)
        expected += found[::-1]
    batch = batch.with_token(values=values, token_rewards=rewards)
    options = {"gamma": gamma, "lam": lam, "turn_gamma": turn_gamma, "turn_lam": turn_lam}
    close(at_actions(batch, bilevel_gae(batch, whiten=False, **options).advantages), expected, atol=1e-9)


def test_bilevel_gae_of_one_turn_is_gae_and_of_turns_without_discount_the_return() -> None:
    one = pack([trajectory(0, [("a", 4, 1.0)]), trajectory(1, [("a", 2, 0.5)])])
    one = one.with_token(values=torch.linspace(-1, 1, one.num_tokens, dtype=torch.float64))
    for name in ("advantages", "returns"):
        level, plain = (getattr(f(one, gamma=0.9, lam=0.8), name) for f in (bilevel_gae, gae))
        torch.testing.assert_close(level, plain, atol=1e-12, rtol=0)
    several = two_turns()
    exact = gae(several.with_token(token_rewards=place_rewards(several)), whiten=False)
    torch.testing.assert_close(bilevel_gae(several, turn_gamma=1.0, whiten=False).returns, exact.returns)


# --- ReBN and HGPO, on the worked examples of N5.3 and N5.4 -----------------------------------------------------------------


def test_rebn_on_the_worked_example() -> None:
    batch = batch_of(WORKED)  # returns .95, 1 | 0, 0, 0
    got = by_turn(batch, rebn(batch, gamma=0.95))
    close(got, [1.048057, 1.141634, -0.729897, -0.729897, -0.729897])
    equal = batch_of([[("a", 2, 0.0), ("b", 1, 1.0)], [("a", 3, 1.0)]])
    assert by_turn(equal, rebn(equal)) == [0, 0, 0]


HISTORIES: list[Episode] = [
    [("s0", 1, 0), ("s1", 2, 0), ("s2", 1, 1)],
    [("s0", 2, 0), ("s1", 1, 0), ("s2", 1, 0)],
    [("s3", 1, 0), ("s1", 1, 0.5)],
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"history": 2, "normalise": "none"}, [0.405, 0.443333, 0.5, -0.405, -0.456667, -0.5, 0, 0.033333]),
        ({"history": 0, "normalise": "none"}, [0.405, 0.433333, 0.5, -0.405, -0.466666, -0.5, 0, 0.033333]),
        ({"history": 2}, [0.999997, 1.070783, 0.999998, -0.999997, -1.106997, -0.999998, 0, 0.090535]),
    ],
)
def test_hgpo_on_the_worked_example(options: dict[str, object], expected: list[float]) -> None:
    batch = batch_of(HISTORIES)
    close(by_turn(batch, hgpo(batch, gamma=0.9, **options)), expected, atol=2e-6)


@settings(max_examples=40)
@given(st.lists(episodes, min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 2))
def test_hgpo_without_history_is_the_step_part_of_gigpo(group: list[Episode], gamma: float, alpha: float) -> None:
    """The only cluster is the state's, with weight w = 2^alpha, so that the sum is w a / (w + 1e-6)."""
    batch, weight = batch_of(group), 2**alpha
    step = gigpo(batch, gamma=gamma, omega=1.0) - gigpo(batch, gamma=gamma, omega=0.0)
    got = hgpo(batch, gamma=gamma, alpha=alpha, history=0, normalise="none")
    torch.testing.assert_close(got * (weight + 1e-6) / weight, step, atol=1e-12, rtol=0)


def test_hgpo_with_the_episode_as_the_widest_cluster() -> None:
    """By hand: returns of episodes 1, 0, .5, so a_0 = .5, -.5, 0 with weight 1 beside weight 2 of the state's cluster."""
    batch = batch_of(HISTORIES)
    got = by_turn(batch, hgpo(batch, gamma=0.9, history=0, normalise="none", episode=True))
    first = (0.5 + 2 * 0.405) / 3
    close(got[:2] + got[6:], [first, (0.5 + 2 * 0.433333) / 3, 0, 0.033333], atol=2e-6)


def test_hgpo_without_states_is_told_what_is_missing() -> None:
    with pytest.raises(UserError, match="advantage hgpo compares the turns"):
        hgpo(replace(two_turns(), ragged={}))


CALLS: list[Episode] = [
    [("a", 1, 0.2), ("b", 2, 1)],
    [("a", 2, 0.6), ("b", 1, 0)],
    [("a", 1, 0.1), ("b", 1, 0.3), ("c", 1, 1)],
]
"""First turns .2, .6, .1: mean .3, deviation .264575. Outcomes 1, 0, 1: mean 2/3, deviation .577350. The middle turn has no peer."""


def test_mt_grpo_on_a_group_by_hand() -> None:
    batch = batch_of(CALLS)
    first, final = [-0.377964, 1.133893, -0.755929], [0.577350, -1.154701, 0.577350]
    expected = [first[0] + final[0], final[0], first[1] + final[1], final[1], first[2] + final[2], final[2], final[2]]
    close(by_turn(batch, mt_grpo(batch)), expected, atol=1e-5)
    half = [first[0] + final[0] / 2, final[0], first[1] + final[1] / 2, final[1], first[2] + final[2] / 2, final[2] / 2]
    close(by_turn(batch, mt_grpo(batch, outcome=0.5))[:6], half, atol=1e-5)
    plain = [-0.1 + 1 / 3, 1 / 3, 0.3 - 2 / 3, -2 / 3, -0.2 + 1 / 3, 1 / 3, 1 / 3]
    close(by_turn(batch, mt_grpo(batch, std="none")), plain)
    turned = batch_of(CALLS[::-1])
    close(by_turn(turned, mt_grpo(turned, std="none")), plain[4:] + plain[2:4] + plain[:2])
    beyond = batch_of(CALLS, beyond=2.0)  # a configured reward belongs to the outcome, where it is the same for all
    close(by_turn(beyond, mt_grpo(beyond)), expected, atol=1e-5)


def test_mt_grpo_with_the_outcome_alone_is_grpo() -> None:
    batch = batch_of([[("a", 1, 0), ("b", 2, 1)], [("a", 2, 0), ("b", 1, 0)]])
    close(by_turn(batch, mt_grpo(batch, std="none")), [0.5, 0.5, -0.5, -0.5])


@pytest.mark.parametrize("seed", range(4))
def test_turns_in_sequences_of_their_own_have_the_same_advantages(seed: int) -> None:
    """The worked examples, with turns that begin a new sequence because the context before them was rewritten."""
    whole = batch_of(WORKED)
    cut = branched(whole, seed)
    assert cut.num_sequences > whole.num_sequences
    close(by_turn(cut, gigpo(cut)), [1.133333, 0.5, -0.816667, -0.5, -0.816667])
    close(by_turn(cut, rebn(cut, gamma=0.95)), [1.048057, 1.141634, -0.729897, -0.729897, -0.729897])
    calls = branched(batch_of(CALLS), seed)
    close(by_turn(calls, mt_grpo(calls, std="none"))[:4], [-0.1 + 1 / 3, 1 / 3, 0.3 - 2 / 3, -2 / 3])
    values = branched(two_turns(), seed)
    found = bilevel_gae(values, lam=0.95, turn_gamma=0.9, whiten=False)
    close(at_actions(values, found.advantages), [0.533628, 0.45645, 0.691, 0.69, 0.2])
