"""Pools: named places for the processes of a run on Ray, and which role works in which.

    placement:
      name: ray
      pools: {train: {places: 4}, more: {places: 2}, checks: {places: 2, cpus: 4, gpu: false}}
      roles: {actor: train, rollout: train, reference: more, critic: more, reward: checks}

Roles of one pool take turns in its places (the k-th process of each in the k-th place), roles of different pools work apart. A reward
takes no turns: it scores while engines sample.
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from burnish.config.errors import nearest
from burnish.config.slots.base import Record

Role = Literal["actor", "rollout", "reference", "critic", "reward"]
ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD = get_args(Role)


class Pool(Record):
    """Places for processes."""

    places: int = Field(1, ge=1)
    """How many: each is on one machine, and every role of the pool has a process there."""
    cpus: int = Field(1, ge=1)
    """CPUs of each place, and the threads of its processes."""
    gpu: bool = True
    """Whether each place has a GPU, where the cluster has any."""


Room = tuple[Pool, dict[str, int]]
"""A pool, and how many processes each of its roles has there."""


def check_pools(pools: dict[str, Pool], roles: dict[Role, str]) -> None:
    """Refuse roles without a pool, pools without a role, and what cannot be divided among them."""
    for role, pool in roles.items():
        if pool not in pools:
            known = ", ".join(pools) or "none"
            raise ValueError(f"roles.{role}={pool}: there is no such pool{nearest(pool, pools)} (pools: {known})")
    for role in (ACTOR, ROLLOUT):
        if pools and role not in roles:
            raise ValueError(f"with pools, roles.{role} must name the pool of the processes that {_does(role)}")
    idle = [name for name in pools if name not in roles.values()]
    if idle:
        raise ValueError(f"pools.{idle[0]} has no effect: no role works there")
    if pools and not pools[roles[ACTOR]].gpu and pools[roles[ROLLOUT]].gpu:
        raise ValueError(f"pools.{roles[ACTOR]}.gpu=false leaves the actor without a GPU while engines have some")
    if pools and pools[roles[ACTOR]].gpu and not pools[roles[ROLLOUT]].gpu:
        raise ValueError(f"pools.{roles[ROLLOUT]}.gpu=false leaves engines without a GPU while the actor has some")


def _does(role: str) -> str:
    return {ACTOR: "train", ROLLOUT: "sample"}[role]


def in_words(pools: dict[str, Pool], roles: dict[Role, str]) -> str:
    """The processes of a run in pools."""
    told = []
    for name, pool in pools.items():
        own = ", ".join(role for role, where in roles.items() if where == name)
        places = f"{pool.places} place{'' if pool.places == 1 else 's'}"
        told.append(f"pool {name} for {own}: {places} of {pool.cpus} CPU{'' if pool.cpus == 1 else 's'}")
    return "; ".join(told)
