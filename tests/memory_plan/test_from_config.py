"""The memory plan of a configuration: from config.json alone, for the machine that is here; told and compared in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Optimizer
from burnish.config.schema import RewardModelConfig, SftConfig, TrainConfig
from burnish.distributed.roles import build_critic, build_learner, build_policy
from burnish.memory_plan import from_config
from burnish.memory_plan.from_config import PlannedRun, plan_run
from burnish.memory_plan.planner import CUDA_CONTEXT_BYTES, GIB, SAMPLING, RunSetup, plan_memory
from burnish.models.compiled_layers import compiled_forward
from burnish.models.decoder import Decoder, Layer
from burnish.trainers.performance import MemoryPlanCheck
from tests.trainers.tiny import TINY, run_of

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
BASIC = ["model.dtype=bfloat16", "model.device=cuda", "data.train.path=x.jsonl", "training.token_budget=16384"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with nothing in it but its shape."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def of_train(directory: Path, *overrides: str) -> PlannedRun:
    loaded = load(TrainConfig, None, [f"model.path={directory}", *BASIC, *overrides])
    return plan_run(loaded.config, None)


def test_a_plan_needs_config_json_alone(directory: Path) -> None:
    made = of_train(directory, "data.max_prompt_tokens=128", "rollout.max_tokens=256").stages["training"]
    assert made.setup.arch.num_parameters == 1_543_714_304
    assert (made.setup.longest, made.setup.rows) == (384, 16384)
    assert made.setup.update_tokens == 64 * 8 * 384
    assert made.setup.tokens_per_row == pytest.approx(8 * 384 / (128 + 8 * 256))
    cache = next(part.bytes for part in made.phases[SAMPLING])
    assert cache == (256 * 24 + 1) * 16 * 2 * 28 * 2 * 128 * 2  # all rows at their longest, in pages of 16


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (["training.activations=recompute"], "activations", "recompute"),
        (["training.share_prefixes=false"], "tokens_per_row", 1.0),
        (["algorithm.kl.reference=none", "algorithm.kl.loss.coef=0"], "reference", "none"),
        (["algorithm.kl.reference=ema"], "reference", "ema"),
        (["model.lora={}"], "reference", "off"),
        (["algorithm.kl.loss.estimator=full"], "full_kl", True),
        (["rollout.mismatch=stale"], "engine_copy", True),
        (
            [
                "rollout.opponents={name: pool, at_once: 2}",
                "environment={name: kuhn_poker, max_turns: 3}",
                "data.train.path=null",
                "data.train.task=kuhn_poker",
            ],
            "opponents",
            2,
        ),
        (["rollout.cache_gib=2"], "cache", 4681 * 16 * 28672),  # whole pages
        (["training.mini_batches=4"], "update_tokens", 128 * 1280),
        (["environment={name: x.py:E, max_turns: 3}"], "longest", 1024 + 3 * 256),
        (["environment={name: x.py:E, max_turns: 3, max_tokens: 4096}"], "longest", 4096),
    ],
    ids=lambda x: x[0].partition("=")[0] if isinstance(x, list) else "",
)
def test_what_the_config_says_is_in_the_setup(directory: Path, overrides: list[str], field: str, value: Any) -> None:
    basic = ["rollout.max_tokens=256", "algorithm.kl.loss.coef=0.1"]
    plain, changed = (of_train(directory, *basic, *more).stages["training"].setup for more in ([], overrides))
    assert getattr(changed, field) == value
    assert getattr(plain, field) != value


def test_a_new_model_has_the_vocabulary_of_its_task() -> None:
    config = load(
        TrainConfig, None, ["model.new.num_layers=2", "data.train.task=sort_digits", "model.device=cpu"]
    ).config
    module = build_policy(config.model, config.data.train, 0, None).module
    assert isinstance(module, Decoder)
    assert plan_run(config, None).stages["training"].setup.arch == module.arch


def test_a_critic_and_a_warm_start_have_their_place(directory: Path) -> None:
    found = of_train(directory, "algorithm=ppo", "warm_start.data.path=y.jsonl", "warm_start.activations=selective")
    assert list(found.stages) == ["warm start", "training"]
    assert found.stages["warm start"].setup.activations == "selective"
    assert found.stages["warm start"].setup.section == "warm_start"
    assert found.stages["training"].setup.critic is not None
    assert "the critic learns" in found.text


def test_the_plan_reads_the_shape_of_a_process_reward_model(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    path = tmp_path / "it" / "config.json"
    path.write_text(json.dumps({**SHAPE, "num_hidden_layers": 4}))
    prime = ["algorithm=prime", f"algorithm.process.path={path.parent}"]
    setup = of_train(directory, *prime).stages["training"].setup
    assert (setup.arch.num_layers, setup.process_arch and setup.process_arch.num_layers) == (28, 4)
    assert of_train(directory, prime[0]).stages["training"].setup.process_arch is None
    path.write_text(json.dumps({"model_type": "mamba"}))
    reason = of_train(directory, *prime).reason
    assert reason is not None
    assert f"algorithm.process.path={path.parent}: the forward pass is transformers' own" in reason


def adapter_of(directory: Path, folder: Path) -> Path:
    """A PEFT directory with nothing in it but what it is."""
    folder.mkdir()
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps({**said, "base_model_name_or_path": str(directory)}))
    return folder


def test_a_reward_model_in_the_process_is_counted_where_it_shares_the_device(directory: Path, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": False}))  # it has no output head

    def bytes_of(device: str = "cuda", **options: str) -> tuple[int, int]:
        part = {"name": "model", "options": {"path": str(scorer), "device": device, **options}}
        made = of_train(directory, f"reward.parts={json.dumps([part])}").stages["training"]
        return sum(p.bytes for p in made.resident if p.name == "reward models"), made.total

    (plain, total), (half, less), (elsewhere, least) = bytes_of(), bytes_of(dtype="bfloat16"), bytes_of("cpu")
    assert (plain, half, elsewhere) == (4 * 1_543_714_304, 2 * 1_543_714_304, 0)
    assert (total - least, less - least) == (plain, half)


def test_an_adapter_is_planned_on_its_base(directory: Path, tmp_path: Path) -> None:
    folder = adapter_of(directory, tmp_path / "adapter")
    setup = of_train(directory, "algorithm=prime", f"algorithm.process.path={folder}").stages["training"].setup
    assert setup.process_arch == setup.arch


def test_4_bits_are_not_advised_where_the_config_refuses_them(directory: Path, tmp_path: Path) -> None:
    folder = adapter_of(directory, tmp_path / "adapter")
    sft = ["model.dtype=bfloat16", "model.device=cuda", "sft.data.path=x.jsonl"]
    for overrides, expected in (
        ([f"model.path={directory}", "model.lora={}"], True),
        ([f"model.adapter={folder}"], False),
        ([f"model.path={directory}", "model.lora={}", "parallel.tensor=2", "parallel.data=1"], False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WORLD_SIZE", "2" if "parallel.tensor=2" in overrides else "1")
            setup = plan_run(load(SftConfig, None, [*sft, *overrides]).config, None).stages["sft"].setup
        assert setup.may_quantise is expected
    for mismatch, expected in (("noise", False), ("quantised", False), ("stale", True)):
        made = of_train(directory, "model.lora={}", f"rollout.mismatch={mismatch}")
        assert made.stages["training"].setup.may_quantise is expected


@pytest.mark.parametrize("lora", [[], ["model.lora={}"]])
def test_what_a_stage_makes_is_planned_as_large_as_the_policy(directory: Path, lora: list[str]) -> None:
    setup = of_train(directory, "algorithm=prime", "algorithm.process.path=stage:cold", *lora).stages["training"].setup
    assert setup.process_arch == setup.arch
    teacher = "algorithm.kl.reference={name: teacher, path: 'stage:cold'}"
    setup = of_train(directory, teacher, *lora).stages["training"].setup
    assert (setup.reference, setup.teacher) == ("teacher", 1_543_714_304)


def test_a_supervised_run_is_planned_too(directory: Path) -> None:
    overrides = [f"model.path={directory}", "model.dtype=bfloat16", "model.device=cuda", "sft.data.path=x.jsonl"]
    found = plan_run(load(SftConfig, None, overrides).config, None)
    setup = found.stages["sft"].setup
    assert (setup.longest, setup.update_tokens, setup.section) == (2048, 128 * 2048, "sft")


def test_a_reward_model_is_planned_with_its_adapters_and_without_an_output_head(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(SHAPE | {"tie_word_embeddings": False}))
    basic = [f"model.path={directory}", "model.dtype=bfloat16", "model.device=cuda", "reward_model.data.path=x.jsonl"]
    sizes = {}
    for name, more in {"whole": [], "adapters": ["model.lora.rank=8"], "nf4": ["model.lora.base=nf4"]}.items():
        made = plan_run(load(RewardModelConfig, None, [*basic, *more]).config, None).stages["reward model"]
        setup = made.setup
        assert (setup.longest, setup.update_tokens, setup.section) == (2048, 2 * 64 * 2048, "reward_model")
        assert setup.is_reward_model
        sizes[name] = {part.name: part.bytes for part in made.parts}
    layers = 28 * 1536 * (2048 + 1536 + 3 * 8960)  # numbers in the matrices
    rest = 1_543_714_304 - layers
    assert sizes["whole"]["weights"] == sizes["whole"]["master copies"] / 2 + 4 * 1536  # the head is float32 itself
    assert sizes["whole"]["weights"] == pytest.approx(2 * 1_543_714_304, rel=1e-4)
    adapters = 28 * 8 * ((1536 + 1536) * 2 + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert sizes["adapters"]["weights"] == 2 * (1_543_714_304 + adapters) + 4 * 1536
    assert sizes["adapters"]["moments"] == 8 * (adapters + 1536)
    assert sizes["nf4"]["weights"] == pytest.approx(layers * 4.5 / 8 + 2 * (rest + 2 * adapters), rel=1e-3)


def test_each_of_several_processes_has_its_share(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"model.path={directory}", "model.device=cuda", "sft.data.path=x.jsonl", "parallel.context=2"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    setup = plan_run(load(SftConfig, None, overrides).config, None).stages["sft"].setup
    assert (setup.shards, setup.slices, setup.update_tokens) == (8, 2, 128 * 2048 // 4)


@pytest.mark.parametrize(
    ("shape", "words"),
    [({"model_type": "gpt2"}, "transformers' own"), ({}, "backend=transformers"), (None, "does not exist")],
)
def test_a_model_whose_shape_is_not_known_is_not_planned(
    directory: Path, shape: dict[str, Any] | None, words: str
) -> None:
    (directory / "config.json").write_text(json.dumps(SHAPE | (shape or {})))
    path = directory if shape is not None else directory / "nowhere"
    found = of_train(path, *(["model.backend=transformers"] if shape == {} else []))
    assert found.text.startswith("memory: not planned, ")
    assert words in found.text
    assert found.check() == []


# --- told and compared -----------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_fit_is_refused_before_anything_is_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(from_config, "_device_bytes", lambda *_: 24 * GIB)
    (directory / "r.yaml").write_text(
        f"model: {{path: {directory}, dtype: bfloat16, device: cuda}}\ndata: {{train: {{path: x.jsonl}}}}\n"
    )
    assert main(["train", str(directory / "r.yaml"), "--dry-run"]) != 0
    captured = capsys.readouterr()
    assert "of 24.0 GiB on the GPU at the peak" in captured.out
    assert "to make it fit:" in captured.out


def test_on_a_cpu_a_run_says_in_a_line_what_it_needs_and_logs_its_error(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", TINY, ["training.steps=1"])
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if "memory/planned_gib" in row)
    assert first["memory/plan_error"] == pytest.approx(first["memory/planned_gib"] / first["memory/peak_gib"] - 1)
    assert "memory: about " in (folder / "log.txt").read_text()


def test_the_error_is_told_for_the_first_update_and_for_one_with_state(directory: Path) -> None:
    found = of_train(directory)
    made = found.stages["training"]
    first, later = made.learners_peak(1), made.learners_peak(2)
    assert later - first > 10 * GIB  # moments and master copies
    assert later == made.total - CUDA_CONTEXT_BYTES
    watch, told = MemoryPlanCheck(found, "training"), list[str]()
    assert watch.after(0, {"memory/peak_gib": 3.0}, told.append) == {}  # no update was made
    values = watch.after(1, {"memory/peak_gib": first / GIB}, told.append)
    assert values == {"memory/planned_gib": first / GIB, "memory/plan_error": pytest.approx(0, abs=1e-6)}
    values = watch.after(2, {"memory/peak_gib": later / GIB / 1.1}, told.append)
    assert values["memory/plan_error"] == pytest.approx(0.1)
    assert watch.after(3, {"memory/peak_gib": 1.0}, told.append) == {}
    assert [text.rpartition(": ")[2] for text in told] == ["+0%", "+10%"]
    resumed = MemoryPlanCheck(found, "training")
    assert resumed.after(40, {"memory/peak_gib": later / GIB}, told.append)["memory/plan_error"] == pytest.approx(
        0, abs=1e-6
    )
    assert resumed.is_done


# --- the key itself --------------------------------------------------------------------------------------------------------


def test_the_policy_and_the_critic_keep_what_training_activations_says() -> None:
    overrides = [
        "model.new.num_layers=2",
        "data.train.task=sort_digits",
        "training.activations=recompute",
        "algorithm=ppo",
    ]
    config = load(TrainConfig, None, overrides).config
    policy = build_policy(config.model, config.data.train, 0, None)
    critic = build_critic(config, policy)
    learner = build_learner(config, policy)
    assert critic is not None
    for model in (learner.model, critic.model.backbone):
        assert isinstance(model, Decoder)
        assert model.activations == "recompute"
        layer = model.layers[0]
        assert isinstance(layer, Layer)
        calls: list[int] = []
        layer.attention_norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model.hidden(torch.arange(6), torch.tensor([0, 6])).sum().backward()
        assert len(calls) == 2


def test_a_supervised_stage_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    from burnish.trainers import sft

    train = sft.train
    monkeypatch.setattr(
        sft, "train", lambda learner, *a, **k: (seen.append(learner.model.activations), train(learner, *a, **k))[1]
    )
    recipe = tmp_path / "s.yaml"
    recipe.write_text(
        "model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32, max_positions: 64}}\n"
        "sft: {data: {task: sort_digits, options: {num: 8}}, updates: 1, batch_size: 2, max_tokens: 60, activations: selective}\n"
        f"run: {{directory: {tmp_path}}}\n"
    )
    assert main(["sft", str(recipe)]) == 0
    assert seen == ["selective"]


def test_compiled_layers_reach_the_layers_and_go_with_what_they_can() -> None:
    overrides = ["model.new.num_layers=2", "data.train.task=sort_digits", "training.layers=compiled"]
    config = load(TrainConfig, None, overrides).config
    policy = build_policy(config.model, config.data.train, 0, None)
    learner = build_learner(config, policy)
    assert isinstance(learner.model, Decoder)
    assert all(layer.forward_override is compiled_forward for layer in learner.model.layers)
    with pytest.raises(UserError, match=r"training\.layers=compiled selects itself"):
        load(TrainConfig, None, [*overrides, "training.activations=selective"])


def test_8_bit_layers_reach_the_model_and_the_plan_and_go_with_what_they_can() -> None:
    overrides = ["model.new.num_layers=2", "data.train.task=sort_digits", "training.layers=fp8"]
    config = load(TrainConfig, None, overrides).config
    policy = build_policy(config.model, config.data.train, 0, None)
    learner = build_learner(config, policy)
    assert isinstance(learner.model, Decoder)
    assert all("forward" in vars(layer.down) for layer in learner.model.layers)
    arch = learner.model.arch
    setups = [RunSetup(arch, "bfloat16", True, Optimizer(), 65536, 512, 65536, in_fp8=f) for f in (False, True)]
    plans = [plan_memory(setup) for setup in setups]
    sizes = [next(part.bytes for part in plan.phases[plan.phase] if part.name == "activations") for plan in plans]
    h, q, m = arch.hidden_size, arch.num_heads * arch.head_dim, arch.mlp_size
    assert sizes[0] - sizes[1] == 65536 * 2 * (
        2 * h + m - q - 4 * 4
    )  # attention also keeps the input of the output projection
    for more, words in (
        ("rollout.exact=true", "computes every token as the engine does"),
        ("model.backend=transformers", "needs the native decoder"),
    ):
        with pytest.raises(UserError, match=words):
            load(TrainConfig, None, [*overrides, more])
    across = ["placement=ray", "placement.workers=2", "parallel.tensor=2"]
    with pytest.raises(UserError, match=r"parallel\.tensor splits"):
        load(TrainConfig, None, [*overrides, *across])
