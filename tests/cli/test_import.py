"""`burnish import`: scripts of verl and TRL become recipes, and the recipes train with `--shrink`."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.cli.main import main
from tests.cli.train_recipes import metrics

SCRIPTS = Path(__file__).parents[1] / "config" / "importing" / "scripts"
pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(
    ("system", "name", "command"),
    [
        ("verl", "verl_gspo_lora.sh", "train"),
        ("trl", "trl_dpo.py", "prefer"),
        ("verl", "verl_grpo.sh", "train"),
        ("verl", "verl_ppo.sh", "train"),
        ("verl", "verl_dapo.sh", "train"),
        ("verl", "verl_multiturn.yaml", "train"),
        ("trl", "trl_grpo.py", "train"),
        ("verl", "verl_sft.sh", "sft"),
        ("trl", "trl_sft.py", "sft"),
    ],
)
def test_an_imported_script_trains_shrunk(
    system: str, name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", system, str(SCRIPTS / name), "--out", "made/recipe.yaml"]) == 0
    said = capsys.readouterr().out
    assert "translated (" in said
    assert f"run it: burnish {command} made/recipe.yaml" in said
    assert "does not load" not in said
    assert main([command, "made/recipe.yaml", "--shrink", "run.directory=runs", "run.name=r"]) == 0
    assert metrics()[-1]["step"] == 2


def test_without_out_the_recipe_is_printed_and_the_table_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "verl", str(SCRIPTS / "verl_ppo.sh")]) == 0
    shown = capsys.readouterr()
    Path("printed.yaml").write_text(shown.out)
    assert shown.out.startswith("# Made from verl_ppo.sh by `burnish import verl`.\n# Something else here: ")
    assert "no counterpart (1)\n  my.own.key=7\n" in shown.err
    assert "the same here without a key" in shown.err
    assert main(["train", "printed.yaml", "--dry-run", "--shrink"]) == 0


def test_a_recipe_that_exists_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("kept.yaml").write_text("mine")
    assert main(["import", "trl", str(SCRIPTS / "trl_grpo.py"), "--out", "kept.yaml"]) == 2
    assert "kept.yaml exists: give another --out, or --force to replace it" in capsys.readouterr().err
    assert Path("kept.yaml").read_text() == "mine"
    assert not Path("kept_rewards.py").exists()
    assert main(["import", "trl", str(SCRIPTS / "trl_grpo.py"), "--out", "kept.yaml", "--force"]) == 0
    assert "def correct(" in Path("kept_rewards.py").read_text()


def test_rows_are_counted_and_their_data_source_chooses_the_reward(capsys: pytest.CaptureFixture[str]) -> None:
    row = '{"prompt": "1+1?", "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}}\n'
    Path("rows.jsonl").write_text(row * 96)
    Path("run.sh").write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=rows.jsonl data.train_batch_size=32 "
        "trainer.total_epochs=2 actor_rollout_ref.model.path=m"
    )
    assert main(["import", "verl", "run.sh"]) == 0
    shown = capsys.readouterr()
    assert "training.steps=6 (2 epochs of 96 rows)" in shown.err
    assert "- name: number" in shown.out
