"""Whole runs with LoRA adapters: they learn, resume bit for bit, save little, start from one another and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Model
from burnish.config.schema import SftConfig
from burnish.models.decoder import Decoder
from burnish.models.lora.peft_files import base_model_of, read_lora_config
from burnish.models.policy import load_policy, save_merged
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.trainers.sft import execute as execute_sft
from tests.trainers.tiny import run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

BASE = """
data: {train: {task: sort_digits, limit: 24, options: {min_digits: 2, max_digits: 4}}, max_prompt_tokens: 16}
rollout: {prompts: 24, n: 8, max_tokens: 6}
reward: {workers: 1}
algorithm: {kl: {loss: {coef: 0.001}, reference: frozen}}
training: {steps: 10, optimizer: {lr: 6.0e-3, betas: [0.9, 0.95]}}
run: {samples_every: 100, save_every: 100, threads: 1}
"""
NEW = "model: {new: {hidden_size: 32, num_layers: 2, num_heads: 2, mlp_size: 64, max_positions: 64}}"
WARM = """
warm_start:
  data: {task: sort_digits, options: {num: 1000, clean: true, min_digits: 2, max_digits: 4}}
  updates: 50
  batch_size: 64
  optimizer: {lr: 1.0e-2}
"""
SHORT = ["training.steps=4", "run.save_every=2", "rollout.prompts=6", "rollout.n=4"]
RUNS: dict[str, list[str]] = {
    "frozen": ["algorithm.kl.loss.coef=0.1", "training.mini_batches=2"],
    "critic": [
        "algorithm=ppo",
        "algorithm.critic={warmup_steps: 1, optimizer: {lr: 0.01}}",
        "algorithm.kl={reward: {coef: 0.1}, reference: {name: ema, eta: 0.2}}",
    ],
    "in 4 bits, a critic": [
        "model.lora.base=nf4-double",
        "algorithm=ppo",
        "algorithm.critic={optimizer: {lr: 0.01}}",
        "algorithm.kl.reward.coef=0.1",
    ],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is right about half the time."""
    folder = tmp_path_factory.mktemp("base") / "run"
    return run_of(folder, NEW + BASE + WARM, ["training.steps=1", "rollout.prompts=1"]) / "warm_start"


def recipe(base: Path, model: str = "lora: {rank: 8, alpha: 16}") -> str:
    return f"model: {{path: {base}, {model}}}\n{BASE}"


def last(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


@pytest.mark.parametrize("kept_in", ["dtype", "nf4"])
def test_a_run_learns_with_adapters_alone(kept_in: str, base: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    run = run_of(tmp_path, recipe(base), [f"model.lora.base={kept_in}"])
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1, rewards
    assert all(row["mismatch/mean"] <= 1e-5 and row["mismatch/max"] <= 1e-3 for row in rows)
    folder = last(run)
    assert not (folder / "model.safetensors").exists()
    adapter, state = load_file(folder / "adapter_model.safetensors"), load_file(folder / "optimizer.safetensors")
    assert len(adapter) == 2 * 7 * 2
    assert (read_lora_config(folder).rank, read_lora_config(folder).base) == (8, kept_in)
    assert base_model_of(folder) == base.resolve()
    assert all(name.endswith((".lora_a", ".lora_b")) for name in state)
    per_parameter = {name.split("/", 1)[1] for name in state}
    assert len(per_parameter) == 2 * 4 * 2
    assert before == {file.name: file.read_bytes() for file in base.iterdir()}


class Killed(BaseException):
    """The end of a life."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch, base: Path, folder: Path, overrides: list[str]) -> None:
    """A run that dies before the step is committed."""
    commit = Run.commit

    def dies(self: Run, number: int, *rest: object) -> None:
        if number == step:
            raise Killed
        commit(self, number, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Run, "commit", dies)
        with pytest.raises(Killed):
            run_of(folder, recipe(base), overrides)


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_ends_as_if_it_had_never_stopped(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*SHORT, *RUNS[name]]
    whole = run_of(tmp_path / "whole", recipe(base), overrides)
    killed_at(3, monkeypatch, base, tmp_path / "killed", overrides)
    again = run_of(tmp_path / "killed", recipe(base), overrides)
    metrics = [
        [{k: v for k, v in row.items() if k.split("/")[0] in ("reward", "actor", "critic", "mismatch")} for row in rows]
        for rows in (read_metrics(whole / "metrics.jsonl"), read_metrics(again / "metrics.jsonl"))
    ]
    assert metrics[0] == metrics[1]
    files = [{str(f.relative_to(last(run))): f for f in last(run).rglob("*.safetensors")} for run in (whole, again)]
    assert files[0].keys() == files[1].keys()
    assert {"adapter_model.safetensors", "optimizer.safetensors"} <= files[0].keys()
    assert ("critic/model.safetensors" in files[0]) == ("critic" in name)
    assert all(path.read_bytes() == files[1][file].read_bytes() for file, path in files[0].items())
    if "critic" in name:
        names = load_file(files[0]["critic/model.safetensors"])
        assert "head" in names
        assert all(name == "head" or name.endswith((".lora_a", ".lora_b")) for name in names)


def test_a_reference_from_an_adapter_is_that_adapter_and_the_next_run_goes_on_from_it(
    base: Path, tmp_path: Path
) -> None:
    first = last(run_of(tmp_path / "first", recipe(base), [*SHORT, "algorithm.kl={loss: {coef: 0}, reference: none}"]))
    kept = {file.name: file.read_bytes() for file in first.iterdir() if file.is_file()}
    text = f"model: {{adapter: {first}}}\n{BASE}"
    second = run_of(tmp_path / "second", text, [*SHORT, "algorithm.kl.loss.coef=1.0"])
    distance = [row["actor/kl_ref"] for row in read_metrics(second / "metrics.jsonl") if "actor/kl_ref" in row]
    assert abs(distance[0]) < 1e-6  # the reference is where the run starts
    assert distance[-1] > 1e-3
    assert kept == {file.name: file.read_bytes() for file in first.iterdir() if file.is_file()}
    assert read_lora_config(last(second)) == read_lora_config(first)
    assert base_model_of(last(second)) == base.resolve()
    with pytest.raises(UserError, match=r"is a PEFT adapter: set model.adapter="):
        run_of(tmp_path / "third", f"model: {{path: {first}}}\n{BASE}", SHORT)


@pytest.mark.parametrize(
    "change",
    [{"rank": 4}, {"alpha": 4}, {"rslora": True}, {"targets": ["q_proj", "v_proj"]}, {"base": "nf4"}],
    ids=str,
)
def test_every_option_changes_the_first_update(change: dict[str, Any], base: Path) -> None:
    norms = []
    for options in ({"rank": 8, "alpha": 16}, {"rank": 8, "alpha": 16} | change):
        policy = load_policy(Model.model_validate({"device": "cpu", "lora": options}), base, None, 0)
        assert isinstance(policy.module, Decoder)
        logp, _ = policy.module.token_logprobs(torch.tensor([3, 4, 5, 12, 3]), torch.tensor([0, 5]), torch.arange(1, 5))
        logp.sum().backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in policy.module.parameters() if p.grad is not None]))
    assert not torch.isclose(*norms, rtol=1e-3)


def test_a_warm_start_trains_the_adapter_and_the_reference_is_what_it_left(base: Path, tmp_path: Path) -> None:
    overrides = [*SHORT, "training.steps=2", "warm_start.updates=5", "algorithm.kl.loss.coef=1.0"]
    run = run_of(tmp_path, recipe(base) + WARM, overrides)
    warm = load_file(run / "warm_start" / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in warm.items() if "lora_B" in name)
    distance = [row["actor/kl_ref"] for row in read_metrics(run / "metrics.jsonl") if "actor/kl_ref" in row]
    assert abs(distance[0]) < 1e-6


def test_supervised_training_of_adapters_and_the_merged_model(base: Path, tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(f"""
model: {{path: {base}, dtype: float64, lora: {{rank: 4, alpha: 8, rslora: true, targets: [q_proj, v_proj, down_proj]}}}}
sft: {{data: {{task: sort_digits, options: {{num: 200, clean: true}}}}, updates: 12, batch_size: 16, optimizer: {{lr: 1.0e-2}}}}
run: {{directory: {tmp_path / "runs"}, name: it, threads: 1}}
""")
    loaded = load(SftConfig, tmp_path / "sft.yaml", [])
    outcome = execute_sft(loaded.config, loaded.resolved, loaded.base, "it")
    losses = [row["sft/loss"] for row in read_metrics(outcome.directory / "metrics.jsonl")]
    assert losses[-1] < losses[0]
    policy = load_policy(Model(device="cpu", dtype="float64"), outcome.model, None, 0)
    assert policy.lora == loaded.config.model.lora
    (tmp_path / "merged").mkdir()
    save_merged(policy, tmp_path / "merged")
    merged = load_policy(Model(device="cpu", dtype="float64"), tmp_path / "merged", None, 0)
    tokens = torch.tensor([3, 4, 5, 12, 3, 4])
    found = []
    for one in (policy, merged):
        assert isinstance(one.module, Decoder)
        found.append(one.module.token_logprobs(tokens, torch.tensor([0, 6]), torch.arange(1, 6))[0])
    assert merged.lora is None
    torch.testing.assert_close(*found, atol=1e-12, rtol=0)
