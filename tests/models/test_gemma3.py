"""Gemma 3: agreement with transformers in its differences from the plain decoder, and reading and writing config.json."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.config.model import NewModel
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.architecture import architecture_from_hf, architecture_to_hf, new_architecture, why_not_native
from burnish.models.decoder import Decoder, initialise
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import hf_tensors, load_decoder, save_decoder

CPU = torch.device("cpu")
TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
REAL = Path(os.environ.get("BURNISH_GEMMA3", "/nowhere"))
CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def in_float64(theirs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms, the eager softmax and the embedding factor in float32; here they use the model's dtype."""
    from transformers.models.gemma3 import modeling_gemma3

    def forward(self: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    monkeypatch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", forward)
    theirs.model.embed_tokens.embed_scale = torch.tensor(theirs.config.hidden_size**0.5, dtype=torch.float64)
    theirs.set_attn_implementation("sdpa")


def their_logprobs(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]


def our_logprobs(model: Decoder, tokens: Tensor) -> Tensor:
    wanted = torch.arange(1, len(tokens))
    return model.token_logprobs(tokens, torch.tensor([0, len(tokens)]), wanted)[0].detach()


@pytest.mark.parametrize("length", [4, 40, 300])
@pytest.mark.parametrize("variant", ["gemma3", "gemma3-linear"])
@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_logprobs_within_and_beyond_the_window_are_those_of_transformers(
    tiny_model: TinyModel,
    packed: Packed,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
    variant: str,
    dtype: Any,
    gap: float,
) -> None:
    theirs, directory = tiny_model(variant, True, dtype)
    if dtype == torch.float64:
        in_float64(theirs, monkeypatch)
    tokens, _ = packed([length])
    ours = load_decoder(directory, dtype, CPU)
    expected = their_logprobs(theirs, tokens)
    assert expected.std() > 0.5
    assert (our_logprobs(ours, tokens) - expected).abs().max() < gap * expected.abs().max()


def test_gradients_are_those_of_transformers(
    tiny_model: TinyModel, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, directory = tiny_model("gemma3", True, torch.float64)
    in_float64(theirs, monkeypatch)
    tokens, offsets = packed([23])
    ours = load_decoder(directory, torch.float64, CPU)
    ours.token_logprobs(tokens, offsets, torch.arange(1, 23))[0].sum().backward()
    theirs.zero_grad()
    logp = theirs(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    logp[torch.arange(22), tokens[1:]].sum().backward()
    got = {name: p.grad for name, p in ours.named_parameters()}
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    pairs = {
        "layers.0.attention_norm.weight": "model.layers.0.input_layernorm.weight",
        "layers.0.attention_out_norm.weight": "model.layers.0.post_attention_layernorm.weight",
        "layers.1.mlp_norm.weight": "model.layers.1.pre_feedforward_layernorm.weight",
        "layers.2.mlp_out_norm.weight": "model.layers.2.post_feedforward_layernorm.weight",
        "layers.2.q_norm.weight": "model.layers.2.self_attn.q_norm.weight",
        "layers.1.down.weight": "model.layers.1.mlp.down_proj.weight",
        "norm.weight": "model.norm.weight",
    }
    for mine, yours in pairs.items():
        torch.testing.assert_close(got[mine], expected[yours], atol=1e-9, rtol=1e-9)


def test_the_norm_in_half_types_has_the_gradient_of_the_wide_one() -> None:
    from burnish.models.kernels.elementwise import RMSNorm

    norm = RMSNorm(16, 1e-6, 1.0)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(0.1 * torch.randn(16, generator=torch.Generator().manual_seed(1)).bfloat16())
    wide, half = x.float().requires_grad_(), x.clone().requires_grad_()
    weight = torch.arange(80.0).view(5, 16).bfloat16() / 80
    (norm(wide) * weight.float()).sum().backward()
    expected = norm.weight.grad.clone()
    norm.zero_grad()
    (norm.bfloat16()(half) * weight).sum().backward()
    torch.testing.assert_close(half.grad.float(), wide.grad, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(norm.weight.grad.float(), expected, atol=5e-2, rtol=2e-2)


def test_saved_weights_are_theirs_bit_for_bit_and_load_in_transformers(tiny_model: TinyModel, tmp_path: Path) -> None:
    theirs, directory = tiny_model("gemma3", True, torch.bfloat16)
    ours = load_decoder(directory, torch.bfloat16, CPU)
    named = dict(theirs.named_parameters())
    assert {name for name, _ in hf_tensors(ours)} == set(named)
    assert all(torch.equal(tensor, named[name]) for name, tensor in hf_tensors(ours))
    save_decoder(ours, tmp_path, source=directory)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))


def test_a_new_model_is_written_as_one_that_transformers_loads(tmp_path: Path, packed: Packed) -> None:
    new = NewModel(family="gemma3_text", hidden_size=32, num_layers=7, num_heads=4, num_kv_heads=1, mlp_size=48)
    arch = new_architecture(new, 61)
    assert arch.local_layers == (True,) * 5 + (False, False)
    model = Decoder(arch)
    initialise(model, 0, 0.2)
    assert not model.norm.weight.any()
    save_decoder(model, tmp_path, source=None)
    assert architecture_from_hf(json.loads((tmp_path / "config.json").read_text())) == arch
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens, _ = packed([600])  # longer than the window of 512
    assert (our_logprobs(model, tokens) - their_logprobs(theirs, tokens)).abs().max() < 1e-4


def test_old_and_new_configs_say_the_same() -> None:
    old = architecture_from_hf(CONFIG)
    kinds = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    new = {k: v for k, v in CONFIG.items() if not k.startswith("rope")}
    assert architecture_from_hf({**new, "layer_types": kinds, "rope_parameters": nested}) == old
    assert old.windows == (5, 5, 5, 5, 5, None, 5)
    assert (old.rope_theta, old.local_theta) == (1_000_000.0, 10_000.0)
    scaled = architecture_from_hf({**CONFIG, "rope_scaling": {"type": "linear", "factor": 8.0}})
    assert scaled.rope_scaling is not None
    assert scaled.rope_scaling["factor"] == 8.0
    assert architecture_from_hf(architecture_to_hf(old, "float32", (1,), 0)) == old


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_activation": "gelu"}, "activation 'gelu' is not gelu_pytorch_tanh"),
        ({"layer_types": ["chunked_attention"] * 7}, "layers of type 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "lists 1 layers, and there are 7"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert why_not_native(CONFIG) is None
    assert reason in str(why_not_native({**CONFIG, **change}))


def test_a_config_without_a_size_names_it() -> None:
    config = {k: v for k, v in CONFIG.items() if k != "intermediate_size"}
    assert why_not_native(config) is None
    with pytest.raises(UserError, match="no number for 'intermediate_size'"):
        architecture_from_hf(config)


@pytest.mark.slow  # half a minute on two free cores
@pytest.mark.skipif(not REAL.is_dir(), reason="BURNISH_GEMMA3 does not name a directory with gemma3-270m")
def test_the_real_model_agrees_with_transformers_and_its_engines_with_it() -> None:
    theirs = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32)
    ours = load_decoder(REAL, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat([torch.tensor([2]), torch.randint(3, 60_000, (540,), generator=generator)])  # past the window
    with torch.no_grad():
        expected = their_logprobs(theirs, tokens)
        got = our_logprobs(ours, tokens)
    assert (got - expected).abs().max() < 1e-5 * float(expected.abs().max())
    prompt = tuple(tokens[:530].tolist())
    request = Request("a", prompt, SamplingOptions(max_tokens=3, temperature=0.0), 0)
    for engine in (DenseEngine(ours), PagedEngine(ours, max_rows=1)):
        engine.submit([request])
        (done,) = engine.stream()
        whole = torch.tensor([*prompt, *done.tokens.tolist()])
        with torch.no_grad():
            logp = their_logprobs(theirs, whole)[-3:]
            best = theirs(input_ids=whole[None], use_cache=False).logits[0, -4:-1].argmax(-1)
        assert best.tolist() == done.tokens.tolist()
        assert (torch.from_numpy(done.logp) - logp).abs().max() < 1e-3


def test_a_text_begins_with_bos_even_where_the_tokenizers_files_forget_it(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE({"<pad>": 0, "<eos>": 1, "<bos>": 2, "a": 3, "b": 4}, []))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(tmp_path)
    for family, expected in (("gemma3_text", [2, 3, 4]), ("llama", [3, 4])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("ab", special=True) == expected
        assert tokenizer.encode("ab") == [3, 4]  # a rendered chat template has its BOS already
