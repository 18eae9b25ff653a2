"""References: the weights of each kind over time, checkpoints bit for bit, and teachers from a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.terms.loss_terms import full_kl
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import NewModel, Optimizer
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.distributed.roles import build_policy, check_teacher
from burnish.memory_plan.from_config import plan_run
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.logprob import Distribution, head_kl
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.training.forward import Packing, batch_outputs, micro_batches_of
from burnish.training.learner import Learner
from burnish.training.reference import EmaReference, Reference, TeacherReference, make_reference

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4)]
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "ema": {"eta": 0.25},
    "hard_sync": {"every": 2},
    "iterate": {"every": 2},
}
MOVING = ["ema", "hard_sync", "iterate"]


class Vector(nn.Module):
    """A model that is one parameter."""

    def __init__(self, values: list[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))


def learner(model: Decoder) -> Learner:
    return Learner(model, Optimizer(lr=0.01), 10, 9, 0.8)


def reference(name: str, model: nn.Module, **options: Any) -> Reference:
    return make_reference(name, model, token_budget=9, temperature=0.8, **(KINDS[name] | options))


def train(it: Learner, ref: Reference, batch: Batch, steps: range) -> list[bool]:
    """Steps of two updates each, as the trainer makes them."""
    changed = []
    for step in steps:
        for _ in range(2):
            it.update(batch, NllLoss())
            ref.after_update(it.model)
        changed.append(ref.after_step(it.model, step))
    return changed


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_starts_as_the_policy(name: str, make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    torch.testing.assert_close(reference(name, it.model).logprobs(batch), it.logprobs(batch), atol=1e-12, rtol=0)


def test_a_frozen_one_does_not_follow(make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    ref = reference("frozen", it.model)
    before = ref.logprobs(batch)
    assert train(it, ref, batch, range(1, 4)) == [False] * 3
    assert torch.equal(ref.logprobs(batch), before)
    assert not torch.allclose(it.logprobs(batch), before)
    assert not any(p.requires_grad for p in ref.model.parameters())


def shadow(ref: Reference) -> Tensor:
    assert isinstance(ref, EmaReference)
    return ref.shadow["w"]


def test_the_average_is_the_worked_number() -> None:
    ref = reference("ema", Vector([1, -2]), eta=0.01)
    ref.after_update(Vector([2, 0]))
    torch.testing.assert_close(shadow(ref), torch.tensor([1.01, -1.98]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eta_one_copies_and_eta_zero_stands_still_exactly(dtype: torch.dtype) -> None:
    start, theta = Vector([0.1, -7.3, 1e4], dtype), Vector([0.3, 1e-4, -0.7], dtype)
    copied, still = reference("ema", start, eta=1.0), reference("ema", start, eta=0.0)
    for ref in (copied, still):
        ref.after_update(theta)
    assert torch.equal(shadow(copied), theta.w.detach().float())
    assert torch.equal(shadow(still), start.w.detach().float())


def test_the_average_is_over_updates_not_steps(make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    ref = reference("ema", it.model)
    expected = {n: p.detach().clone() for n, p in it.model.named_parameters()}
    for _ in range(4):
        it.update(batch, NllLoss())
        ref.after_update(it.model)
        expected = {n: 0.75 * expected[n] + 0.25 * p.detach() for n, p in it.model.named_parameters()}
    assert not ref.after_step(it.model, 1)
    held = make_model()
    held.load_state_dict(expected)
    torch.testing.assert_close(ref.logprobs(batch), learner(held).logprobs(batch), atol=1e-12, rtol=0)


def test_the_average_of_a_half_type_moves_by_less_than_the_type_can_add(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    start, batch = make_model(dtype=torch.bfloat16), make_batch(SHAPES)
    theta = make_model(seed=1, dtype=torch.bfloat16)
    ref = reference("ema", start, eta=0.001)
    before = ref.logprobs(batch)
    for _ in range(1000):
        ref.after_update(theta)
    assert isinstance(ref, EmaReference)
    share = 1 - 0.999**1000
    for name, parameter in start.named_parameters():
        exact = torch.lerp(parameter.detach().float(), dict(theta.named_parameters())[name].detach().float(), share)
        torch.testing.assert_close(ref.shadow[name], exact, atol=1e-4, rtol=1e-4)
    assert {p.dtype for p in ref.model.parameters()} == {torch.bfloat16}
    assert not torch.equal(ref.logprobs(batch), before)
    rounded = make_model(dtype=torch.bfloat16)
    rounded.load_state_dict(ref.shadow)
    assert torch.equal(ref.logprobs(batch), learner(rounded).logprobs(batch))


@pytest.mark.parametrize("name", ["hard_sync", "iterate"])
def test_a_copy_is_made_after_every_so_many_steps_and_not_between(
    name: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    it, batch = learner(make_model()), make_batch(SHAPES)
    ref = reference(name, it.model, every=3)
    held = it.logprobs(batch)
    for step in range(1, 8):
        changed = train(it, ref, batch, range(step, step + 1))
        assert changed == [step % 3 == 0]
        if changed == [True]:
            held = it.logprobs(batch)
        torch.testing.assert_close(ref.logprobs(batch), held, atol=1e-12, rtol=0)
    assert ref.restarts == (name == "iterate")


def test_an_iteration_is_one_step_unless_said_otherwise() -> None:
    policy = Vector([1.0])
    ref = make_reference("iterate", policy, 9, 1.0)
    assert [ref.after_step(policy, k) for k in (1, 2)] == [True, True]
    assert ref.model is policy  # no copy: it is asked before the step's first update
    assert make_reference("iterate", policy, 9, 1.0, every=2).model is not policy


# --- checkpoints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_stops_goes_on_with_the_same_reference_bit_for_bit(
    name: str, dtype: torch.dtype, tmp_path: Path, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, it = make_batch(SHAPES), learner(make_model(dtype=dtype))
    ref = reference(name, it.model)
    train(it, ref, batch, range(1, 4))
    write_contents(tmp_path, [*it.contents(keep_in_place), *ref.contents(keep_in_place)])
    policy = {n: t.clone() for n, t in it.model.state_dict().items()}

    again = learner(make_model(dtype=dtype))
    other = reference(name, again.model)  # from the run's start, as a new process makes it
    again.model.load_state_dict(policy)
    again.load(tmp_path)
    other.load(tmp_path)
    assert torch.equal(other.logprobs(batch), ref.logprobs(batch))
    assert train(again, other, batch, range(4, 6)) == train(it, ref, batch, range(4, 6))
    assert torch.equal(other.logprobs(batch), ref.logprobs(batch))
    assert (tmp_path / "reference.safetensors").exists() == (name in MOVING)


def test_the_saved_average_is_float32(tmp_path: Path, make_model: MakeModel) -> None:
    write_contents(tmp_path, reference("ema", make_model(dtype=torch.bfloat16)).contents(keep_in_place))
    assert {t.dtype for t in load_file(tmp_path / "reference.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize("name", MOVING)
def test_a_missing_or_wrong_file_is_named(name: str, tmp_path: Path, make_model: MakeModel) -> None:
    ref, path = reference(name, make_model()), tmp_path / "reference.safetensors"
    start = {n: p.clone() for n, p in ref.model.named_parameters()}
    with pytest.raises(UserError, match=r"reference\.safetensors is not there"):
        ref.load(tmp_path)
    path.write_bytes(b"no tensors here")
    with pytest.raises(UserError, match=r"reference\.safetensors cannot be read"):
        ref.load(tmp_path)
    stored = {n: torch.zeros_like(p) for n, p in start.items()}
    for damaged, complaint in (
        ({n: t for n, t in stored.items() if n != "norm.weight"}, r"missing \['norm.weight'\]"),
        (stored | {"extra": torch.zeros(1)}, r"unexpected \['extra'\]"),
        (stored | {"norm.weight": torch.zeros(7, dtype=torch.float64)}, r"norm.weight is \(7,\)"),
        (stored | {"norm.weight": torch.zeros(8)}, r"norm.weight is \(8,\) in torch.float32"),
    ):
        save_file(damaged, path)
        with pytest.raises(UserError, match=rf"reference\.safetensors does not fit the model: .*{complaint}"):
            ref.load(tmp_path)
    assert all(torch.equal(p, start[n]) for n, p in ref.model.named_parameters())


# --- teachers ----------------------------------------------------------------------------------------------------------

CHARACTERS = "0123456789>"
TEACHER_SHAPES = [
    "model.new={hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32}",
    "data.train.task=sort_digits",
]


def made(seed: int, rows: int | None = None, hidden: int = 16, characters: str = CHARACTERS) -> PolicyModel:
    """A small model of the digits; `rows` is how many tokens its embedding has room for."""
    tokenizer = Tokenizer.from_characters(characters)
    new = NewModel(hidden_size=hidden, num_layers=1, num_heads=2, mlp_size=32, max_positions=64)
    module = Decoder(new_architecture(new, rows or tokenizer.vocab_size))
    initialise(module, seed, std=0.5)
    return PolicyModel(module, tokenizer, None, "")


def saved(folder: Path, model: PolicyModel) -> str:
    folder.mkdir()
    model.save(folder)
    return str(folder)


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(2, 12, (12,), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([False, False, True, True, True, True, False, True, True, True, True, True])
    return Batch(tokens, torch.tensor([0, 6, 12]), {"action_mask": mask, "loss_mask": mask})


def test_it_says_what_the_model_of_its_directory_says(tmp_path: Path, batch: Batch) -> None:
    policy, teacher = made(0), made(1, hidden=24)
    reference = make_reference("teacher", policy.module, 1000, 0.7, path=saved(tmp_path / "teacher", teacher))
    assert isinstance(reference, TeacherReference)
    expected = batch_outputs(teacher.module, batch, frozenset(), Packing.of(teacher.module, 1000), 0.7)["logp"]
    torch.testing.assert_close(reference.logprobs(batch), expected)
    assert not any(p.requires_grad for p in reference.model.parameters())
    before = [p.clone() for p in reference.model.parameters()]
    reference.after_update(policy.module)
    reference.after_step(policy.module, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, reference.model.parameters(), strict=True))
    assert reference.contents(lambda tensor: tensor) == []  # a checkpoint need not hold what a directory holds


def test_without_a_directory_it_is_the_model_the_run_starts_from(batch: Batch) -> None:
    policy = made(0)
    teacher, frozen = (make_reference(name, policy.module, 1000, 1.0) for name in ("teacher", "frozen"))
    assert torch.equal(teacher.logprobs(batch), frozen.logprobs(batch))


def test_rows_for_tokens_that_do_not_exist_are_left_out_of_a_kl_over_the_vocabulary(
    tmp_path: Path, batch: Batch
) -> None:
    policy, teacher = made(0), made(1, rows=32)
    reference = make_reference("teacher", policy.module, 1000, 1.0, path=saved(tmp_path / "teacher", teacher))
    (piece,) = micro_batches_of(batch, Packing.of(policy.module, 1000), "loss_mask")
    found = reference.distribution(piece)
    assert found.weight.shape[0] == policy.module.arch.vocab_size == 13
    kl = policy.module.token_kl(batch.tokens, batch.offsets, piece.wanted, found)[2]
    logits = [
        m.logits(m.hidden(batch.tokens, batch.offsets))[piece.wanted - 1] for m in (policy.module, teacher.module)
    ]
    torch.testing.assert_close(kl, full_kl(logits[0], logits[1][:, :13]))


# --- KL over the most likely tokens ------------------------------------------------------------------------------------------------


def coarse_kl(log_p: torch.Tensor, log_q: torch.Tensor, top: int) -> torch.Tensor:
    """An oracle: the KL of two distributions in which all but the `top` likeliest tokens are one."""
    index = log_p.detach().topk(top, -1).indices
    rows = []
    for p, q, chosen in zip(log_p.exp(), log_q.exp(), index, strict=True):
        one, other = (torch.cat([x[chosen], (x.sum() - x[chosen].sum())[None]]) for x in (p, q))
        rows.append((one * (one.log() - other.log())).sum())
    return torch.stack(rows)


@pytest.mark.parametrize("top", [1, 3, 10])
def test_the_likeliest_tokens_one_by_one_and_the_others_as_one(top: int) -> None:
    generator = torch.Generator().manual_seed(top)
    hidden, weight, other, head = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in ((5, 4), (12, 4), (5, 6), (12, 6))
    )
    targets = torch.randint(12, (5,), generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()
    kl = head_kl(hidden, weight, targets, Distribution(other, head, top), 0.8)[2]
    expected = coarse_kl(*((h @ w.t() / 0.8).log_softmax(-1) for h, w in ((hidden, weight), (other, head))), top)
    torch.testing.assert_close(kl, expected, atol=1e-12, rtol=1e-9)
    slopes = torch.randn(5, generator=generator, dtype=torch.float64)
    for got, oracle in zip(
        torch.autograd.grad((slopes * kl).sum(), [hidden, weight]),
        torch.autograd.grad((slopes * expected).sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(got, oracle, atol=1e-12, rtol=1e-9)
    whole = head_kl(hidden, weight, targets, Distribution(other, head), 0.8)[2]
    assert bool((kl <= whole + 1e-12).all())  # what is not told apart cannot differ
    assert bool((kl >= 0).all())


def test_as_many_as_there_are_is_the_kl_itself() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(7, 4)
    other = Distribution(torch.randn(3, 4), torch.randn(7, 4))
    targets = torch.zeros(3, dtype=torch.long)
    for top in (7, 100):
        assert torch.equal(
            head_kl(hidden, weight, targets, other._replace(top=top))[2], head_kl(hidden, weight, targets, other)[2]
        )


# --- refused teachers -------------------------------------------------------------------------------------------------------


def config_of(path: str, *overrides: str) -> TrainConfig:
    teacher = ["algorithm=on_policy_distillation", f"algorithm.kl.reference.path={path}"]
    return load(TrainConfig, None, [*TEACHER_SHAPES, *teacher, *overrides]).config


FULL = "algorithm.kl={reward: {coef: 0}, loss: {estimator: full, coef: 1}}"


@pytest.mark.parametrize(
    ("characters", "rows", "words"),
    [
        ("0123456789<", None, "13 tokens instead of 13, and token 12 is '<' instead of '>'"),
        ("0123456789>+", None, "14 tokens instead of 13"),
        (CHARACTERS, 40, None),
    ],
)
def test_another_tokenizer_is_refused_with_the_first_difference(
    characters: str, rows: int | None, words: str | None, tmp_path: Path
) -> None:
    config = config_of(saved(tmp_path / "teacher", made(1, rows, characters=characters)), FULL)
    policy = build_policy(config.model, config.data.train, 0, None)
    if words is None:
        check_teacher(config, policy, None)
        return
    with pytest.raises(UserError) as error:
        check_teacher(config, policy, None)
    assert words in str(error.value)
    assert "another tokenizer than the policy" in str(error.value)


def test_a_teacher_with_fewer_rows_says_nothing_of_some_tokens(tmp_path: Path) -> None:
    config = config_of(saved(tmp_path / "teacher", made(1)), FULL)
    policy = made(0, rows=20)
    with pytest.raises(UserError, match="has 13 rows for tokens and the policy 20"):
        check_teacher(config, policy, None)
    check_teacher(config_of(str(tmp_path / "teacher")), policy, None)  # of sampled tokens it does


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = config_of(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere does not exist"):
        check_teacher(config, made(0), None)


def test_the_memory_plan_knows_the_teacher(tmp_path: Path) -> None:
    teacher = made(1, hidden=64)
    plan = plan_run(config_of(saved(tmp_path / "teacher", teacher)), None).stages["training"]
    (part,) = [part for part in plan.resident if part.name == "teacher"]
    assert part.bytes == 4 * teacher.module.arch.num_parameters
