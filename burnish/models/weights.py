"""Hugging Face directories in and out: safetensors only, checked tensor by tensor.

Each Hugging Face tensor is a block of rows of one of our parameters (query, key and value are rows of `qkv`), so one
table serves loading and saving.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from burnish.config.errors import UserError, nearest
from burnish.models.architecture import Architecture, from_hf, read_config, to_hf, why_not_native
from burnish.models.decoder import Decoder

SHARD_BYTES = 4 << 30
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of our parameter `ours` are Hugging Face's tensor `theirs`."""

    theirs: str
    ours: str
    start: int = 0
    stop: int | None = None


def blocks(arch: Architecture) -> list[Block]:
    """The whole correspondence, in Hugging Face's order."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    table = [Block("model.embed_tokens.weight", "embedding.weight")]
    for i in range(arch.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            table += [
                Block(f"{theirs}self_attn.q_proj.{kind}", f"{ours}qkv.{kind}", 0, q),
                Block(f"{theirs}self_attn.k_proj.{kind}", f"{ours}qkv.{kind}", q, q + kv),
                Block(f"{theirs}self_attn.v_proj.{kind}", f"{ours}qkv.{kind}", q + kv, q + 2 * kv),
            ]
        for kind in ("weight", "bias") if arch.out_bias else ("weight",):
            table.append(Block(f"{theirs}self_attn.o_proj.{kind}", f"{ours}out.{kind}"))
        if arch.qk_norm:
            table.append(Block(f"{theirs}self_attn.q_norm.weight", f"{ours}q_norm.weight"))
            table.append(Block(f"{theirs}self_attn.k_norm.weight", f"{ours}k_norm.weight"))
        for kind in ("weight", "bias") if arch.mlp_bias else ("weight",):
            table += [
                Block(f"{theirs}mlp.gate_proj.{kind}", f"{ours}gate_up.{kind}", 0, arch.mlp_size),
                Block(f"{theirs}mlp.up_proj.{kind}", f"{ours}gate_up.{kind}", arch.mlp_size, 2 * arch.mlp_size),
                Block(f"{theirs}mlp.down_proj.{kind}", f"{ours}down.{kind}"),
            ]
        table.append(Block(f"{theirs}input_layernorm.weight", f"{ours}attention_norm.weight"))
        table.append(Block(f"{theirs}post_attention_layernorm.weight", f"{ours}mlp_norm.weight"))
    table.append(Block("model.norm.weight", "norm.weight"))
    if not arch.tied:
        table.append(Block("lm_head.weight", "head.weight"))
    return table


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory; pickled weights are refused."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in sorted(set(_weight_map(index).values()))]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise UserError(f"{directory}: {index.name} names files that are not there: {', '.join(missing)}")
        return files
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    pickles = sorted(f.name for pattern in PICKLES for f in directory.glob(pattern))
    if pickles:
        raise UserError(
            f"{directory} holds its weights as pickle ({', '.join(pickles[:3])}), which can run any code when it is opened; "
            "convert it to safetensors (transformers: model.save_pretrained(...)) and load that"
        )
    raise UserError(f"{directory} has no weights: expected model.safetensors or model.safetensors.index.json")


def _weight_map(index: Path) -> dict[str, str]:
    """File name by tensor name."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{index} is damaged: it should be a JSON object with a `weight_map`") from error
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} is damaged: `weight_map` should be an object, not a {type(weight_map).__name__}")
    return weight_map


def load_decoder(directory: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Our decoder with the weights of a Hugging Face directory."""
    config = read_config(directory)
    reason = why_not_native(config)
    if reason:
        raise UserError(f"{directory} cannot run on the native decoder: {reason}; set model.backend=transformers")
    arch = from_hf(config, str(directory / "config.json"))
    with torch.device("meta"):
        model = Decoder(arch)
    model.to(dtype).to_empty(device=device)  # in this order no float32 copy of the model is ever made
    fill(model, stored_tensors(directory), str(directory))
    return model


def fill(model: Decoder, tensors: Iterator[tuple[str, Tensor]], where: str) -> None:
    """Copy named Hugging Face tensors into the model in place; every one must be known, fit, and none may miss."""
    table = {b.theirs: b for b in blocks(model.arch)}
    parameters = dict(model.named_parameters())
    waiting = set(table)
    for name, tensor in tensors:
        if name == "lm_head.weight" and model.arch.tied:
            continue  # some exporters write the tied head a second time
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old exports carry this derived buffer
        if name not in table:
            raise UserError(f"{where}: unexpected tensor {name!r}{nearest(name, table)}")
        block = table[name]
        target = parameters[block.ours].data[block.start : block.stop]
        if target.shape != tensor.shape:
            raise UserError(f"{where}: {name} is {tuple(tensor.shape)} but config.json implies {tuple(target.shape)}")
        target.copy_(tensor)
        waiting.discard(name)
    if waiting:
        raise UserError(f"{where}: {len(waiting)} tensors are missing, first {sorted(waiting)[0]}")


def stored_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model directory under their Hugging Face names, one at a time."""
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
                    yield name, handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read as safetensors: {error}") from error


def hf_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names, as views of our parameters."""
    parameters = dict(model.named_parameters())
    for block in blocks(model.arch):
        yield block.theirs, parameters[block.ours].detach()[block.start : block.stop]


def save_tensors(directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """safetensors files of at most SHARD_BYTES each, with an index when there are several."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.to("cpu").contiguous()
        size += num_bytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, directory / name, metadata={"format": "pt"})
    total = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def save_decoder(
    model: Decoder, directory: Path, source: Path | None, eos_ids: tuple[int, ...] = (), pad_id: int | None = None
) -> None:
    """A Hugging Face directory that transformers loads unchanged (the tokenizer is saved by its own class).

    A model that came from a directory keeps that directory's config.json (with the dtype it now has) and
    generation_config.json; a new one gets both written.
    """
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    if source is not None:
        config: dict[str, Any] = read_config(source)
        config.pop("torch_dtype", None)
        config["dtype"] = dtype
        if (source / "generation_config.json").is_file():
            shutil.copy(source / "generation_config.json", directory / "generation_config.json")
    else:
        config = to_hf(model.arch, dtype, eos_ids, pad_id)
        generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": pad_id, "do_sample": True}
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_tensors(directory, hf_tensors(model))
