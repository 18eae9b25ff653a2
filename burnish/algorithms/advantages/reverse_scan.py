"""Discounted suffix sums of ragged sequences: y_t = x_t + c * y_{t+1}, computed as a blocked scan.

Returns and GAE advantages are this recurrence. The packed values are cut into blocks of K, regardless of sequence ends.
Most blocks lie inside one sequence; there the scan is a product with a triangular K x K matrix. The few blocks in which a
sequence ends are scanned step by step, with coefficient 0 at the end. The values carried from each block into the one
before it follow the same recurrence over blocks, with c^K. The whole scan takes a few passes over the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.segments import offsets_from_lengths


def discount_cumsum(x: Tensor, offsets: Tensor, c: float | Tensor, block: int | None = None) -> Tensor:
    """[M] y_t = x_t + c * y_{t+1} inside each run x[offsets[i]:offsets[i+1]]; c is a number, or one per run [S].

    `block` is the block size K; the result depends on it only by rounding.
    """
    num = x.numel()
    if num == 0 or (not isinstance(c, Tensor) and c == 0):
        return x.clone()
    if isinstance(c, Tensor):
        c = c.to(x.dtype)
    k = block or _block_size(num, offsets.numel() - 1)
    rows = -(-num // k)
    ends = offsets[1:][offsets.diff() > 0] - 1  # [E] the last element of each run that has one
    boundary, which = torch.unique_consecutive(ends // k, return_inverse=True)  # blocks in which a run ends
    y = x.new_empty(rows * k)
    whole = num // k
    _scan_inner_blocks(x[: whole * k].view(whole, k), y[: whole * k].view(whole, k), _per_block(c, offsets, k, whole))
    y = y.view(rows, k)
    values, reach = _scan_boundary_blocks(x, offsets, c, boundary, which, ends % k, k)
    y[boundary] = values.t()
    if rows > 1:
        # The last element always ends a run, so the last block is a boundary block and the runs of blocks cover all blocks.
        runs = torch.cat([boundary.new_zeros(1), boundary + 1])
        step = c**k if not isinstance(c, Tensor) else c[_run_of(boundary * k, offsets)] ** k
        carry = y.new_zeros(rows)
        carry[:-1] = discount_cumsum(y[:, 0].contiguous(), runs, step)[1:]  # value that follows each block
        y[boundary] += (reach * carry[boundary]).t()
        carry[boundary] = 0
        _add_carry(y, carry, _per_block(c, offsets, k, rows))
    return y.view(-1)[:num]


def segment_cumsum(x: Tensor, offsets: Tensor) -> Tensor:
    """[M] cumulative sum inside each run, the element itself included."""
    return discount_cumsum(x.flip(0), offsets_from_lengths(offsets.diff().flip(0)), 1.0).flip(0)


def _block_size(num: int, runs: int) -> int:
    """64 for long runs and less for short ones, so that few blocks contain the end of a run."""
    wanted = num // (8 * max(runs, 1))
    return min(64, max(8, 1 << (wanted.bit_length() - 1 if wanted else 0)))


def _run_of(positions: Tensor, offsets: Tensor) -> Tensor:
    """The run that contains each position."""
    return torch.searchsorted(offsets, positions, right=True) - 1


def _per_block(c: float | Tensor, offsets: Tensor, k: int, rows: int) -> float | Tensor:
    """The coefficient of each block, by its first element; valid for blocks inside one run."""
    if not isinstance(c, Tensor):
        return c
    return c[_run_of(torch.arange(rows, device=c.device) * k, offsets)]


def _scan_inner_blocks(x: Tensor, out: Tensor, c: float | Tensor) -> None:
    """The scan inside each row of x [rows, K], assuming no run ends there."""
    k = x.shape[1]
    if isinstance(c, Tensor):
        out.copy_(x)
        for t in range(k - 2, -1, -1):
            out[:, t].addcmul_(c, out[:, t + 1])
        return
    exponent = torch.arange(k, device=x.device)
    exponent = exponent[:, None] - exponent  # y_t takes x_s times c^(s-t) for s >= t
    powers = torch.where(exponent >= 0, torch.pow(float(c), exponent.clamp(min=0).double()), 0.0)
    torch.mm(x, powers.to(x.dtype), out=out)


def _scan_boundary_blocks(
    x: Tensor, offsets: Tensor, c: float | Tensor, boundary: Tensor, which: Tensor, at: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """[K, R] the scan of the blocks in which runs end, and the factor with which the following block reaches each element."""
    steps = torch.arange(k, device=x.device)[:, None]
    # The last block may be shorter than K; elements beyond the end of the last run are not used.
    positions = (boundary * k + steps).clamp(max=x.numel() - 1)  # [K, R]
    values = x[positions]
    reach = c[_run_of(positions, offsets)] if isinstance(c, Tensor) else torch.full_like(values, c)
    reach[at, which] = 0
    for t in range(k - 2, -1, -1):
        values[t].addcmul_(reach[t], values[t + 1])
        reach[t] *= reach[t + 1]
    return values, reach


def _add_carry(y: Tensor, carry: Tensor, c: float | Tensor) -> None:
    """Adds c^(K-t) times the value that follows each block to its element t, in place."""
    k = y.shape[1]
    if isinstance(c, Tensor):
        for t in range(k - 1, -1, -1):
            carry = carry * c
            y[:, t] += carry
        return
    powers = torch.pow(float(c), torch.arange(k, 0, -1, device=y.device).double())
    y.addr_(carry, powers.to(y.dtype))
