"""A small policy that vLLM runs on a CPU too: its attention there wants heads of 32."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.model import Lora
from burnish.core.engine import Engine
from burnish.models.lora.adapters import add_lora
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from tests.inference.engine_contract import LETTERS, Subject

ROWS = 4
SIZES = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "mlp_size": 96, "max_positions": 256}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: `make test-vllm`"))


@pytest.fixture(scope="session")
def make_policy(tools: Any) -> Callable[..., PolicyModel]:
    """`make_policy(folder, lora=...)`: a policy, saved in a folder as what it came from where there is one."""

    def make(folder: Path | None = None, lora: Lora | None = None, **options: Any) -> PolicyModel:
        module = tools.decoder(torch.float32, **(SIZES | options))
        policy = PolicyModel(module, letters(), folder, "a toy")
        if folder is not None:
            policy.source = None
            policy.save(folder)
            policy.source = folder
        if lora is not None:
            add_lora(module, lora, seed=0)
        return policy

    return make


@pytest.fixture(scope="session")
def subject_of() -> Callable[[PolicyModel, Engine], Subject]:
    """The subject of the contract: an engine and the policy it has its weights from."""

    def make(policy: PolicyModel, engine: Engine) -> Subject:
        module: Any = policy.module

        def logits(tokens: list[int]) -> Tensor:
            with torch.no_grad():
                return module.logits(module.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)])))

        def change(version: int) -> None:
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            engine.load(version, ())

        return Subject(engine, logits, change, ROWS, SIZES["max_positions"])

    return make


def letters() -> Tokenizer:
    """A tokenizer of the contract's letters, without a special token."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False))
