"""Batches of agents' trajectories with every column that an algorithm reads, and the same trajectories cut into branches.

A branch is what `pack` makes of a rewritten context: all earlier tokens again, which are context and no actions, then its own
turns. Every sampled token is an action in exactly one branch.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import role_key

GROUPS = [0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4]
"""Mixed groups, a group of one, a constant one."""
REWARDS = [1, 0, 0.5, 0.3, 0.8, -1, 0.5, 1, 1, 0.25, 0]
LOGPROBS = ("new", "old", "ref", "author_logp", "behaviour_logp")


def episodes(seed: int) -> Batch:
    """Trajectories of one sequence each: a prompt of two tokens, one to four turns, an observation between two turns.

    Columns that describe sampled tokens are nan at all other tokens.
    """
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    masks, starts = list[list[bool]](), list[list[int]]()
    for _ in GROUPS:
        mask, own = [False, False], list[int]()
        for turn in range(chance.randint(1, 4)):
            mask += [False] * (chance.randint(1, 2) if turn else 0)
            own.append(len(mask))
            mask += [True] * chance.randint(1, 4)
        masks.append(mask)
        starts.append(own)
    mask = torch.tensor([m for one in masks for m in one])
    size, num, num_turns = mask.numel(), len(GROUPS), sum(map(len, starts))

    def numbers(scale: float = 1.0) -> Tensor:
        drawn = scale * torch.randn(size, generator=generator, dtype=torch.float64)
        return torch.where(mask, drawn, torch.nan)

    def shares(count: int) -> Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    old = torch.where(mask, -0.2 - 3 * shares(size), torch.nan)
    reward = torch.tensor(REWARDS, dtype=torch.float64)
    offsets = offsets_from_lengths(torch.tensor([len(own) for own in starts]))
    turns = {
        "turn_start": torch.tensor([start for own in starts for start in own]),
        "turn_state": torch.randint(3, (num_turns,), generator=generator),
        "turn_reward": (shares(num_turns) * 4).floor() / 4,
        "answer_probability": shares(num_turns),
    }
    return Batch(
        tokens=torch.randint(4, (size,), generator=generator),
        offsets=offsets_from_lengths(torch.tensor([len(one) for one in masks])),
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "old": old,
            "new": old + numbers(),
            "ref": old + numbers(0.3),
            "entropy": torch.where(mask, shares(size), torch.nan),
            "sum_p2": torch.where(mask, shares(size), torch.nan),
            "critic": numbers(),
            "process_rewards": numbers(),
            "author_logp": old + numbers(0.5),
            "behaviour_logp": old + numbers(0.5),
            "identity": torch.arange(size),
        },
        sequence={
            "group_ids": torch.tensor(GROUPS),
            "trajectory_ids": torch.arange(num),
            "key": torch.arange(num) * 977 + 7,
            "reward": reward,
            "accuracy": (reward > 0.4).double(),
            "truncated": torch.arange(num) % 5 == 1,
            "void_turns": (torch.arange(num) % 4 == 2).double(),
            "num_chars": torch.arange(num) * 5 % 17,
            "num_lines": 1 + (torch.arange(num) % 3 == 0).long(),
            "part/a": (shares(num) > 0.5).double(),
            "part/b": shares(num),
            "greedy_reward": torch.tensor([(g % 2) / 2 for g in GROUPS], dtype=torch.float64),
            "prompt_value": torch.tensor([0.1 + g / 5 for g in GROUPS], dtype=torch.float64),
            "budget": 2 + 6 * shares(num),
            "demonstration": torch.arange(num) % 4 == 2,
            "role_ids": torch.tensor([role_key("solver" if k % 7 > 2 else "proposer") for k in range(num)]),
            "episode_ids": torch.arange(num) // 3,
        },
        ragged={name: Ragged(values, offsets) for name, values in turns.items()},
    )


def branched(batch: Batch, seed: int) -> Batch:
    """The same trajectories, most of them cut at some of their turns into sequences of their own."""
    chance = random.Random(seed)
    index, actions, owners, turn_rows = list[int](), list[bool](), list[int](), list[list[int]]()
    lengths = []
    turns = batch.ragged["turn_start"]
    for k in range(batch.num_sequences):
        begin, end = int(batch.offsets[k]), int(batch.offsets[k + 1])
        rows = list(range(int(turns.offsets[k]), int(turns.offsets[k + 1])))
        pieces: list[list[int]] = [[]]
        for row in rows:  # a new branch begins at two thirds of the turns
            if pieces[-1] and chance.random() < 2 / 3:
                pieces.append([])
            pieces[-1].append(row)
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            own = begin + int(turns.values[piece[0]])
            stop = end if following is None else _last_action(batch, begin + int(turns.values[following[0]]))
            index += range(begin, stop)
            actions += [at >= own for at in range(begin, stop)]
            owners.append(k)
            turn_rows.append(piece)
            lengths.append(stop - begin)
    at, is_own, owner = torch.tensor(index), torch.tensor(actions), torch.tensor(owners)
    token = {name: column[at] for name, column in batch.token.items()}
    for name in ("action_mask", "loss_mask"):
        token[name] = token[name] & is_own
    for name in (*LOGPROBS, "entropy", "sum_p2", "critic", "process_rewards"):
        if name in token:
            token[name] = torch.where(token["action_mask"], token[name], torch.nan)
    offsets = offsets_from_lengths(torch.tensor([len(rows) for rows in turn_rows]))
    flat = torch.tensor([row for rows in turn_rows for row in rows])
    sequence = {name: column[owner] for name, column in batch.sequence.items()}
    is_first = torch.tensor([k == 0 or owners[k - 1] != owners[k] for k in range(len(owners))])
    sequence["key"] = torch.where(is_first, sequence["key"], torch.arange(len(owners)) * 31 + 5)
    return replace(
        batch,
        tokens=batch.tokens[at],
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        token=token,
        sequence=sequence,
        ragged={name: Ragged(column.values[flat], offsets) for name, column in batch.ragged.items()},
    )


def _last_action(batch: Batch, before: int) -> int:
    """The place behind the last action token before a place."""
    while not bool(batch.action_mask[before - 1]):
        before -= 1
    return before


def without_turns(batch: Batch) -> Batch:
    """The batch as if the environment reported neither states nor rewards of turns."""
    return replace(batch, ragged={})
