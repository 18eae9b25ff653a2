"""The memory plan: against measured memory, the order of its suggestions, its texts, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.algorithms.losses.model_losses import RewardModelLoss
from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.model import Lora, LoraBase, Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.data.preference_pairs import PreferencePair
from burnish.data.supervised import Example
from burnish.memory_plan import learner_bytes as footprints
from burnish.memory_plan.planner import CUDA_CONTEXT_BYTES, GIB, POLICY, SAMPLING, RunSetup, gib, plan_memory
from burnish.memory_plan.suggestions import (
    check_plan,
    enough_suggestions,
    plan_error,
    plan_line,
    plan_text,
    suggestions,
)
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.heads import new_score_model
from burnish.models.kernels import half_products
from burnish.models.lora.adapters import add_lora
from burnish.models.nf4 import weight_bytes
from burnish.trainers.reward_model import pack_pairs
from burnish.training.learner import Learner
from tests.alive import Alive

SMALL = Architecture("qwen2", 1024, 128, 3, 4, 2, 32, 384, 512, qkv_bias=True)
OF_1_5B = Architecture("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 32768, qkv_bias=True, tied=True)
OF_7B = Architecture("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, 32768, qkv_bias=True)
H200 = int(139.8 * GIB)
LENGTH = 32


def on_gpu(arch: Architecture, **changes: Any) -> RunSetup:
    setup = RunSetup(arch, "bfloat16", True, Optimizer(), token_budget=16384, longest=512, update_tokens=98304)
    return replace(setup, **changes)


# --- against what is held ------------------------------------------------------------------------------------------------


def batch_of(num_sequences: int) -> Batch:
    """Sequences of one length, all but the first token in the loss."""
    num_tokens = num_sequences * LENGTH
    mask = torch.arange(num_tokens) % LENGTH > 0
    batch = Batch(
        torch.arange(num_tokens) * 7 % SMALL.vocab_size,
        offsets_from_lengths(torch.full((num_sequences,), LENGTH)),
        {"action_mask": mask, "loss_mask": mask},
        {},
    )
    return batch.with_token(weight=aggregation_weights(batch, "token-mean"))


def held_in_two_updates(arch: Architecture, setup: RunSetup, num_sequences: int) -> tuple[int, int]:
    """Bytes at the peaks of the first and of the second update of a real learner, weights included."""
    model = Decoder(arch)
    initialise(model, 0)
    model.to(getattr(torch, setup.dtype))
    if setup.lora is not None:
        add_lora(model, setup.lora, 0)
    set_activations(model, setup.activations)
    learner = Learner(model, setup.optimizer, 10, setup.token_budget)
    batch = batch_of(num_sequences)
    model.rotations(LENGTH)
    weights = weight_bytes(model)
    peaks = []
    with Alive(*model.parameters(), *model.buffers(), batch.tokens, batch.offsets, *batch.token.values()) as alive:
        for _ in range(2):
            alive.peak = alive.bytes
            learner.update(batch, NllLoss())
            peaks.append(alive.peak + weights)
    return peaks[0], peaks[1]


@pytest.mark.parametrize("activations", ["keep", "selective", "recompute"])
def test_the_plan_is_what_a_learner_holds(activations: str) -> None:
    for lora, tied, num_sequences, budget in (
        (None, True, 16, 2048),
        (None, False, 32, 512),
        (Lora(rank=4), False, 32, 512),
        (Lora(rank=4, base="nf4"), False, 32, 512),
        (Lora(rank=4, base="nf4-double", targets=["v_proj"]), True, 32, 512),
    ):
        arch = replace(SMALL, tied=tied)
        setup = RunSetup(
            *(arch, "float32", False, Optimizer(), budget, LENGTH, num_sequences * LENGTH),
            activations=activations,
            lora=lora,
        )
        made = plan_memory(setup)
        first, second = held_in_two_updates(arch, setup, num_sequences)
        case = f"{lora}, tied {tied}, {budget} tokens"
        # In 4 bits with recomputation the largest temporary is half a megabyte of nine, and the plan has it in one layer too many.
        tolerance = 0.06 if lora is not None and lora.base == "nf4" and activations == "recompute" else 0.05
        assert made.learners_peak(1) == pytest.approx(first, rel=tolerance), case
        assert made.learners_peak(2) == pytest.approx(second, rel=tolerance), case


@pytest.mark.parametrize(("dtype", "has_products"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_plan_of_a_wide_head_is_what_a_learner_holds(
    dtype: str, has_products: bool, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a vocabulary of 16,384 most of the memory is the head's: its gradient and a chunk of logits."""
    for module in (half_products, footprints):  # processors with and without products of bfloat16
        monkeypatch.setattr(module, "has_bfloat16_products", lambda: has_products)
    arch = replace(SMALL, vocab_size=16384, num_layers=1, tied=True, logit_softcap=softcap)
    for lora in (None, Lora(rank=4)):
        setup = RunSetup(arch, dtype, False, Optimizer(), 512, LENGTH, 32 * LENGTH, activations="keep", lora=lora)
        found = held_in_two_updates(arch, setup, 32)
        made = plan_memory(setup)
        for peak, held in zip((made.learners_peak(1), made.learners_peak(2)), found, strict=True):
            assert 0.97 * held < peak < 1.06 * held, f"{lora}: planned {peak / 1e6:.1f} MB, held {held / 1e6:.1f} MB"


def held_by_a_scorer(arch: Architecture, setup: RunSetup, num_pairs: int) -> tuple[int, int]:
    """The same of a scorer's learner, on pairs of sequences that have nothing in common."""
    decoder = Decoder(arch)
    initialise(decoder, 0)
    if setup.lora is not None:
        add_lora(decoder, setup.lora, 0)
    model = new_score_model(decoder, 0)
    set_activations(model, setup.activations)
    learner = Learner(model, setup.optimizer, 10, setup.token_budget)
    tokens = torch.randint(1, arch.vocab_size, (2 * num_pairs, LENGTH), generator=torch.Generator().manual_seed(0))
    answers = [Example(str(k), row, [True] * LENGTH) for k, row in enumerate(tokens.tolist())]
    pairs = [PreferencePair(str(k), answers[2 * k], answers[2 * k + 1], margin=0.0) for k in range(num_pairs)]
    batch = pack_pairs(pairs, 0)
    model.backbone.rotations(LENGTH)
    columns = [*batch.token.values(), *batch.sequence.values()]
    peaks = []
    with Alive(*model.parameters(), *model.buffers(), batch.tokens, batch.offsets, *columns) as alive:
        for _ in range(2):
            alive.peak = alive.bytes
            learner.update(batch, RewardModelLoss(0.0, 0.0), columns=False)
            peaks.append(alive.peak + weight_bytes(model))
    return peaks[0], peaks[1]


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("lora", [None, Lora(rank=4), Lora(rank=4, base="nf4")], ids=["whole", "adapters", "nf4"])
def test_the_plan_of_a_scorer_is_what_its_learner_holds(lora: Lora | None, activations: str) -> None:
    for num_pairs, budget in ((8, 2048), (16, 512)):
        arch = replace(SMALL, tied=True)
        setup = RunSetup(
            *(arch, "float32", False, Optimizer(), budget, LENGTH, 2 * num_pairs * LENGTH),
            activations=activations,
            lora=lora,
            is_reward_model=True,
        )
        made = plan_memory(setup)
        assert list(made.phases) == ["the reward model learns"]
        first, second = held_by_a_scorer(arch, setup, num_pairs)
        assert made.learners_peak(1) == pytest.approx(first, rel=0.05), f"{num_pairs} pairs"
        assert made.learners_peak(2) == pytest.approx(second, rel=0.05), f"{num_pairs} pairs"


@pytest.mark.parametrize(
    ("arch", "rows", "tokens", "micro_batches", "longest", "activations", "lora", "measured"),
    [
        (OF_1_5B, 16280, 16280, 6, 640, "keep", None, 60.12),
        (OF_1_5B, 8192, 8192, 1, 1024, "keep", None, 38.06),
        (OF_1_5B, 32768, 32768, 1, 32768, "keep", None, 87.55),
        (OF_1_5B, 32768, 32768, 1, 32768, "recompute", None, 26.84),
        (OF_1_5B, 14651, 21812, 5, 640, "keep", None, 55.80),  # samples that share their prompts
        (OF_7B, 7160, 7160, 7, 640, "keep", Lora(rank=32), 47.54),
    ],
)
def test_plans_of_measured_runs_are_near_what_was_measured(
    arch: Architecture,
    rows: int,
    tokens: int,
    micro_batches: int,
    longest: int,
    activations: str,
    lora: Lora | None,
    measured: float,
) -> None:
    # Updates in bfloat16 on an H200, what torch had allocated at the peak (bench/learner.py).
    model = footprints.meta_policy(arch, torch.bfloat16, lora)
    learning = footprints.LearnerPasses(activations, rows, tokens, micro_batches, longest)
    found = footprints.learner_footprint(model, Optimizer(), learning, on_gpu=True)
    assert (found.resident + found.update_peak) / GIB == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({}, 0.0),
        ({"precision": "stochastic"}, 0.078),
        ({"offload": True}, 0.188),
        ({"name": "adam8bit"}, 0.156),
        ({"name": "adam8bit", "precision": "stochastic", "offload": True}, 0.251),
        ({"name": "muon"}, 0.310),
        ({"name": "muon", "offload": True}, 0.720),
    ],
    ids=str,
)
def test_an_update_holds_what_was_measured_beside_the_state(options: dict[str, Any], measured: float) -> None:
    model = footprints.meta_policy(OF_1_5B, torch.bfloat16, None)
    found = footprints.learner_footprint(
        model, Optimizer(**options), footprints.LearnerPasses("keep", 1, 1, 1, 1), on_gpu=True
    )
    assert found.update / GIB == pytest.approx(measured, abs=0.05)


def test_the_peak_is_that_of_the_learner_and_what_torch_does_not_know_of() -> None:
    made = plan_memory(on_gpu(OF_1_5B))
    assert made.total == made.learners_peak(2) + CUDA_CONTEXT_BYTES
    assert made.phase == POLICY


def test_parts_are_the_bytes_of_the_tensors_they_name() -> None:
    parts = {part.name: part.bytes for part in plan_memory(on_gpu(OF_1_5B)).parts}
    numbers = OF_1_5B.num_parameters
    assert parts["weights"] == 2 * numbers
    assert parts["master copies"] == parts["gradient sums"] == 4 * numbers
    assert parts["moments"] == 8 * numbers
    rows = 16384 * (28 * (2 * (4 * 1536 + 3 * 1536 + 3 * 256 + 3 * 8960) + 4 * 14))
    assert parts["activations"] == pytest.approx(rows, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "part", "per_number"),
    [
        ({"optimizer": Optimizer(offload=True)}, "moments", 0),
        ({"optimizer": Optimizer(name="adam8bit")}, "moments", 2),
        ({"optimizer": Optimizer(precision="stochastic")}, "master copies", 0),
        ({"reference": "copy"}, "reference", 2),
        ({"reference": "ema"}, "reference", 6),
        ({"engine_copy": True}, "engine's weights", 2),
        ({"opponents": 2}, "opponents", 4),
        ({"opponents": 2, "lora": Lora(rank=1)}, "opponents", 4 * 1_154_048 / OF_1_5B.num_parameters),
    ],
    ids=str,
)
def test_options_change_their_part(changes: dict[str, Any], part: str, per_number: float) -> None:
    parts = {p.name: p.bytes for p in plan_memory(on_gpu(OF_1_5B, **changes)).parts}
    assert parts.get(part, 0) == pytest.approx(per_number * OF_1_5B.num_parameters, rel=0.02)


def test_state_on_the_host_is_counted_there() -> None:
    here, there = plan_memory(on_gpu(OF_7B)), plan_memory(on_gpu(OF_7B, optimizer=Optimizer(offload=True)))
    assert there.host == 12 * OF_7B.num_parameters
    assert here.total - there.total == there.host
    assert here.host == 0


def test_a_critic_has_a_learner_of_its_own_and_shares_what_is_frozen() -> None:
    alone, with_critic = plan_memory(on_gpu(OF_1_5B)), plan_memory(on_gpu(OF_1_5B, critic=Optimizer()))
    assert with_critic.total - alone.total == pytest.approx(18 * OF_1_5B.num_parameters, rel=0.01)
    adapters = on_gpu(OF_1_5B, lora=Lora(rank=8))
    more = plan_memory(replace(adapters, critic=Optimizer())).total - plan_memory(adapters).total
    assert more < 0.3 * GIB


def test_a_process_reward_model_has_a_learner_and_a_start_of_its_own_and_shares_what_is_frozen() -> None:
    alone, both = plan_memory(on_gpu(OF_1_5B)), plan_memory(on_gpu(OF_1_5B, process=Optimizer()))
    assert both.total - alone.total == pytest.approx(20 * OF_1_5B.num_parameters, rel=0.01)
    assert "process reward model" in [part.name for part in both.resident]
    adapters = on_gpu(OF_1_5B, lora=Lora(rank=8))
    more = plan_memory(replace(adapters, process=Optimizer())).total - plan_memory(adapters).total
    assert more < 0.3 * GIB


def test_a_process_reward_model_of_another_shape_is_counted_by_its_own() -> None:
    alone, both = plan_memory(on_gpu(OF_1_5B)), plan_memory(on_gpu(OF_1_5B, process=Optimizer(), process_arch=OF_7B))
    (part,) = [part for part in both.resident if part.name == "process reward model"]
    assert part.bytes == pytest.approx(16 * OF_7B.num_parameters, rel=0.01)
    assert both.phase == "the process reward model learns"
    assert both.total - alone.total > 20 * OF_7B.num_parameters
    adapters = on_gpu(OF_1_5B, lora=Lora(rank=8), process=Optimizer())
    more = plan_memory(replace(adapters, process_arch=OF_1_5B)).total - plan_memory(adapters).total
    assert more == 2 * OF_1_5B.num_parameters  # frozen weights that are not the policy's


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.5), ("nf4-double", 4.13)])
def test_frozen_weights_in_4_bits_are_counted_so_and_are_whole_in_every_process(base: LoraBase, bits: float) -> None:
    plain, quantised = (on_gpu(OF_7B, lora=Lora(rank=32, base=kind)) for kind in ("dtype", base))
    inside = 28 * 3584 * (4608 + 3584 + 3 * 18944)
    saved = plan_memory(plain).total - plan_memory(quantised).total
    assert saved == pytest.approx(inside * (16 - bits) / 8, rel=0.01)
    made = plan_memory(replace(quantised, shards=4))
    (weights,) = [part for part in made.resident if part.name == "weights"]
    (alone,) = [part for part in plan_memory(quantised).resident if part.name == "weights"]
    assert weights.bytes == pytest.approx(inside * bits / 8 + (alone.bytes - inside * bits / 8) / 4, rel=1e-3)
    assert f"parameters in bfloat16, the layers' in {base}" in plan_text(made, None)
    with_critic = plan_memory(replace(quantised, critic=Optimizer()))
    (critic,) = [part for part in with_critic.resident if part.name == "critic"]
    assert critic.bytes < 2 * GIB  # on the policy's own 4 bits
    for is_plain, size in ((False, alone.bytes), (True, 2 * OF_7B.num_parameters)):
        copied = plan_memory(replace(quantised, engine_copy=True, plain_copy=is_plain))
        assert [part.bytes for part in copied.resident if part.name == "engine's weights"] == [size]


def test_4_bits_are_advised_last_of_all() -> None:
    setup = on_gpu(OF_7B, lora=Lora(rank=8))
    assert suggestions(setup)[-1].text == "model.lora.base=nf4"
    for without in (on_gpu(OF_7B, lora=Lora(rank=8, base="nf4")), replace(setup, may_quantise=False)):
        assert all("lora" not in change.text for change in suggestions(without))


def test_a_cache_that_is_larger_than_the_learners_work_makes_sampling_the_peak() -> None:
    small, large = (plan_memory(on_gpu(OF_1_5B, cache=size * GIB)) for size in (10, 60))
    assert (small.phase, large.phase) == (POLICY, SAMPLING)
    resident = sum(part.bytes for part in large.resident)
    assert large.total == resident + 60 * GIB + CUDA_CONTEXT_BYTES
    assert large.learners_peak(2) == small.learners_peak(2)  # it sleeps then


def test_a_cache_stays_during_updates_that_overlap_with_sampling() -> None:
    cache = 50 * GIB
    turns, overlapping = (plan_memory(on_gpu(OF_1_5B, cache=cache, overlaps=overlaps)) for overlaps in (False, True))
    learners = plan_memory(on_gpu(OF_1_5B))
    assert SAMPLING in turns.phases
    assert SAMPLING not in overlapping.phases
    assert overlapping.total == learners.total + cache
    assert all(overlapping.learners_peak(k) == learners.learners_peak(k) + cache for k in (1, 2))


def test_processes_that_share_a_model_hold_a_piece_each() -> None:
    one, four = plan_memory(on_gpu(OF_7B)), plan_memory(on_gpu(OF_7B, shards=4))
    pieces = {part.name: part.bytes for part in four.parts}
    whole = {part.name: part.bytes for part in one.parts}
    for name in ("weights", "master copies", "moments", "gradient sums"):
        assert pieces[name] == whole[name] // 4
    assert pieces["gathered weights"] < whole["weights"] / 4
    others = {"critic": Optimizer(), "process": Optimizer()}
    for name in ("critic", "process reward model"):
        (mine, all_of_it) = (
            next(
                part.bytes for part in plan_memory(on_gpu(OF_7B, shards=shards, **others)).resident if part.name == name
            )
            for shards in (4, 1)
        )
        assert mine == pytest.approx(all_of_it / 4, rel=1e-6)
    assert plan_memory(on_gpu(OF_7B, slices=2)).setup.rows == one.setup.rows // 2


def test_keys_are_gathered_where_their_heads_cannot_be_divided() -> None:
    exchanged, gathered = (
        {part.name: part.bytes for part in plan_memory(on_gpu(OF_7B, shards=n, slices=n)).parts} for n in (4, 8)
    )
    rows = plan_memory(on_gpu(OF_7B, shards=8, slices=8)).setup.rows * 8
    assert "gathered keys" not in exchanged  # 4 key heads
    assert gathered["gathered keys"] == 2 * rows * 4 * 128 * (3 * 2 + 4)


def test_the_experts_of_other_processes_are_never_gathered() -> None:
    shape = ExpertShape(num_experts=8, experts_per_token=2, expert_size=512)
    arch = replace(OF_7B, family="mixtral", num_layers=2, experts=shape, qkv_bias=False)
    whole, divided = (
        next(
            part.bytes
            for part in plan_memory(on_gpu(arch, shards=4, expert_ranks=n)).parts
            if part.name == "gathered weights"
        )
        for n in (1, 4)
    )
    assert whole - divided == 2 * (8 * 3 * 512 * 3584 * 2) * 3 // 4  # two layers in bfloat16


# --- what to change ------------------------------------------------------------------------------------------------------


def test_levers_come_in_the_order_of_what_they_cost_and_say_what_they_save() -> None:
    found = suggestions(on_gpu(OF_7B))
    assert [change.text for change in found] == [
        "training.activations=selective",
        "training.token_budget=4096",
        "training.optimizer.offload=true",
        "training.activations=recompute",
        "training.activations=offload",
        "training.optimizer.name=adam8bit",
        "training.optimizer.precision=stochastic",
        "model.lora={}",
    ]
    state = next(change for change in found if change.text == "training.optimizer.offload=true")
    assert state.saves == 12 * OF_7B.num_parameters
    total = plan_memory(on_gpu(OF_7B)).total
    assert all(plan_memory(change.apply(on_gpu(OF_7B))).total == total - change.saves for change in found)


def test_on_a_cpu_a_plan_far_above_the_memory_is_refused_with_advice_that_fits_and_one_near_it_is_told() -> None:
    setup = replace(on_gpu(OF_7B, cache=90 * GIB), on_gpu=False)
    least = plan_memory(replace(setup, token_budget=1, longest=1, update_tokens=1, cache=0)).total
    total = plan_memory(setup).total
    assert least > 12 * OF_7B.num_parameters  # weights, master copies and moments, whatever the lengths
    assert check_plan(plan_memory(setup), total * 2) is None
    assert "this run may not fit" in (check_plan(plan_memory(setup), int(least + 0.6 * (total - least))) or "")
    with pytest.raises(UserError, match="this run does not fit") as caught:
        check_plan(plan_memory(setup), int(least + 0.4 * (total - least)))
    assert "rollout.cache_gib=" in str(caught.value)
    assert "even so" not in str(caught.value)


def test_a_model_too_small_for_an_option_gets_advice_without_it() -> None:
    tiny = Architecture("llama", 16, 16, 1, 2, 2, 8, 24, 32)
    assert all("adam8bit" not in change.text for change in suggestions(replace(on_gpu(tiny), on_gpu=False)))


def test_one_lever_is_advised_where_one_is_enough() -> None:
    applied, after = enough_suggestions(on_gpu(OF_7B), H200)
    assert [change.text for change in applied] == ["training.optimizer.offload=true"]
    assert after.total <= H200


def test_several_are_advised_together_and_none_that_is_needless() -> None:
    setup, room = on_gpu(OF_7B), 70 * GIB
    applied, after = enough_suggestions(setup, room)
    assert len(applied) > 1
    assert all(change.keeps_results for change in applied)
    assert after.total <= room
    assert after.total == plan_memory(setup).total - sum(change.saves for change in applied)
    assert "training.optimizer.offload=true" in {change.text for change in applied}


def test_another_method_is_advised_only_where_nothing_else_is_enough() -> None:
    applied, after = enough_suggestions(on_gpu(OF_7B), 40 * GIB)
    assert applied[-1].text == "model.lora={}"
    assert after.total <= 40 * GIB


def test_a_cache_that_is_too_large_is_halved() -> None:
    setup = on_gpu(OF_1_5B, cache=80 * GIB)
    assert [change.text for change in enough_suggestions(setup, 70 * GIB)[0]] == ["rollout.cache_gib=40"]


def test_no_state_is_sent_to_a_host_without_room_for_it() -> None:
    applied, _ = enough_suggestions(on_gpu(OF_7B), H200, host_capacity=32 * GIB)
    assert all("optimizer.offload" not in change.text for change in applied)


def test_options_of_an_optimizer_add_up() -> None:
    setup = on_gpu(OF_7B, optimizer=Optimizer(lr=3e-5))
    applied, after = enough_suggestions(setup, 75 * GIB, host_capacity=1 * GIB)
    names = {change.text for change in applied}
    assert {"training.optimizer.name=adam8bit", "training.optimizer.precision=stochastic"} <= names
    found = after.setup.optimizer
    assert (found.name, found.precision, found.lr) == ("adam8bit", "stochastic", 3e-5)


# --- words ---------------------------------------------------------------------------------------------------------------


def test_what_cannot_fit_is_refused_with_the_numbers_and_what_to_change() -> None:
    made = plan_memory(on_gpu(OF_7B))
    with pytest.raises(UserError) as error:
        check_plan(made, H200)
    words = str(error.value)
    assert f"{gib(made.total)} of 139.8 GiB on the GPU at the peak, while the policy learns" in words
    assert "master copies   28.4 GiB" in words
    assert "training.optimizer.offload=true saves 85.1 GiB" in words


def test_what_is_near_is_only_warned_of_and_what_fits_is_not() -> None:
    made = plan_memory(on_gpu(OF_1_5B))
    assert check_plan(made, H200) is None
    for room in (int(made.total / 1.04), int(made.total / 0.97)):
        warning = check_plan(made, room)
        assert warning is not None
        assert "may not fit" in warning
        assert "activations=selective saves" in warning
    with pytest.raises(UserError):
        check_plan(made, int(made.total / 1.06))


def test_a_length_that_is_only_allowed_is_no_reason_to_refuse() -> None:
    made = plan_memory(on_gpu(OF_1_5B, longest=60_000, token_budget=8192))
    assert made.total > 1.05 * H200
    warning = check_plan(made, H200)
    assert warning is not None
    assert "when a sequence has 60,000 tokens" in warning


def test_state_that_the_host_has_no_room_for_is_refused() -> None:
    made = plan_memory(on_gpu(OF_7B, optimizer=Optimizer(offload=True)))
    with pytest.raises(UserError, match=r"85\.1 GiB of optimizer state in host memory, of which 64\.0 GiB are free"):
        check_plan(made, H200, 64 * GIB)


def test_the_plan_is_printed_by_part_and_in_a_line() -> None:
    made = plan_memory(on_gpu(OF_1_5B, cache=10 * GIB))
    lines = plan_text(made, H200).splitlines()
    assert lines[0] == f"memory: {gib(made.total)} of 139.8 GiB on the GPU at the peak, while the policy learns"
    assert [line.split()[0] for line in lines[1:-1]] == [part.name.split()[0] for part in made.parts]
    assert lines[-1] == "  30.9 GiB while it samples"
    assert plan_line(made, None).startswith(
        f"memory: about {gib(made.total)} at the peak (activations 32.9 GiB, moments 11.5"
    )


def test_the_plan_tells_how_wrong_it_was() -> None:
    error, text = plan_error(int(61.2 * GIB), int(60.4 * GIB))
    assert error == pytest.approx(61.2 / 60.4 - 1)
    assert text == "memory: planned 61.2 GiB, measured 60.4 GiB: +1%"
