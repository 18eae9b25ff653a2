"""Checks that the choices of an `Algorithm` fit together. Each raises a ValueError with the reason and what to set instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burnish.algorithms.advantages.spec import (
    ADVANTAGE_RECORDS,
    AdvantageRecord,
    MaxRlAdvantage,
    OpmdAdvantage,
)
from burnish.algorithms.correction.spec import BypassCorrection
from burnish.algorithms.curriculum.spec import NoCurriculum
from burnish.algorithms.filters.spec import FILTER_RECORDS, Refill
from burnish.algorithms.losses.distillation_spec import DivergenceLoss, GoldLoss
from burnish.algorithms.losses.off_policy_spec import GammaClip, OpmdLoss, SecondMomentClip
from burnish.algorithms.losses.spec import (
    PREFERENCE_LOSS_RECORDS,
    PairLoss,
    policy_loss_conflict,
)
from burnish.algorithms.terms.spec import IterateReference
from burnish.config.records import Plugin

if TYPE_CHECKING:
    from burnish.algorithms.spec import Algorithm


def check_combinations(a: Algorithm) -> None:
    """Refuse choices that do not work together, or of which one would have no effect."""
    for check in (
        _check_policy,
        _check_reference,
        _check_distillation,
        _check_critic,
        _check_process,
        _check_aggregation,
        _check_filters,
        _check_shaping,
        _check_clip_and_correction,
        _check_correction,
        _check_router,
        _check_replay,
    ):
        check(a)


def _check_policy(a: Algorithm) -> None:
    """Checks that loss, ratio, clip and advantage go together."""
    if reason := policy_loss_conflict(a.ratio, a.clip, a.loss):
        raise ValueError(reason)
    if "greedy" in a.advantage.needs and a.shaping:
        raise ValueError(
            f"advantage {a.advantage.name} compares with the greedy answer's reward, which is not shaped: remove algorithm.shaping"
        )
    if "prompt_values" in a.advantage.needs:
        _check_prompt_values(a)
    _check_branching(a)
    if isinstance(a.loss, Plugin):
        return
    accepted = a.loss.advantages
    if isinstance(a.loss, DivergenceLoss):
        accepted = ("none",) if a.loss.weight == 1 else None
    if accepted is not None and a.advantage.name not in accepted:
        raise ValueError(
            f"loss {a.loss.name} goes with advantage {' or '.join(accepted)}, not {a.advantage.name}: set algorithm.advantage={accepted[0]}"
        )
    if accepted is None and a.advantage.name == "none":
        raise ValueError(f"loss {a.loss.name} multiplies the advantage, and advantage none is 0 everywhere")
    if isinstance(a.advantage, OpmdAdvantage) and isinstance(a.loss, OpmdLoss):
        soft, tau = a.advantage.baseline == "logavgexp", a.advantage.tau
        if soft and tau != a.loss.tau:
            raise ValueError(
                f"the soft mean of advantage opmd has tau {tau:g} and loss opmd has tau {a.loss.tau:g}: they are one temperature, set both"
            )
    if isinstance(a.advantage, MaxRlAdvantage):
        _check_positive_rewards(a)
    if a.kl.reward.coef > 0 and a.advantage.name == "reinforce" and a.advantage.gamma == 0:
        raise ValueError("gamma 0 discards every reward after the next token; with KL in the reward use gamma > 0")


def _check_positive_rewards(a: Algorithm) -> None:
    """Checks that nothing makes rewards negative for an advantage that divides by their mean. A plug-in's rewards are not known."""
    name = a.advantage.name
    if a.kl.reward.coef > 0:
        raise ValueError(
            f"kl.reward makes rewards negative, and advantage {name} divides by their mean: use algorithm.kl.loss instead"
        )
    for shaper in a.shaping:
        if not isinstance(shaper, Plugin) and shaper.may_be_negative:
            raise ValueError(
                f"shaping {shaper.name} can make rewards negative, and advantage {name} divides by their mean: remove it, or give its options "
                "values of 0 or more (signed, cosine and stop_properly take them)"
            )


def _check_prompt_values(a: Algorithm) -> None:
    """Checks that rewards are compared with values of the same rewards, and that the value pass chooses the prompts."""
    name = a.advantage.name
    if a.shaping or a.kl.reward.coef > 0:
        raise ValueError(
            f"advantage {name} compares with values of rewards that are not shaped and have no KL in them: remove algorithm.shaping and set "
            "algorithm.kl.reward.coef=0"
        )
    if not isinstance(a.curriculum, NoCurriculum):
        raise ValueError(
            f"advantage {name} leaves out prompts that were never solved before training, and a curriculum chooses others: set "
            "algorithm.curriculum=none"
        )


def _check_branching(a: Algorithm) -> None:
    """Checks that no other slot invalidates the comparisons of advantages that branch (spo_chain, spo_tree)."""
    name, kl = a.advantage.name, a.kl.reward.coef > 0
    if "borders" in a.advantage.needs and (a.shaping or kl):
        raise ValueError(
            f"advantage {name} compares with the rewards of answers continued from its borders, which are not shaped and have no KL in "
            "them: remove algorithm.shaping and set algorithm.kl.reward.coef=0 (algorithm.kl.loss can be used instead)"
        )
    is_tree = "tree" in a.advantage.needs
    if is_tree and kl:
        raise ValueError(
            f"advantage {name} compares answers that share a prefix, and KL in the reward would count the prefix once for each of them: "
            "set algorithm.kl.reward.coef=0 (algorithm.kl.loss can be used instead)"
        )
    for one in a.filters:
        if is_tree and not isinstance(one, Plugin) and one.of_answers:
            raise ValueError(
                f"filter {one.name} drops whole answers, but an answer of a tree also trains edges that other answers share: use tree_edges"
            )
        if "tree" in one.needs and not is_tree:
            raise ValueError(f"filter {one.name} chooses edges of trees, and advantage {name} has none: use spo_tree")


def _check_reference(a: Algorithm) -> None:
    """Checks that there is a reference exactly if something uses it."""
    terms = a.kl.loss.coef > 0 or a.kl.reward.coef > 0 or a.kl.advantage.coef > 0
    user = "kl has a coefficient above 0" if terms else f"loss {a.loss.name} compares with a reference"
    required, name = terms or "reference" in a.loss.needs, a.kl.reference.name
    if required and name == "none":
        raise ValueError(f"{user} but kl.reference is none: set algorithm.kl.reference=frozen")
    anchored = not isinstance(a.loss, Plugin) and a.loss.anchored
    if not required and not anchored and name != "none":
        raise ValueError(
            "kl.reference is loaded but both kl coefficients are 0: set algorithm.kl.loss.coef or algorithm.kl.reference=none"
        )
    if anchored and name == "teacher":
        raise ValueError(
            f"loss {a.loss.name} is anchored at kl.reference, which would be the teacher instead of the policy it started from: "
            "use another loss with a teacher"
        )
    _check_rollout_reference(a)
    if a.kl.reward.estimator.endswith("+"):
        raise ValueError(
            "kl.reward has no gradient, so a '+' estimator (which changes only the gradient) does nothing there"
        )
    current = isinstance(a.kl.reference, IterateReference) and a.kl.reference.every == 1
    if a.kl.loss.estimator == "full" and a.kl.loss.coef > 0 and current:
        raise ValueError(
            "kl.loss.estimator=full runs the reference during an update, and a reference that is the policy itself (iterate, every 1) has "
            "moved by then: set estimator=k2, or kl.reference.every above 1"
        )
    advantage = a.advantage
    if a.kl.reward.coef > 0 and isinstance(advantage, AdvantageRecord) and not advantage.reads_reward:
        reader = f"loss {a.loss.name}" if a.advantage.name == "none" else f"advantage {a.advantage.name}"
        raise ValueError(f"kl.reward changes the reward, which {reader} does not read: set algorithm.kl.reward.coef=0")
    if a.kl.reward.center == "sequence" and isinstance(advantage, AdvantageRecord) and advantage.is_shift_free:
        raise ValueError(
            f"kl.reward.center=sequence subtracts the same number from every sample's reward, which advantage {a.advantage.name} subtracts anyway: use token"
        )


def _check_distillation(a: Algorithm) -> None:
    """Checks that the divergence is counted once, and that a context and a reference go together."""
    kl, context = a.kl, a.kl.context.name
    if isinstance(a.loss, DivergenceLoss) and kl.loss.coef > 0:
        raise ValueError(
            "loss divergence is the KL to the reference already: set algorithm.kl.loss.coef=0, or another loss with kl.loss"
        )
    if context != "prompt" and kl.reference.name == "none":
        raise ValueError(
            f"kl.context={context} is what the reference reads, but kl.reference is none: set it to frozen, ema or policy"
        )
    if kl.reference.name == "policy" and context == "prompt":
        raise ValueError(
            "kl.reference=policy with the policy's own prompt is the policy itself, and the KL is 0: set algorithm.kl.context to "
            "demonstration or success, or use another reference"
        )
    _check_gold(a)
    if context != "prompt" and a.replay is not None:
        raise ValueError(
            f"kl.context={context} is made from the rows of a step's own draws, and replayed groups have none: set algorithm.replay=null"
        )
    if kl.reference.name == "teachers" and a.replay is not None:
        raise ValueError(
            "kl.reference=teachers reads a column of the rows of a step's own draws, and replayed groups have none: set algorithm.replay=null, "
            "or use one teacher"
        )
    if kl.advantage.coef > 0 and a.advantage.name == "none":
        raise ValueError(
            f"kl.advantage changes the advantages, which loss {a.loss.name} does not read: set algorithm.kl.advantage.coef=0"
        )
    for name, term in (("loss", kl.loss), ("reward", kl.reward), ("advantage", kl.advantage)):
        if term.clamp is not None and term.coef == 0:
            raise ValueError(f"kl.{name}.clamp has no effect: kl.{name}.coef is 0")


def _check_gold(a: Algorithm) -> None:
    """Checks that nothing beside groups of aligned tokens is in the loss, and that their teacher can be asked for them."""
    if not isinstance(a.loss, GoldLoss):
        return
    if a.kl.reference.name != "teacher":
        raise ValueError(
            f"loss gold learns from one teacher with a tokenizer of its own, but kl.reference is {a.kl.reference.name}: set "
            "algorithm.kl.reference={name: teacher, path: <a model directory>}"
        )
    if a.replay is not None:
        raise ValueError(
            "loss gold aligns the answers of a step's own draws, and replayed groups have none: set algorithm.replay=null"
        )
    for key, is_set in (
        ("kl.loss.coef", a.kl.loss.coef > 0),
        ("kl.reward.coef", a.kl.reward.coef > 0),
        ("kl.advantage.coef", a.kl.advantage.coef > 0),
    ):
        if is_set:
            raise ValueError(
                f"algorithm.{key} compares single tokens with the reference, whose tokens are others with loss gold: set it to 0"
            )
    if a.entropy.coef > 0 or a.entropy.top_share is not None or a.entropy.adaptive is not None:
        raise ValueError(
            "algorithm.entropy is of single tokens, and loss gold counts groups of tokens: set algorithm.entropy={}"
        )
    if a.correction.acts:
        raise ValueError(
            f"correction {a.correction.name} weights single tokens, and the loss of gold is that of groups: set algorithm.correction=none"
        )


def _check_rollout_reference(a: Algorithm) -> None:
    """Checks that the engine's log-probs of sampled tokens are all that the reference must give."""
    if a.kl.reference.name != "rollout":
        return
    if a.kl.loss.estimator == "full":
        raise ValueError(
            "kl.loss.estimator=full compares whole distributions, and kl.reference=rollout knows the sampled tokens alone: set estimator=k2"
        )
    if a.kl.reward.coef > 0:
        raise ValueError(
            "kl.reward to kl.reference=rollout would compare the sampling policy with itself: use kl.loss, or another reference"
        )
    if "reference" in a.loss.needs:
        raise ValueError(
            f"loss {a.loss.name} compares with the model that training began with, not with the samples' own policy: set "
            "algorithm.kl.reference=frozen"
        )


def _check_clip_and_correction(a: Algorithm) -> None:
    """Checks that the gap between engine and trainer is corrected once: by the clip's own weight, or by the correction's."""
    correction, clip = a.correction, a.clip
    own = "algorithm.correction=bypass makes the engine's policy the anchor of that weight"
    weighs = (
        correction.acts
        and not isinstance(correction, BypassCorrection)
        and getattr(correction, "weights", "") is not None
    )
    if weighs and not clip.takes_weights:
        raise ValueError(
            f"clip {clip.name} is a weight, and algorithm.correction={correction.name} would multiply the loss by another: remove the "
            f"correction's weights ({own})"
        )
    if isinstance(clip, GammaClip) and weighs:
        level = getattr(correction, "level", getattr(correction, "weights", "any"))
        if level != "token" or getattr(correction, "batch_normalise", False):
            raise ValueError(
                "clip gamma adds up the weights of single tokens: of algorithm.correction it takes seed with level token, or decoupled with "
                f"weights token and without batch_normalise ({own})"
            )
    for user, is_used in (
        ("clip second_moment", isinstance(clip, SecondMomentClip)),
        ("filter seq_error", any(f.name == "seq_error" for f in a.filters)),
    ):
        if is_used and isinstance(correction, BypassCorrection):
            raise ValueError(
                f"{user} compares the log-probs of engine and trainer, and correction bypass takes the engine's for both: use another "
                "correction, or leave it out"
            )
    if isinstance(clip, SecondMomentClip) and a.replay is not None:
        raise ValueError(
            "clip second_moment compares the log-probs of engine and trainer, and replayed samples are anchored at the engine's: remove "
            "algorithm.replay (rollout.source.name=async makes stale samples without it)"
        )


def _check_correction(a: Algorithm) -> None:
    """Checks that a bypass correction fits the ratio, the clip, the loss and its anchor."""
    if not isinstance(a.correction, BypassCorrection):
        return
    if a.correction.loss == "reinforce" and (a.ratio.name, a.clip.name, a.loss.name) != ("none", "none", "logprob"):
        raise ValueError(
            "correction.loss=reinforce weights log-probs and takes the place of ratio, clip and loss: "
            "set algorithm.ratio=none, algorithm.clip=none and algorithm.loss=logprob, or correction.loss=ppo_clip"
        )
    if a.correction.loss == "ppo_clip" and a.ratio.name == "none":
        raise ValueError(
            f"correction bypass with ppo_clip bounds the ratio to the engine's policy, and loss {a.loss.name} has none: "
            "set algorithm.correction.loss=reinforce"
        )
    if not isinstance(a.loss, Plugin) and a.loss.anchored and a.kl.reference.name != "none":
        raise ValueError(f"loss {a.loss.name} is anchored on the reference, so correction bypass cannot set its anchor")


def _check_router(a: Algorithm) -> None:
    """Checks that there are old log-probs of the learner, whose experts are replayed."""
    if a.router.learner_experts == "replay" and isinstance(a.correction, BypassCorrection):
        raise ValueError(
            "router.learner_experts=replay takes the experts of the learner's pass of old log-probs, and correction bypass has the engine's "
            "log-probs instead: set router.engine_experts=replay, or another correction"
        )


def _check_critic(a: Algorithm) -> None:
    """Checks that there is a critic exactly if the advantage uses one."""
    if "critic" in a.advantage.needs and a.critic is None:
        raise ValueError(
            f"advantage {a.advantage.name} needs a critic: set algorithm.critic={{}} (or algorithm=ppo, which has one)"
        )
    if a.critic is not None and "critic" not in a.advantage.needs:
        raise ValueError(
            f"algorithm.critic would be trained for nothing: advantage {a.advantage.name} does not use values (gae does)"
        )


def _check_process(a: Algorithm) -> None:
    """Checks that there is a process reward model exactly if the advantage uses one."""
    if "process" in a.advantage.needs and a.process is None:
        raise ValueError(
            f"advantage {a.advantage.name} needs a process reward model: set algorithm.process={{}} (or algorithm=prime, which has one)"
        )
    if a.process is not None and "process" not in a.advantage.needs:
        raise ValueError(
            f"algorithm.process would be trained for nothing: advantage {a.advantage.name} does not use process rewards (prime_rloo does)"
        )


def _check_aggregation(a: Algorithm) -> None:
    """Checks that the aggregation fits the clip and the loss."""
    if a.aggregation.horizon is not None and a.aggregation.name != "seq-mean-token-sum-norm":
        raise ValueError(f"aggregation.horizon only divides seq-mean-token-sum-norm, not {a.aggregation.name}")
    choices = [c for c in (a.clip, a.loss) if not isinstance(c, Plugin) and c.level == "sequence"]
    one = choices[0].name if choices else None
    if one is not None and a.entropy.top_share is not None:
        raise ValueError(f"entropy.top_share picks tokens, but {one} is one number per sequence: remove one of the two")
    if one is not None and a.aggregation.name != "seq-mean-token-mean":
        raise ValueError(
            f"{one} is one number per sequence and its plain mean is taken: set algorithm.aggregation=seq-mean-token-mean"
        )


def _check_shaping(a: Algorithm) -> None:
    """Checks that something reads the shaped reward."""
    advantage = a.advantage
    if not isinstance(advantage, AdvantageRecord):
        return
    is_read = advantage.reads_reward or any(isinstance(f, Plugin) or f.reads_reward for f in a.filters)
    if a.shaping and not is_read:
        raise ValueError(
            f"algorithm.shaping changes the reward, which advantage {a.advantage.name} does not read: remove it"
        )
    dense = [s.name for s in a.shaping if not isinstance(s, Plugin) and s.dense and not s.of_turns]
    of_turns = [s.name for s in a.shaping if not isinstance(s, Plugin) and s.of_turns]
    if of_turns and not advantage.by_token and not advantage.by_turn:
        able = [r.model_fields["name"].default for r in ADVANTAGE_RECORDS if r.by_token or r.by_turn]
        raise ValueError(
            f"{of_turns[0]} rewards single turns: it needs an advantage that gives turns a credit of their own ({', '.join(able)}), not "
            f"{advantage.name}"
        )
    if of_turns and a.replay is not None:
        raise ValueError(
            f"{of_turns[0]} is measured with the current policy when a group is sampled: remove algorithm.replay"
        )
    discounted = any(getattr(advantage, name, 1.0) != 1.0 for name in ("gamma", "turn_gamma"))
    if dense and (not advantage.by_token or discounted):
        able = [r.model_fields["name"].default for r in ADVANTAGE_RECORDS if r.by_token]
        raise ValueError(
            f"{dense[0]} rewards single tokens: it needs an advantage with a return for every token "
            f"and gamma 1 ({', '.join(able)}), not {advantage.name}"
        )


def _check_filters(a: Algorithm) -> None:
    """Checks that filters and refill have an effect."""
    names = [f.name for f in a.filters]
    if twice := [n for n in names if names.count(n) > 1]:
        raise ValueError(f"filter {twice[0]} is given twice")
    needing = next((n for n in ("cppo", "clip_b", "balance") if n in names), None)
    if needing is not None and a.advantage.name == "none":
        raise ValueError(f"filter {needing} chooses by the advantages, and advantage none is 0 everywhere")
    if "pairs" in names:
        _check_pairs(a, names)
    active = a.refill != Refill()
    if active and not any(not isinstance(f, Plugin) and f.of_groups for f in a.filters):
        able = [r.model_fields["name"].default for r in FILTER_RECORDS if r.of_groups]
        raise ValueError(
            f"algorithm.refill replaces groups that a filter dropped, but there is no such filter: add one of {', '.join(able)}"
        )


def _check_pairs(a: Algorithm, filters: list[str]) -> None:
    """Checks that the loss compares the pairs that the filter makes, and that no later filter splits a pair."""
    if isinstance(a.loss, Plugin) or not isinstance(a.loss, PairLoss):
        able = [r.model_fields["name"].default for r in PREFERENCE_LOSS_RECORDS if issubclass(r, PairLoss)]
        raise ValueError(
            f"filter pairs is for a loss that compares two answers, and loss {a.loss.name} does not: set algorithm.loss to one of {', '.join(able)}"
        )
    if filters[-1] != "pairs":
        raise ValueError(f"filter {filters[-1]} could drop one answer of a pair: put pairs last in algorithm.filters")
    if a.correction.acts or isinstance(a.correction, BypassCorrection):
        raise ValueError(
            f"loss {a.loss.name} compares two answers of any policy: algorithm.correction has no effect on it, set it to none"
        )


def _check_replay(a: Algorithm) -> None:
    """Checks that the loss accounts for samples of an older policy."""
    if a.replay is None or isinstance(a.loss, Plugin):
        return
    weighs = a.correction.acts and getattr(a.correction, "weights", "token") is not None
    if a.loss.name == "logprob" and not weighs and a.advantage.name != "asymre":
        raise ValueError(
            "algorithm.replay trains on samples of older policies, and loss logprob has no ratio to correct for that: "
            "set algorithm.loss=surrogate with algorithm.ratio=token, or algorithm.correction=decoupled_token_is"
        )
    if a.loss.name == "mixed_offpolicy":
        raise ValueError(
            "algorithm.replay would replay demonstrations with their groups, and loss mixed_offpolicy takes them from a file: remove one"
        )
