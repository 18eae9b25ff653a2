"""Named tensors for vLLM; these tests do not need vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.config.model import Lora
from burnish.inference import server_client
from burnish.inference.server_client import write_weight_files
from burnish.inference.vllm.vllm_engine import engine_arguments
from burnish.inference.vllm.vllm_weights import (
    WeightUpdate,
    max_lora_rank,
    trained_tensors,
    write_adapter,
    write_config,
)
from burnish.models import weight_files
from burnish.models.lora.adapters import merged_tensors
from burnish.models.policy import full_hf_tensors, load_policy
from burnish.models.weight_files import hf_tensors, load_decoder, stored_tensors

Named = list[tuple[str, torch.Tensor]]


def test_where_none_are_handed_over_they_are_the_policys_own(make_policy: Any) -> None:
    policy, other = make_policy(), make_policy(seed=1)
    update = WeightUpdate(policy, adapters=False)
    for handed, source in (((), policy), (full_hf_tensors(other), other)):
        got = list(update.tensors(handed))
        expected = dict(full_hf_tensors(source))
        assert [name for name, _ in got] == list(expected)
        assert all(torch.equal(tensor, expected[name]) and not tensor.requires_grad for name, tensor in got)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda named: named[:-1], r"without 1 of 21 tensors, first lm_head.weight"),
        (lambda named: named[4:], r"without 4 of 21 tensors, first model.embed_tokens.weight"),
        (lambda named: [*named, ("model.norms.weight", torch.zeros(3))], "'model.norms.weight'.*model.norm.weight"),
        (
            lambda named: [(n, t[:5] if n == "model.norm.weight" else t) for n, t in named],
            r"model.norm.weight as \(5,\)",
        ),
    ],
)
def test_a_tensor_that_is_missing_unknown_or_of_another_shape_is_named(
    make_policy: Any, change: Callable[[Named], Named], words: str
) -> None:
    policy = make_policy()
    with pytest.raises(UserError, match=words):
        list(WeightUpdate(policy, adapters=False).tensors(change(list(full_hf_tensors(policy)))))


def test_a_model_on_its_way_to_a_server_is_whole_in_however_many_files(
    make_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    write_config(policy, tmp_path)
    for size in (weight_files.FILE_BYTES, 40_000):
        monkeypatch.setattr(server_client, "FILE_BYTES", size)
        folder = tmp_path / str(size)
        write_weight_files(folder, full_hf_tensors(policy))
        (folder / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
        read = load_decoder(folder, torch.float32, torch.device("cpu"))
        for (name, ours), (_, theirs) in zip(policy.module.named_parameters(), read.named_parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        assert len(list(folder.glob("*.safetensors"))) == (1 if size > 40_000 else 10)


def test_only_a_config_is_written_to_start_from(make_policy: Any, tmp_path: Path) -> None:
    write_config(make_policy(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_of_a_policy_with_adapters_these_alone_go_and_make_a_peft_directory(make_policy: Any, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "base", Lora(rank=4, alpha=8, targets=["q_proj", "down_proj"]))
    named = dict(trained_tensors(policy, adapters=True))
    assert len(named) == 2 * 2 * 2
    doubled = {name: 2 * tensor for name, tensor in named.items()}
    write_adapter(tmp_path / "adapter", policy, doubled.items())
    read = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert read.keys() == doubled.keys()
    assert all(torch.equal(read[name], doubled[name]) for name in read)
    from burnish.config.model import Model

    again = load_policy(Model(adapter=str(tmp_path / "adapter")), None, None, 0, tmp_path / "adapter")
    assert all(torch.equal(tensor, doubled[name]) for name, tensor in trained_tensors(again, adapters=True))


def test_to_a_server_of_a_policy_in_4_bits_whole_weights_go_with_the_adapters_added_in(
    make_policy: Any, tmp_path: Path
) -> None:
    policy = make_policy(tmp_path / "base", Lora(rank=4, alpha=8, base="nf4"))
    stored = {name: tensor.whole() for name, tensor in stored_tensors(tmp_path / "base")}
    sent = dict(trained_tensors(policy, adapters=False))
    assert sent.keys() == stored.keys()
    changed = {name for name in sent if not torch.equal(sent[name], stored[name])}
    assert changed == {name for name in stored if "_proj." in name}
    expected = dict(merged_tensors(policy.module))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


def test_vllm_in_this_process_starts_from_the_numbers_of_the_4_bits_and_takes_adapters(
    make_policy: Any, tmp_path: Path
) -> None:
    policy = make_policy(tmp_path / "base", Lora(rank=4, alpha=8, base="nf4"))
    given = engine_arguments(policy, Vllm(), 4, None, tmp_path / "folder", can_sleep=False)
    assert given["enable_lora"]
    assert given["model"] == str(tmp_path / "folder" / "base")
    read = load_decoder(Path(given["model"]), torch.float32, torch.device("cpu"))
    expected = dict(hf_tensors(policy.module))
    for name, tensor in hf_tensors(read):
        assert torch.equal(tensor, expected[name]), name


def test_adapters_added_into_half_weights_are_not_rounded_away_for_a_wider_engine(
    make_policy: Any, tmp_path: Path
) -> None:
    policy = make_policy(tmp_path / "base", Lora(rank=4, alpha=8, base="nf4"))
    policy.module.to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if name.endswith("lora_b"):
                parameter.fill_(1e-4)
    below, name = dict(hf_tensors(policy.module)), "model.layers.0.self_attn.o_proj.weight"
    layer = policy.module.layers[0].out
    delta = 2 * (layer.lora_b.detach().double() @ layer.lora_a.detach().double())
    errors = []
    for wide in (False, True):
        sent = dict(WeightUpdate(policy, adapters=False, wide=wide).tensors(()))
        got = sent[name].double() - below[name].double()
        errors.append(float((got - delta).norm() / delta.norm()))
        assert sent["model.norm.weight"].dtype == torch.bfloat16
    assert errors[0] > 0.5
    assert errors[1] < 1e-3


def test_vllm_has_room_for_ranks_of_certain_sizes() -> None:
    assert [max_lora_rank(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    with pytest.raises(UserError, match="up to rank 512"):
        max_lora_rank(513)
