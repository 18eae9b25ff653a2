"""Compare model directories: architecture and tokenizer (the first difference is an error), and digests of their content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.models.architecture import architecture_from_hf, read_config, why_not_native
from burnish.models.tokenizer import TOKENIZER_FILES

IGNORED_CONFIG_KEYS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
"""Keys of config.json that do not change the function that the weights define."""
MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")
SAMPLE_BYTES, NUM_SAMPLES = 1 << 14, 64
"""Samples of a large file for its digest. They are spread over the whole file, since training may change any part."""


def check_same_architecture(one: Path, other: Path) -> None:
    """Raise if two config.json describe different functions of the weights."""
    configs = [read_config(path) for path in (one, other)]
    if configs[0].get("model_type") != configs[1].get("model_type"):
        kinds = [config.get("model_type") for config in configs]
        raise UserError(f"the models differ in architecture: {one} is {kinds[0]!r}, {other} is {kinds[1]!r}")
    if any(why_not_native(config) for config in configs):
        described: list[dict[str, Any]] = [_relevant_keys(config) for config in configs]
    else:  # with the family's defaults, so that an omitted key is not a difference
        pairs = zip(configs, (one, other), strict=True)
        described = [asdict(architecture_from_hf(config, str(path / "config.json"))) for config, path in pairs]
    for name in sorted(described[0].keys() | described[1].keys()):
        mine, theirs = described[0].get(name), described[1].get(name)
        if mine != theirs:
            raise UserError(f"the models differ in architecture: {name} is {mine!r} in {one} and {theirs!r} in {other}")


def _relevant_keys(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}


def check_same_tokenizer(one: Path, other: Path) -> None:
    """Raise if a token id stands for different text in two directories."""
    for name in TOKENIZER_FILES:
        files = [path / name for path in (one, other)]
        there = [file.is_file() for file in files]
        if there[0] != there[1]:
            raise UserError(f"the models differ in their tokenizers: only {one if there[0] else other} has {name}")
        if not there[0] or files[0].read_bytes() == files[1].read_bytes():
            continue
        difference = (
            _tokenizer_difference(*map(read_json_object, files)) if name.endswith(".json") else "the files differ"
        )
        if difference is not None:
            raise UserError(f"the models differ in their tokenizers ({name} of {one} and {other}): {difference}")


def _tokenizer_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first token or setting that differs; None if only the formatting of the files differs."""
    ours, theirs = _vocabulary(one), _vocabulary(other)
    for token in sorted(ours.keys() | theirs.keys(), key=lambda token: (ours.get(token, 1 << 62), token)):
        if ours.get(token) != theirs.get(token):
            places = [f"{'no id' if ids.get(token) is None else ids[token]}" for ids in (ours, theirs)]
            return f"the token {token!r} has {places[0]} in the first and {places[1]} in the second"
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if one.get(part) != other.get(part):
            return f"{part} differs"
    models = [{k: v for k, v in (t.get("model") or {}).items() if k != "vocab"} for t in (one, other)]
    setting = next(
        (k for k in sorted(models[0].keys() | models[1].keys()) if models[0].get(k) != models[1].get(k)), None
    )
    return None if setting is None else f"model.{setting} differs"


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Ids by token, with added tokens; a file without a `model` (vocab.json) is the vocabulary itself."""
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        return tokenizer
    vocabulary = model.get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: (token, score) pairs; the index is the id
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}


def model_digest(path: Path) -> str:
    """Digest of a model directory: all of its configs and tokenizer, and samples of its weights."""
    files = sorted({file for pattern in MODEL_FILES for file in path.glob(pattern)})
    return digest_parts(part for file in files for part in (file.name.encode(), *_sampled_bytes(file)))


def digest_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of byte strings, each prefixed with its length so that their boundaries count too; 16 hex digits."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()[:16]


def _sampled_bytes(path: Path) -> list[bytes]:
    size = path.stat().st_size
    if size <= SAMPLE_BYTES * NUM_SAMPLES:
        return [path.read_bytes()]
    with path.open("rb") as file:
        starts = [i * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]
        return [str(size).encode(), *(os.pread(file.fileno(), SAMPLE_BYTES, start) for start in starts)]
