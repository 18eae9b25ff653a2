"""Plans how weights move from the ranks that train to the ranks that sample, with the fewest bytes.

A layout says which blocks of every tensor each rank holds (`core/sharded_tensors.py`). The learner's may be any mix of pipeline
stages, FSDP shards, tensor- and expert-parallel parts and copies; the engines' any mix of tensor- and expert-parallel parts and
copies (`reshard_layouts.py`). A rank may be in both: learner and engine share its GPU.

A block that a rank needs and does not hold arrives there exactly once. It comes from a holder on its own machine if there is one. If
there is none, it crosses the network once for the whole machine, and the rank that received it hands it to the others there. Senders
and receivers are chosen so that the busiest has least to do. No torch is needed: a plan for hundreds of ranks can be made and judged
on any machine, and is executed by `reshard_transfer.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from burnish.core.sharded_tensors import PlacedShard, Shard

Holders = Mapping[int, Sequence[PlacedShard]]
"""By rank: the blocks of one tensor that it holds, with their places in its own tensor."""
Place = tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A block of a tensor that goes from one rank to another, or stays on a rank that holds it."""

    tensor: str
    sizes: tuple[int, ...]
    source: int
    source_at: Place
    """Where the block starts in the source's tensor: the learner's, or the engine's if `is_relayed`."""
    target: int
    target_at: Place
    num_bytes: int
    is_relayed: bool = False
    """Whether the source received the block itself, in an earlier transfer."""

    @property
    def is_local(self) -> bool:
        return self.source == self.target and not self.is_relayed


@dataclass
class Load:
    """Bytes that each rank sends and receives, within machines and between them."""

    sent: Counter[int] = field(default_factory=Counter)
    received: Counter[int] = field(default_factory=Counter)

    def add(self, source: int, target: int, num_bytes: int) -> None:
        self.sent[source] += num_bytes
        self.received[target] += num_bytes

    @property
    def total(self) -> int:
        return self.received.total()

    @property
    def busiest(self) -> int:
        """Most bytes that one rank sends or receives. Links work in both directions at once."""
        return max([0, *self.sent.values(), *self.received.values()])


@dataclass
class Plan:
    """Transfers in an order in which they can be executed: a relayed block is received before it is sent on."""

    node_of: Callable[[int], int]
    keeps_transfers: bool = True
    """Whether `transfers` are listed; otherwise only counted."""
    rank: int | None = None
    """If set, only transfers from or to this rank are listed."""
    transfers: list[Transfer] = field(default_factory=list)
    num_transfers: int = 0
    within: Load = field(default_factory=Load)
    """Bytes between ranks of one machine."""
    across: Load = field(default_factory=Load)
    """Bytes between machines."""
    kept_bytes: int = 0
    """Bytes that ranks copy from their own tensors."""

    @property
    def moved_bytes(self) -> int:
        return self.within.total + self.across.total

    def add(self, transfer: Transfer) -> None:
        self.num_transfers += 1
        if self.keeps_transfers and self.rank in (None, transfer.source, transfer.target):
            self.transfers.append(transfer)
        if transfer.is_local:
            self.kept_bytes += transfer.num_bytes
            return
        is_within = self.node_of(transfer.source) == self.node_of(transfer.target)
        (self.within if is_within else self.across).add(transfer.source, transfer.target, transfer.num_bytes)

    def seconds(self, within_per_s: float, across_per_s: float) -> float:
        """Time of the busiest rank at these bytes per second of a link, if one kind of transfer follows the other."""
        return self.within.busiest / within_per_s + self.across.busiest / across_per_s


@dataclass(frozen=True)
class LowerBound:
    """What no plan can go below."""

    moved_bytes: int
    """Bytes that ranks need and do not hold."""
    across_bytes: int
    """Bytes that machines need and do not hold."""
    busiest_across: int
    """Bytes over the busiest link between machines, if the ranks of a machine share what it needs evenly."""

    def seconds(self, across_per_s: float) -> float:
        return self.busiest_across / across_per_s


@dataclass(frozen=True)
class TensorLayout:
    """A tensor, who holds it and who needs it."""

    name: str
    item_size: int
    sources: Holders
    targets: Holders


def make_plan(
    tensors: Iterable[TensorLayout],
    node_of: Callable[[int], int],
    keeps_transfers: bool = True,
    rank: int | None = None,
) -> Plan:
    """Plan the transfer of all tensors. `node_of(rank)` is the rank's machine.

    Millions of transfers may be counted and not listed, or only those of one `rank` listed.
    """
    plan = Plan(node_of, keeps_transfers, rank)
    for tensor in tensors:
        for block in shared_blocks(tensor):
            _plan_block(plan, tensor, block)
    return plan


def lower_bound(tensors: Iterable[TensorLayout], node_of: Callable[[int], int]) -> LowerBound:
    """The fewest bytes between ranks, between machines, and over the busiest link between machines."""
    moved = across = 0
    into: Counter[int] = Counter()
    ranks: dict[int, set[int]] = defaultdict(set)
    for tensor in tensors:
        for rank in (*tensor.sources, *tensor.targets):
            ranks[node_of(rank)].add(rank)
        for block in shared_blocks(tensor):
            size = block.numel * tensor.item_size
            missing = [rank for rank in block.targets if rank not in block.sources]
            moved += size * len(missing)
            have = {node_of(rank) for rank in block.sources}
            for node in {node_of(rank) for rank in missing} - have:
                across += size
                into[node] += size
    busiest = max((-(-size // len(ranks[node])) for node, size in into.items()), default=0)
    return LowerBound(moved, across, busiest)


# --- blocks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedBlock:
    """The overlap of a stored and a needed block, with its place on every rank that holds or needs it."""

    sizes: tuple[int, ...]
    numel: int
    sources: Mapping[int, Place]
    targets: Mapping[int, Place]


def shared_blocks(tensor: TensorLayout) -> Iterable[SharedBlock]:
    """Divide a tensor into blocks that are each wholly held or not, and wholly needed or not, by every rank.

    Blocks of the same side are equal or disjoint, as those of every mesh are. A missing or doubly stored element is a `ValueError`.
    """
    sources, targets = _distinct(tensor.name, tensor.sources), _distinct(tensor.name, tensor.targets)
    stored = sorted(sources, key=lambda shard: shard.offsets)
    starts = [shard.offsets[0] for shard in stored]
    tallest = max((shard.sizes[0] for shard in stored), default=0)
    for wanted, wanting in targets.items():
        found = 0
        first = bisect_left(starts, wanted.offsets[0] - tallest + 1)
        last = bisect_left(starts, wanted.offsets[0] + wanted.sizes[0])
        for shard in stored[first:last]:
            common = _common(wanted, shard)
            if common is None:
                continue
            offsets, sizes = common
            block = SharedBlock(
                sizes,
                _product(sizes),
                {rank: _within(offsets, shard, at) for rank, at in sources[shard].items()},
                {rank: _within(offsets, wanted, at) for rank, at in wanting.items()},
            )
            found += block.numel
            yield block
        if found != wanted.numel:
            what = "not held by any rank" if found < wanted.numel else "held in blocks that overlap"
            raise ValueError(f"{tensor.name}: {abs(wanted.numel - found)} of {wanted.numel} elements are {what}")


def _distinct(name: str, holders: Holders) -> dict[Shard, dict[int, Place]]:
    """The different blocks of a tensor, each with its place on the ranks that hold it."""
    found: dict[Shard, dict[int, Place]] = {}
    for rank, blocks in holders.items():
        for block in blocks:
            if block.shard.numel:
                found.setdefault(block.shard, {})[rank] = block.at
    if len({shard.shape for shard in found}) > 1:
        raise ValueError(f"{name} has different shapes on different ranks: {sorted({s.shape for s in found})}")
    return found


def _common(one: Shard, other: Shard) -> tuple[Place, Place] | None:
    """Offsets and sizes of the elements that two blocks share."""
    offsets, sizes = [], []
    for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return tuple(offsets), tuple(sizes)


def _within(offsets: Place, shard: Shard, at: Place) -> Place:
    """Place of the element at `offsets` of the full tensor in the tensor that has the shard at `at`."""
    return tuple(o - start + place for o, start, place in zip(offsets, shard.offsets, at, strict=True))


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


# --- the choice of senders ---------------------------------------------------------------------------------------------


def _plan_block(plan: Plan, tensor: TensorLayout, block: SharedBlock) -> None:
    size, node_of = block.numel * tensor.item_size, plan.node_of

    def add(source: int, source_at: Place, target: int, is_relayed: bool = False) -> None:
        target_at = block.targets[target]
        plan.add(Transfer(tensor.name, block.sizes, source, source_at, target, target_at, size, is_relayed))

    missing: dict[int, list[int]] = defaultdict(list)
    for rank in block.targets:
        if rank in block.sources:
            add(rank, block.sources[rank], rank)
        else:
            missing[node_of(rank)].append(rank)
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in block.sources:
        holders[node_of(rank)].append(rank)
    for node, ranks in missing.items():
        left = ranks
        relay: int | None = None
        if not holders.get(node):
            relay = min(ranks, key=lambda rank: (plan.across.received[rank], rank))
            sender = min(block.sources, key=lambda rank: (plan.across.sent[rank], rank))
            add(sender, block.sources[sender], relay)
            left = [rank for rank in ranks if rank != relay]
        for rank in left:
            # A rank that has received the block can hand it on as well as its first holder.
            first = [(holder, block.sources[holder], False) for holder in holders.get(node, ())]
            later = [] if relay is None else [(relay, block.targets[relay], True)]
            source, at, is_relayed = min((*first, *later), key=lambda one: (plan.within.sent[one[0]], one[0]))
            add(source, at, rank, is_relayed)


def chunks_of(total: int, parts: int) -> list[tuple[int, int]]:
    """The ranges of `torch.chunk`: equal ones, but for the last ones, which may be shorter or empty."""
    each = -(-total // parts)
    return list(pairwise(min(k * each, total) for k in range(parts + 1)))
