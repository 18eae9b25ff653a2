"""Stand-ins for the models and data files that published recipes name, so that their dry runs find everything they need."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from burnish.config.data import Source
from burnish.config.plugins import is_reference
from burnish.config.requirements import AnyConfig, data_sources, model_directories
from burnish.config.schema import PreferConfig, RewardModelConfig, TrainConfig
from burnish.models.tokenizer import Tokenizer

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
}
"""Qwen2.5-1.5B's config.json."""
VISION_SHAPE = {
    **SHAPE,
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 1536,
        "patch_size": 14,
    },
    "image_token_id": 2,
    "video_token_id": 3,
}
"""A config.json of Qwen2.5-VL with that decoder."""
PROMPT = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": '{"asserts": ["assert 1 + 1 == 2"]}'},
}
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PASSAGE = {"id": "1", "title": "Sums", "text": "One and one are two."}
IMITATED = {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "2"}
PREFERRED = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}


def make_files(config: AnyConfig) -> None:
    """All models and files that a config names, in the working directory; a file has one row of the kind that is read."""
    for _, path in model_directories(config):
        make_model(path, isinstance(config, TrainConfig) and config.data.template.system is not None)
    make_data(data_sources(config), PREFERRED if isinstance(config, PreferConfig | RewardModelConfig) else IMITATED)
    if isinstance(config, TrainConfig):
        column = config.data.demonstration_column or getattr(config.algorithm.kl.context, "column", None)
        shown: dict[str, Any] = {name: "2" for name in (column, config.validation.by) if name is not None}
        if any(part.name == "rm_r1" for part in config.reward.parts):
            shown["reward_model"] = {"style": "rule", "ground_truth": "A"}
        for options in (part.options for part in config.reward.parts if part.name == "lean"):
            shown["reward_model"] = {"style": "rule", "ground_truth": "theorem one : 1 + 1 = 2 := by sorry"}
            Path(options["project"], ".lake/build/lib/lean").mkdir(parents=True)
        make_data([*config.data.train, *config.data.validation], PROMPT | shown)
        for options in (config.environment.options, *(tool.options for tool in config.environment.tools)):
            if "corpus" in options:
                Path(options["corpus"]).write_text(json.dumps(PASSAGE) + "\n")


def make_lean(prefix: Path) -> Path:
    """A folder for PATH with a `lean` that knows where it is and checks nothing."""
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin/lean").write_text(f"#!/bin/sh\necho {prefix}\n")
    (prefix / "bin/lean").chmod(0o755)
    return prefix / "bin"


def make_model(path: str, is_chat: bool = False) -> None:
    """A directory that says what a model looks like, with a tokenizer and without weights."""
    if not is_reference(path):
        Path(path).mkdir(parents=True, exist_ok=True)
        sees = "-VL-" in path
        (Path(path) / "config.json").write_text(json.dumps(VISION_SHAPE if sees else SHAPE))
        marks = ("<|image_pad|>", "<|video_pad|>") if sees else ()
        files = {"preprocessor_config.json": json.dumps({"patch_size": 14, "merge_size": 2})} if sees else {}
        tokenizer = Tokenizer.from_characters(string.printable, marks, more_files=files)
        if is_chat:
            tokenizer._inner.chat_template = CHAT_TEMPLATE
        tokenizer.save(Path(path))


def make_data(sources: Iterable[Source], row: dict[str, Any]) -> None:
    """The files of some sources."""
    for path in (Path(source.path) for source in sources if source.path is not None and not is_reference(source.path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
