"""Slot `advantage`: rewards to advantages. Pure functions of a batch; no gradient.

Each returns one value a sequence [S] where that is all there is, else one a token [N] (0 where the model did not write);
`gae` returns an `Estimate`, because the critic has targets of its own. The outcome is the sequence column `reward`;
where rewards stand on tokens (KL in the reward, dense shaping) the token column `token_rewards` takes its place. Group
statistics count every trajectory once and see all samples of the group, whatever the loss mask says.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from burnish.algorithms.advantages.group_relative import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    reinforce_rej,
    rloo,
    softmean,
    win_rate,
)
from burnish.algorithms.advantages.returns import (
    AdvantagesAndReturns,
    distillation,
    gae,
    gigpo,
    otb,
    prime_rloo,
    raft,
    reinforce,
    reinforce_plus_plus,
    remax,
    zero_advantages,
)
from burnish.algorithms.advantages.spo import spo_chain, spo_tree

ADVANTAGES: dict[str, Callable[..., Tensor | AdvantagesAndReturns]] = {
    "grpo": grpo,
    "reinforce": reinforce,
    "rloo": rloo,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "grpo_passk": grpo_passk,
    "raft": raft,
    "reinforce_rej": reinforce_rej,
    "gae": gae,
    "gdpo": gdpo,
    "otb": otb,
    "softmean": softmean,
    "win_rate": win_rate,
    "prime_rloo": prime_rloo,
    "gigpo": gigpo,
    "spo_chain": spo_chain,
    "spo_tree": spo_tree,
    "distillation": distillation,
    "none": zero_advantages,
}
