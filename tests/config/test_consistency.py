"""Combinations that cannot work are refused with the reason; valid ones are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig

MINIMAL = ["model.new.num_layers=1", "data.train.task=sort_digits"]
HELD_OUT = ["data.validation.task=sort_digits", "validation.limit=8"]
BARE = {"ratio": "none", "clip": "none"}
ONLINE = {**BARE, "advantage": "none", "loss": "simpo"}
KL_REWARD = {"reward": {"coef": 0.1}, "reference": "frozen"}
BARE_DIVERGENCE = [
    "algorithm.loss=divergence",
    "algorithm.advantage=none",
    "algorithm.ratio=none",
    "algorithm.clip=none",
]
GOLD = ["algorithm=gold", "algorithm.kl.reference.path=x"]
TAUGHT = ["algorithm=on_policy_distillation", "algorithm.kl.reference.path=teacher"]
SHOWN = ["algorithm=luffy", "data.demonstrations_per_group=1", "data.demonstration_column=answer"]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"clip": "soft", "ratio": "sequence"}, "clip soft bounds ratio token"),
    ({"clip": "is_weight"}, "clip is_weight makes loss sg_logprob"),
    ({"loss": "sg_logprob"}, "clip ppo makes loss surrogate"),
    ({"loss": "omd_sq"}, "loss omd_sq uses no ratio"),
    ({"clip": "log_geo", "ratio": "sequence", "aggregation": "token-mean"}, "log_geo is one number per sequence"),
    ({**BARE, "loss": "bce"}, "loss bce goes with advantage none"),
    ({"advantage": "none"}, "advantage none is 0 everywhere"),
    ({"advantage": "gae"}, "advantage gae needs a critic"),
    ({"critic": {}}, "would be trained for nothing"),
    ({"advantage": {"name": "gae", "lam": 0.9, "length_adaptive": 0.05}, "critic": {}}, "takes the place of lam"),
    ({"advantage": {"name": "gae", "whiten": False, "ddof": 0}, "critic": {}}, "whitening, which is off"),
    ({"advantage": {"name": "grpo", "std": "none", "eps": 0.1}}, "the division by a deviation, which is off"),
    ({"advantage": {"name": "gpg", "eps": 0.1}}, "the division by a deviation, which is off"),
    ({"advantage": "gdpo", "shaping": ["signed"]}, "which advantage gdpo does not read"),
    ({"advantage": "gdpo", "kl": KL_REWARD}, "which advantage gdpo does not read"),
    ({"advantage": "remax", "shaping": ["signed"]}, "not shaped"),
    ({"advantage": "spo_chain", "shaping": ["signed"]}, "answers continued from its borders, which are not shaped"),
    ({"advantage": "spo_chain", "kl": KL_REWARD}, "answers continued from its borders, which are not shaped"),
    ({"advantage": "spo_tree", "kl": KL_REWARD}, "would count the prefix once for each of them"),
    ({"advantage": "spo_tree", "filters": ["overlong"]}, "also trains edges that other answers share"),
    ({"advantage": "spo_tree", "filters": ["positives_only"]}, "also trains edges that other answers share"),
    ({"advantage": "spo_tree", "filters": ["cppo"]}, "also trains edges that other answers share"),
    ({"advantage": "spo_tree", "filters": ["pf_ppo"]}, "also trains edges that other answers share"),
    ({"advantage": "spo_chain", "filters": ["tree_edges"]}, "chooses edges of trees, and advantage spo_chain has none"),
    ({**BARE, "loss": "mine.py:f", "advantage": "remax", "shaping": ["signed"]}, "not shaped"),
    ({"shaping": ["repetition_dense"]}, "a return for every token and gamma 1"),
    ({"shaping": ["repetition_dense"], "advantage": {"name": "reinforce", "gamma": 0.9}}, "and gamma 1"),
    ({**BARE, "loss": "bce", "advantage": "none", "filters": ["cppo"]}, "cppo chooses by the advantages"),
    ({**BARE, "loss": "omd_sq", "entropy": {"top_share": 0.2}}, "picks tokens, but omd_sq"),
    ({"kl": {**KL_REWARD, "reward": {"coef": 0.1, "center": "sequence"}}}, "subtracts anyway"),
    ({"kl": {"adaptive": {}}}, "would stay 0"),
    ({"filters": ["overlong", "overlong"]}, "given twice"),
    ({"filters": [{"name": "difficulty_band", "low": 0, "high": 1}]}, "keeps everything"),
    ({"filters": ["zero_signal"], "refill": {"short": "fill"}}, "put every dropped group back"),
    ({"filters": ["zero_signal"], "refill": {"enough": 0.5}}, "there is only one"),
    ({"filters": ["pairs"]}, "is for a loss that compares two answers, and loss surrogate does not"),
    ({**ONLINE, "filters": ["pairs", "overlong"]}, "put pairs last"),
    ({**ONLINE, "filters": ["pairs"], "correction": "decoupled_token_is"}, "compares two answers of any policy"),
    ({"replay": {"uses": 4, "max_age": 2}}, "cannot be reached"),
    ({**BARE, "loss": "logprob", "replay": {}}, "loss logprob has no ratio to correct for that"),
    ({**BARE, "loss": "mixed_offpolicy", "replay": {}}, "replay demonstrations"),
    (
        {"kl": {"reference": {"name": "teachers", "paths": {"a": "http://"}}}},
        "paths.a=http:// is no address of a server",
    ),
    ({"kl": {"reference": {"name": "teachers", "paths": {"a": "x:8000"}}}}, "paths.a=x:8000 is no address"),
    ({"kl": {"reference": {"name": "teacher", "url": "x:1"}}}, "url=x:1 is no address"),
    ({"router": {"engine_experts": "replay", "learner_experts": "replay"}}, "give the same updates different experts"),
    ({"router": {"learner_experts": "replay"}, "correction": "bypass"}, "bypass has the engine's log-probs instead"),
]


@pytest.mark.parametrize(("tree", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_an_algorithm_that_cannot_be_is_refused_with_the_reason(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        Algorithm.model_validate(tree)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=dpo"], "use `burnish prefer` with preference.loss=dpo"),
        (["algorithm=dpo"], "or add pairs to algorithm.filters"),
        (
            ["algorithm.replay.max_age=1", "algorithm.replay.uses=2", "rollout.source=ahead"],
            "allows no replay: set it above 1",
        ),
        (["algorithm=online_dpo", "rollout.n=1"], "needs rollout.n of 2 or more"),
        (["algorithm=lcpo"], "set data.budget={}"),
        (["data.budget={}"], "asks for a length that nothing rewards"),
        (["algorithm=sft"], "use `burnish sft`"),
        (["algorithm=spo_tree", "rollout.n=1"], "needs rollout.n of 2 or more"),
        (["algorithm=spo_tree", "environment=game.py:Game"], "game.py:Game cannot be restored to such a state"),
        (["algorithm=spo_chain", "rollout.stop=[x]"], "does not see a rollout.stop string that begins before it"),
        (["algorithm=spo_chain", "rollout.source=async"], "loads new weights in the middle of them: use sync or ahead"),
        (
            ["algorithm=spo_chain", "data.demonstrations_per_group=1", "data.demonstration_column=answer"],
            "a demonstration shares none",
        ),
        (["algorithm.router.learner_experts=replay"], "no effect with one update per batch"),
        (
            ["algorithm.router.learner_experts=replay", "algorithm.correction=decoupled_token_is"],
            "no effect with one update per batch",
        ),
        (["algorithm.auxiliary.sft=0.1"], "imitates data.demonstrations, but there are none"),
        (["data.demonstrations.path=a.jsonl"], "set algorithm.auxiliary.sft"),
        (["data.demonstrations_per_update=8"], "no effect without data.demonstrations"),
        (["algorithm=on_policy_distillation"], "would be its own teacher"),
        (["algorithm=mopd"], "set algorithm.kl.reference.paths"),
        (
            ["algorithm=mopd", "algorithm.kl.reference.paths={a: x}", "algorithm.replay={}"],
            "replayed groups have none: set algorithm.replay=null, or use one teacher",
        ),
        (["algorithm=iw_opd"], "would be its own teacher"),
        (["algorithm=sdft"], "set algorithm.kl.context.column"),
        (["algorithm=gold"], "loss gold would hold the policy at the weights it started from"),
        (["algorithm=gold", "algorithm.kl.reference=ema"], "learns from one teacher with a tokenizer of its own"),
        (["algorithm=gold", "algorithm.kl.reference.url='http://a'"], "load it from a path instead of a url"),
        ([*GOLD, "algorithm.replay={}"], "replayed groups have none"),
        ([*GOLD, "algorithm.kl.loss.coef=1"], "kl.loss.coef compares single tokens"),
        ([*GOLD, "algorithm.entropy.coef=0.1"], "loss gold counts groups of tokens"),
        (
            [*GOLD, "algorithm.correction={name: decoupled, weights: sequence}"],
            "correction decoupled weights single tokens",
        ),
        ([*GOLD, "algorithm.advantage=grpo"], "goes with advantage none"),
        ([*GOLD, "algorithm.loss={name: gold, compare: sorted, alpha: 0}"], "alpha belongs to compare hybrid"),
        ([*GOLD, "algorithm.loss={matched_weight: 0, unmatched_weight: 0}"], "so there is no loss"),
        ([*GOLD, "data.template.kind=prerendered"], "loss gold renders prompts anew for the teacher"),
        ([*GOLD, "placement=ray"], "loss gold reads columns that are not sent to workers"),
        (["algorithm=opsd"], "set algorithm.kl.context.column"),
        (["algorithm=sdpo", "rollout.n=1"], "success compares samples of one prompt"),
        (["algorithm=chord"], "auxiliary.chord imitates data.demonstrations, but there are none"),
        (["algorithm.kl.reference=policy", "algorithm.kl.loss.coef=0.1"], "is the policy itself, and the KL is 0"),
        ([*TAUGHT, "algorithm.kl.loss.clamp=1"], "kl.loss.clamp has no effect"),
        ([*BARE_DIVERGENCE, "algorithm.kl.loss.coef=0"], "hold the policy at the weights it started from"),
        (
            [*BARE_DIVERGENCE, "algorithm.kl.reference=ema", "algorithm.kl.loss.coef=1"],
            "is the KL to the reference already",
        ),
        (
            [*BARE_DIVERGENCE, "algorithm.kl.reference=ema", "algorithm.loss.support=student"],
            "set top, for example 100",
        ),
        (
            [
                "algorithm=kimi_k15",
                "algorithm.kl={loss: {estimator: k2, coef: 0.1}, reference: {name: teacher, path: x}}",
            ],
            "is anchored at kl.reference, which would be the teacher",
        ),
        (
            ["placement=ray", "reward.parts=[{name: judge, options: {path: m, template: t}}]"],
            "reward part judge runs its model on the driver's machine",
        ),
        (["algorithm.advantage=distillation"], "learns from a teacher, but algorithm.kl.reference is frozen"),
        ([*TAUGHT, "algorithm.shaping=[signed]"], "with outcome=0 does not read"),
        ([*TAUGHT, "algorithm.advantage.outcome=1", "rollout.n=1"], "compares samples of one prompt"),
        ([*TAUGHT, "algorithm.kl.loss={coef: 1, top: 4}"], "top belongs to estimator full"),
        (["data.demonstration_column=a"], "no effect without data.demonstrations_per_group"),
        (["algorithm=luffy"], "set data.demonstrations_per_group=1"),
        (
            [*SHOWN, "algorithm.kl.reference=rollout", "algorithm.kl.loss={estimator: k2, coef: 0.1}"],
            "use kl.reference=frozen",
        ),
        (
            [*SHOWN, "algorithm.kl={reward: {coef: 0.1, policy: rollout}, reference: frozen}"],
            "use kl.reward.policy=old",
        ),
        (
            ["algorithm=luffy", "data.demonstrations_per_group=1"],
            "give data.demonstrations or data.demonstration_column",
        ),
        ([*SHOWN, "algorithm=grpo"], "would treat demonstrations as samples of the policy"),
        ([*SHOWN, "data.demonstrations.path=a.jsonl"], "data.demonstrations are not used"),
        ([*SHOWN, "algorithm.advantage=spo_chain"], "a demonstration shares none"),
        (
            [*SHOWN, "data.budget={}", "algorithm.shaping=[lcpo_exact]"],
            "asks for lengths that demonstrations do not have",
        ),
        ([*SHOWN, "environment.name=mine.py:Game"], "a demonstration is one answer"),
        (["algorithm=prime", "reward.parts=[think_format]"], "must know whether an answer is correct"),
        (["algorithm.advantage=prime_rloo"], "set algorithm.process={}"),
        (["algorithm.process={}"], "would be trained for nothing"),
        (
            ["algorithm=prime", "algorithm.process.optimizer.precision=stochastic"],
            "algorithm.process.optimizer.precision",
        ),
        (["algorithm=vc_ppo"], "leaves no steps for the policy: training.steps=100"),
        (["reward.parts=[{name: model, options: {path: x}}]", "placement=ray"], "gives the GPUs to the workers"),
        (
            ["reward.parts=[{name: model, options: {path: x}}]", "algorithm=dapo"],
            "must know whether an answer is correct",
        ),
        (["rollout.source=ahead", "placement=ray"], "they take turns: set placement.layout=split"),
        (["rollout.source=ahead", "rollout.engine=vllm"], "start a server and set rollout.vllm.url"),
        (["rollout.source=ahead", "rollout.exact=true"], "rollout.exact cannot hold"),
        (["rollout.source=async", "training.deterministic=true"], "no two runs are equal; use sync or ahead"),
        (["rollout.engine=vllm", "training.deterministic=true"], "its batches depend on time"),
        (["rollout.speculation=lookup", "training.deterministic=true"], "use source=context, or rollout.exact"),
        (["rollout.source=async", "rollout.mismatch=stale"], "to study rollout.mismatch"),
        (["rollout.source={name: ahead, max_staleness: 2}"], "max_staleness"),
        (["rollout.source={name: async, max_staleness: -1}"], "an integer of 0 or more"),
        (["rollout.n=1"], "needs rollout.n of 2 or more"),
        (["rollout.stages=[{start: 5, n: 1}]"], "needs rollout.n of 2 or more"),
        (["rollout.stages=[{start: 500, n: 4}]"], "starts at step 500, but training.steps=100"),
        (["rollout.stages=[{start: 9, n: 4}, {start: 9, n: 2}]"], "must start after the one before"),
        (["rollout.stages=[{start: 9}]"], "changes nothing"),
        (["training.optimizer.final=0.1"], "no effect on a constant schedule"),
        (["training.optimizer={schedule: cosine, decay: 0.5}"], "decay has no effect on schedule cosine"),
        (["training.optimizer.warmup=2.5"], "neither a whole number of updates nor a fraction below 1"),
        (["training.optimizer={schedule: wsd, warmup: 0.6, decay: 0.5}"], "wsd would never reach its peak"),
        (["training.optimizer.groups=[{match: head}]"], "changes nothing: give lr_scale or weight_decay"),
        (["training.optimizer.groups=[{match: '(', lr_scale: 2}]"], "not a regular expression"),
        (
            ["training.optimizer.precision=stochastic"],
            "training.optimizer.precision=stochastic rounds weights to bfloat16",
        ),
        (
            ["model.dtype=float64", "warm_start={data: {task: sort_digits}, optimizer: {precision: stochastic}}"],
            "warm_start",
        ),
        (["algorithm=ppo", "algorithm.critic.optimizer.precision=stochastic"], "algorithm.critic.optimizer.precision"),
        (["model.device=cpu", "training.optimizer.offload=true"], "no effect with model.device=cpu"),
        (["algorithm=dapo", "reward.parts=[think_format]"], "must know whether an answer is correct"),
        (["algorithm.auxiliary.positive_nll=0.1", "reward.parts=[format]"], "must know whether an answer is correct"),
        (["reward.sandbox=unsafe"], "no part of the reward runs programs"),
        (["run.best_by=validation/greedy/accuracy"], "this run has no held-out data"),
        ([*HELD_OUT, "run.best_by=reward_mean"], "no such metric"),
        ([*HELD_OUT, "run.best_by=validation/greedy/reward"], "did you mean 'validation/greedy/reward_mean'?"),
        ([*HELD_OUT, "run.best_by=-validation/sampled/length_mean"], "did you mean '-validation/greedy/length_mean'?"),
    ],
)
def test_a_run_that_does_not_provide_what_its_algorithm_needs_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(TrainConfig, None, [*MINIMAL, *overrides])
    assert words in str(error.value)


def test_a_graded_part_with_a_threshold_tells_right_from_wrong() -> None:
    part = "reward.parts=[{name: model, options: {path: x}, correct_at: 0.5}]"
    assert load(TrainConfig, None, [*MINIMAL, part, "algorithm=dapo"]).config.reward.parts[0].correct_at == 0.5
