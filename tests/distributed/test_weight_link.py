"""Weights go from a learner's ranks to an engine's over a link, and through the object store where the link broke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from burnish.core.sharded_tensors import PlacedShard, Shard, at_origin, full_shard
from burnish.distributed.ray_roles import uses_link
from burnish.distributed.weight_link import LinkAddress, Member, WeightLink, host_store
from burnish.inference.native.parallel_decoder import rank_part
from burnish.inference.weight_sync import EngineReport, Publication, TrainerClient, WeightSync, probe_request
from tests.distributed.toy_run import config_of
from tests.tiny_engines import decoder

MODEL = decoder(torch.float32, num_kv_heads=4)
FULL = {name: parameter.detach() for name, parameter in MODEL.named_parameters()}


def half(name: str, rank: int) -> torch.Tensor:
    """A learner's rank has the upper or the lower half of the embedding's rows, and all of every other tensor."""
    return FULL[name].chunk(2)[rank] if name == "embedding.weight" else FULL[name]


def member(rank: int) -> Member:
    blocks = {name: [at_origin(full_shard(tensor.shape))] for name, tensor in FULL.items()}
    shape, own = FULL["embedding.weight"].shape, half("embedding.weight", rank).shape
    start = (rank * len(half("embedding.weight", 0)), 0)
    blocks["embedding.weight"] = [PlacedShard(Shard(tuple(shape), start, tuple(own)), (0, 0))]
    return Member(f"machine {rank}", blocks, dict.fromkeys(FULL, 4), ["embedding.weight", "norm.weight"])


def in_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each function returns or raises, run at the same time."""
    found: list[Any] = [None] * len(work)

    def run(index: int) -> None:
        try:
            found[index] = work[index]()
        except RuntimeError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def linked() -> list[WeightLink]:
    """Two ranks of a learner, and the two ranks of an engine."""
    store = host_store("127.0.0.1")
    address = LinkAddress("127.0.0.1", store.port, 2, 2, 2, 20.0)
    members = [member(0), member(1), *[Member("machine 0", names=list(FULL))] * 2]
    found = in_threads([lambda r=r, m=m: WeightLink(address, r, MODEL.arch, None, m) for r, m in enumerate(members)])
    assert all(isinstance(one, WeightLink) for one in found), found
    return found


def parts(rank: int) -> dict[str, torch.Tensor]:
    return {name: rank_part(MODEL.arch, None, name, tensor, rank, 2) for name, tensor in FULL.items()}


def test_each_rank_of_an_engine_gets_its_part_from_the_ranks_that_hold_it() -> None:
    links = linked()
    sources = [{name: half(name, rank) for name in FULL} for rank in range(2)]
    targets = [{name: torch.full_like(part, torch.nan) for name, part in parts(rank).items()} for rank in range(2)]
    for complete in (False, True):
        said = in_threads(
            [
                partial(link.move, complete, a, b)
                for link, a, b in zip(links, [*sources, {}, {}], [{}, {}, *targets], strict=True)
            ]
        )
        assert said == [None] * 4
        for rank, own in enumerate(targets):
            for name, part in parts(rank).items():
                is_sent = complete or name in ("embedding.weight", "norm.weight")
                assert torch.equal(own[name], part) if is_sent else own[name].isnan().all(), name
    small, large = (links[2].plan(complete).moved_bytes for complete in (False, True))
    assert 0 < small < large


def test_a_process_that_leaves_the_link_is_an_error_for_those_that_wait_for_it() -> None:
    links = linked()
    targets = [{name: torch.empty_like(part) for name, part in parts(rank).items()} for rank in range(2)]
    links[0].close()
    said = in_threads([lambda k=k: links[2 + k].move(True, {}, targets[k]) for k in range(2)])
    assert all(isinstance(one, RuntimeError) for one in said)
    assert links[2].group is None


def test_a_process_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burnish.distributed.weight_link.JOIN_TIMEOUT_S", 0.2)
    store = host_store("127.0.0.1")
    address = LinkAddress("127.0.0.1", store.port, 1, 2, 2, 5.0)
    with pytest.raises(RuntimeError):
        WeightLink(address, 0, MODEL.arch, None, member(0))


def test_only_several_ranks_of_both_use_a_link(tmp_path: Any) -> None:
    ray = ["placement=ray", "placement.workers=2", "placement.engines=2", "placement.engine_tensor=2"]
    assert uses_link(config_of(tmp_path, *ray), 2)
    assert not uses_link(config_of(tmp_path, *ray), 1)
    assert not uses_link(config_of(tmp_path, *ray, "placement.sync=delta"), 2)
    assert not uses_link(config_of(tmp_path, *ray[:3]), 2)


@dataclass
class FakeEngines:
    """Two engines; the first `breaks` transfers over the link fail at engine 1."""

    size: int = 2
    breaks: int = 0
    calls: list[tuple[int, str]] = field(default_factory=list)

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        self.calls += [(rank, method) for rank in ranks]
        return [_Handle(rank, method) for rank in ranks]

    def wait_all(self, handles: Sequence[Any]) -> None:
        pass

    def result(self, handle: Any) -> EngineReport:
        is_broken = handle.method == "take_resharded" and handle.rank == 1 and self.breaks > 0
        self.breaks -= is_broken
        return EngineReport(-1 if is_broken else 3, 0, (5,), np.array([-1.0], dtype=np.float32))


@dataclass
class _Handle:
    rank: int
    method: str


@dataclass
class _Done:
    value: Any

    def result(self) -> Any:
        return self.value


def test_an_engine_that_missed_blocks_gets_all_weights_from_the_store_and_a_new_link_later() -> None:
    engines, opened, counted = FakeEngines(breaks=1), list[int](), list[str]()

    def opens() -> bool:
        opened.append(1)
        return True

    trainer = TrainerClient(
        lambda version, complete: pytest.fail("all engines have a link"), lambda: _Done(Publication(3, ())),
        lambda prompt, tokens: _Done([-1.0]), 1e-3, opens, lambda version, complete: _Done(Publication(version, (), moved_bytes=9)),
    )  # fmt: skip
    workers: Any = engines
    sync = WeightSync(workers, trainer, probe_request(13, None), lambda name, amount: counted.append(name))
    sync.begin(3, [0, 1], complete=True)
    assert sync.finish() == []
    assert engines.calls == [(0, "take_resharded"), (1, "take_resharded"), (1, "take")]
    assert "controller/resharding_failures" in counted
    sync.begin(3, [0, 1], complete=False)
    assert sync.finish() == []
    assert engines.calls[3:] == [(0, "take_resharded"), (1, "take_resharded")]
    assert len(opened) == 2


def test_a_link_that_cannot_be_made_leaves_the_store() -> None:
    engines: Any = FakeEngines()
    trainer = TrainerClient(
        lambda version, complete: _Done(Publication(3, ())), lambda: pytest.fail("nothing is repeated"),
        lambda prompt, tokens: _Done([-1.0]), 1e-3, lambda: False, lambda version, complete: pytest.fail("there is no link"),
    )  # fmt: skip
    sync = WeightSync(engines, trainer, probe_request(13, None), lambda name, amount: None)
    sync.begin(3, [0, 1], complete=True)
    sync.finish()
    assert engines.calls == [(0, "take"), (1, "take")]
