"""Gemma 2: agreement with transformers in its differences from the plain decoder, and reading and writing config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.config.model import NewModel
from burnish.models.architecture import architecture_from_hf, architecture_to_hf, new_architecture, why_not_native
from burnish.models.decoder import Decoder, initialise
from burnish.models.weight_files import load_decoder, save_decoder

CPU = torch.device("cpu")
TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CONFIG: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}


def their_logprobs(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]


def test_gradients_are_those_of_transformers(tiny_model: TinyModel, packed: Packed) -> None:
    theirs, directory = tiny_model("gemma2", True, torch.float64)
    ours = load_decoder(directory, torch.float64, CPU)
    tokens, offsets = packed([23])
    logp = ours.token_logprobs(tokens, offsets, torch.arange(1, 23))[0]
    logp.sum().backward()
    theirs.zero_grad()
    expected = their_logprobs(theirs, tokens)
    expected.sum().backward()
    torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)  # transformers computes norms in float32
    q_proj = theirs.model.layers[1].self_attn.q_proj.weight.grad
    pairs = [
        (ours.layers[1].qkv.weight.grad[: q_proj.shape[0]], q_proj),
        (ours.layers[0].down.weight.grad, theirs.model.layers[0].mlp.down_proj.weight.grad),
        (ours.norm.weight.grad, theirs.model.norm.weight.grad),
    ]
    for got, grad in pairs:
        torch.testing.assert_close(got, grad, atol=1e-5 * float(grad.abs().max()), rtol=1e-4)


def test_each_cap_changes_the_log_probs(tiny_model: TinyModel, packed: Packed) -> None:
    _, directory = tiny_model("gemma2")
    tokens, offsets = packed([23])
    config = json.loads((directory / "config.json").read_text())
    found = []
    for off in ((), ("attn_logit_softcapping",), ("final_logit_softcapping",)):
        arch = architecture_from_hf({**config, **dict.fromkeys(off)})
        model = Decoder(arch)
        model.load_state_dict(load_decoder(directory, torch.float32, CPU).state_dict())
        with torch.no_grad():
            found.append(model.token_logprobs(tokens, offsets, torch.arange(1, 23))[0])
    assert (found[0] - found[1]).abs().max() > 0.05
    assert (found[0] - found[2]).abs().max() > 0.05


def test_a_new_model_is_written_as_one_that_transformers_loads(tmp_path: Path, packed: Packed) -> None:
    new = NewModel(family="gemma2", hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, mlp_size=48, tied=True)
    arch = new_architecture(new, 61)
    assert arch.windows == (512, None, None)
    model = Decoder(arch)
    initialise(model, 0, 0.2)
    save_decoder(model, tmp_path, source=None)
    assert architecture_from_hf(json.loads((tmp_path / "config.json").read_text())) == arch
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    tokens, offsets = packed([530])  # longer than the window of 512
    with torch.no_grad():
        ours = model.token_logprobs(tokens, offsets, torch.arange(1, 530))[0]
        assert (ours - their_logprobs(theirs, tokens)).abs().max() < 1e-4


def test_a_short_config_has_the_published_values() -> None:
    arch = architecture_from_hf(CONFIG)
    assert arch.windows == (4096, None, 4096, None)
    assert (arch.score_softcap, arch.logit_softcap, arch.tied, arch.rope_theta) == (50.0, 30.0, True, 10_000.0)
    assert arch.query_scale == pytest.approx((16 / 256) ** 0.5)
    assert architecture_from_hf(architecture_to_hf(arch, "float32", (1,), 0)) == arch


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attention_bias": True}, "biases"),
        ({"layer_types": ["full_attention"]}, "lists 1 layers, and there are 4"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert why_not_native(CONFIG) is None
    assert reason in str(why_not_native({**CONFIG, **change}))
