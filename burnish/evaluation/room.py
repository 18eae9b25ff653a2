"""How many completions are decoded at once, and how large the cache is: arithmetic on plain numbers.

An evaluation has the device to itself, so it may take more of it than a rollout between two updates does. All completions
at once is best where they fit: the long ones begin early, and the last steps are not left to a few of them.
"""

from __future__ import annotations

from typing import NamedTuple

from burnish.rollout.native.plan import FREE_SHARE, GIB, PAGE

MOST_ROWS = 2048  # a step of more rows is no faster a row, and its logits take gigabytes
ROWS_ELSEWHERE = 256  # on a CPU, where nobody knows how much memory is free
STEP = 64  # rows come in multiples of it, for which the kernels are compiled and the matmuls are whole tiles
WORK_BYTES = 6 * GIB  # left to activations and logits, where the device is large enough
SHARE = 0.85  # of the free memory that the cache takes at most


class Plan(NamedTuple):
    """Rows that are decoded at once, and the bytes of their cache."""

    rows: int
    cache_bytes: int


def plan(requests: int, longest_prompt: int, max_tokens: int, token_bytes: int, free_bytes: int) -> Plan:
    """The rows and the cache for so many requests on a device with so much free memory.

    The cache takes what all rows at their longest need, at most 85% of what is free and leaving room to work in (on a small
    device the 40% a rollout takes). A row is counted at half of its new tokens, since few run to the limit; when they grow
    past that the youngest wait.
    """
    longest = -(-(longest_prompt + max_tokens) // PAGE) * PAGE
    typical = longest_prompt + max_tokens // 2
    most = max(free_bytes * FREE_SHARE, min(free_bytes * SHARE, free_bytes - WORK_BYTES))
    fit = int(most // (typical * token_bytes))
    rows = max(1, min(-(-requests // STEP) * STEP if requests > STEP else requests, MOST_ROWS, fit))
    wanted = (rows * longest + PAGE) * token_bytes  # and the page that nobody holds
    return Plan(rows, int(min(wanted, most)))
