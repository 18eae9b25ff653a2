"""Groups that were learnt from before: which they are, what their ratio is taken to, how far the policy has moved from them.

A batch with such groups has the sequence column `use`: 0 where a group is new, k where it comes back for the k-th time. It
is absent where nothing ever comes back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.batch import Batch


def is_replayed(batch: Batch) -> Tensor:
    """[S] bool."""
    use = batch.sequence.get("use")
    if use is None:
        return torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.offsets.device)
    return use > 0


def new_ones(batch: Batch) -> Batch:
    """The sequences that are here for the first time."""
    if "use" not in batch.sequence:  # to select all of them would copy every column
        return batch
    return batch.select((~is_replayed(batch)).nonzero().squeeze(1))


def with_behaviour(batch: Batch, logp: Tensor) -> Tensor:
    """[N] log-probs of `new_ones(batch)`, and at the sequences that come back those of the policy that wrote them."""
    new = (~is_replayed(batch)[batch.sequence_ids]).nonzero().squeeze(1)
    return batch.token["behaviour_logp"].to(logp.dtype).index_copy(0, new, logp)


def behaviour_anchor(batch: Batch) -> Tensor:
    """[N] `old_logp`, and at the tokens that come back the log-probs of the policy that wrote them.

    The ratio of such a token is then pi / pi_behaviour, and whatever bounds it bounds all that happened since: its log-probs
    of now would hide the steps in between.
    """
    back = is_replayed(batch)[batch.sequence_ids] & batch.action_mask
    old = batch.token["old_logp"]
    return torch.where(back, batch.token["behaviour_logp"].to(old.dtype), old)


def replay_drift(batch: Batch, logp: Tensor) -> dict[str, float]:
    """`replay/kl`: the mean of behaviour_logp - logp at the tokens in the loss that come back, `logp` [N] being the policy's of now.
    It estimates how far that has moved from the policies that wrote them. {} where nothing comes back.
    """
    back = is_replayed(batch)[batch.sequence_ids] & batch.loss_mask
    if not bool(back.any()):
        return {}
    moved = batch.token["behaviour_logp"][back].double() - logp[back].double()
    return {"replay/kl": float(moved.mean())}
