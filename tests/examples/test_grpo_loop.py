"""The loop in examples/grpo_loop.py and `burnish train` make the same steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import burnish
from burnish.config.model import Model, NewModel
from burnish.models.policy import load_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_loop.py"
ROWS = [{"question": f"{a}+{b}=", "answer": str(a % 2)} for a in range(4) for b in range(4)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    new = NewModel(hidden_size=32, num_layers=2, num_heads=2, mlp_size=48, max_positions=32)
    path = tmp_path / "model"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789+=", seed=1).save(path)
    return path


def test_the_loop_makes_the_steps_of_burnish_train(model: Path) -> None:
    spec = importlib.util.spec_from_file_location("grpo_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    loop = list(example.train(str(model), ROWS, steps=6, prompts=12, n=8, max_tokens=2, lr=3e-2, seed=3))
    run = burnish.train(
        model=model,
        data=ROWS,
        reward="exact",
        algorithm={"preset": "grpo", "aggregation": "token-mean", "kl": {"loss": {"coef": 0}, "reference": "none"}},
        rollout={"prompts": 12, "n": 8, "max_tokens": 2},
        training={"steps": 6, "optimizer": {"lr": 3e-2}},
        seed=3,
        name="same",
        **{"reward.workers": 1},
    )
    assert [reward for reward, _ in loop] == pytest.approx(run.metrics.column("reward/mean"), abs=1e-7)
    losses = run.metrics.column("actor/loss")
    assert [loss for _, loss in loop] == pytest.approx(losses, abs=1e-6, rel=1e-4)
    assert max(map(abs, losses)) > 1e-3  # the losses say something
    assert len({reward for reward, _ in loop}) > 3  # and so do the rewards
    ours, theirs = (burnish.Policy.load(path).module.state_dict() for path in (f"{model}-grpo", run.checkpoint))
    # Six steps of 0.03 each. AdamW divides a gradient by its size, so the rounding of one near 0 is a visible part of a step.
    assert all((ours[name] - theirs[name]).abs().max() < 1e-3 for name in ours)


def test_the_loop_is_short() -> None:
    source = EXAMPLE.read_text()
    body = source[source.index("def reward") : source.index("if __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 25
