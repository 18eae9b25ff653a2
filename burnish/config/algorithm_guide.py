"""Text about algorithms: slots in a few words, differences between algorithms, and docs/algorithms.md.

`python -m burnish.config.algorithm_guide` writes the page from the presets and the slot records. Only the table of problems is written here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from burnish.algorithms.curriculum.spec import LengthBudget
from burnish.algorithms.filters.spec import Refill
from burnish.algorithms.presets import PRESETS
from burnish.algorithms.presets.critic_free import Preset
from burnish.algorithms.spec import SLOT_RECORDS, Algorithm, Replay
from burnish.algorithms.terms.spec import Aggregation, Auxiliary, Entropy, Kl, KlLoss, KlReward
from burnish.config.loading import algorithm_from_preset
from burnish.config.model import Critic, ProcessModel
from burnish.config.records import REQUIRED, Record, Slot, choice_name, default_of, walk_keys

ALGORITHMS_PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BASELINE_PRESET = "grpo"
"""The preset that the others are compared with."""
OFF = "-"
SLOTS = tuple(name for name in Algorithm.model_fields if name != "preset")


# --- slots and differences ------------------------------------------------------------------------------------------


def describe_slot(value: Any) -> str:
    """A slot in a few words: its name and the options that differ from their defaults; `-` if it is off."""
    if isinstance(value, list):
        return ", ".join(describe_slot(v) for v in value) or OFF
    if isinstance(value, Kl):
        return _describe_kl(value)
    if value is None or getattr(value, "name", "") == "none":
        return OFF
    options = ", ".join(f"{key}={_option_value(v)}" for key, v in non_default_options(value))
    name = getattr(value, "name", "")
    if not name:
        return options or ("on" if isinstance(value, Critic | ProcessModel | Replay) else OFF)
    return f"{name}({options})" if options else str(name)


def non_default_options(record: Record, default: Record | None = None) -> Iterator[tuple[str, Any]]:
    """The options of a record that differ from their defaults, with dotted keys for subsections."""
    for key, value in record:
        usual = default_of(type(record), key) if default is None else getattr(default, key)
        if key == "name" or value == usual:
            continue
        if isinstance(value, Record):
            inside = non_default_options(value, usual if isinstance(usual, type(value)) else None)
            yield from [(f"{key}.{k}", v) for k, v in inside] or [(key, "on")]
        else:
            yield key, value


def slot_differences(first: Algorithm, second: Algorithm) -> list[tuple[str, str, str]]:
    """The slots in which two algorithms differ, with the choice of each."""
    pairs = [(slot, getattr(first, slot), getattr(second, slot)) for slot in SLOTS]
    return [(slot, describe_slot(a), describe_slot(b)) for slot, a, b in pairs if a != b]


def changes_from_grpo(algorithm: Algorithm) -> str:
    """What an algorithm changes compared with GRPO, in one line."""
    changes = slot_differences(algorithm_from_preset(BASELINE_PRESET), algorithm)
    return "; ".join(f"{slot}: {'none' if new == OFF else new}" for slot, _, new in changes)


def _describe_kl(kl: Kl) -> str:
    uses = []
    if kl.loss.coef > 0:
        uses.append(_kl_term("loss", kl.loss) + (" times the ratio" if kl.loss.is_corrected else ""))
    if kl.reward.coef > 0:
        centred = f" centred by {kl.reward.center}" if kl.reward.center != "none" else ""
        uses.append(_kl_term("reward", kl.reward) + centred + (" adaptive" if kl.adaptive is not None else ""))
    reference = describe_slot(kl.reference)
    return OFF if reference == OFF else " ".join([*([", ".join(uses)] if uses else []), f"to {reference}"])


def _kl_term(where: str, term: KlLoss | KlReward) -> str:
    return f"{term.coef:g} {term.estimator} in {where}"


def _option_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- problems ----------------------------------------------------------------------------------------------------------


class Remedy(NamedTuple):
    """A method against a training problem, the overrides that set it on a GRPO recipe, and the presets that have it."""

    problem: str
    method: str
    overrides: tuple[str, ...]
    presets: tuple[str, ...] = ()


COLLAPSE = "entropy collapses, answers become similar"
TEMPLATE = "answers depend less and less on their prompts, although the entropy is high"
LENGTH = "answers grow longer without getting better"
NO_SIGNAL = "prompts that are always or never solved teach nothing"
RATIOS = "token ratios are unstable (mixtures of experts, long answers)"
STALE = "samples are of an older policy (async rollouts, replay) and make training unstable"
STALE_REFERENCE = "the policy has moved far from the reference, and the KL penalty holds it back"
RARE_SUCCESS = "right answers are rare"
TRUNCATION = "truncated answers make rewards noisy"
REPEATS = "answers repeat themselves or mix scripts"
VARIANCE = "advantages are noisy"
CRITIC_BIAS = "a critic is biased at the start, or over long answers"
SPARSE_REWARD = "one reward at the end says little about single tokens"
ROLES = "a batch mixes roles or types of tasks that are not equally easy"
SELF_PLAY = "self-play learns to beat only its current opponent, and collapses"
NO_DATA = "there are no tasks to train on"
UNKNOWN_WORLD = "an agent's rewards are rare, and it does not know what its tools or users will say"
NO_VERIFIER = "there is neither a verifier nor a teacher"
DRIFTED_PREFIX = "a teacher judges late tokens behind a prefix it would not have written"
FORGETTING = "imitating demonstrations makes the policy forget what it could do"
COST = "most of the compute goes into samples that teach little"

PROBLEMS: tuple[Remedy, ...] = (
    Remedy(COLLAPSE, "clip-higher", ("algorithm.clip.high=0.28",), ("dapo", "vapo")),
    Remedy(COLLAPSE, "no gradient at tokens of high covariance", ("algorithm=clip_cov",), ("clip_cov",)),
    Remedy(COLLAPSE, "a penalty on moving those tokens", ("algorithm=kl_cov",), ("kl_cov",)),
    Remedy(COLLAPSE, "unlikely tokens are not pushed down further", ("algorithm=clip_b",), ("clip_b",)),
    Remedy(COLLAPSE, "entropy bonus", ("algorithm.entropy.coef=0.001",), ("t1",)),
    Remedy(COLLAPSE, "entropy bonus with an adaptive coefficient", ("algorithm.entropy={coef: 0.001, adaptive: {target: 0.2}}",)),
    Remedy(COLLAPSE, "learning from high-entropy tokens only", ("algorithm.entropy.top_share=0.2",)),
    Remedy(COLLAPSE, "a higher temperature", ("rollout.temperature=1.2",), ("t1",)),
    Remedy(TEMPLATE, "measure it: how likely answers are under the prompts of others", ("training.collapse_every=5",)),
    Remedy(TEMPLATE, "train on the groups whose rewards differ most", ("algorithm.filters=[{name: snr, share: 0.9}]",)),
    Remedy("wrong answers grow long, extreme prompts count more", "no division by length or deviation", ("algorithm=dr_grpo",), ("dr_grpo",)),
    Remedy("long answers' tokens count less", "one mean over all tokens", ("algorithm.aggregation=token-mean",), ("dapo",)),
    Remedy("prompts with long answers count more", "one mean over the tokens of each prompt", ("algorithm.aggregation=prompt-mean",)),
    Remedy(TRUNCATION, "truncated answers leave the loss", ("algorithm.filters=[overlong]",)),
    Remedy(TRUNCATION, "an agent's trajectories with a turn without call or answer leave the loss", ("algorithm.filters=[void_turns]", "environment={name: torl, max_turns: 3, tools: [{name: python}]}")),
    Remedy(TRUNCATION, "a penalty that grows before the limit", ("algorithm.shaping=[{name: soft_overlong, cache: 128}]",), ("dapo",)),
    Remedy(TRUNCATION, "truncated answers lose reward", ("algorithm.shaping=[{name: stop_properly, coef: 0.5}]",)),
    Remedy(NO_SIGNAL, "drop such groups", ("algorithm.filters=[zero_signal]",), ("scale_rl", "reinforce_rej")),
    Remedy(NO_SIGNAL, "drop them and sample others (dynamic sampling)", ("algorithm.filters=[zero_signal]", "algorithm.refill.rounds=10"), ("dapo",)),
    Remedy(NO_SIGNAL, "keep prompts of medium difficulty", ("algorithm.filters=[{name: difficulty_band, low: 0.2, high: 0.8}]", "algorithm.refill.rounds=4"), ("bae", "prime")),
    Remedy(NO_SIGNAL, "keep the groups whose rewards differ most", ("algorithm.filters=[{name: snr, share: 0.9}]",)),
    Remedy(NO_SIGNAL, "draw rarely solved prompts more often", ("algorithm.curriculum=prioritised",), ("kimi_k15",)),
    Remedy(NO_SIGNAL, "end with the prompts that were hardly ever solved", ("algorithm.curriculum={name: hard_only, start: 401}",), ("orz",)),
    Remedy("wrong answers outnumber the right ones of a group", "drop the surplus", ("algorithm.filters=[balance]",)),
    Remedy(LENGTH, "a reward for being shorter than the other answers of the group", ("algorithm.shaping=[{name: kimi_length, warmup_steps: 100}]",), ("kimi_k15", "long2short")),
    Remedy(LENGTH, "a penalty on tokens and turns that grows with how often the prompt is solved", ("algorithm.shaping=[linear_length]",)),
    Remedy(LENGTH, "a length asked for in the prompt", ("algorithm=lcpo", "data.budget={}"), ("lcpo", "lcpo_max")),
    Remedy(LENGTH, "a reward that falls with length when right", ("algorithm.shaping=[cosine]",), ("demystify",)),
    Remedy(LENGTH, "a context that grows in stages", ("rollout.stages=[{start: 201, max_tokens: 2048}]",), ("deepscaler",)),
    Remedy(REPEATS, "a penalty on repeated n-grams", ("algorithm.shaping=[repetition]",), ("demystify",)),
    Remedy(REPEATS, "-1 for broken answers", ("algorithm.shaping=[t1_penalty]",), ("t1",)),
    Remedy(REPEATS, "a reward for one language", ("reward.parts=[math, {name: language, options: {target: en}}]",), ("r1",)),
    Remedy(RATIOS, "one ratio per sequence", ("algorithm=gspo",), ("gspo", "gspo_token", "luspo")),
    Remedy(RATIOS, "geometric mean of clipped ratios", ("algorithm=gmpo",), ("gmpo",)),
    Remedy(RATIOS, "a gate instead of a clip", ("algorithm=sapo",), ("sapo",)),
    Remedy(RATIOS, "a trust region on probabilities", ("algorithm=dppo_tv",), ("dppo_tv", "dppo_kl")),
    Remedy(RATIOS, "drifted sequences with negative advantage leave the loss", ("algorithm.clip.drift=0.5",)),
    Remedy(RATIOS, "the learner computes with the engine's experts", ("algorithm.router.engine_experts=replay",)),
    Remedy(RATIOS, "all updates of a batch compute with the same experts", ("algorithm.router.learner_experts=replay", "training.mini_batches=4")),
    Remedy(STALE, "a smooth weight of the whole sequence's ratio", ("algorithm=vespo",), ("vespo",)),
    Remedy(STALE, "a ratio of at most 1 on bad answers, none on good ones", ("algorithm=topr",), ("topr",)),
    Remedy(STALE, "no gradient at the few tokens of largest mismatch", ("algorithm=m2po",), ("m2po",)),
    Remedy(STALE, "a baseline below the mean, without a ratio", ("algorithm=asymre",), ("asymre",)),
    Remedy(STALE, "a clip without a ratio", ("algorithm=rec",), ("rec",)),
    Remedy(STALE, "a mirror-descent step without a reference", ("algorithm=opmd",), ("opmd",)),
    Remedy(STALE, "a squared penalty on leaving the policy that sampled", ("algorithm.kl={loss: {estimator: k2, coef: 0.002}, reference: rollout}",)),
    Remedy(STALE, "answers on which engine and trainer disagree leave the loss", ("algorithm.filters=[{name: seq_error, threshold: 2}]",)),
    Remedy("the clip takes rare but pivotal tokens out of the loss", "the clipped ratio as a weight", ("algorithm=cispo",), ("cispo", "scale_rl")),
    Remedy(STALE_REFERENCE, "replace the reference by a copy of the policy every k steps", ("algorithm.kl.reference={name: hard_sync, every: 400}",), ("r1_zero", "r1")),
    Remedy(STALE_REFERENCE, "a moving average", ("algorithm.kl.reference={name: ema, eta: 0.01}",), ("t1",)),
    Remedy(STALE_REFERENCE, "no reference", ("algorithm.kl.loss.coef=0", "algorithm.kl.reference=none"), ("dapo", "orz")),
    Remedy("the KL estimate's gradient is biased", "value of k3, gradient of k2", ("algorithm.kl.loss.estimator=k3+",)),
    Remedy(CRITIC_BIAS, "train the critic alone first", ("algorithm=ppo", "algorithm.critic.warmup_steps=50"), ("vc_ppo", "vapo")),
    Remedy(CRITIC_BIAS, "one lambda for the critic, another for the policy", ("algorithm=vc_ppo",), ("vc_ppo",)),
    Remedy(CRITIC_BIAS, "a lambda that follows the length", ("algorithm=vapo",), ("vapo",)),
    Remedy(SPARSE_REWARD, "rewards of tokens, learnt from outcomes", ("algorithm=prime",), ("prime",)),
    Remedy(SPARSE_REWARD, "values at the tokens where the policy was unsure, estimated by continuing answers from there", ("algorithm=spo_chain",), ("spo_chain",)),
    Remedy(SPARSE_REWARD, "values from answers that branch", ("algorithm=spo_tree",), ("spo_tree",)),
    Remedy(SPARSE_REWARD, "a teacher judges every token", ("algorithm=on_policy_distillation", "algorithm.kl.reference.path=teacher"), ("on_policy_distillation",)),
    Remedy(SPARSE_REWARD, "a teacher for each kind of row judges every token", ("algorithm=mopd", "algorithm.kl.reference.paths={math: teacher, code: teacher}"), ("mopd",)),
    Remedy(SPARSE_REWARD, "a teacher with another tokenizer judges groups of tokens", ("algorithm=gold", "algorithm.kl.reference.path=teacher"), ("gold",)),
    Remedy(SPARSE_REWARD, "a teacher in addition to the verifier", ("algorithm=kdrl", "algorithm.kl.reference.path=teacher"), ("kdrl",)),
    Remedy(SPARSE_REWARD, "the policy itself, shown a success of the group, judges every token", ("algorithm=sdpo",), ("sdpo",)),
    Remedy(SPARSE_REWARD, "compare an agent's turns that begin in the same state", ("algorithm=gigpo", "environment={name: 'game.py:Game', max_turns: 8}"), ("gigpo",)),
    Remedy(SPARSE_REWARD, "a reward for each turn of an agent beside the outcome", ("algorithm=mt_grpo", "environment={name: 'game.py:Game', max_turns: 8}"), ("mt_grpo",)),
    Remedy(SPARSE_REWARD, "a critic that estimates from turn to turn", ("algorithm=bilevel_gae", "environment={name: 'game.py:Game', max_turns: 8}"), ("bilevel_gae",)),
    Remedy(SPARSE_REWARD, "returns of turns, normalised over the batch", ("algorithm.advantage={name: rebn, gamma: 0.9}", "environment={name: 'game.py:Game', max_turns: 8}"), ("rebn",)),
    Remedy(SPARSE_REWARD, "compare turns of the same state and, with more weight, the same history", ("algorithm=hgpo", "environment={name: 'game.py:Game', max_turns: 8}"), ("hgpo",)),
    Remedy(SPARSE_REWARD, "the last step's advantage for all steps of a run, divided by their number", ("algorithm=step_broadcast", "environment={name: 'game.py:Game', max_turns: 8}"), ("step_broadcast",)),
    Remedy(SPARSE_REWARD, "reward a turn for making the known answer likelier (IGPO)", ("algorithm=rebn", "algorithm.shaping=[information_gain]", "environment={name: 'search.py:Search', max_turns: 8}")),
    Remedy(SPARSE_REWARD, "a teacher's KL, subtracted from advantages after their normalisation", ("algorithm.kl={loss: {coef: 0}, advantage: {coef: 0.1}, reference: {name: teacher, path: teacher}}",)),
    Remedy(DRIFTED_PREFIX, "early tokens count more", ("algorithm=iw_opd", "algorithm.kl.reference.path=teacher"), ("iw_opd",)),
    Remedy(FORGETTING, "the policy that reads the demonstration teaches the policy that does not", ("algorithm=sdft", "algorithm.kl.context.column=solution"), ("sdft", "opsd")),
    Remedy(ROLES, "a moving average of each role as its baseline (self-play)", ("algorithm=rae", "environment={name: 'game.py:Game', max_turns: 8}"), ("rae",)),
    Remedy(ROLES, "attempts against attempts at the same problem, proposals against proposals", ("algorithm=hierarchical_grpo", "environment={name: 'tasks.py:Proposals', max_turns: 5}"), ("hierarchical_grpo",)),
    Remedy(ROLES, "a baseline for each role, over the batch", ("algorithm=trr_plus_plus",), ("trr_plus_plus",)),
    Remedy(SELF_PLAY, "part of the games against earlier weights", ("algorithm=rae", "rollout.opponents={name: pool, share: 0.75}", "environment={name: kuhn_poker, max_turns: 3}", "data.train=[{task: kuhn_poker}]", "data.validation=[{task: kuhn_poker, limit: 64}]", "reward.parts=[task]")),
    Remedy("an answer takes several conversations", "every sample counts once, and all its conversations get its advantage", ("algorithm=multi_conversation",), ("multi_conversation",)),
    Remedy(RARE_SUCCESS, "imitate right answers in addition to the policy loss", ("algorithm.auxiliary.positive_nll=0.1",), ("vapo",)),
    Remedy(RARE_SUCCESS, "weight prompts by one over how often they are solved", ("algorithm=max_rl",), ("max_rl",)),
    Remedy(RARE_SUCCESS, "easy prompts first", ("algorithm.curriculum={name: easy_to_hard, column: level}",)),
    Remedy(RARE_SUCCESS, "imitate demonstrations in addition to the policy loss", ("algorithm.auxiliary.sft=0.1", "data.demonstrations.path=demonstrations.jsonl"), ("rl_sft",)),
    Remedy(RARE_SUCCESS, "imitate demonstrations by a schedule, and most where the policy is undecided", ("algorithm=chord", "data.demonstrations.path=demonstrations.jsonl"), ("chord",)),
    Remedy(RARE_SUCCESS, "demonstrations inside the groups", ("algorithm=luffy", "data.demonstrations.path=demonstrations.jsonl", "data.demonstrations_per_group=1"), ("luffy", "rl_plus")),
    Remedy(UNKNOWN_WORLD, "predict what the environment says, beside the policy loss", ("algorithm.auxiliary.observations={tool: 0.1}", "environment={name: torl, max_turns: 3, tools: [{name: python}]}"), ("echo",)),
    Remedy(NO_VERIFIER, "imitate one's own samples of a sharper distribution", ("algorithm=ssd", "rollout.temperature=0.7"), ("ssd",)),
    Remedy(NO_VERIFIER, "a model that is asked whether the answer is right", ("reward.parts=[{name: judge, options: {path: models/judge}}]",)),
    Remedy(NO_VERIFIER, "train a judge first, by RL on preference pairs, to give reasons and a verdict (RM-R1)", ("reward.parts=[rm_r1]",)),
    Remedy(NO_VERIFIER, "a judge of that kind, which compares an answer with the expected one", ("reward.parts=[{name: judge, options: {path: models/judge, parser: pair}}]",)),
    Remedy("samples that nothing grades are empty or stubs", "they leave the loss", ("algorithm.filters=[non_stub]",), ("ssd",)),
    Remedy(VARIANCE, "leave a sample's own reward out of its baseline", ("algorithm.advantage=rloo",), ("rloo",)),
    Remedy(VARIANCE, "weight the baseline by length", ("algorithm.advantage=opo",), ("opo",)),
    Remedy(VARIANCE, "a baseline for every position", ("algorithm.advantage=otb",), ("otb",)),
    Remedy(VARIANCE, "a greedy answer as baseline, without groups", ("algorithm.advantage=remax", "rollout.n=1"), ("remax",)),
    Remedy("one of several rewards dominates the others", "normalise each on its own", ("algorithm.advantage=gdpo", "reward.parts=[math, think_format]"), ("gdpo",)),
    Remedy(COST, "one sample a prompt, against values estimated before training", ("algorithm=astar_po", "rollout.n=1"), ("astar_po",)),
    Remedy(COST, "prune samples of small advantage", ("algorithm.filters=[{name: cppo, prune: 0.5}]",), ("cppo",)),
    Remedy(COST, "train on right answers alone", ("algorithm=raft_plus_plus",), ("raft_plus_plus",)),
    Remedy(COST, "learn from groups of earlier steps again", ("algorithm.replay={share: 0.5, uses: 2}",), ("pf_ppo", "spo_tree")),
    Remedy(NO_DATA, "the model proposes and solves tasks about programs, checked by the sandbox", ("algorithm=trr_plus_plus", "data.train=[{task: absolute_zero}]", "data.validation=[{task: absolute_zero, limit: 24}]", "reward.parts=[task]", "environment={name: absolute_zero, max_turns: 9}"), ("trr_plus_plus",)),
)  # fmt: skip


# --- the page ----------------------------------------------------------------------------------------------------------

ALGORITHMS_INTRO = """\
# Algorithms

Generated by `python -m burnish.config.algorithm_guide` from the presets and slots in `burnish/algorithms/`; a test compares the two.

An algorithm is one choice for each slot. `algorithm: dapo` takes a row of the table below. Every slot can be changed separately, in the
recipe or on the command line. `burnish algorithms` prints the table, `burnish algorithms dapo` one row with its formulas and YAML,
`burnish algorithms --diff grpo dapo` the differences between two rows. Each row that can run has a recipe of its name in `recipes/`, and

    burnish train recipes/dapo.yaml --shrink

runs all of its slots in seconds, with a tiny model on a built-in task. Its first lines say what was made smaller.
[What each algorithm learns](learning.md) has the accuracy of the rows on toys, over several seeds.
"""
DOCUMENTED_SECTIONS: tuple[tuple[str, type[Record]], ...] = (
    ("algorithm.aggregation", Aggregation),
    ("algorithm.kl", Kl),
    ("algorithm.entropy", Entropy),
    ("algorithm.auxiliary", Auxiliary),
    ("algorithm.refill", Refill),
    ("algorithm.replay", Replay),
    ("algorithm.critic", Critic),
    ("algorithm.process", ProcessModel),
    ("data.budget", LengthBudget),
)


def algorithms_page() -> str:
    """The text of docs/algorithms.md."""
    parts = [ALGORITHMS_INTRO, problems_table(), presets_table(), slots_text()]
    return "\n".join(parts)


def problems_table() -> str:
    """The table of problems, methods and settings."""
    lines = ["## From the problem to the setting", ""]
    lines += ["Settings are overrides on a recipe of `grpo`; those with `algorithm=` take a whole preset.", ""]
    lines += ["| problem | method | setting | used by |", "|---|---|---|---|"]
    last = ""
    for remedy in PROBLEMS:
        settings = " ".join(f"`{_cell(shlex.quote(text))}`" for text in remedy.overrides)
        named = ", ".join(f"`{name}`" for name in remedy.presets)
        lines.append(f"| {remedy.problem if remedy.problem != last else ''} | {remedy.method} | {settings} | {named} |")
        last = remedy.problem
    return "\n".join(lines) + "\n"


def presets_table() -> str:
    """The table of presets."""
    lines = [
        f"## Presets ({len(PRESETS)})",
        "",
        f"The column `changes` lists how a preset differs from `{BASELINE_PRESET}`.",
        "",
    ]
    lines += ["| preset | published in | problem it solves, and notes | changes | |", "|---|---|---|---|---|"]
    for name, preset in PRESETS.items():
        algorithm = algorithm_from_preset(name)
        recipe = f"[recipe](../recipes/{name}.yaml)"
        problem = "; ".join(text for text in (preset.solves, preset.note) if text)
        cells = [f"`{name}`", citation(preset), problem, changes_from_grpo(algorithm), recipe]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def slots_text() -> str:
    """Every choice of every slot, and the sections of an algorithm, with formula, paper and options."""
    lines = ["## Slots", ""]
    for slot, records in SLOT_RECORDS.items():
        lines += [f"### {'algorithm.kl' if slot == 'reference' else 'algorithm'}.{slot}", ""]
        for record in records:
            lines += _record_text(f"`{choice_name(record)}`: ", record)
        lines.append("")
    for key, section in DOCUMENTED_SECTIONS:
        lines += [f"### {key}", "", *_record_text("", section), ""]
    return "\n".join(lines)


def citation(preset: Preset) -> str:
    """The title and the paper of a preset, without repeating the title."""
    return preset.paper if preset.paper.startswith(preset.title) else f"{preset.title}: {preset.paper}"


def record_summary(record: type[Record]) -> list[str]:
    """The first line of a record's docstring, its formula and its paper."""
    lines = [(record.__doc__ or "").strip().splitlines()[0]]
    if issubclass(record, Slot):
        lines += [text for text in (record.formula, record.paper) if text]
    return lines


def _record_text(head: str, record: type[Record]) -> list[str]:
    """A record and its options as list items. `head` is the name of a choice, empty for a section."""
    sentences = record_summary(record)[:1]
    if issubclass(record, Slot):
        sentences += [f"`{record.formula}`."] if record.formula else []
        sentences += [f"{record.paper}."] if record.paper else []
        sentences += [f"Needs {', '.join(record.needs)}."] if record.needs else []
    lines = [f"- {head}{' '.join(sentences)}"]
    for key in walk_keys(record, choice=head):
        if key.is_leaf and key.choice == head:  # options of an inner choice are listed under its own slot
            default = "required" if key.default is REQUIRED else f"default {_default(key.default)}"
            lines.append(f"  - `{key.path}` ({key.node.expected}; {default}): {key.doc}")
    return lines


def _default(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return (
        f"{value:g}"
        if isinstance(value, float)
        else repr(value)
        if isinstance(value, str) and " " in value
        else str(value)
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    ALGORITHMS_PAGE.write_text(algorithms_page(), encoding="utf-8")
    print(f"wrote {ALGORITHMS_PAGE.relative_to(ALGORITHMS_PAGE.parents[1])}")
