"""`training.deterministic`: the mode of torch for a run, and equal gradients on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import kth_smallest, running_sum
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels.device import CUBLAS_VARIABLE, deterministic_algorithms
from burnish.trainers import rl_run
from burnish.training.learner import Learner
from tests.trainers.tiny import TINY, run_of


def test_the_mode_holds_for_the_block_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CUBLAS_VARIABLE, raising=False)
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    seen = []

    def fails() -> None:
        with deterministic_algorithms(True):
            seen.append(torch.are_deterministic_algorithms_enabled())
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_workspace_of_cublas_that_does_not_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    with pytest.raises(UserError, match="CUBLAS_WORKSPACE_CONFIG=:0:0"), deterministic_algorithms(True):
        pass


@pytest.mark.parametrize(("wanted", "on_gpu"), [(True, True), (True, False), (False, True)])
def test_a_run_on_a_gpu_has_the_mode_if_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool, on_gpu: bool
) -> None:
    asked = []

    @contextlib.contextmanager
    def noted(is_wanted: bool) -> Iterator[None]:
        asked.append(is_wanted)
        yield

    monkeypatch.setattr(rl_run, "deterministic_algorithms", noted)
    monkeypatch.setattr(rl_run, "is_gpu_device", lambda device: on_gpu)
    run_of(tmp_path, TINY, ["training.steps=1", f"training.deterministic={wanted}"])
    assert asked == [wanted and on_gpu]


def test_running_sums_are_cumulative() -> None:
    assert running_sum(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1, 3, 7]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def test_the_value_of_a_rank_is_found_in_deterministic_mode(device: str) -> None:
    values = torch.tensor([4.0, 1.0, 4.0, 2.0], device=device)
    with deterministic_algorithms(device == "cuda"):
        assert [float(kth_smallest(values, rank)) for rank in range(4)] == [1, 2, 4, 4]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="sums have a fixed order on a CPU")
@pytest.mark.parametrize("lengths", [(40, 24), (900, 200)], ids=["short", "long"])
def test_gradients_of_shared_prefixes_are_equal_bit_for_bit_on_a_gpu(
    make_batch: Callable[..., Batch], lengths: tuple[int, int]
) -> None:
    prompt, answer = lengths
    batch = make_batch([(group, prompt, answer + sample) for group in range(4) for sample in range(8)]).to(
        torch.device("cuda")
    )

    def trained() -> list[torch.Tensor]:
        model = Decoder(Architecture("qwen3", 11, 256, 2, 4, 2, 64, 512, 2048, qk_norm=True))
        initialise(model, 0)
        learner = Learner(model.to("cuda", torch.bfloat16), Optimizer(lr=1e-3), 3, 8192, share_prefixes=True)
        for _ in range(3):
            learner.update(batch, PolicyLoss())
        return [parameter.detach().clone() for parameter in model.parameters()]

    with deterministic_algorithms(True):
        first, *others = (trained() for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
