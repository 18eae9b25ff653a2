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
PROMPT = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": '{"asserts": ["assert 1 + 1 == 2"]}'},
}
IMITATED = {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "2"}
PREFERRED = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}


def make_files(config: AnyConfig) -> None:
    """All models and files that a config names, in the working directory; a file has one row of the kind that is read."""
    for _, path in model_directories(config):
        make_model(path)
    make_data(data_sources(config), PREFERRED if isinstance(config, PreferConfig | RewardModelConfig) else IMITATED)
    if isinstance(config, TrainConfig):
        column = config.data.demonstration_column
        shown = {} if column is None else {column: "2"}
        make_data([*config.data.train, *config.data.validation], PROMPT | shown)


def make_model(path: str) -> None:
    """A directory that says what a model looks like, with a tokenizer and without weights."""
    if not is_reference(path):
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "config.json").write_text(json.dumps(SHAPE))
        Tokenizer.from_characters(string.printable).save(Path(path))


def make_data(sources: Iterable[Source], row: dict[str, Any]) -> None:
    """The files of some sources."""
    for path in (Path(source.path) for source in sources if source.path is not None and not is_reference(source.path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
