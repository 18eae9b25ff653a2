"""Named tensors on their way to vLLM; nothing here needs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.config.errors import UserError
from burnish.config.lora import Lora
from burnish.models import saving
from burnish.models.lora import merged_tensors
from burnish.models.policy import load_policy, whole_tensors
from burnish.models.weights import load_decoder, stored_tensors
from burnish.rollout.vllm import weights
from burnish.rollout.vllm.weights import Update, room_for, trained_tensors, write_adapter, write_config, write_model

Named = list[tuple[str, torch.Tensor]]


def test_where_none_are_handed_over_they_are_the_policys_own(make_policy: Any) -> None:
    policy, other = make_policy(), make_policy(seed=1)
    update = Update(policy)
    for handed, source in (((), policy), (whole_tensors(other), other)):
        got = list(update.tensors(handed))
        expected = dict(whole_tensors(source))
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
        list(Update(policy).tensors(change(list(whole_tensors(policy)))))


def test_a_model_on_its_way_to_a_server_is_whole_in_however_many_files(
    make_policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_policy()
    write_config(policy, tmp_path)
    for size in (saving.FILE_BYTES, 40_000):
        monkeypatch.setattr(weights, "FILE_BYTES", size)
        folder = tmp_path / str(size)
        write_model(folder, whole_tensors(policy))
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
    named = dict(trained_tensors(policy))
    assert len(named) == 2 * 2 * 2
    doubled = {name: 2 * tensor for name, tensor in named.items()}
    write_adapter(tmp_path / "adapter", policy, doubled.items())
    read = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert read.keys() == doubled.keys()
    assert all(torch.equal(read[name], doubled[name]) for name in read)
    from burnish.config.model import Model

    again = load_policy(Model(adapter=str(tmp_path / "adapter")), None, None, 0, tmp_path / "adapter")
    assert all(torch.equal(tensor, doubled[name]) for name, tensor in trained_tensors(again))


def test_of_a_policy_in_4_bits_whole_weights_go_with_the_adapters_added_in(make_policy: Any, tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "base", Lora(rank=4, alpha=8, base="nf4"))
    stored = {name: tensor.whole() for name, tensor in stored_tensors(tmp_path / "base")}
    sent = dict(trained_tensors(policy))
    assert sent.keys() == stored.keys()
    changed = {name for name in sent if not torch.equal(sent[name], stored[name])}
    assert changed == {name for name in stored if "_proj." in name}
    expected = dict(merged_tensors(policy.module))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


def test_vllm_has_room_for_ranks_of_certain_sizes() -> None:
    assert [room_for(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    with pytest.raises(UserError, match="up to rank 512"):
        room_for(513)
