"""`burnish.models.kernels.draft_lookup` as one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _chunk_scores(
    texts_ptr, end_ptr, searched_ptr, scores_ptr, stride, chunks, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    text_ptr = texts_ptr + row.to(tl.int64) * stride
    end = tl.load(end_ptr + row)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    agrees = column < tl.load(searched_ptr + row)
    length = tl.zeros([BLOCK], tl.int32)
    for back in tl.static_range(MAX_MATCH):
        wanted = tl.load(text_ptr + tl.maximum(end - back, 0))
        found = tl.load(text_ptr + column - back, mask=agrees & (column >= back), other=-1)
        agrees = agrees & (found == wanted) & (wanted >= 0)
        length += agrees.to(tl.int32)
    score = tl.where(length > 0, (length.to(tl.int64) << 32) + column, -1)
    tl.store(scores_ptr + row * chunks + chunk, tl.max(score, 0))


def chunk_scores(texts: Tensor, end: Tensor, searched: Tensor, max_match: int) -> Tensor:
    """Length of the best match times 2^32 plus its column, or -1, for each part of the columns; [rows, parts]."""
    rows, columns = texts.shape
    chunks = triton.cdiv(columns, BLOCK)
    scores = torch.empty(rows, chunks, dtype=torch.int64, device=texts.device)
    _chunk_scores[(rows, chunks)](
        texts, end, searched, scores, texts.stride(0), chunks, MAX_MATCH=max_match, BLOCK=BLOCK, num_warps=4
    )
    return scores
