"""Preference training end to end: it learns with any kind of reference, and KTO's mismatched answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Model
from burnish.config.schema import PreferConfig
from burnish.data.preference_pairs import LabelledAnswer
from burnish.data.supervised import Example
from burnish.data.tasks.registry import make_task
from burnish.distributed.roles import build_policy
from burnish.evaluation.completions import read_completions
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers import preference
from burnish.trainers.preference import answer_pairs_of_labelled
from burnish.training.parallel.ranks import SOLO

TINY = """
model: {new: {hidden_size: 32, num_layers: 2, num_heads: 2, mlp_size: 64, max_positions: 32}, device: cpu}
preference:
  data: {task: sort_digits, options: {num: 300}}
  held_out: {task: sort_digits, options: {num: 60}}
  updates: 20
  batch_size: 16
  optimizer: {lr: 3.0e-3}
run: {threads: 1}
"""


def prefer(folder: Path, *overrides: str, text: str = TINY, name: str = "run") -> list[dict[str, Any]]:
    """The metrics of a run."""
    (folder / "recipe.yaml").write_text(text)
    more = [f"run.directory={folder}", f"run.name={name}", *overrides]
    loaded = load(PreferConfig, folder / "recipe.yaml", more)
    outcome = preference.execute(loaded.config, loaded.resolved, loaded.base, name)
    assert outcome is not None
    assert outcome.is_complete
    return read_metrics(outcome.directory / "metrics.jsonl")


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in rows]


@pytest.mark.parametrize(
    ("loss", "least"),
    [
        ("dpo", 0.95),
        ("{name: dpo, beta: 5.0, average: true}", 0.95),
        ("ipo", 0.95),
        ("simpo", 0.9),
        ("orpo", 0.8),
        ("kto", 0.6),
    ],
)
def test_held_out_preferences_are_learnt(loss: str, least: float, tmp_path: Path) -> None:
    rows = prefer(tmp_path, f"preference.loss={loss}")
    kind = "answers" if loss == "kto" else "pairs"
    before, after = (rows[i][f"validation/{kind}/accuracy"] for i in (0, -1))
    assert after >= max(least, before + 0.1), (before, after)
    if "dpo" in loss:
        assert before == 0.5  # policy and reference are the same
    assert rows[-1][f"validation/{kind}/loss"] < rows[0][f"validation/{kind}/loss"]
    assert rows[-1][f"validation/{kind}/margin"] > rows[0][f"validation/{kind}/margin"]


def test_a_cached_reference_and_one_that_is_asked_give_the_same_run(tmp_path: Path) -> None:
    short = ["preference.updates=4", "model.dtype=float64"]
    cached = prefer(tmp_path, *short, name="cached")
    live = prefer(tmp_path, *short, "preference.reference=live", name="live")
    for one, other in zip(without_times(cached), without_times(live), strict=True):
        assert one == pytest.approx(other, abs=1e-9)
    assert (tmp_path / "cached/reference").is_dir()
    assert not (tmp_path / "live/reference").exists()


def test_a_damaged_cache_of_the_reference_is_computed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["preference.updates=2", "preference.data.options.num=16", "preference.held_out.options.num=8"]
    prefer(tmp_path, *short, name="r")
    for name, at in (("train", -1), ("held_out", 10)):
        file = tmp_path / "r" / "reference" / f"{name}-00000000.safetensors"
        whole = bytearray(file.read_bytes())
        whole[at] ^= 1  # the last is a value, the other the header
        file.write_bytes(whole)
    expected = without_times(prefer(tmp_path, *[*short[1:], "preference.updates=4"], name="whole"))
    capsys.readouterr()
    assert without_times(prefer(tmp_path, *[*short[1:], "preference.updates=4"], name="r"))[-2:] == expected[-2:]
    said = capsys.readouterr().out
    assert "train-00000000.safetensors is damaged: its log-probs are computed again" in said
    assert "held_out-00000000.safetensors is damaged" in said
    assert "preference.updates: 2 before, 4 from here on" in said


def test_the_token_budget_changes_nothing(tmp_path: Path) -> None:
    """One micro-batch, whole pairs in several, and pairs that no micro-batch has room for."""
    short = ["preference.updates=3", "model.dtype=float64", "preference.data.options.num=48"]
    short.append("preference.held_out.options.num=8")
    runs = [
        without_times(prefer(tmp_path, *short, f"preference.token_budget={b}", name=f"b{b}")) for b in (4096, 60, 12)
    ]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert one == pytest.approx(two, abs=1e-9)


def test_with_adapters_the_reference_is_the_model_without_them(tmp_path: Path) -> None:
    new = load(PreferConfig, None, ["model.new.hidden_size=32", "preference.data.task=sort_digits"]).config
    base = build_policy(new.model.model_copy(update={"device": "cpu"}), new.preference.data, 0, None)
    (tmp_path / "base").mkdir()
    base.save(tmp_path / "base")
    adapted = ["model.new=null", f"model.path={tmp_path / 'base'}", "model.lora.rank=4", "preference.updates=3"]
    cached = prefer(tmp_path, *adapted, name="cached")
    live = prefer(tmp_path, *adapted, "preference.reference=live", name="live")
    for one, other in zip(without_times(cached), without_times(live), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert live[1]["preference/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert live[-1]["preference/margin"] > 0.001
    config = load(PreferConfig, tmp_path / "recipe.yaml", [*adapted, "preference.reference=live"]).config
    policy = build_policy(Model.model_validate(config.model.model_dump()), [], 0, tmp_path)
    reference = preference.live_reference(config, policy, SOLO)
    assert reference is not None
    assert reference.model is policy.module  # no second model


def answer(name: str, prompt: list[int], said: list[int], is_good: bool = True) -> LabelledAnswer:
    mask = [False] * len(prompt) + [True] * len(said)
    return LabelledAnswer(name, Example(name, prompt + said, mask), is_good)


def test_a_mismatched_row_is_the_prompt_with_the_next_answer_to_another_one() -> None:
    answers = [
        answer("a", [1, 2], [10]),
        answer("b", [1, 2], [11], False),
        answer("c", [3], [12, 13]),
        answer("d", [4], [14, 15, 16, 17]),
    ]
    units = answer_pairs_of_labelled(answers, 5)
    assert [unit.second.tokens for unit in units] == [[1, 2, 12, 13], [1, 2, 12, 13], [3, 14, 15, 16, 17], [4, 10]]
    assert units[0].second.mask == [False, False, True, True]
    assert [unit.is_good for unit in units] == [True, False, True, True]
    with pytest.raises(UserError, match="give rows of more than one prompt"):
        answer_pairs_of_labelled(answers[:2], 5)


# --- the toy, with pairs of its own samples --------------------------------------------------------------------------

WARM = """
model: {new: {hidden_size: 128, num_layers: 2, num_heads: 4, mlp_size: 336, max_positions: 64}, device: cpu}
sft:
  data: {task: sort_digits, options: {num: 2000}}
  updates: 250
  batch_size: 128
  optimizer: {lr: 3.0e-3, betas: [0.9, 0.95], warmup: 20, schedule: linear, final: 0.1}
"""
FROM_SAMPLES = """
model: {path: warm, device: cpu}
preference:
  loss: {name: dpo, beta: 1.0}
  data: {path: pairs.jsonl}
  held_out: {task: sort_digits, options: {num: 200}}
  updates: 60
  batch_size: 64
  optimizer: {lr: 1.0e-4, schedule: linear, final: 0.1}
"""


def accuracy(folder: Path, model: str, seed: int) -> float:
    """Greedy, on held-out problems."""
    out = folder / f"eval-{model.replace('/', '-')}"
    arguments = ["--limit", "400", "--max-tokens", "10", "--seed", str(seed), "--out", str(out)]
    assert main(["eval", str(folder / model), "task:sort_digits", *arguments]) == 0
    found: float = json.loads((out / "sort_digits.json").read_text())["accuracy"]
    return found


def sampled_pairs(folder: Path, seed: int, num: int) -> list[dict[str, str]]:
    """A right sample beside up to four wrong ones, of every train problem that the model answers both ways, by the verifier."""
    task = make_task("sort_digits", {}, seed)
    rows = [task.row("train", i) for i in range(num)]
    (folder / "asked.jsonl").write_text(
        "".join(json.dumps({"question": row.prompt, "answer": row.answer}) + "\n" for row in rows)
    )
    sampling = ["--n", "8", "--temperature", "1", "--max-tokens", "10", "--reward", "exact", "--seed", str(seed)]
    out = folder / "samples.jsonl"
    assert main(["eval", str(folder / "warm"), str(folder / "asked.jsonl"), *sampling, "--out", str(out)]) == 0
    right, wrong = dict[str, str](), dict[str, list[str]]()
    for sample in read_completions(out):
        prompt, said = sample["prompt"], sample["completion"]
        if sample["accuracy"] == 1:
            right[prompt] = said
        elif said.strip() and said not in wrong.setdefault(prompt, []):
            wrong[prompt].append(said)
    return [
        {"prompt": prompt, "chosen": right[prompt], "rejected": said}
        for prompt in right
        for said in wrong.get(prompt, [])[:4]
    ]


@pytest.mark.slow  # a minute a seed: a supervised start, 16,000 samples, 60 updates, two evaluations
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pairs_of_its_own_samples_that_a_verifier_judged_teach_a_model(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(seed)
    (tmp_path / "warm.yaml").write_text(WARM)
    assert main(["sft", "warm.yaml", f"seed={seed}", "run.directory=sft", "run.name=run"]) == 0
    (tmp_path / "sft/run/checkpoints/step-000250").rename(tmp_path / "warm")
    pairs = sampled_pairs(tmp_path, seed, 2000)
    assert len(pairs) > 1000
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    rows = prefer(tmp_path, f"seed={seed}", text=FROM_SAMPLES, name="dpo")
    assert rows[-1]["validation/pairs/accuracy"] > 0.75  # of 0.5, on wrong answers that are not its own
    before, after = accuracy(tmp_path, "warm", seed), accuracy(tmp_path, "dpo/checkpoints/step-000060", seed)
    print(f"seed {seed}: {len(pairs)} pairs, greedy accuracy {before:.3f} -> {after:.3f}")
    assert after > before + 0.2, (before, after)
