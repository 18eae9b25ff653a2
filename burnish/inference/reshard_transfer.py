"""Executes a plan of weight transfers (`resharding.py`) between the ranks of a process group, and verifies what arrived.

All ranks make the same plan from the same layouts, so that only weights are exchanged. Blocks between two ranks travel together in
buckets. Each bucket ends with a checksum of its bits. The receiver computes it again from the tensors it has written, so that a wrong
offset is found as well as a wrong bit. Blocks that a rank hands on are sent after all others have arrived. The group is gloo's, and
messages are in host memory: the ranks of a learner and of an engine may share a GPU, which NCCL refuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from burnish.core.random_keys import to_int64
from burnish.core.sharded_tensors import PlacedShard, at_origin, full_shard, local_tensor
from burnish.inference.resharding import Transfer
from burnish.inference.weight_sync import BUCKET_BYTES, SyncError, checksum
from burnish.training.sharded_checkpoint import parameter_blocks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CHECKSUM_BYTES = 8
TAG = 0
"""Of messages. Those between two ranks arrive in the order in which they were sent."""


def learner_layout(model: nn.Module) -> dict[str, list[PlacedShard]]:
    """The blocks of every full parameter that this rank's part of a learner's model holds, in Hugging Face's order of rows."""
    whole = {name: [at_origin(full_shard(parameter.shape))] for name, parameter in model.named_parameters()}
    return whole | parameter_blocks(model)


def exchange_layouts(own: Mapping[str, Any], group: ProcessGroup) -> list[dict[str, Any]]:
    """The layouts of all ranks, in rank order."""
    from torch.distributed import all_gather_object

    found: list[Any] = [None] * group.size()
    all_gather_object(found, dict(own), group=group)
    return found


@torch.no_grad()
def execute(
    transfers: Iterable[Transfer],
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: ProcessGroup,
    bucket_bytes: int = BUCKET_BYTES,
) -> int:
    """Write this rank's `targets`. `sources` are its parts of the learner's tensors; both may be empty. Returns the bytes received.

    Every rank of the group must call it with the same transfers. A `SyncError` names the first tensor that did not arrive.
    """
    rank = group.rank()
    sources = {name: local_tensor(tensor) for name, tensor in sources.items()}
    for name in sources.keys() & targets.keys():
        if sources[name].dtype != targets[name].dtype:
            raise ValueError(f"{name} is {sources[name].dtype} at the learner and {targets[name].dtype} at the engine")
    own: list[list[Transfer]] = [[], []]
    for transfer in transfers:
        if transfer.is_local and transfer.target == rank:
            _target_view(transfer, targets).copy_(_source_view(transfer, sources, targets))
        elif rank in (transfer.source, transfer.target) and not transfer.is_local:
            own[transfer.is_relayed].append(transfer)
    return sum(_exchange(some, sources, targets, group, bucket_bytes) for some in own)


def _exchange(
    transfers: Sequence[Transfer],
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: ProcessGroup,
    bucket_bytes: int,
) -> int:
    """Send and receive blocks, a bucket for each peer at a time."""
    rank, received = group.rank(), 0
    by_peer: dict[tuple[int, bool], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        is_sent = transfer.source == rank
        by_peer[transfer.target if is_sent else transfer.source, is_sent].append(transfer)
    buckets = {peer: _in_buckets(some, bucket_bytes) for peer, some in by_peer.items()}
    for number in range(max(map(len, buckets.values()), default=0)):
        present = {peer: some[number] for peer, some in buckets.items() if number < len(some)}
        messages: dict[tuple[int, bool], Tensor] = {}
        for (peer, is_sent), some in present.items():
            if is_sent:
                messages[peer, is_sent] = _packed([_source_view(one, sources, targets) for one in some])
            else:
                size = sum(one.num_bytes for one in some) + CHECKSUM_BYTES
                messages[peer, is_sent] = torch.empty(size, dtype=torch.uint8)
        works = [
            (group.send if is_sent else group.recv)([message], peer, TAG)
            for (peer, is_sent), message in sorted(messages.items(), key=lambda item: item[0])
        ]
        for work in works:
            work.wait()
        for (peer, is_sent), some in present.items():
            if not is_sent:
                _unpack(messages[peer, is_sent], some, targets, peer)
                received += sum(one.num_bytes for one in some)
    return received


def _in_buckets(transfers: Sequence[Transfer], bucket_bytes: int) -> list[list[Transfer]]:
    """Consecutive transfers of up to `bucket_bytes` together; a larger one is alone. Both ends divide them alike."""
    buckets: list[list[Transfer]] = []
    size = bucket_bytes
    for transfer in transfers:
        if size + transfer.num_bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(transfer)
        size += transfer.num_bytes
    return buckets


def _packed(views: Sequence[Tensor]) -> Tensor:
    """The bytes of blocks in host memory, and their checksum."""
    raw = torch.cat([_raw(view) for view in views]).cpu()
    total = torch.tensor([to_int64(checksum(raw))]).view(torch.uint8)
    return torch.cat([raw, total])


def _unpack(message: Tensor, transfers: Sequence[Transfer], targets: Mapping[str, Tensor], peer: int) -> None:
    """Write the blocks of a message, then verify what the tensors hold now."""
    start = 0
    for one in transfers:
        view = _target_view(one, targets)
        raw = message[start : start + one.num_bytes].clone()  # aligned, as a view of wider values must be
        view.copy_(raw.view(view.dtype).view(one.sizes))
        start += one.num_bytes
    if not torch.equal(_packed([_target_view(one, targets) for one in transfers]), message):
        raise SyncError(
            f"weights from rank {peer} did not arrive: {transfers[0].tensor} and {len(transfers) - 1} more blocks have another checksum "
            "than there; the run stops before anything is sampled with them"
        )


def _raw(view: Tensor) -> Tensor:
    return view.contiguous().view(-1).view(torch.uint8)


def _source_view(transfer: Transfer, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
    return _block((targets if transfer.is_relayed else sources)[transfer.tensor], transfer.source_at, transfer.sizes)


def _target_view(transfer: Transfer, targets: Mapping[str, Tensor]) -> Tensor:
    return _block(targets[transfer.tensor], transfer.target_at, transfer.sizes)


def _block(tensor: Tensor, at: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))]
