"""New weights for engines in other processes: every engine shows that it has them, bit for bit, before anything it samples is used."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.core.batch import Batch
from burnish.distributed.role_workers import RolloutWorker, TrainingWorker
from burnish.distributed.roles import build_policy
from burnish.inference.weight_sync import Publication, Publisher, SyncError, digest
from burnish.models.nf4 import quantised_tensors
from tests.distributed.in_process_backend import HereBackend
from tests.distributed.toy_run import config_of, learn, parts_of, requests, run


class Faulty(HereBackend):
    """Does something to the weights on their way to engine 1, from the second version on."""

    def fault(self, publication: Publication, worker: Any) -> Any:
        raise NotImplementedError

    def call(self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method == "take" and rank == 1 and args[0].version > 0:
            return self.fault(args[0], self.workers[rank])
        return super().call(rank, method, args, kwargs)


class OneBucketMissing(Faulty):
    def fault(self, publication: Publication, worker: Any) -> Any:
        return worker.take(replace(publication, buckets=publication.buckets[:1] + publication.buckets[2:]))


class OneVersionMissing(Faulty):
    def fault(self, publication: Publication, worker: Any) -> Any:
        old = Publication(publication.version - 1, (), None, True)
        return worker.take(old)


class OneBitWrong(Faulty):
    def fault(self, publication: Publication, worker: Any) -> Any:
        bucket = publication.buckets[-1]
        data = np.array(bucket.data)
        data[-1] ^= 1
        return worker.take(replace(publication, buckets=(*publication.buckets[:-1], replace(bucket, data=data))))


class OtherWeightsInUse(Faulty):
    """The parameters are right, and the engine samples with a copy that is not."""

    def fault(self, publication: Publication, worker: Any) -> Any:
        stale = copy.deepcopy(worker.policy.module)
        worker.thread.engine.model = stale
        return worker.take(publication)


def synced(folder: Path, backend: type[HereBackend], *overrides: str) -> None:
    parts = parts_of(folder, *overrides, backend=backend)
    parts.trainer._publisher = Publisher(parts.trainer.store.put, keeps_base=parts.trainer._delta, bucket_bytes=1 << 11)
    run(parts.engine, requests(2))
    learn(parts.trainer)
    parts.engine.load(1, ())
    parts.engine.submit(requests(2))
    for completion in parts.engine.stream():
        raise AssertionError(f"{completion.id} was handed over")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (OneBucketMissing, r"engine 1, version 1: tensor layers\.0\.qkv\.weight is not what the trainer has \(1 of"),
        (
            OneVersionMissing,
            r"engine 1 has version 0 of the weights, and 1 was published: tensor embedding\.weight and \d+ more there are old",
        ),
        (OneBitWrong, r"engine 1, version 1: tensor head\.weight is not what the trainer has \(1 of"),
        (
            OtherWeightsInUse,
            "engine 1, version 1: token [12] of the probe has log-prob .* though all tensors are equal",
        ),
    ],
)
@pytest.mark.parametrize("sync", ["full", "delta"])
def test_weights_that_did_not_arrive_stop_the_run(tmp_path: Path, backend: type[Faulty], words: str, sync: str) -> None:
    with pytest.raises(SyncError, match=words):
        synced(tmp_path, backend, f"placement.sync={sync}")


def test_what_was_sampled_with_another_version_stops_the_run(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    run(parts.engine, requests(2))
    parts.engine.load(1, ())
    parts.engine.confirm()
    worker = parts.backend.workers[1]
    worker.thread.do(lambda engine: engine.load(0, ()))  # as if its requests had come before the weights
    with pytest.raises(SyncError, match="engine 1 sampled with version 0 of the weights, and 1 was sent before"):
        run(parts.engine, requests(4))


def adapters(folder: Path) -> list[str]:
    """What makes a run one of adapters, on a model that is saved."""
    config = config_of(folder)
    build_policy(config.model, config.data.train, 0, folder).save(folder / "a")
    return ["model.new=null", "model.path=a", "model.lora={rank: 2}"]


def move(trainer: TrainingWorker) -> None:
    """Change every weight that is trained, as an update would."""
    with torch.no_grad():
        for parameter in trainer.learner.names.values():
            parameter.add_(torch.linspace(-0.2, 0.2, parameter.numel()).view_as(parameter))


def weights_of(worker: TrainingWorker | RolloutWorker) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in worker.policy.module.named_parameters()}


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("sync", ["full", "delta"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_engine_that_is_started_again_gets_the_weights_of_its_version_though_the_trainer_has_moved(
    tmp_path: Path, has_adapters: bool, sync: str, steps: int
) -> None:
    overlap = ["rollout.source=ahead", "placement.layout=split", f"placement.sync={sync}"]
    parts = parts_of(tmp_path, *overlap, *(adapters(tmp_path) if has_adapters else ()), engines=1)
    for version in range(steps + 1):
        move(parts.trainer)
        parts.engine.load(version, ())
    asked, published = requests(6), weights_of(parts.trainer)
    expected = run(parts.engine, asked)
    assert {version for _, _, version in expected.values()} == {steps}
    move(parts.trainer)  # the first update of the next step
    parts.counted.clear()
    parts.backend.dead.add(0)
    assert run(parts.engine, asked) == expected
    assert parts.backend.restarted == [0]
    assert are_same(weights_of(parts.backend.workers[0]), published)
    assert parts.counted["controller/sync_bytes"] == sum(tensor.nbytes for tensor in published.values())
    move(parts.trainer)
    parts.engine.load(steps + 1, ())
    assert are_same(weights_of(parts.backend.workers[0]), weights_of(parts.trainer))


def test_engines_that_sample_while_others_learn_begin_with_the_first_weights_however_late_they_are_asked(
    tmp_path: Path,
) -> None:
    parts = parts_of(tmp_path, "rollout.source=ahead", "placement.layout=split")
    asked = requests(6)
    expected = run(parts.local, asked)
    move(parts.trainer)  # by what was in the journal
    assert run(parts.local, asked) != expected
    assert run(parts.engine, asked) == expected


@pytest.mark.parametrize(("first", "words"), [(0.0, None), (0.01, "token 1 of the probe has log-prob")])
def test_an_engine_that_prefers_the_other_of_two_tokens_is_held_to_what_is_known_of_the_tokens_before(
    tmp_path: Path, first: float, words: str | None
) -> None:
    parts = parts_of(tmp_path, "rollout.source=ahead", "placement.layout=split", engines=1)
    run(parts.engine, requests(2))
    sync = parts.engine.sync
    ((tokens, logp),) = sync._expected.items()
    # As if an engine before had drawn another third token, as likely, and gone on otherwise.
    other = (*tokens[:2], tokens[2] + 1, tokens[3])
    sync._expected = {other: [logp[0] + first, *logp[1:3], logp[3] - 1]}
    move(parts.trainer)
    parts.backend.dead.add(0)
    if words is None:
        assert len(run(parts.engine, requests(2))) == 4
    else:
        with pytest.raises(SyncError, match=words):
            run(parts.engine, requests(2))


@pytest.mark.parametrize(
    ("source", "sync", "copies"), [("sync", "full", 0), ("ahead", "full", 0), ("sync", "delta", 1)]
)
def test_of_what_was_published_no_more_is_kept_than_may_be_asked_for(
    tmp_path: Path, source: str, sync: str, copies: int
) -> None:
    placed = [f"rollout.source={source}", "placement.layout=split", f"placement.sync={sync}"]
    parts = parts_of(tmp_path, *placed, *adapters(tmp_path))
    run(parts.engine, requests(2))
    move(parts.trainer)
    parts.engine.load(1, ())
    parts.engine.confirm()
    trained = sum(parameter.nbytes for parameter in parts.trainer.learner.names.values())
    publisher = parts.trainer._publisher
    assert publisher is not None
    assert sum(tensor.nbytes for tensor in publisher._base.values()) == copies * trained
    held = sum(bucket.data.nbytes for bucket in publisher._last_buckets)
    assert held == (trained if (source, sync) == ("ahead", "full") else 0)
    for worker in parts.backend.workers:
        assert are_same(weights_of(worker), weights_of(parts.trainer))


@pytest.mark.parametrize("source", ["sync", "ahead"])
def test_where_the_learner_goes_on_meanwhile_weights_are_verified_before_it_does(tmp_path: Path, source: str) -> None:
    parts = parts_of(tmp_path, f"rollout.source={source}", "placement.layout=split", backend=OneBitWrong)
    run(parts.engine, requests(2))
    learn(parts.trainer)
    if source == "sync":  # it waits for what is sampled, and asks before it moves
        parts.engine.load(1, ())
        with pytest.raises(SyncError):
            parts.engine.sleep()
    else:
        with pytest.raises(SyncError):
            parts.engine.load(1, ())


def test_the_trainer_scores_the_probe_once_however_engines_continue_it(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    run(parts.engine, requests(2))
    asked: list[tuple[int, ...]] = []
    score = parts.trainer.score

    def counted(prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        asked.append(tuple(tokens))
        return score(prompt, tokens)

    parts.trainer.score = counted  # type: ignore[method-assign]
    parts.engine.load(1, ())
    assert len(asked) == 1  # what it was the last time, before any engine has answered
    parts.engine.confirm()
    assert len(asked) == 1
    with torch.no_grad():  # another token is the likeliest now
        parts.trainer.policy.module.head.weight.mul_(-1)
    parts.engine.load(2, ())
    parts.engine.confirm()
    assert len(asked) == 3
    assert asked[0] == asked[1] != asked[2]


def test_an_engine_that_was_left_out_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(tmp_path, engines=3)
    run(parts.engine, requests(2))
    send = parts.engine.workers.send_same

    def forgetful(ranks: Sequence[int], method: str, *arguments: Any) -> Any:
        return send([rank for rank in ranks if rank != 2], method, *arguments)

    monkeypatch.setattr(parts.engine.workers, "send_same", forgetful)
    learn(parts.trainer)
    words = r"engine 2 was not sent version 1 of the weights: tensor embedding\.weight and \d+ more there are old"
    parts.engine.load(1, ())
    with pytest.raises(SyncError, match=words):
        parts.engine.confirm()


def test_a_change_to_another_version_than_the_engine_has_is_refused(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "placement.sync=delta", engines=1)
    run(parts.engine, requests(1))
    parts.trainer.publish(1, False)  # nobody takes it
    learn(parts.trainer)
    parts.engine.load(2, ())
    with pytest.raises(RuntimeError, match="a delta from version 1 does not apply to an engine with version 0"):
        parts.engine.confirm()


def test_nothing_is_loaded_under_running_requests(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.engine.submit(requests(2))
    with pytest.raises(RuntimeError, match="new weights while 4 requests run"):
        parts.engine.load(1, ())
    list(parts.engine.stream())
    with pytest.raises(ValueError, match="from the trainer, not from here"):
        parts.engine.load(1, [("head.weight", torch.zeros(1))])


def test_a_delta_sends_less_and_leaves_the_same_bits(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, "placement.sync=delta")
    run(parts.engine, requests(2))
    everything = parts.counted.pop("controller/sync_bytes")
    with torch.no_grad():
        parts.trainer.policy.module.norm.weight[3] += 1e-9
    parts.engine.load(1, ())
    parts.engine.confirm()
    changed = parts.counted["controller/sync_bytes"]
    values = sum(p.numel() for p in parts.trainer.policy.module.parameters())
    assert everything == 8 * values
    assert values / 8 <= changed < values / 8 + 40
    for worker in parts.backend.workers:
        theirs = dict(worker.policy.module.named_parameters())
        assert all(torch.equal(theirs[name], mine) for name, mine in parts.trainer.policy.module.named_parameters())


def test_at_a_small_learning_rate_in_bfloat16_a_delta_is_less_than_a_third_and_exact(tmp_path: Path) -> None:
    """The product's own AdamW at 1e-6, master weights and all, over some updates; engines end with the trainer's bits."""
    small = ["model.dtype=bfloat16", "training.optimizer.lr=1e-6", "model.new.hidden_size=64", "model.new.mlp_size=128"]
    parts = parts_of(tmp_path, "placement.sync=delta", *small)
    run(parts.engine, requests(2))
    everything = parts.counted.pop("controller/sync_bytes")
    values = sum(p.numel() for p in parts.trainer.policy.module.parameters())
    assert everything == 2 * values
    trainer = parts.trainer
    generator, started = torch.Generator().manual_seed(0), copy.deepcopy(trainer.policy.module)
    for version in range(1, 6):
        tokens = torch.randint(0, 10, (24,), generator=generator)
        mask = torch.arange(24) % 6 > 1
        batch = Batch(tokens, torch.arange(5) * 6, {"action_mask": mask, "loss_mask": mask, "weight": mask / 16})
        assert trainer.update("actor", batch, NllLoss(), 1.0, None, True).skipped is None
        parts.engine.load(version, ())
        parts.engine.confirm()
        sent = parts.counted.pop("controller/sync_bytes")
        assert sent <= 0.3 * everything
        for worker in parts.backend.workers:
            theirs = dict(worker.policy.module.named_parameters())
            assert all(torch.equal(theirs[name], mine) for name, mine in trainer.policy.module.named_parameters())
    pairs = zip(started.parameters(), trainer.policy.module.parameters(), strict=True)
    assert any(not torch.equal(before, after) for before, after in pairs)  # or nothing was to be sent


def test_an_engine_takes_the_trainers_weights_in_4_bits_whatever_its_own_directory_holds(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    policy = build_policy(config.model, config.data.train, 0, tmp_path)
    policy.save(tmp_path / "a")
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if name.startswith("layers.") and parameter.dim() == 2:
                parameter.mul_(-1.5)
    policy.save(tmp_path / "b")
    lora = ["model.new=null", "model.lora={rank: 2, base: nf4}"]
    trainer = TrainingWorker(config_of(tmp_path, *lora, "model.path=a"), tmp_path, None)
    engine = RolloutWorker(config_of(tmp_path, *lora, "model.path=b"), tmp_path)
    mine, theirs = (quantised_tensors(worker.policy.module) for worker in (trainer, engine))
    assert any(not torch.equal(mine[name], theirs[name]) for name in mine)
    everything = trainer.publish(1, complete=True)
    assert everything is not None
    assert everything.checksums.keys() > mine.keys()
    report = engine.take(everything)
    assert report.digest == digest(everything.checksums)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    np.testing.assert_allclose(report.logp, trainer.score(engine.probe.tokens, report.tokens), atol=1e-6)
    name = "layers.0.qkv.weight.codes"
    theirs[name][0] ^= 1
    assert [k for k, total in engine.checksums().items() if total != everything.checksums[k]] == [name]
    learnt = trainer.publish(2, complete=False)
    assert learnt is not None
    assert not learnt.checksums.keys() & mine.keys()
