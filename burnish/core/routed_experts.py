"""The experts that an engine chose for the tokens of a sample, from its completions to the batch (mixtures of experts only).

The learner's own choice in its pass of old log-probs is a column of the same form, `LEARNER_EXPERTS`.

A record has a row for each token: [tokens, layers with experts, experts of a token], int16. It is `UNKNOWN_EXPERT` where the
engine computed nothing: at the last token of an answer, at prompt tokens of the last layer, and in text from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from burnish.core.trajectory import TokenNode, Trajectory

ENGINE_EXPERTS = "engine_experts"
"""Name of the token column [N, layers, k], and of the array of a journal."""
LEARNER_EXPERTS = "learner_experts"
"""Name of the token column [N, layers, k] with the experts that the learner chose in its pass of old log-probs."""
EXPERT_COLUMNS = (ENGINE_EXPERTS, LEARNER_EXPERTS)
UNKNOWN_EXPERT = -1


def padded_record(record: np.ndarray, num_tokens: int) -> np.ndarray:
    """A record of exactly `num_tokens` tokens: cut, or with unknown rows behind it."""
    missing = num_tokens - len(record)
    if missing <= 0:
        return record[:num_tokens]
    return np.concatenate([record, np.full((missing, *record.shape[1:]), UNKNOWN_EXPERT, dtype=record.dtype)])


def first_records(earlier: np.ndarray | None, later: np.ndarray | None) -> np.ndarray | None:
    """The records of a turn that two requests computed: of each token the earlier one, where it is known.

    The second request reads the tokens of the first as a prompt, perhaps with newer weights. The log-probs of those tokens are
    the first request's, so its experts are the ones to compare or to replay.
    """
    if earlier is None or later is None:
        return earlier if later is None else later
    size = max(len(earlier), len(later))
    earlier, later = padded_record(earlier, size), padded_record(later, size)
    return np.where(earlier == UNKNOWN_EXPERT, later, earlier)


def expert_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the token column of the sequences of some trajectories; {} if no token has a record."""
    paths = [[t.nodes[index] for index in path] for t in trajectories for path in t.paths]
    sizes = _record_sizes([node for path in paths for node in path])
    if sizes is None:
        return {}
    return {ENGINE_EXPERTS: torch.from_numpy(_records([node for path in paths for node in path], sizes))}


def records_to_arrays(nodes: Sequence[TokenNode]) -> dict[str, np.ndarray]:
    """Return the records of all tokens of some nodes as one array of a journal; {} if there are none."""
    sizes = _record_sizes(nodes)
    return {} if sizes is None else {ENGINE_EXPERTS: _records(nodes, sizes)}


def restore_records(nodes: Sequence[TokenNode], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the records of `records_to_arrays` back. Journals without records have no such array."""
    if ENGINE_EXPERTS not in arrays:
        return
    at, records = 0, arrays[ENGINE_EXPERTS].copy()
    for node in nodes:
        own = records[at : (at := at + len(node.tokens))]
        node.experts = own if (own != UNKNOWN_EXPERT).any() else None


def _record_sizes(nodes: Sequence[TokenNode]) -> tuple[int, ...] | None:
    return next((node.experts.shape[1:] for node in nodes if node.experts is not None), None)


def _records(nodes: Sequence[TokenNode], sizes: tuple[int, ...]) -> np.ndarray:
    empty = np.zeros((0, *sizes), dtype=np.int16)
    return np.concatenate([padded_record(empty if n.experts is None else n.experts, len(n.tokens)) for n in nodes])
