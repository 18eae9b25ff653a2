"""Options whose effect takes steps to show: a short run with the option moved differs from one without.

`OVER_STEPS` names for each the run it acts in, its key and another value. Everything a run logs but times is compared,
and the weights it ends with.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from tests.made_tokenizers import merging
from tests.trainers.tiny import TINY, run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

PPO = ["algorithm=ppo", "algorithm.kl={reward: {coef: 0}, reference: none}"]
KL = ["algorithm.kl={loss: {coef: 0.5}, reference: frozen}"]
STEERED = ["algorithm=ppo", "algorithm.kl.reward.coef=0.5", "algorithm.kl.adaptive={target: 0.001, horizon: 10}"]
STEERED_ENTROPY = ["algorithm.entropy={coef: 0.01, adaptive: {target: 5.0}}"]
FILTERED = ["algorithm.filters=[{name: difficulty_band, low: 0.3, high: 0.7}]"]
REFILLED = [*FILTERED, "algorithm.refill={rounds: 3}"]
REPLAYED = ["algorithm.replay={share: 0.5, uses: 3, max_age: 2}"]
BUCKETS = ["algorithm.curriculum={name: easy_to_hard, column: length, buckets: 2, steps: 2}"]
HARD = ["algorithm.curriculum={name: hard_only, start: 3, below: 0.6, steps: 1}"]
PRIME = [
    "algorithm={preset: prime, filters: [], refill: {oversample: 1, short: partial}}",
    "algorithm.process.optimizer.lr=0.01",
]
PRIORITISED = ["algorithm.curriculum=prioritised"]
IMITATED = [
    "algorithm.auxiliary.sft=0.1",
    "data.demonstrations={task: sort_digits, options: {num: 64, clean: true, min_digits: 2, max_digits: 3}}",
]

FAULTS = [
    "{name: noise, scale: 0.3}",
    "{name: stale, steps: 2}",
    "quantised",
    "{name: temperature, factor: 1.5}",
    "{name: truncated, top_p: 0.5, reported: truncated}",
    "never_loaded",
    "{name: extra_bos, token: 1}",
]

CHAIN = ["algorithm=spo_chain", "algorithm.advantage={name: spo_chain, every: 2, rollouts: 2}"]
TREE = [
    "algorithm=spo_tree",
    "algorithm.advantage={name: spo_tree, branches: [2], segment: 2}",
    "algorithm.replay=null",
]

ASTAR = ["algorithm=astar_po", "algorithm.loss.beta=0.1"]
OWN_SAMPLES = ["algorithm=ssd", "algorithm.filters=[{name: non_stub, min_chars: 1}]", "rollout.temperature=0.5"]
CHORD = ["data.demonstrations={task: sort_digits, options: {num: 64, clean: true, min_digits: 2, max_digits: 3}}"]
SCHEDULE = "algorithm.auxiliary.chord={peak: 0.5, valley: 0.1, warmup: 1, decay: 2}"
OWN_TEACHER = [
    "algorithm={preset: sdft, loss: {top: 4}, kl: {context: {column: answer, text: '{context}'}}}",
    "rollout.n=4",
]
SUCCESSES = ["algorithm={preset: sdpo, kl: {context: {text: '{context}', threshold: 0.5}}}", "rollout.prompts=8"]
GOLD = ["algorithm=gold", "model.path=RESPELLED", "algorithm.kl.reference.path=WARM"]
CORRECTED = [
    "environment={name: multi_turn_correction, max_turns: 2, workers: 1, options: {verifier: task, prompt: '>'}}",
    "algorithm.advantage=rebn",
    "algorithm.shaping=[{name: information_gain, before: '>'}]",
]

OVER_STEPS: dict[str, tuple[list[str], str]] = {
    "OfflineValueAdvantage.samples": (ASTAR, "algorithm.advantage.samples=2"),
    "OfflineValueAdvantage.beta": (ASTAR, "algorithm.advantage.beta=5"),
    "ImitationLoss.temperature": (OWN_SAMPLES, "algorithm.loss.temperature=2"),
    "Auxiliary.chord": ([*IMITATED[1:], "algorithm.auxiliary={sft: 0.1}"], "algorithm.auxiliary={sft: 0, chord: {}}"),
    "Chord.gate": ([*CHORD, "algorithm.auxiliary.chord={}"], "algorithm.auxiliary.chord.gate=none"),
    "Chord.peak": ([*CHORD, SCHEDULE], "algorithm.auxiliary.chord.peak=0.9"),
    "Chord.valley": ([*CHORD, SCHEDULE], "algorithm.auxiliary.chord.valley=0.3"),
    "Chord.warmup": ([*CHORD, SCHEDULE], "algorithm.auxiliary.chord.warmup=2"),
    "Chord.decay": ([*CHORD, SCHEDULE], "algorithm.auxiliary.chord.decay=1"),
    "DivergenceLoss.alpha": (OWN_TEACHER, "algorithm.loss.alpha=0"),
    "DivergenceLoss.support": (OWN_TEACHER, "algorithm.loss.support=teacher"),
    "DivergenceLoss.top": (OWN_TEACHER, "algorithm.loss.top=2"),
    "DivergenceLoss.rest": (OWN_TEACHER, "algorithm.loss.rest=tail"),
    "GoldLoss.alpha": (GOLD, "algorithm.loss.alpha=0"),
    "GoldLoss.merge": (GOLD, "algorithm.loss.merge=bayesian"),
    "GoldLoss.compare": (GOLD, "algorithm.loss.compare=sorted"),
    "GoldLoss.matched_weight": (GOLD, "algorithm.loss.matched_weight=0.2"),
    "GoldLoss.unmatched_weight": (GOLD, "algorithm.loss.unmatched_weight=2"),
    "Kl.context": (KL, "algorithm.kl.context={name: demonstration, column: answer, text: '{context}'}"),
    "DemonstrationContext.place": (OWN_TEACHER, "algorithm.kl.context.place=system"),
    "DemonstrationContext.text": (OWN_TEACHER, "algorithm.kl.context.text='{context}>'"),
    "DemonstrationContext.column": (OWN_TEACHER, "algorithm.kl.context.column=length"),
    "DemonstrationContext.skip": (OWN_TEACHER, "algorithm.kl.context.skip=1"),
    "SuccessContext.place": (SUCCESSES, "algorithm.kl.context.place=system"),
    "SuccessContext.text": (SUCCESSES, "algorithm.kl.context.text='{context}>'"),
    "SuccessContext.threshold": (SUCCESSES, "algorithm.kl.context.threshold=0"),
    "SpoChainAdvantage.below": (CHAIN, "algorithm.advantage.below=0.5"),
    "SpoChainAdvantage.every": (CHAIN, "algorithm.advantage.every=1"),
    "SpoChainAdvantage.rollouts": (CHAIN, "algorithm.advantage.rollouts=3"),
    "SpoTreeAdvantage.branches": (TREE, "algorithm.advantage.branches=[3]"),
    "SpoTreeAdvantage.segment": (TREE, "algorithm.advantage.segment=1"),
    "KlLoss.top": ([*KL, "algorithm.kl.loss.estimator=full"], "algorithm.kl.loss.top=2"),
    "Kl.reference": (KL, "algorithm.kl.reference=ema"),
    "EmaReference.eta": ([*KL, "algorithm.kl.reference=ema"], "algorithm.kl.reference.eta=0.5"),
    "HardSyncReference.every": (
        [*KL, "algorithm.kl.reference={name: hard_sync, every: 1}"],
        "algorithm.kl.reference.every=2",
    ),
    "IterateReference.every": ([*KL, "algorithm.kl.reference=iterate"], "algorithm.kl.reference.every=2"),
    "Kl.adaptive": (STEERED, "algorithm.kl.adaptive=null"),
    "KlTarget.target": (STEERED, "algorithm.kl.adaptive.target=10"),
    "KlTarget.horizon": (STEERED, "algorithm.kl.adaptive.horizon=1000"),
    "Entropy.adaptive": (STEERED_ENTROPY, "algorithm.entropy.adaptive=null"),
    "EntropyTarget.target": (STEERED_ENTROPY, "algorithm.entropy.adaptive.target=0.001"),
    "EntropyTarget.delta": (STEERED_ENTROPY, "algorithm.entropy.adaptive.delta=0.5"),
    "InformationGainShaper.before": (CORRECTED, "algorithm.shaping=[{name: information_gain, before: '2>'}]"),
    "Auxiliary.sft": (IMITATED, "algorithm.auxiliary.sft=0.5"),
    "Refill.rounds": (REFILLED, "algorithm.refill.rounds=1"),
    "Refill.oversample": (REFILLED, "algorithm.refill.oversample=2"),
    "Refill.enough": (REFILLED, "algorithm.refill.enough=0.25"),
    "Replay.share": (REPLAYED, "algorithm.replay.share=0.25"),
    "Replay.uses": (REPLAYED, "algorithm.replay.uses=2"),
    "Replay.max_age": ([*REPLAYED, "algorithm.replay.uses=2"], "algorithm.replay.max_age=1"),
    "Replay.capacity": (REPLAYED, "algorithm.replay.capacity=2"),
    "Replay.pick": (REPLAYED, "algorithm.replay.pick=oldest"),
    "Critic.warmup_steps": (PPO, "algorithm.critic.warmup_steps=2"),
    "Critic.updates": (PPO, "algorithm.critic.updates=3"),
    "Critic.clip": ([*PPO, "algorithm.critic={updates: 8, optimizer: {lr: 0.05}}"], "algorithm.critic.clip=0.01"),
    "Critic.optimizer": (PPO, "algorithm.critic.optimizer.lr=0.1"),
    "ProcessModel.path": (PRIME, "algorithm.process.path=ANOTHER"),
    "ProcessModel.beta": (PRIME, "algorithm.process.beta=0.5"),
    "ProcessModel.loss": (PRIME, "algorithm.process.loss=contrast"),
    "ProcessModel.update": (PRIME, "algorithm.process.update=after"),
    "ProcessModel.mini_batches": (PRIME, "algorithm.process.mini_batches=2"),
    "ProcessModel.optimizer": (PRIME, "algorithm.process.optimizer.lr=0.1"),
    "PrioritisedCurriculum.ema": (PRIORITISED, "algorithm.curriculum.ema=1"),
    "PrioritisedCurriculum.warmup_steps": (PRIORITISED, "algorithm.curriculum.warmup_steps=3"),
    "EasyToHardCurriculum.column": (
        [*BUCKETS, "data.train=[{path: rows.jsonl}]", "reward.parts=exact"],
        "algorithm.curriculum.column=backwards",
    ),
    "EasyToHardCurriculum.buckets": ([*BUCKETS, "algorithm.curriculum.steps=4"], "algorithm.curriculum.buckets=4"),
    "EasyToHardCurriculum.steps": (BUCKETS, "algorithm.curriculum.steps=4"),
    "EasyToHardCurriculum.warmup_steps": (BUCKETS, "algorithm.curriculum.warmup_steps=2"),
    "HardOnlyCurriculum.start": (HARD, "algorithm.curriculum.start=2"),
    "HardOnlyCurriculum.below": (HARD, "algorithm.curriculum.below=1"),
    "HardOnlyCurriculum.lr_final": (HARD, "algorithm.curriculum.lr_final=1"),
    "HardOnlyCurriculum.steps": (HARD, "algorithm.curriculum.steps=10"),
}


Outcome = tuple[list[dict[str, Any]], dict[str, list[float]]]


def respelled(warm: Path) -> Path:
    """The same weights with another tokenizer, which has pairs of digits in place of some digits."""
    folder = warm.parent / "respelled"
    if not folder.exists():
        shutil.copytree(warm, folder)
        merging("01234>", ("0", "1"), ("1", "2"), ("2", "3"), ("3", "4"), ("0", "2")).save(folder)
    return folder


def finished(folder: Path, warm: Path, overrides: list[str]) -> Outcome:
    """What a run logged at every step, without times, and the weights it ended with."""
    overrides = [o.replace("RESPELLED", str(respelled(warm))).replace("WARM", str(warm)) for o in overrides]
    folder = run_of(folder, TINY, ["model.new=null", f"model.path={warm}", *overrides])
    rows = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    (last,) = (folder / "checkpoints").glob("step-*")
    return rows, {name: t.flatten().tolist() for name, t in load_file(last / "model.safetensors").items()}


@pytest.fixture(scope="module")
def unmoved(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Outcome]:
    """The run that several options are moved in, made once."""
    made: dict[tuple[str, ...], Outcome] = {}

    def outcome(base: list[str]) -> Outcome:
        if tuple(base) not in made:
            made[tuple(base)] = finished(tmp_path_factory.mktemp("base"), warm, base)
        return made[tuple(base)]

    return outcome


@pytest.mark.parametrize("key", OVER_STEPS)
def test_the_option_changes_the_run(
    key: str, tmp_path: Path, warm: Path, unmoved: Callable[[list[str]], Outcome]
) -> None:
    base, move = OVER_STEPS[key]
    move = move.replace("ANOTHER", str(warm.parent / "checkpoints" / "step-000001"))  # the same model a step later
    assert unmoved(base) != finished(tmp_path / "moved", warm, [*base, move])


def test_two_runs_alike_are_the_same(tmp_path: Path, warm: Path) -> None:
    assert finished(tmp_path / "one", warm, PPO) == finished(tmp_path / "two", warm, PPO)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_sampler_shows_in_the_mismatch_of_the_run(fault: str, tmp_path: Path, warm: Path) -> None:
    rows, _ = finished(tmp_path / "faulty", warm, [f"rollout.mismatch={fault}"])
    assert max(row["mismatch/mean"] for row in rows) > 1e-4
    assert max(row["mismatch/mismatch_k3_kl"] for row in rows) > 0


def test_an_exact_run_logs_a_gap_of_exactly_zero_at_every_step(tmp_path: Path, warm: Path) -> None:
    rows, _ = finished(tmp_path / "exact", warm, ["rollout.exact=true", "training.mini_batches=2"])
    gaps = [
        row[name] for row in rows if "mismatch/mean" in row for name in ("mismatch/mean", "mismatch/mismatch_k3_kl")
    ]
    assert gaps == [0.0] * len(gaps)
    plain, _ = finished(tmp_path / "plain", warm, ["training.mini_batches=2"])
    assert max(row["mismatch/mean"] for row in plain if "mismatch/mean" in row) > 0
