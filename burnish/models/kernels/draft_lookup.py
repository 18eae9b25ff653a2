"""Search for the longest earlier occurrence of a text's last tokens, for speculative decoding (prompt lookup)."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.models.kernels.device import use_triton

MAX_MATCH = 8
"""Most tokens that are compared: of longer matches the last one is found."""


def longest_match(texts: Tensor, end: Tensor, searched: Tensor) -> Tensor:
    """Where the last tokens of each text end for the last time before, by the number of tokens that agree.

    `texts` [rows, columns] are int32, with negative numbers where there is no token. The text of row i ends with column `end[i]`, and
    the columns before `searched[i] <= end[i]` are searched. Returns the column [rows] of the longest match, of equal ones the last; -1
    if not even the last token occurs.
    """
    if use_triton(texts):
        from burnish.models.kernels.triton.draft_lookup import chunk_scores

        scores = chunk_scores(texts, end, searched, MAX_MATCH)
    else:
        columns = torch.arange(texts.shape[1], device=texts.device)
        agrees = columns < searched[:, None]
        length = torch.zeros_like(texts)
        for back in range(MAX_MATCH):
            wanted = texts.gather(1, (end - back).clamp(min=0)[:, None])
            agrees[:, :back] = False
            agrees[:, back:] &= (texts[:, : texts.shape[1] - back] == wanted) & (wanted >= 0)
            length += agrees
        scores = torch.where(length > 0, (length.long() << 32) + columns, -1)
    best = scores.amax(1)
    return torch.where(best >= 0, best & 0xFFFFFFFF, -1)
