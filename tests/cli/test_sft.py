"""`burnish sft`: the printed loss, the saved model, and resuming after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.cli.main import main
from burnish.config.loading import dump, load
from burnish.config.model import Model, NewModel
from burnish.config.schema import Sft, SftConfig
from burnish.data.supervised import Example, example_order
from burnish.models.policy import load_policy
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.run_directory import RunDirectory, run_name
from burnish.trainers import sft
from burnish.training.forward import Packing
from burnish.training.learner import Learner, Update
from burnish.training.meter import Meter
from burnish.training.parallel.ranks import SOLO
from tests.cli.crashing_runs import killed_after

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
sft:
  data: {task: sort_digits, options: {num: 24}}
  updates: 7
  batch_size: 8
  optimizer: {lr: 1.0e-2, warmup: 2, schedule: linear}
run: {directory: runs, save_every: 3}
"""


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_leaves_metrics_a_model_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "tiny.yaml"]) == 0
    rows = read_metrics(Path("runs/tiny-0/metrics.jsonl"))
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == [f"final loss: {rows[-1]['sft/loss']:.4f}", "model: runs/tiny-0/checkpoints/step-000007"]
    checkpoint = Path("runs/tiny-0/checkpoints/step-000007")
    assert json.loads((checkpoint / "trainer.json").read_text()) == {"updates": 7}
    assert "updates: 7" in Path("runs/tiny-0/config.yaml").read_text()
    assert main(["sample", str(checkpoint), "4321>", "--max-tokens", "8"]) == 0
    assert main(["sft", "tiny.yaml"]) == 0  # again: nothing is left to do
    assert "is complete: all 7 updates are done" in capsys.readouterr().out
    assert main(["sft", "tiny.yaml", "model.new.max_positions=4", "--fresh"]) == 2
    assert [folder.name for folder in Path("runs").iterdir()] == ["tiny-0"]  # what is refused moves no old run
    assert main(["sft", "tiny.yaml", "sft.updates=1", "--fresh"]) == 0
    assert "the old run is now runs/tiny-0.1" in capsys.readouterr().out
    assert len(read_metrics(Path("runs/tiny-0.1/metrics.jsonl"))) == 7
    assert len(read_metrics(Path("runs/tiny-0/metrics.jsonl"))) == 1
    Path("runs/tiny-0/metrics.jsonl").unlink()
    assert main(["sft", "tiny.yaml", "sft.updates=1"]) == 0
    assert "final loss: not known (metrics.jsonl has no line of the last update)" in capsys.readouterr().out


@pytest.mark.parametrize("kill_after", [0, 2, 5])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(kill_after: int) -> None:
    assert main(["sft", "tiny.yaml", "run.directory=whole"]) == 0
    with killed_after(kill_after):
        main(["sft", "tiny.yaml", "run.directory=broken"])
    assert len(read_metrics(Path("broken/tiny-0/metrics.jsonl"))) == kill_after
    assert main(["sft", "tiny.yaml", "run.directory=broken"]) == 0
    whole, broken = Path("whole/tiny-0"), Path("broken/tiny-0")
    assert without_times(whole / "metrics.jsonl") == without_times(broken / "metrics.jsonl")
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert_same_tensors(whole / "checkpoints/step-000007" / name, broken / "checkpoints/step-000007" / name)


def test_the_first_loss_is_the_mean_nll_of_what_the_demonstrations_say() -> None:
    from transformers import AutoModelForCausalLM

    Path("d.jsonl").write_text('{"prompt": "21>", "completion": "12"}\n{"prompt": "5310>", "completion": "0135"}\n')
    data = ["sft.data=[{path: d.jsonl}]", "model.new=null", "model.path=start", "sft.updates=1", "sft.batch_size=2"]
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    policy = load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=4)
    Path("start").mkdir()
    policy.save(Path("start"))
    assert main(["sft", "tiny.yaml", *data]) == 0
    theirs: Any = AutoModelForCausalLM.from_pretrained("start", dtype=torch.float32)
    losses = []
    for prompt, completion in (("21>", "12"), ("5310>", "0135")):
        context = policy.tokenizer.encode(prompt)
        tokens = torch.tensor([*context, *policy.tokenizer.encode(completion), policy.tokenizer.eos_ids[0]])
        logp = theirs(tokens[None]).logits[0].detach().log_softmax(-1)
        losses += [-float(logp[i - 1, tokens[i]]) for i in range(len(context), len(tokens))]
    assert read_metrics(Path("runs/tiny-0/metrics.jsonl"))[0]["sft/loss"] == pytest.approx(
        sum(losses) / len(losses), abs=1e-5
    )


def test_ctrl_c_saves_and_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import signal

    update = Learner.update

    def interrupted(self: Learner, *args: Any) -> Update:
        if self.updates == 1:
            signal.raise_signal(signal.SIGINT)
        return update(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        assert main(["sft", "tiny.yaml"]) == 0
    assert "stopped; the same command goes on from here: runs/tiny-0" in capsys.readouterr().out
    assert [p.name for p in Path("runs/tiny-0/checkpoints").glob("step-*")] == ["step-000002"]
    assert main(["sft", "tiny.yaml"]) == 0
    assert [r["step"] for r in read_metrics(Path("runs/tiny-0/metrics.jsonl"))] == [1, 2, 3, 4, 5, 6, 7]


class Recorder:
    """Stands for a learner whose every second update is skipped; keeps the tokens it was given."""

    device, dtype = torch.device("cpu"), torch.float32
    meter, names = Meter(device, None), {"weight": torch.zeros(1)}
    ranks, packing = SOLO, Packing(1000)

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.updates = 0

    def usage(self) -> dict[str, float]:
        return {}

    def update(self, batch: Any, loss: Any) -> Update:
        self.seen.append(batch.tokens.tolist())
        skipped = len(self.seen) % 2 == 0
        self.updates += not skipped
        return Update({"loss": 1.0}, torch.zeros(0), "not finite" if skipped else None)


def test_a_skipped_update_uses_its_examples_up() -> None:
    examples = [Example(str(i), [0, i], [False, True]) for i in range(1, 8)]
    config, values = Sft(updates=5, batch_size=2), list[dict[str, float]]()
    learner: Any = Recorder()
    sft.train(learner, examples, config, 3, lambda update, v: values.append(v))
    order = example_order(7, 3, 10)
    assert learner.seen == [[0, order[2 * u] + 1, 0, order[2 * u + 1] + 1] for u in range(5)]
    assert [v.get("sft/skipped") for v in values] == [None, 1.0, None, 1.0, None]
    late: Any = Recorder()
    sft.train(late, examples, config, 3, lambda update, v: update == 4, start=2)
    assert late.seen == learner.seen[2:4]


@pytest.mark.parametrize(
    "row", [{"text": "21>12"}, {"question": "21>", "response": "12"}, {"problem": "21>", "answer": "12"}]
)
def test_rows_of_other_systems_are_trained_on(row: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("d.jsonl").write_text(json.dumps(row) + "\n")
    own = ["sft.data=[{task: sort_digits, options: {num: 8}}, {path: d.jsonl}]", "sft.updates=1"]
    assert main(["sft", "tiny.yaml", "--dry-run", *own]) == 0
    assert "data: 9 examples; 1 updates use each 0.9 times" in capsys.readouterr().out
    assert main(["sft", "tiny.yaml", *own]) == 0


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "tiny.yaml", "--dry-run", "sft.updates=9"]) == 0
    assert "updates: 9" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_a_dry_run_refuses_another_config_than_that_of_the_run_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    old = load(SftConfig, Path("tiny.yaml"), ["seed=1"]).config
    RunDirectory.create(Path(old.run.directory), run_name(old.run.name, "tiny", 0), dump(old)).close()
    assert main(["sft", "tiny.yaml", "--dry-run"]) == 2
    assert "exists with another config:\n  seed: 1 there, 0 now" in capsys.readouterr().out
    assert main(["sft", "tiny.yaml", "--dry-run", "--fresh"]) == 0


def test_a_shrunk_recipe_says_what_was_changed_and_runs_in_a_folder_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    big = "model: {path: no/such/model}\nsft: {data: {path: no.jsonl}, updates: 900, batch_size: 64}\n"
    Path("big.yaml").write_text(big)
    assert main(["sft", "big.yaml", "--shrink", "sft.updates=3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "shrunk: sft.batch_size: 64 -> 4" in said
    assert not any("sft.updates" in line for line in said)  # the override changes it back
    assert "shrunk: sft.data: no.jsonl -> sort_digits" in said
    assert said[-1] == "model: runs/big-shrunk-0/checkpoints/step-000003"  # overrides come after shrinking
    assert [r["step"] for r in read_metrics(Path("runs/big-shrunk-0/metrics.jsonl"))] == [1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sft.updatez=1"], "did you mean 'updates'"),
        (["sft.data=[{path: no.jsonl}]", "model.new=null", "model.path=start"], "model directory start does not exist"),
        (["sft.data.options.nun=3"], "option of the demonstrations of 'sort_digits'"),
        (["model.new.max_positions=4"], "no examples left"),
        (["sft.overlong=error", "model.new.max_positions=12"], "more than max_tokens=12"),
    ],
)
def test_bad_input_is_explained_and_leaves_no_run(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", "tiny.yaml", *overrides]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_examples_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "tiny.yaml", "sft.updates=1", "model.new.max_positions=12"]) == 0
    assert "examples are longer than 12 tokens and were left out" in capsys.readouterr().out
