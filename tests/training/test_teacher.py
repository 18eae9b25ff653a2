"""A teacher as the reference: another model from a directory, asked for log-probs and for whole distributions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from burnish.algorithms.terms.loss_terms import full_kl
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import NewModel
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.distributed.roles import build_policy, check_teacher
from burnish.memory_plan.from_config import planned
from burnish.models.architecture import from_nothing
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.logprob import Distribution, head_kl
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.training.forward import Packing, batch_outputs, micro_batches_of
from burnish.training.reference import TeacherReference, make_reference

CHARACTERS = "0123456789>"
SHAPES = ["model.new={hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32}", "data.train.task=sort_digits"]


def made(seed: int, rows: int | None = None, hidden: int = 16, characters: str = CHARACTERS) -> PolicyModel:
    """A small model of the digits; `rows` is how many tokens its embedding has room for."""
    tokenizer = Tokenizer.from_characters(characters)
    new = NewModel(hidden_size=hidden, num_layers=1, num_heads=2, mlp_size=32, max_positions=64)
    module = Decoder(from_nothing(new, rows or tokenizer.vocab_size))
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


# --- the likeliest tokens ------------------------------------------------------------------------------------------------


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


# --- what is refused -------------------------------------------------------------------------------------------------------


def config_of(path: str, *overrides: str) -> TrainConfig:
    teacher = ["algorithm=on_policy_distillation", f"algorithm.kl.reference.path={path}"]
    return load(TrainConfig, None, [*SHAPES, *teacher, *overrides]).config


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
    plan = planned(config_of(saved(tmp_path / "teacher", teacher)), None).stages["training"]
    (part,) = [part for part in plan.resident if part.name == "teacher"]
    assert part.bytes == 4 * teacher.module.arch.num_parameters
