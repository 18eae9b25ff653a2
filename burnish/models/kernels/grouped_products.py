"""Products of rows that are sorted by expert with the matrices of their experts, and sums over the slots of tokens.

`ends` [E] (int32) has the end of each expert's rows; an expert may have none. On a GPU in bfloat16 a product is one call of
`torch._grouped_mm`, which reads `ends` on the device. In other types or widths the forward product there is our own kernel,
which CUDA graphs can record as well. Everywhere else a product is a loop of matmuls over the experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from burnish.models.kernels.device import use_triton

ALIGNMENT = 16
"""`torch._grouped_mm` needs rows that begin at multiples of this number of bytes."""


def has_grouped_mm(a: Tensor, b: Tensor, widths: tuple[int, int]) -> bool:
    """Whether `torch._grouped_mm` can multiply these; `widths` are the inputs and outputs of an expert. The number of rows is free."""
    return (
        a.is_cuda
        and a.dtype == b.dtype == torch.bfloat16
        and all(width * a.element_size() % ALIGNMENT == 0 for width in widths)
    )


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows [M, in] times the transposed matrices [E, out, in] of their experts; [M, out]."""
    if has_grouped_mm(rows, matrices, (matrices.shape[1], matrices.shape[2])):
        return torch._grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    if use_triton(rows):
        from burnish.models.kernels.triton import expert_kernels

        return expert_kernels.grouped_product(rows, matrices, ends)
    product = rows.new_empty(rows.shape[0], matrices.shape[1])
    for expert, span in expert_spans(ends):
        torch.mm(rows[span], matrices[expert].t(), out=product[span])
    return product


def grouped_input_gradient(grad: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """grad [M, out] times the matrices [E, out, in] of their experts; [M, in]."""
    if has_grouped_mm(grad, matrices, (matrices.shape[1], matrices.shape[2])):
        return torch._grouped_mm(grad, matrices, offs=ends)
    product = grad.new_empty(grad.shape[0], matrices.shape[2])
    for expert, span in expert_spans(ends):
        torch.mm(grad[span], matrices[expert], out=product[span])
    return product


def grouped_weight_gradient(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The sum over each expert's rows of grad [M, out] times rows [M, in]; [E, out, in]."""
    if has_grouped_mm(rows, grad, (rows.shape[1], grad.shape[1])):
        return torch._grouped_mm(grad.t(), rows, offs=ends)
    total = grad.new_zeros(ends.shape[0], grad.shape[1], rows.shape[1])
    for expert, span in expert_spans(ends):
        torch.mm(grad[span].t(), rows[span], out=total[expert])
    return total


def sum_slots(outputs: Tensor, rows: Tensor) -> Tensor:
    """The sum of each token's outputs in the order of its slots: [M, width] -> [N, width]; `rows` [N, k] has their rows.

    Half types are summed in float32 and rounded once.
    """
    if use_triton(outputs):
        from burnish.models.kernels.triton import expert_kernels

        return expert_kernels.sum_slots(outputs, rows)
    wide = torch.promote_types(outputs.dtype, torch.float32)
    total = outputs[rows[:, 0]].to(wide)
    for slot in range(1, rows.shape[1]):
        total += outputs[rows[:, slot]]
    return total.to(outputs.dtype)


def expert_spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, with their rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
