"""Routers in training: the balance loss for any split, metrics, and experts of engine and learner recorded, compared and replayed."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.terms.spec import Router
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Request
from burnish.core.routed_experts import ENGINE_EXPERTS, LEARNER_EXPERTS, UNKNOWN_EXPERT
from burnish.core.trajectory import TokenNode, Trajectory, pack
from burnish.inference.native import scheduler
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.activation_checkpointing import set_activations
from burnish.models.cached_forward import exact_logprobs
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.experts import ExpertMlp
from burnish.models.router_pass import LearnerRouting, RouterSums
from burnish.rollout.scoring import from_arrays, to_arrays
from burnish.training.forward import Packing, micro_batches_of
from burnish.training.learner import Learner
from tests import tiny_engines
from tests.trainers.tiny import TINY, run_of

EXPERTS = {"family": "qwen3_moe", "num_layers": 3, "experts": ExpertShape(6, 2, 20, (True, False, True))}
PROMPTS = [(1, 2, 3, 4, 5, 6, 7), (8, 9), (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2)]


def sampled(model: Decoder, exact: bool = False, **options: Any) -> tuple[Batch, list[Completion]]:
    """Completions of an engine that records experts, two for each prompt, as a batch with the records."""
    requests: list[Request] = tiny_engines.requests(PROMPTS, n=2, max_tokens=12, **options)
    model.records_experts = True
    found = tiny_engines.run(PagedEngine(model, 4, exact=exact), requests)
    completions = [found[request.id] for request in requests]
    trajectories = []
    for request, one in zip(requests, completions, strict=True):
        prompt, sample = request.id.split(".")
        nodes = [
            TokenNode(-1, np.array(request.tokens), experts=one.experts[: len(request.tokens)]),
            TokenNode(0, one.tokens, one.logp, np.zeros(len(one.tokens), np.int32), experts=one.experts[len(request.tokens) :]),
        ]  # fmt: skip
        trajectories.append(Trajectory(prompt, 0, int(sample), nodes, "stop", "", reward=0.0))
    batch = pack(from_arrays(to_arrays(trajectories)))
    return batch.with_token(weight=torch.full((batch.num_tokens,), 1 / batch.num_tokens)), completions


def gradients(
    model: Decoder, batch: Batch, router: Router, budget: int, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    it = copy.deepcopy(model)
    set_activations(it, options.pop("activations", "keep"))
    learner = Learner(it, Optimizer(lr=1e-9, clip_norm=1e9), 1, budget, router=router, **options)
    total, _, _ = learner._accumulate(batch, NllLoss())
    return {name: g.clone() for name, g in learner.optimizer.gradients().items()}, (total, learner)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_engines.decoder(**EXPERTS)


@pytest.fixture(scope="module")
def batch(model: Decoder) -> Batch:
    return sampled(copy.deepcopy(model))[0]


def remember(seen: list[Tensor], router: Any, inputs: Any, logits: Tensor) -> None:
    seen.append(logits.softmax(-1))


def balance_by_definition(model: Decoder, batch: Batch) -> Tensor:
    """The loss written out: each sequence alone, the scores read from the routers."""
    total, shape = torch.zeros((), dtype=torch.float64), EXPERTS["experts"]
    mlps = [module for module in model.modules() if isinstance(module, ExpertMlp)]
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        seen: list[Tensor] = []
        hooks = [mlp.router.register_forward_hook(partial(remember, seen)) for mlp in mlps]
        model.hidden(batch.tokens[start:end], torch.tensor([0, end - start]))
        for hook in hooks:
            hook.remove()
        for scores in seen:
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(2, -1).indices, 1.0)
            total = total + (6 / 2 * chosen.mean(0) * scores.mean(0)).sum() / len(seen)
    assert isinstance(shape, ExpertShape)
    return total / batch.num_sequences


def test_the_balance_loss_is_its_definition_for_any_split_and_activation_policy(model: Decoder, batch: Batch) -> None:
    plain, _ = gradients(model, batch, Router(), 10_000)
    whole, (total, learner) = gradients(model, batch, Router(balance=0.3), 10_000, share_prefixes=False)
    wanted = balance_by_definition(it := copy.deepcopy(model), batch)
    wanted.backward()
    for name, parameter in it.named_parameters():
        expected = plain[name] + 0.3 * (0 if parameter.grad is None else parameter.grad)
        assert torch.allclose(whole[name], expected, atol=1e-10), name
    assert not torch.allclose(whole["layers.0.experts.router.weight"], plain["layers.0.experts.router.weight"])
    stats = learner.routers.stats()
    assert stats["router/balance"] == pytest.approx(float(wanted.detach()), abs=1e-12)
    assert 0 < stats["router/entropy"] < np.log(6)
    assert 1 <= stats["router/imbalance"] < 3
    for budget, options in ((40, {}), (60, {"activations": "recompute"}), (10_000, {"activations": "selective"})):
        again, (other, _) = gradients(model, batch, Router(balance=0.3), budget, **options)
        assert other == pytest.approx(total, abs=1e-12)
        for name in whole:
            assert torch.allclose(again[name], whole[name], atol=1e-10), (budget, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_exact_mode_engine_and_learner_choose_the_same_experts(dtype: torch.dtype) -> None:
    model = tiny_engines.decoder(dtype, **EXPERTS)
    model.exact = partial(exact_logprobs, model)
    batch, completions = sampled(model, exact=True)
    record = batch.token[ENGINE_EXPERTS]
    assert record.shape == (batch.num_tokens, 2, 2)
    is_last = torch.zeros(batch.num_tokens, dtype=torch.bool)
    is_last[batch.offsets[1:] - 1] = True
    assert torch.equal((record[:, 0] == UNKNOWN_EXPERT).all(-1), is_last), "only the last token was not computed"
    _, (_, learner) = gradients(model, batch, Router(engine_experts="compare"), 50)
    sums = learner.routers.sums
    assert int(sums.recorded) == int((record != UNKNOWN_EXPERT).sum()) > 200
    assert int(sums.recorded - sums.agreed) == 0
    assert all(c.experts is not None and len(c.experts) > len(c.tokens) for c in completions)


def test_a_prompt_in_chunks_has_no_records_of_the_pages_earlier_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 8)
    model = tiny_engines.decoder(**EXPERTS)
    model.records_experts = True
    engine = PagedEngine(model, 1, num_blocks=4)
    tiny_engines.run(engine, tiny_engines.requests([(1, 2)], max_tokens=30))
    prompt = PROMPTS[2]
    (found,) = tiny_engines.run(engine, tiny_engines.requests([prompt], max_tokens=3)).values()
    assert found.experts is not None
    assert (found.experts[: len(prompt) - 1, -1] == UNKNOWN_EXPERT).all(), "the last layer computes the last token only"
    assert (found.experts[len(prompt) - 1 : -1] != UNKNOWN_EXPERT).all()
    assert (found.experts[:-1, 0] != UNKNOWN_EXPERT).all()


@pytest.mark.parametrize("exact", [False, True])
def test_a_reference_in_the_same_module_is_not_measured_and_the_balance_loss_stays(batch: Batch, exact: bool) -> None:
    model = tiny_engines.decoder(torch.float32, **EXPERTS)
    model.exact = partial(exact_logprobs, model) if exact else None
    set_activations(model, "recompute")
    (one,) = micro_batches_of(batch, Packing.of(model, 10_000, True), "loss_mask")
    assert one.shared_prefix is not None
    where = one.batch.tokens, one.batch.offsets, one.wanted
    sums = RouterSums.zeros(2, 6, torch.device("cpu"))
    routing = LearnerRouting(sums, one.batch.token[ENGINE_EXPERTS], True, one.batch.num_sequences)
    model.set_routing(routing)
    reference = model.distribution(*where, one.shared_prefix)
    assert float(sums.rows) == 0
    _, _, kl = model.token_kl(*where, reference, shared_prefix=one.shared_prefix)
    measured, term = float(sums.rows), routing.balance_term()
    assert measured > 0
    assert term is not None
    (kl.sum() + term).backward()
    assert model.get_parameter("layers.0.experts.router.weight").grad is not None
    assert float(sums.rows) == measured, "a recomputed layer is not measured again"


@pytest.mark.parametrize("engine", ["stale", "bfloat16"])
def test_replay_brings_the_learner_closer_to_an_engine_that_chose_otherwise(engine: str) -> None:
    trained = tiny_engines.decoder(**EXPERTS, seed=1)
    sampler = copy.deepcopy(trained)
    if engine == "bfloat16":  # the same weights, in other arithmetic
        sampler.to(torch.bfloat16)
        trained.load_state_dict(sampler.state_dict())
    else:
        for module in sampler.modules():
            if isinstance(module, ExpertMlp):
                noise = torch.randn(module.router.weight.shape, generator=torch.Generator().manual_seed(3))
                module.router.weight.data += 0.1 * noise
    batch, _ = sampled(sampler)
    gaps, agreement = {}, {}
    for way in ("ignore", "compare", "replay"):
        router = Router.model_validate({"engine_experts": way})
        learner = Learner(copy.deepcopy(trained), Optimizer(lr=1e-9), 1, 60, router=router)
        gap = (learner.logprobs(batch) - batch.token["behaviour_logp"])[batch.action_mask]
        gaps[way] = float(gap.abs().mean())
        agreement[way] = learner.update(batch, NllLoss()).stats.get("router/agreement")
    assert gaps["ignore"] == gaps["compare"]
    assert 0 < gaps["replay"] < 0.7 * gaps["ignore"]
    assert agreement["ignore"] is None
    assert 0.5 < agreement["compare"] < 1


def test_a_replayed_record_of_the_models_own_choice_changes_nothing(model: Decoder, batch: Batch) -> None:
    own, _ = gradients(model, batch, Router(), 60)
    for policy in ("keep", "recompute"):
        replayed, _ = gradients(model, batch, Router(engine_experts="replay"), 60, activations=policy)
        for name in own:
            assert torch.allclose(replayed[name], own[name], atol=1e-12), name
    wrong = torch.where(batch.token[ENGINE_EXPERTS] >= 0, (batch.token[ENGINE_EXPERTS] + 1) % 6, UNKNOWN_EXPERT)
    other, _ = gradients(model, batch.with_token(**{ENGINE_EXPERTS: wrong}), Router(engine_experts="replay"), 60)
    assert not torch.allclose(other["layers.0.experts.down.weight"], own["layers.0.experts.down.weight"])


RECORDING = frozenset({LEARNER_EXPERTS})


@pytest.mark.parametrize("exact", [False, True])
def test_a_later_mini_batch_has_the_experts_of_the_old_pass(exact: bool) -> None:
    model = tiny_engines.decoder(torch.float32 if exact else torch.float64, **EXPERTS)
    model.exact = partial(exact_logprobs, model) if exact else None
    batch, _ = sampled(model, exact=exact)
    learner = Learner(model, Optimizer(lr=0.05), 2, 60, router=Router(learner_experts="replay"))
    old = learner.outputs(batch, RECORDING)
    experts = old[LEARNER_EXPERTS]
    known = batch.token[ENGINE_EXPERTS] != UNKNOWN_EXPERT
    assert torch.equal(experts[known], batch.token[ENGINE_EXPERTS][known]), "the engine has the same weights"
    prepared = batch.with_token(**{LEARNER_EXPERTS: experts})
    first, second = (prepared.select(torch.arange(*part)) for part in ((0, 2), (2, 6)))
    update = learner.update(first, NllLoss())
    assert update.logp is not None
    ratio = (update.logp - old["logp"][: first.num_tokens])[first.loss_mask].exp()
    assert torch.equal(ratio, torch.ones_like(ratio)) if exact else torch.allclose(ratio, torch.ones_like(ratio))
    assert update.stats["router/old_agreement"] == 1
    # The update moved the routers: they would choose others now, and do not.
    recorded = {name: learner.outputs(one, RECORDING)[LEARNER_EXPERTS] for name, one in
                (("own", batch.select(torch.arange(2, 6))), ("replayed", second))}  # fmt: skip
    assert torch.equal(recorded["replayed"], second.token[LEARNER_EXPERTS])
    assert float((recorded["own"] != recorded["replayed"]).double().mean()) > 0.02
    own = learner.logprobs(batch.select(torch.arange(2, 6)))
    update = learner.update(second, NllLoss())
    assert 0.2 < update.stats["router/old_agreement"] < 1
    assert update.logp is not None
    assert not torch.allclose(update.logp[second.loss_mask], own[second.loss_mask], atol=1e-3)


@pytest.mark.parametrize("activations", ["keep", "recompute", "selective"])
def test_gradients_with_the_learners_record_are_those_with_the_same_record_of_an_engine(
    model: Decoder, batch: Batch, activations: str
) -> None:
    # Only some tokens have a record: the others are routed by their scores.
    record = torch.where(batch.positions[:, None, None] % 3 > 0, (batch.token[ENGINE_EXPERTS] + 1) % 6, UNKNOWN_EXPERT)
    record = record.to(torch.int16)
    records = {name: batch.with_token(**{name: record}) for name in (ENGINE_EXPERTS, LEARNER_EXPERTS)}
    wanted, _ = gradients(model, records[ENGINE_EXPERTS], Router(engine_experts="replay"), 10_000)
    router = Router(learner_experts="replay", engine_experts="compare")
    found, (_, learner) = gradients(model, records[LEARNER_EXPERTS], router, 60, activations=activations)
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], atol=1e-12), name
    stats = learner.routers.stats()
    assert stats["router/agreement"] > stats["router/old_agreement"] > 0
    own, _ = gradients(model, records[LEARNER_EXPERTS], Router(), 60)
    assert not torch.allclose(own["layers.0.experts.down.weight"], wanted["layers.0.experts.down.weight"])


def test_a_run_records_replays_and_reports(tmp_path: Path) -> None:
    new = "model.new={family: qwen3_moe, hidden_size: 16, num_layers: 2, num_heads: 2, experts: [4, 2, 12], max_positions: 64}"
    overrides = [new, "algorithm.router={engine_experts: replay, balance: 0.01}", "training.steps=2"]
    metrics = [
        json.loads(line) for line in (run_of(tmp_path, TINY, overrides) / "metrics.jsonl").read_text().splitlines()
    ]
    last = metrics[-1]
    assert last["router/agreement"] > 0.99
    assert {"router/entropy", "router/imbalance", "router/dead", "router/balance"} < last.keys()
    own = [new, "algorithm.router={engine_experts: compare, learner_experts: replay}", "training.steps=2"]
    replays = [*own, "training.mini_batches=2", "training.optimizer.lr=0.05", "algorithm.entropy.coef=0.5"]
    last = json.loads((run_of(tmp_path / "own", TINY, replays) / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0.3 < last["router/old_agreement"] < 1
    assert "router/agreement" in last
    with pytest.raises(UserError, match="the model has no experts"):
        run_of(tmp_path / "dense", TINY, ["algorithm.router.balance=0.1"])
