"""Load and save PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`, as `peft` writes them.

An adapter with unsupported features (DoRA, ranks that differ between layers, trained embeddings) is an error that names
the key. Keys about how an adapter was initialised or trained are ignored. The adapter of a score model also holds the
model's whole head.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from burnish.config.errors import UserError, did_you_mean
from burnish.config.model import ALL_PROJECTIONS, PROJECTIONS, Lora, LoraBase
from burnish.config.model_ids import model_directory
from burnish.config.yaml_text import read_json_object
from burnish.core.pipeline_stage import stage_of
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, trained_tower_weights
from burnish.models.model_families import FAMILIES
from burnish.models.vision.tensor_names import TOWER, TOWER_MODULES
from burnish.models.weight_blocks import WeightBlock
from burnish.models.weight_files import block_tensors, file_tensors, load_weight_blocks
from burnish.models.weight_layout import Projection, lora_targets, row_order_of
from burnish.run.checkpoint.saver import TensorStaging, keep_in_place
from burnish.run.checkpoint.snapshot import BytesFile, Content, write_contents
from burnish.run.checkpoint.tensor_file import TensorFile

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_FORMAT_FILE = "base_weights.json"
"""Our addition to a PEFT directory: the format of the base weights if it is not the model's dtype, since it changes the model."""
READ_KEYS = (
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "base_model_name_or_path",
    "init_lora_weights",
    "exclude_modules",
)
IGNORED_KEYS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "megatron_core"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying"),
)
"""Keys about an adapter's training, which do not change the product of A and B."""
NEUTRAL_VALUES: tuple[Any, ...] = (None, False, "none", {}, [])
CAUSAL_LM, SEQ_CLS = "CAUSAL_LM", "SEQ_CLS"
"""Task types: language model (policy) and sequence classification (score model)."""
PEFT_PREFIX = "base_model.model."
"""Before the path of a module of the base model."""
HEAD_MODULES, SCORE_TENSOR = ("classifier", "score"), f"{PEFT_PREFIX}score.weight"
"""Names of the head that peft trains whole for sequence classification, and the name of our head's tensor."""
SUPPORTED_INITS: tuple[Any, ...] = (True, False, None, "gaussian")
"""Initialisations of an adapter that do not change the base weights."""


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds a PEFT adapter."""
    return (directory / ADAPTER_CONFIG).is_file()


def is_score_adapter(directory: Path) -> bool:
    """Whether a PEFT directory holds the adapter and the head of a score model."""
    return read_json_object(directory / ADAPTER_CONFIG).get("task_type") == SEQ_CLS


def read_lora_config(directory: Path, scores: bool = False) -> Lora:
    """Read a PEFT directory's config; raise if it is not supported, or not of a score model if `scores`."""
    if not is_adapter(directory):
        raise UserError(f"{directory} is not a PEFT adapter directory: it has no {ADAPTER_CONFIG}")
    config = read_json_object(directory / ADAPTER_CONFIG)
    where = directory / ADAPTER_CONFIG
    if config.get("peft_type") != "LORA":
        raise UserError(f"{where}: peft_type is {config.get('peft_type')!r}, and only LORA is known here")
    if is_score_adapter(directory) != scores:
        raise UserError(_wrong_task_message(directory, scores))
    whole = config.get("modules_to_save")
    if not scores and isinstance(whole, list) and all(set(str(path).split(".")) & {*TOWER_MODULES} for path in whole):
        config["modules_to_save"] = None  # of a vision tower, which is loaded with the adapters
    if scores and isinstance(whole, list) and set(whole) <= set(HEAD_MODULES):
        config["modules_to_save"] = None  # the head, which is loaded with the adapters
    strange = [
        key for key, value in config.items() if key not in (*READ_KEYS, *IGNORED_KEYS) and value not in NEUTRAL_VALUES
    ]
    if strange:
        raise UserError(f"{where}: {strange[0]}={config[strange[0]]!r} is not supported: merge the adapter with peft")
    if config.get("init_lora_weights") not in SUPPORTED_INITS:
        started = config["init_lora_weights"]
        raise UserError(f"{where}: init_lora_weights={started!r} changes the base weights: merge the adapter with peft")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise UserError(f"{where}: r={rank!r} and lora_alpha={alpha!r}; expected two numbers above 0")
    chosen = _read_targets(config.get("target_modules"), where)
    base = _read_base_format(directory / BASE_FORMAT_FILE)
    return Lora(rank=rank, alpha=alpha, targets=chosen, rslora=bool(config.get("use_rslora")), base=base)


def _wrong_task_message(directory: Path, scores: bool) -> str:
    if scores:
        return (
            f"{directory} is the adapter of a language model, not of a reward model: a reward model's has task_type "
            f"{SEQ_CLS}, such as a checkpoint of `burnish reward-model`"
        )
    return (
        f"{directory} is the adapter of a reward model (task_type {SEQ_CLS}), which generates no text: use it as the path of a "
        "reward part `model`, not as the start of a policy"
    )


def _read_base_format(file: Path) -> LoraBase:
    """The format of the base weights that an adapter was trained on."""
    named = read_json_object(file).get("base") if file.is_file() else "dtype"
    known: tuple[LoraBase, ...] = get_args(LoraBase)
    found = next((base for base in known if base == named), None)
    if found is None:
        raise UserError(f"{file}: base is {named!r}; expected one of {', '.join(known)}")
    return found


def _read_targets(named: Any, where: Path) -> Any:
    """`Lora.targets` from a config's `target_modules`: names, or full paths, which peft writes for models with few layers."""
    if named == "all-linear":
        return named
    if not isinstance(named, list) or not named:
        raise UserError(f"{where}: target_modules is {named!r}; expected a list of {', '.join(PROJECTIONS)}")
    names = {str(name).rsplit(".", 1)[-1] for name in named}
    strange = sorted(names - set(ALL_PROJECTIONS))
    if strange:
        raise UserError(f"{where}: there is no target {strange[0]!r} here{did_you_mean(strange[0], ALL_PROJECTIONS)}")
    return "all-linear" if names == set(PROJECTIONS) else [name for name in ALL_PROJECTIONS if name in names]


def base_model_of(directory: Path) -> Path:
    """The directory of an adapter's base model; a relative path is relative to the adapter's directory or the working directory.

    The base may be an id of the hub, as `peft` often writes it.
    """
    named = read_json_object(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    found = model_directory(named, directory) if isinstance(named, str) and named else None
    if found is None:
        raise UserError(
            f"{directory / ADAPTER_CONFIG}: base_model_name_or_path is {named!r}, and there is no such directory here; "
            "correct it there, or in a recipe give model.path as well as model.adapter"
        )
    return found


def adapter_blocks(arch: Architecture, lora: Lora) -> list[WeightBlock]:
    """The rows of our parameters that each PEFT tensor corresponds to."""
    table, names = [], FAMILIES[arch.family].vision_names
    prefix = PEFT_PREFIX + ("model." if names is None else names.decoder_module)
    for index in range(arch.num_layers):
        modules: dict[str, list[Projection]] = {}
        for target in lora_targets(arch, lora, index):
            modules.setdefault(target.module, []).append(target)
        for module, parts in modules.items():
            ours, row = f"layers.{index}.{module}", 0
            theirs = [f"{prefix}layers.{index}.{part.path}" for part in parts]
            for k, name in enumerate(theirs):
                rows = k * lora.rank, (k + 1) * lora.rank
                table.append(WeightBlock(f"{name}.lora_A.weight", f"{ours}.lora_a", *rows))
            for part, name in zip(parts, theirs, strict=True):
                table.append(WeightBlock(f"{name}.lora_B.weight", f"{ours}.lora_b", row, row + part.num_outputs))
                row += part.num_outputs
    return table


def _target_names(arch: Architecture, lora: Lora) -> list[str]:
    """The names of the projections with adapters, in the order of the forward pass."""
    return list(dict.fromkeys(target.name for target in lora_targets(arch, lora)))


def _adapter_parameters(model: Decoder, lora: Lora, head: Tensor | None) -> tuple[dict[str, Tensor], list[WeightBlock]]:
    """The trained parameters by name (with a score model's head), and their PEFT tensors."""
    parameters, table = dict[str, Tensor](adapter_weights(model)), adapter_blocks(model.arch, lora)
    table += _tower_blocks(model, (name for name in parameters if name.startswith(TOWER)))
    return (
        (parameters, table)
        if head is None
        else (parameters | {"head": head}, [*table, WeightBlock(SCORE_TENSOR, "head")])
    )


def _tower_blocks(model: Decoder, parameters: Iterable[str]) -> list[WeightBlock]:
    """The PEFT tensors of parameters of a vision tower, which are saved whole."""
    names = FAMILIES[model.arch.family].vision_names
    if names is None:
        return []
    path = {name: names.tower_module_name(name.removeprefix(TOWER)) for name in parameters}
    return [WeightBlock(PEFT_PREFIX + theirs, ours) for ours, theirs in path.items()]


def _tower_parameters(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if name.startswith(TOWER)}


def _whole_modules(model: Decoder) -> list[str] | None:
    """PEFT's `modules_to_save`: the modules of a vision tower that are trained; None if there are none."""
    names, trained = FAMILIES[model.arch.family].vision_names, trained_tower_weights(model)
    if names is None or model.vision is None or not trained:
        return None
    modules = dict(model.vision.named_modules())
    chosen = [name for name, module in modules.items() if any(module is part for part in model.vision.projector)]
    inside = {name for name in trained if name.removeprefix(TOWER).startswith(tuple(f"{part}." for part in chosen))}
    if len(inside) < len(trained):  # more than the projector
        return list(names.whole_modules)
    return [names.tower_module_name(name) for name in chosen]


def adapter_contents(
    model: Decoder, stage: TensorStaging, base: Path | None, head: Tensor | None = None
) -> list[Content]:
    """Files of a PEFT directory for a model whose base weights are in the directory `base`; with a score model's `head`."""
    lora = model.lora
    assert lora is not None, "a model with adapters"
    config = {
        "peft_type": "LORA",
        "task_type": CAUSAL_LM if head is None else SEQ_CLS,
        "base_model_name_or_path": None if base is None else str(base.resolve()),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": _target_names(model.arch, lora),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": _whole_modules(model) if head is None else ["score"],
    }
    if model.arch.vision is not None:  # the tower's projections have the same names, and no adapters
        config["exclude_modules"] = rf".*\b({'|'.join(TOWER_MODULES)})\b.*"
    parts = block_tensors(*_adapter_parameters(model, lora, head), partial(row_order_of, model), stage_of(model))
    tensors = {name: stage(tensor) for name, tensor in parts}
    own = [] if lora.base == "dtype" else [BytesFile(BASE_FORMAT_FILE, json.dumps({"base": lora.base}))]
    return [
        TensorFile(ADAPTER_WEIGHTS, tensors, {"format": "pt"}),
        BytesFile(ADAPTER_CONFIG, json.dumps(config, indent=1)),
        *own,
    ]


def save_adapter(model: Decoder, directory: Path, base: Path | None) -> None:
    """Write a model's adapters as a PEFT directory."""
    write_contents(directory, adapter_contents(model, keep_in_place, base))


def load_adapter(model: Decoder, directory: Path, head: Tensor | None = None) -> None:
    """Load the adapters of a PEFT directory into a model in place, and a score model's `head`.

    Every tensor must be known and have the right shape, and none may be missing.
    """
    if model.lora is None:
        raise UserError(f"{directory} holds an adapter, and the model has none: set model.lora or model.adapter")
    found, expected = read_lora_config(directory, scores=head is not None), model.lora
    kinds = [(lora.rank, lora.scale, _target_names(model.arch, lora), lora.base) for lora in (found, expected)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"{directory} has adapters of another kind: {describe_lora(found)}, not {describe_lora(expected)}"
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        pickled = (directory / "adapter_model.bin").is_file()
        hint = "; loading a pickle can run any code: save it again as safetensors with peft" if pickled else ""
        raise UserError(f"{directory} has no {ADAPTER_WEIGHTS}{hint}")
    where, whose = directory / ADAPTER_WEIGHTS, f"the model and {ADAPTER_CONFIG} imply"
    parameters, table = _adapter_parameters(model, expected, head)
    saved = {name for name, _ in file_tensors(where)}
    tower = _tower_blocks(model, _tower_parameters(model))
    table += [block for block in tower if block.hf_name in saved and block not in table]
    parameters |= _tower_parameters(model)
    order, stage = partial(row_order_of, model), stage_of(model)
    load_weight_blocks(parameters, table, file_tensors(where), str(where), whose, order, stage=stage)
    model.drop_features()


def describe_lora(lora: Lora) -> str:
    """A description such as `LoRA of rank 16 x 2 on q_proj, v_proj`, with rank and scale."""
    which = "all projections" if lora.projections in (PROJECTIONS, ALL_PROJECTIONS) else ", ".join(lora.projections)
    below = "" if lora.base == "dtype" else f" over weights in 4 bits ({lora.base})"
    return f"LoRA of rank {lora.rank} x {lora.scale:g} on {which}{below}"
