"""A teacher behind a server: log-probs and a run are those of the same model in this process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Model
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.distributed.server_teacher import ServerTeacher
from burnish.models.policy import load_policy
from burnish.run.metrics import read_metrics
from burnish.training.reference import make_reference
from tests.trainers.tiny import TINY, WARM, run_of


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """The address of a server of a model."""
    command = [sys.executable, "-m", "burnish.cli.main", "serve", str(directory), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process.stderr.readline().split()[3].removesuffix("/v1")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_a_served_teacher_judges_as_one_of_this_process(tmp_path: Path) -> None:
    warm = run_of(tmp_path / "warm", TINY + WARM, ["training.steps=1"]) / "warm_start"
    policy = load_policy(Model.model_validate({"path": str(warm), "dtype": "float32"}), warm, None, 0)
    lengths = [6, 4, 5]
    batch = Batch(
        tokens=torch.tensor([3, 4, 11, 2, 3, 1, 5, 11, 5, 1, 2, 2, 11, 4, 4]),
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        token={"action_mask": torch.tensor([i >= 3 for n in lengths for i in range(n)])},
    )
    expected = make_reference("frozen", policy.module, 1000, 1.0).logprobs(batch)
    with serving(warm) as url:
        torch.testing.assert_close(ServerTeacher(url).logprobs(batch), expected, atol=1e-4, rtol=1e-4)
        with pytest.raises(UserError, match=r"teacher server .*wrong"):
            ServerTeacher(url, "wrong").logprobs(batch)
        places = {"url": url, "path": str(warm)}
        served, here = (
            _gaps(tmp_path / name, f"{{name: teacher, {name}: '{place}'}}") for name, place in places.items()
        )
    assert served == pytest.approx(here, rel=1e-3)
    assert len(served) == 2


def _gaps(folder: Path, teacher: str) -> list[float]:
    """The KL to the teacher at each step of a run."""
    taught = ["algorithm=on_policy_distillation", f"algorithm.kl.reference={teacher}", "training.steps=2"]
    return [row["actor/kl_reward"] for row in read_metrics(run_of(folder, TINY, taught) / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.temperature=0.7", "log-probs are those at temperature 1"),
        ("algorithm.kl={loss: {estimator: full, coef: 1}, reward: {coef: 0}}", "not distributions"),
        ("algorithm.kl.reference.path=here", "has a path or a url"),
    ],
)
def test_what_a_server_cannot_give_is_refused(override: str, message: str) -> None:
    taught = ["algorithm=on_policy_distillation", "algorithm.kl.reference.url=http://localhost:1"]
    with pytest.raises(UserError, match=message):
        load(TrainConfig, None, ["data.train.task=sort_digits", "model.new.num_layers=1", *taught, override])
