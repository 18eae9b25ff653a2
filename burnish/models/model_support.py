"""What a config asks of its models that their families do not support, found before any weights are downloaded or loaded.

The native decoder has the families of `model_families.py`. Any other decoder is trained through
transformers, without adapters, reward models and what else `_native_settings` lists. The facts come from the config.json of a directory or
of the Hugging Face cache, or else from the table of published models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from burnish.algorithms.terms.spec import TeacherReference
from burnish.config.errors import UserError
from burnish.config.loading import ConfigType, Loaded
from burnish.config.model_ids import cached_directory, local_directory, parse_model_id
from burnish.config.plugins import is_reference
from burnish.config.requirements import AnyConfig, pin_model_ids
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig
from burnish.config.stages import StagesConfig, load_stage_configs
from burnish.models.architecture import read_config, why_not_native
from burnish.models.model_families import FAMILIES
from burnish.models.published_models import find_published


def pin_supported_models(
    loaded: Loaded[ConfigType],
    record: Path | None,
    say: Callable[[str], None],
    with_weights: bool = True,
    recipe: Path | None = None,
) -> Loaded[ConfigType]:
    """`pin_model_ids`, after a check of what the config asks of its models: before any download, then with their config.json.

    The weights are fetched last. `recipe` is the file of a config of stages.
    """
    _check_support(loaded, recipe)
    small_files = pin_model_ids(loaded, record, lambda text: None, with_weights=False)
    if small_files is not loaded:
        _check_support(small_files, recipe)
    return pin_model_ids(loaded, record, say, with_weights)


def _check_support(loaded: Loaded[Any], recipe: Path | None) -> None:
    for problem in recipe_problems(loaded, recipe):
        raise UserError(problem)


def recipe_problems(loaded: Loaded[Any], recipe: Path | None = None) -> list[str]:
    """Why the models of a config, or of any stage of the `recipe`, cannot do what is asked of them."""
    if not isinstance(loaded.config, StagesConfig):
        return unsupported(loaded.config, loaded.base)
    assert recipe is not None, "stages are read from a file"
    stages = load_stage_configs(loaded, recipe, Path())
    base_model = loaded.config.model.path
    return [
        f"stage {name}: {problem}"
        for name, stage in stages.items()
        for problem in unsupported(stage.config, stage.base, base_model)
    ]


def unsupported(config: AnyConfig, base: Path | None, base_model: str | None = None) -> list[str]:
    """Why the models of a config cannot do what it asks of them, as error texts. Models that are not known are not checked.

    `base_model` is the model from which earlier stages made the policy, if the config names an output of a stage.
    """
    path = config.model.path
    if path is not None and is_reference(path):
        path = base_model
    problems: list[str] = []
    hf_config = None if path is None else known_config(path, base)
    if path is not None and hf_config is not None:
        problems += [f"model.path={path}: {text}" for text in _policy_problems(config, hf_config)]
        # The start of a run checks a directory with its real prompts. A later stage or a download comes too late for that.
        if isinstance(config, TrainConfig) and (base_model is not None or local_directory(path, base) is None):
            problems += [f"model.path={path}: {text}" for text in _too_long(config, hf_config)]
    if isinstance(config, TrainConfig):
        problems += _other_models(config, base)
    return problems


def known_config(path: str, base: Path | None) -> dict[str, Any] | None:
    """What is known of a model's config.json without a download; None if nothing is."""
    directory = local_directory(path, base)
    if directory is None:
        model = parse_model_id(path, (base or Path(), Path()))
        directory = None if model is None else cached_directory(model, with_weights=False)
    if directory is not None:
        # An adapter has no architecture of its own. A damaged directory is reported where the model is loaded.
        return read_config(directory) if (directory / "config.json").is_file() else None
    published = find_published(path)
    return None if published is None else published.hf_config()


def _policy_problems(config: AnyConfig, hf_config: dict[str, Any]) -> Iterator[str]:
    # Check the family before the format of the weights: a user need not convert weights of a family that is refused.
    reason = _why_not_native({key: value for key, value in hf_config.items() if key != "quantization_config"})
    if reason is not None:
        for need, advice in _native_settings(config):
            yield f"{need} needs the native decoder, and this model does not run on it ({reason}): {advice}"
    quantised = hf_config.get("quantization_config")
    if quantised:
        kind = quantised.get("quant_method", "a quantised format") if isinstance(quantised, dict) else quantised
        yield f"its weights are stored as {kind}, which cannot be trained: convert them to bfloat16 and give that folder"


def _why_not_native(hf_config: dict[str, Any]) -> str | None:
    """`why_not_native` of a config.json, or of the table of published models, which knows no vision towers."""
    family = FAMILIES.get(hf_config.get("model_type", ""))
    if family is not None and family.vision_names is not None and "vision_config" not in hf_config:
        return None
    return why_not_native(hf_config)


def _native_settings(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """The settings of a config that need the native decoder, and what to do without it."""
    if isinstance(config, RewardModelConfig):
        yield "`burnish reward-model`", "train the scorer from a model of a native family, which may be a smaller one"
    if config.model.backend == "native":
        yield "model.backend=native", "set it to auto"
    if config.model.lora is not None or config.model.adapter is not None:
        key = "model.lora" if config.model.lora is not None else "model.adapter"
        yield key, "remove it and train all weights, or take a model of a native family"
    if not isinstance(config, RewardModelConfig):
        for kind in ("pipeline", "context", "expert", "tensor"):
            if getattr(config.parallel, kind) > 1:
                yield f"parallel.{kind}", "use parallel.data"
    for where, section in _training_sections(config):
        if section.activations == "selective":
            yield f"{where}.activations=selective", "use recompute, offload or keep"
    if not isinstance(config, TrainConfig):
        return
    if config.training.layers != "plain":
        yield f"training.layers={config.training.layers}", "set it to plain"
    if config.algorithm.kl.loss.estimator == "full":
        yield "algorithm.kl.loss.estimator=full", "use k3+ or k2, whose gradients are unbiased"
    elif config.algorithm.compares_vocabulary:
        yield "algorithm.loss=divergence over the vocabulary", "set algorithm.loss.support=sampled"
    rollout = config.rollout
    if rollout.engine == "native":
        yield "rollout.engine=native", "use auto, vllm or sglang"
    if rollout.exact:
        yield "rollout.exact", "set it to false"
    if rollout.engine == "auto" and (rollout.cache_gib is not None or rollout.cache_dtype != "auto"):
        yield "rollout.cache_gib or cache_dtype", "remove it"
    if rollout.engine == "auto" and rollout.weights.name != "model":
        yield "rollout.weights=fp8", "set it to model"
    if rollout.speculation.name != "none":
        yield "rollout.speculation", "remove it"


def _training_sections(config: AnyConfig) -> Iterator[tuple[str, Any]]:
    if isinstance(config, TrainConfig):
        yield "training", config.training
        if config.warm_start is not None:
            yield "warm_start", config.warm_start
    elif isinstance(config, SftConfig):
        yield "sft", config.sft
    elif isinstance(config, PreferConfig):
        yield "preference", config.preference
    else:
        yield "reward_model", config.reward_model


def _too_long(config: TrainConfig, hf_config: dict[str, Any]) -> Iterator[str]:
    """Answers that do not fit the model even without a prompt. The run checks the real prompts (`check_positions`)."""
    positions = hf_config.get("text_config", hf_config).get("max_position_embeddings")
    if positions is None:
        return
    answers = [("rollout.max_tokens", max(stage.max_tokens for stage in config.rollout.all_stages()))]
    answers += [
        (f"validation.modes.{name}.max_tokens", mode.max_tokens) for name, mode in config.validation.modes.items()
    ]
    for key, tokens in answers:
        if tokens >= positions:
            yield f"{key}={tokens} leaves no room for a prompt: the model is made for {positions} positions; lower it"
            return


def _other_models(config: TrainConfig, base: Path | None) -> Iterator[str]:
    """Problems of the teacher and of reward models."""
    reference, loss = config.algorithm.kl.reference, config.algorithm.kl.loss
    asked: list[tuple[str, Any, str]] = []
    if isinstance(reference, TeacherReference) and loss.estimator == "full" and loss.coef:
        asked.append(("algorithm.kl.reference.path", reference.path, "algorithm.kl.loss.estimator=full"))
    for index, part in enumerate(config.reward.parts):
        if part.name == "model":
            asked.append((f"reward.parts[{index}] (model): options.path", part.options.get("path"), "a reward model"))
    for key, path, need in asked:
        hf_config = known_config(path, base) if isinstance(path, str) and not is_reference(path) else None
        reason = None if hf_config is None else _why_not_native(hf_config)
        if reason is not None:
            yield f"{key}={path}: {need} needs the native decoder, and this model does not run on it ({reason})"
