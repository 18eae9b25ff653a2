"""What a config asks of its models is checked against their families before weights are fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.loading import load, load_tree
from burnish.config.model_ids import parse_model_id
from burnish.config.recipe_names import NamedRecipe, named_recipes
from burnish.config.requirements import model_directories
from burnish.config.schema import RewardModelConfig, SftConfig, TrainConfig
from burnish.config.stages import CONFIG_TYPES, StagesConfig, load_stage_configs
from burnish.models.model_support import recipe_problems, unsupported
from burnish.models.published_models import PUBLISHED, find_published
from tests.config.fake_hub import serve_hub, use_hub

PAIRS = {"reward_model": {"data": {"task": "sort_digits"}}}
RL = {"data": {"train": {"task": "sort_digits"}}, "rollout": {"max_tokens": 16}}


@pytest.mark.parametrize("recipe", named_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_can_run_as_written(recipe: NamedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load({**CONFIG_TYPES, "stages": StagesConfig}[recipe.command], recipe.path)
    configs = [loaded.config]
    if recipe.command == "stages":
        configs = [stage.config for stage in load_stage_configs(loaded, recipe.path, Path()).values()]
    named = [path for config in configs for _, path in model_directories(config)]
    unknown = [path for path in named if not path.startswith("stage:") and find_published(path) is None]
    assert not unknown, f"add {unknown[0]} to burnish/models/published_models.py"
    assert recipe_problems(loaded, recipe.path) == []


def problems(kind: type[Any], tree: dict[str, Any]) -> list[str]:
    return unsupported(load_tree(kind, tree, None).config, None)


def test_a_family_without_a_native_decoder_has_no_reward_model_adapters_or_exact_rollouts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    other = {"path": str(tmp_path)}
    (scorer,) = problems(RewardModelConfig, {"model": other, **PAIRS})
    assert scorer.startswith(f"model.path={tmp_path}: `burnish reward-model` needs the native decoder")
    assert "'gpt_neox' is not one of llama" in scorer
    assert "a smaller one" in scorer
    asked = {**RL, "model": {**other, "lora": {"rank": 4}}, "training": {"layers": "compiled"}}
    asked["rollout"] = {"max_tokens": 16, "exact": True}
    found = problems(TrainConfig, asked)
    assert [text.split(" ")[1] for text in found] == ["model.lora", "training.layers=compiled", "rollout.exact"]
    assert problems(TrainConfig, {**RL, "model": other}) == []
    taught = {"preset": "sdft", "kl": {"context": {"column": "answer"}}}
    (text,) = problems(TrainConfig, {**RL, "model": other, "algorithm": taught})
    assert "set algorithm.loss.support=sampled" in text
    assert problems(TrainConfig, {**asked, "model": {"path": "Qwen/Qwen2.5-7B", "lora": {"rank": 4}}}) == []


def test_quantised_models_and_answers_beyond_the_positions_are_refused_and_vision_models_are_not() -> None:
    imitated = {"sft": {"data": {"task": "sort_digits"}}}
    (fp8,) = problems(SftConfig, {**imitated, "model": {"path": "deepseek-ai/DeepSeek-V3"}})
    assert "stored as fp8, which cannot be trained: convert them to bfloat16" in fp8
    for vision in ("models/Qwen2.5-VL-7B-Instruct", "google/gemma-3-4b-it"):
        assert problems(SftConfig, {**imitated, "model": {"path": vision, "lora": {"rank": 4}}}) == []
    long = {**RL, "rollout": {"max_tokens": 4096}}
    (text,) = problems(TrainConfig, {**long, "model": {"path": "models/qwen2.5-math-7b"}})
    assert "rollout.max_tokens=4096 leaves no room for a prompt: the model is made for 4096 positions" in text
    assert problems(TrainConfig, {**long, "model": {"path": "models/Qwen2.5-Math-7B-16k-think"}}) == []
    for kind in ("model", "judge"):
        scored = {"parts": [{"name": kind, "options": {"path": "deepseek-ai/DeepSeek-V3"}}]}
        (text,) = problems(TrainConfig, {**RL, "model": {"path": "Qwen/Qwen2.5-7B"}, "reward": scored})
        assert text.startswith(
            f"reward.parts[0] ({kind}): options.path=deepseek-ai/DeepSeek-V3: its weights are stored"
        )


TEACHER = {"name": "teacher", "path": "OTHER"}
TWO_WORKERS = {"parallel": {"tensor": 2}, "placement": {"name": "ray", "workers": 2}}
PARTS = [{"name": "judge", "options": {"path": "OTHER", "engine": "native"}}]
SEVERAL = {"name": "teachers", "paths": {"math": "Qwen/Qwen2.5-7B", "code": "OTHER", "own": None}}
OTHER_MODELS: dict[str, tuple[dict[str, Any], str, str]] = {
    "divergence": (
        {"algorithm": {"preset": "sdft", "kl": {"context": {"column": "answer"}, "reference": TEACHER}}},
        "algorithm.kl.reference.path=",
        "set algorithm.loss.support=sampled",
    ),
    "full": (
        {"algorithm": {"preset": "grpo", "kl": {"loss": {"estimator": "full", "coef": 0.1}, "reference": TEACHER}}},
        "algorithm.kl.reference.path=",
        "use k3+ or k2",
    ),
    "gold": (
        {"algorithm": {"preset": "gold", "kl": {"reference": TEACHER}}},
        "algorithm.kl.reference.path=",
        "algorithm.loss=gold needs",
    ),
    "teachers": (
        {"algorithm": {"preset": "grpo", "kl": {"loss": {"estimator": "full", "coef": 0.1}, "reference": SEVERAL}}},
        "algorithm.kl.reference.paths.code=",
        "use k3+ or k2",
    ),
    "tensor parallelism": (
        {"algorithm": {"preset": "on_policy_distillation", "kl": {"reference": TEACHER}}, **TWO_WORKERS},
        "algorithm.kl.reference.path=",
        "parallel.tensor needs",
    ),
    "process": (
        {"algorithm": {"preset": "prime", "process": {"path": "OTHER"}}, "model": {"lora": {"rank": 4}}},
        "algorithm.process.path=",
        "model.lora needs",
    ),
    "reward model": ({"reward": {"parts": [{**PARTS[0], "name": "model"}]}}, "reward.parts[0] (model)", "train the"),
    "judge": ({"reward": {"parts": PARTS}}, "reward.parts[0] (judge)", "engine=native of the judge"),
}


@pytest.mark.parametrize(("asked", "key", "advice"), OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_teachers_process_reward_models_and_judges_are_checked_too(
    tmp_path: Path, asked: dict[str, Any], key: str, advice: str
) -> None:
    def found(model_type: str, **more: Any) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **more}))
        tree = json.loads(json.dumps({**RL, **asked}).replace("OTHER", str(tmp_path)))
        tree["model"] = {"path": "Qwen/Qwen2.5-7B", **tree.get("model", {})}
        return problems(TrainConfig, tree)

    (text,) = found("gpt_neox")
    assert text.startswith(key)
    assert "this model does not run on it (architecture 'gpt_neox'" in text
    assert advice in text
    (text,) = found("qwen2", quantization_config={"quant_method": "fp8"})
    assert text.startswith(key)
    assert "its weights are stored as fp8" in text
    assert found("qwen2") == []


def test_a_teacher_must_have_the_positions_that_answers_need_and_one_from_a_stage_the_family_of_its_base() -> None:
    taught = {"preset": "mopd", "kl": {"reference": {"name": "teachers", "paths": {"math": "Qwen/Qwen2.5-Math-7B"}}}}
    long = {**RL, "rollout": {"max_tokens": 5000}, "model": {"path": "Qwen/Qwen2.5-7B"}, "algorithm": taught}
    (text,) = problems(TrainConfig, long)
    assert text.startswith("algorithm.kl.reference.paths.math=Qwen/Qwen2.5-Math-7B: rollout.max_tokens=5000 leaves no")
    assert problems(TrainConfig, {**long, "rollout": {"max_tokens": 4000}}) == []
    gold = {"preset": "gold", "kl": {"reference": {"name": "teacher", "path": "stage:base"}}}
    tree = {**RL, "model": {"path": "Qwen/Qwen2.5-7B"}, "algorithm": gold}
    base = load_tree(TrainConfig, tree, None).config
    (text,) = unsupported(base, None, "deepseek-ai/DeepSeek-V3")
    assert text.startswith("algorithm.kl.reference.path=stage:base: its weights are stored as fp8")
    gold["kl"]["reference"]["path"] = "stage:sft"
    assert unsupported(load_tree(TrainConfig, tree, None).config, None, "deepseek-ai/DeepSeek-V3") == []


def test_a_name_that_goes_on_has_the_family_of_its_origin_alone() -> None:
    found = find_published("models/Llama-3.1-8B-long-cot")
    assert found is not None
    assert (found.model_type, found.max_positions) == ("llama", None)
    assert find_published("models/mine") is None
    assert all(parse_model_id(repo, ()) is not None for repo in PUBLISHED)


def test_a_config_json_wins_over_the_table(tmp_path: Path) -> None:
    (tmp_path / "Qwen2.5-7B").mkdir()
    (tmp_path / "Qwen2.5-7B/config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    (text,) = problems(RewardModelConfig, {**PAIRS, "model": {"path": str(tmp_path / "Qwen2.5-7B")}})
    assert "'gpt_oss'" in text


def test_start_dry_run_shrink_and_stages_say_it_before_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    reason = "its weights are stored as fp8"
    Path("scorer.yaml").write_text(json.dumps({"model": {"path": "deepseek-ai/DeepSeek-V3"}, **PAIRS}))
    stage = {"command": "reward-model", "config": PAIRS}
    whole = {"model": {"path": "models/DeepSeek-V3"}, "stages": {"scorer": stage}}
    Path("stages.yaml").write_text(json.dumps(whole))
    with serve_hub() as hub:
        use_hub(hub, tmp_path / "cache", monkeypatch)
        assert main(["reward-model", "scorer.yaml"]) == 2
        assert f"model.path=deepseek-ai/DeepSeek-V3: {reason}" in capsys.readouterr().err
        assert main(["stages", "stages.yaml"]) == 2
        assert f"stage scorer: model.path=models/DeepSeek-V3: {reason}" in capsys.readouterr().err
        assert not hub.downloads()
        assert main(["reward-model", "scorer.yaml", "--dry-run"]) == 2
        assert reason in capsys.readouterr().out
        assert main(["reward-model", "scorer.yaml", "--shrink"]) == 0
        assert (
            f"as written, this recipe would not start: model.path=deepseek-ai/DeepSeek-V3: {reason}"
            in capsys.readouterr().err
        )
        # A model that is not in the table: its config.json is fetched and read, its weights are not.
        files = {"config.json": b'{"model_type": "gpt_oss"}', "tokenizer.json": b"{}", "model.safetensors": b""}
        hub.commit("org/unknown", files)
        assert main(["reward-model", "scorer.yaml", "model.path=org/unknown"]) == 2
        reason = "`burnish reward-model` needs the native decoder"
        assert f"model.path=org/unknown@{hub.refs['org/unknown', 'main']}: {reason}" in capsys.readouterr().err
        assert "model.safetensors" not in hub.downloads()
