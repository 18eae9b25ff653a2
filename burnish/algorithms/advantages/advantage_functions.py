"""Slot `advantage`: the function of each choice, from rewards to advantages, without gradient.

An advantage function takes a batch and the options of its record. It returns one value per sequence [S], or one per token
[N] with 0 outside `action_mask`. Those with a critic return `AdvantagesAndReturns`, because it has its own targets. Those with a state
from batch to batch take it as their second argument and return it anew, as `rae` does. The outcome
is the sequence column `reward`; if rewards are per token (KL in the reward, dense shaping), it is the token column
`token_rewards`. Group statistics count every trajectory once and include all samples of the group, whatever the loss mask.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from burnish.algorithms.advantages.group_baselines import asymre, max_rl, opmd
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
from burnish.algorithms.advantages.offline_values import offline_value
from burnish.algorithms.advantages.returns import (
    AdvantagesAndReturns,
    distillation,
    gae,
    otb,
    prime_rloo,
    raft,
    reinforce,
    reinforce_plus_plus,
    remax,
    zero_advantages,
)
from burnish.algorithms.advantages.roles import AdvantagesAndBaselines, hierarchical_grpo, rae, trr_plus_plus
from burnish.algorithms.advantages.spo import spo_chain, spo_tree
from burnish.algorithms.advantages.turns import bilevel_gae, gigpo, hgpo, mt_grpo, rebn, step_broadcast

ADVANTAGES: dict[str, Callable[..., Tensor | AdvantagesAndReturns | AdvantagesAndBaselines]] = {
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
    "max_rl": max_rl,
    "asymre": asymre,
    "opmd": opmd,
    "offline_value": offline_value,
    "prime_rloo": prime_rloo,
    "gigpo": gigpo,
    "hgpo": hgpo,
    "mt_grpo": mt_grpo,
    "rebn": rebn,
    "step_broadcast": step_broadcast,
    "bilevel_gae": bilevel_gae,
    "rae": rae,
    "hierarchical_grpo": hierarchical_grpo,
    "spo_chain": spo_chain,
    "spo_tree": spo_tree,
    "distillation": distillation,
    "trr_plus_plus": trr_plus_plus,
    "none": zero_advantages,
}
"""The function of each choice of `algorithm.advantage`."""
