"""What a config asks of its models that their families do not support, found before any weights are downloaded or loaded.

The native decoder has the families of `model_families.py`. Any other decoder runs through transformers, without adapters, reward models and
what else `native_settings` lists. The models are the policy, its teachers, the process reward model, reward models and judges.
The facts come from the config.json of a directory or of the Hugging Face cache, or else from the table of published models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from burnish.algorithms.losses.distillation_spec import DivergenceLoss, GoldLoss
from burnish.algorithms.terms.spec import TeacherReference, TeachersReference
from burnish.config.errors import UserError
from burnish.config.loading import ConfigType, Loaded
from burnish.config.model_ids import cached_directory, local_directory, parse_model_id
from burnish.config.plugins import is_reference
from burnish.config.requirements import AnyConfig, pin_model_ids
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig
from burnish.config.stages import BASE_STAGE, StagesConfig, load_stage_configs
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
        found = _family_problems(hf_config, native_settings(config), "trained")
        problems += [f"model.path={path}: {text}" for text in found]
        # The start of a run checks a directory with its real prompts. A later stage or a download comes too late for that.
        if isinstance(config, TrainConfig) and (base_model is not None or local_directory(path, base) is None):
            problems += [f"model.path={path}: {text}" for text in _too_long(config, hf_config)]
    if isinstance(config, TrainConfig):
        problems += _other_problems(config, base, base_model)
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


def _family_problems(hf_config: dict[str, Any], settings: Iterable[tuple[str, str]], use: str) -> Iterator[str]:
    """Problems of one model: settings that its family does not support, and a format of its weights that has no such `use`."""
    # Check the family before the format of the weights: a user need not convert weights of a family that is refused.
    reason = _why_not_native({key: value for key, value in hf_config.items() if key != "quantization_config"})
    if reason is not None:
        for need, advice in settings:
            yield f"{need} needs the native decoder, and this model does not run on it ({reason}): {advice}"
    quantised = hf_config.get("quantization_config")
    if quantised:
        kind = quantised.get("quant_method", "a quantised format") if isinstance(quantised, dict) else quantised
        yield f"its weights are stored as {kind}, which cannot be {use}: convert them to bfloat16 and give that folder"


def _why_not_native(hf_config: dict[str, Any]) -> str | None:
    """`why_not_native` of a config.json, or of the table of published models, which knows no vision towers."""
    family = FAMILIES.get(hf_config.get("model_type", ""))
    if family is not None and family.vision_names is not None and "vision_config" not in hf_config:
        return None
    return why_not_native(hf_config)


def native_settings(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """The settings of a config that need the native decoder for the policy, and what to do without it."""
    if isinstance(config, RewardModelConfig):
        yield "`burnish reward-model`", "train the scorer from a model of a native family, which may be a smaller one"
    yield from _learner_settings(config, _training_sections(config))
    if not isinstance(config, TrainConfig):
        return
    yield from _vocabulary_settings(config)
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


def _learner_settings(config: AnyConfig, sections: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """The settings of a model that is trained, by the given sections of the config."""
    if config.model.backend == "native":
        yield "model.backend=native", "set it to auto"
    if config.model.lora is not None or config.model.adapter is not None:
        key = "model.lora" if config.model.lora is not None else "model.adapter"
        yield key, "remove it and train all weights, or take a model of a native family"
    yield from _parallel_settings(config)
    for where, section in sections:
        if section.activations == "selective":
            yield f"{where}.activations=selective", "use recompute, offload or keep"
    if isinstance(config, TrainConfig) and config.training.layers != "plain":
        yield f"training.layers={config.training.layers}", "set it to plain"


def _vocabulary_settings(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """The setting that compares whole distributions of policy and teacher, if any. Both models must be native."""
    algorithm = config.algorithm
    if not algorithm.compares_vocabulary:
        return
    if isinstance(algorithm.loss, GoldLoss):
        yield "algorithm.loss=gold", "take a model of a native family"
    elif isinstance(algorithm.loss, DivergenceLoss) and algorithm.loss.support != "sampled":
        yield "algorithm.loss=divergence over the vocabulary", "set algorithm.loss.support=sampled"
    else:
        yield "algorithm.kl.loss.estimator=full", "use k3+ or k2, whose gradients are unbiased"


def _parallel_settings(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """The divisions of a learner that cut the native decoder's layers."""
    if not isinstance(config, RewardModelConfig):
        for kind in ("pipeline", "context", "expert", "tensor"):
            if getattr(config.parallel, kind) > 1:
                yield f"parallel.{kind}", "use parallel.data"


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


class OtherModel(NamedTuple):
    """A model of a run besides the policy."""

    key: str
    path: str
    settings: list[tuple[str, str]]
    """The settings that need the native decoder for it, and what to do without it."""
    use: str = "read"
    """What is done with its weights."""
    is_from_policy: bool = True
    """Whether an output of an earlier stage has the family of the policy."""
    reads_answers: bool = False
    """Whether it reads the policy's own tokens."""


def _other_problems(config: TrainConfig, base: Path | None, base_model: str | None) -> Iterator[str]:
    """Problems of teachers, of the process reward model, of reward models and of judges."""
    for model in _other_models(config):
        origin: str | None = model.path
        if is_reference(model.path):
            origin = base_model if model.is_from_policy else None
        hf_config = None if origin is None else known_config(origin, base)
        if hf_config is None:
            continue
        if is_reference(model.path) and model.path != f"stage:{BASE_STAGE}":  # stages write weights of 16 bits or more
            hf_config = {key: value for key, value in hf_config.items() if key != "quantization_config"}
        problems = list(_family_problems(hf_config, model.settings, model.use))
        if model.reads_answers:
            problems += _too_long(config, hf_config)
        yield from (f"{model.key}={model.path}: {text}" for text in problems)


def _other_models(config: TrainConfig) -> Iterator[OtherModel]:
    """The models of a config besides the policy. Servers are not checked: they have loaded theirs."""
    reference, process = config.algorithm.kl.reference, config.algorithm.process
    teachers: dict[str, str] = {}
    if isinstance(reference, TeacherReference) and reference.path is not None:
        teachers["path"] = reference.path
    if isinstance(reference, TeachersReference):
        teachers = {f"paths.{name}": path for name, path in reference.directories.items()}
    has_own_tokens = isinstance(config.algorithm.loss, GoldLoss)
    for key, path in teachers.items():
        settings = [*_vocabulary_settings(config), *_parallel_settings(config)]
        yield OtherModel(f"algorithm.kl.reference.{key}", path, settings, reads_answers=not has_own_tokens)
    if process is not None and process.path is not None:
        settings = list(_learner_settings(config, [("training", config.training)]))
        yield OtherModel("algorithm.process.path", process.path, settings, "trained", reads_answers=True)
    for index, part in enumerate(config.reward.parts):
        directory = part.options.get("path")
        if not isinstance(directory, str):
            continue
        key = f"reward.parts[{index}] ({part.name}): options.path"
        if part.name == "model":
            settings = [("a reward model", "train the scorer from a model of a native family")]
            yield OtherModel(key, directory, settings, is_from_policy=False)
        if part.name == "judge":
            is_native = part.options.get("engine") == "native"
            yield OtherModel(key, directory, [("engine=native of the judge", "set it to auto")] if is_native else [])
