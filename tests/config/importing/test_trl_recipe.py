"""TRL scripts become recipes that load, by their syntax tree alone, and every argument is in the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.foreign_keys.counterparts import has_key, leading_key, our_key
from burnish.config.foreign_keys.trl_keys import TRL
from burnish.config.importing.draft import DataFacts, Imported, TableRow
from burnish.config.importing.trl_recipe import import_trl
from burnish.config.importing.trl_script import read_trl_script
from burnish.config.loading import load_tree
from burnish.config.stages import CONFIG_TYPES

SCRIPTS = Path(__file__).parent / "scripts"


def imported(path: Path, **options: Any) -> tuple[Any, Imported, dict[str, TableRow]]:
    made = import_trl(path, Path("recipe.yaml"), {}, options.pop("facts", DataFacts()), **options)
    config = load_tree(CONFIG_TYPES[made.command], made.tree, Path("recipe.yaml")).config
    return config, made, {row.key: row for row in made.rows}


def from_text(tmp_path: Path, arguments: str, name: str = "GRPO", trainer: str = "") -> tuple[Any, dict[str, TableRow]]:
    path = tmp_path / "train.py"
    path.write_text(
        f"trainer = {name}Trainer('m', args={name}Config({arguments}){', ' + trainer if trainer else ''})\n"
    )
    config, _, rows = imported(path)
    return config, rows


def test_grpo() -> None:
    config, made, rows = imported(SCRIPTS / "trl_grpo.py")
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.rollout.prompts, config.rollout.n, config.rollout.max_tokens) == (
        4,
        8,
        512,
    )  # 8 x 4 completions, 8 a prompt
    assert (config.data.train[0].path, config.data.train[0].prompt_key) == ("data/sums.jsonl", "question")
    assert (config.training.steps, config.training.optimizer.schedule, config.training.optimizer.warmup) == (
        40,
        "cosine",
        0.1,
    )
    algorithm = config.algorithm
    assert (algorithm.advantage.std, algorithm.aggregation.name) == ("none", "seq-mean-token-sum-norm")
    assert (algorithm.clip.low, algorithm.clip.high) == (0.2, 0.28)
    assert (algorithm.kl.loss.coef, algorithm.kl.loss.is_corrected) == (0.04, True)
    assert (config.run.directory, config.run.name, config.run.trackers[0].name) == ("outputs", "sums", "wandb")
    assert [(part.name, part.weight) for part in config.reward.parts] == [
        ("recipe_rewards.py:correct", 1.0),
        ("recipe_rewards.py:tagged", 0.2),
    ]
    assert rows["my_new_option"] == TableRow("my_new_option", 3, "none", "")
    assert rows["report_to"].verdict == "differs"
    assert "my_tracker is none of" in rows["report_to"].ours
    assert any("changes its rows with map(" in note for note in made.notes)


@pytest.mark.parametrize("name", ["trl_grpo.py", "trl_dpo.py", "trl_sft.py"])
def test_every_argument_has_one_row(name: str) -> None:
    found = read_trl_script(SCRIPTS / name, {}, None)
    given = {*found.arguments, *found.trainer} - {"args"}
    rows = [row for row in imported(SCRIPTS / name)[1].rows if not row.is_default]
    assert sum(row.num_keys for row in rows) == len(given)
    assert {row.key for row in rows if row.num_keys == 1} <= given


@pytest.mark.parametrize("name", ["trl_grpo.py", "trl_dpo.py", "trl_sft.py"])
def test_translations_agree_with_the_table_of_counterparts(name: str) -> None:
    config, made, _ = imported(SCRIPTS / name)
    for row in made.rows:
        if row.verdict == "translated" and "=" in row.ours:
            key = leading_key(row.ours)
            assert has_key(type(config), key), row
            listed = leading_key(our_key(TRL[row.key], type(config)) or key) if row.key in TRL else key
            assert key.startswith(listed) or listed.startswith(key), (row, listed)


def test_reward_functions_are_copied_with_what_they_use_and_without_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, made, _ = imported(SCRIPTS / "trl_grpo.py")
    text = made.files["recipe_rewards.py"]
    assert "GRPO" not in text
    assert "dataset" not in text
    scope: dict[str, Any] = {}
    exec(text, scope)  # the functions of the script, which has no training left
    assert scope["correct"](["<answer>4</answer>", "4"], answer=["4", "4"]) == [1.0, 0.0]


def test_dpo_with_lora_on_four_bits() -> None:
    config, made, rows = imported(SCRIPTS / "trl_dpo.py")
    assert (made.command, config.seed) == ("prefer", 7)
    lora, stage = config.model.lora, config.preference
    assert (lora.rank, lora.alpha, lora.targets, lora.base) == (32, 64, "all-linear", "nf4-double")
    assert (stage.loss.name, stage.loss.beta, stage.batch_size, stage.max_tokens, stage.updates) == (
        "ipo",
        0.05,
        32,
        2048,
        300,
    )
    assert (stage.optimizer.name, stage.optimizer.lr, stage.optimizer.schedule) == ("adam8bit", 5e-6, "linear")
    assert (stage.held_out[0].limit, stage.held_out_every) == (500, 50)
    assert rows["push_to_hub"].verdict == "none"
    assert rows["processing_class"].verdict == "same"
    assert "hf download trl-lib/ultrafeedback_binarized" in " ".join(made.notes)


def test_sft_with_argparse_and_the_environment() -> None:
    config, made, rows = imported(SCRIPTS / "trl_sft.py")
    assert (made.command, config.model.path) == ("sft", "HuggingFaceTB/SmolLM2-135M")
    assert (config.sft.optimizer.lr, config.sft.batch_size, config.sft.optimizer.warmup) == (1e-5, 32, 5)
    assert rows["weight_decay"] == TableRow(
        "weight_decay",
        "compute_decay()",
        "differs",
        "its value is not known without running the script: set it by hand",
    )
    assert rows["train_dataset"].verdict == "differs"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("loss_type='grpo'", {"aggregation": "seq-mean-token-mean", "clip": "ppo"}),
        ("", {"aggregation": "token-mean", "clip": "ppo", "advantage": "grpo", "reference": "none"}),
        ("loss_type='cispo', epsilon_high=5.0", {"clip": "is_weight", "loss": "sg_logprob"}),
        ("loss_type='sapo'", {"clip": "soft", "aggregation": "seq-mean-token-mean"}),
        (
            "loss_type='vespo', vespo_k_pos=1.5, use_vllm=True, vllm_importance_sampling_mode='token_truncate'",
            {"clip": "gamma", "loss": "sg_logprob", "aggregation": "token-mean", "correction": "decoupled"},
        ),
        (
            "loss_type='luspo', importance_sampling_level='sequence'",
            {"ratio": "sequence", "aggregation": "seq-mean-token-sum"},
        ),
        ("loss_type='grpo', importance_sampling_level='sequence', epsilon=3e-4", {"ratio": "sequence"}),
        ("multi_objective_aggregation='normalize_then_sum'", {"advantage": "gdpo"}),
        ("beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=1.0", {"reference": "hard_sync"}),
        ("use_vllm=True, vllm_importance_sampling_mode='token_truncate'", {"correction": "decoupled"}),
    ],
)
def test_loss_types_and_their_relatives(arguments: str, expected: dict[str, str], tmp_path: Path) -> None:
    a = from_text(tmp_path, arguments)[0].algorithm
    slots = {
        name: getattr(a, name).name for name in ("advantage", "ratio", "clip", "loss", "aggregation", "correction")
    }
    slots["reference"] = a.kl.reference.name
    assert expected.items() <= slots.items()
    assert a.filters == []


def test_no_limit_is_a_large_one(tmp_path: Path) -> None:
    assert from_text(tmp_path, "max_length=None", "DPO")[0].preference.max_tokens == 32768
    assert from_text(tmp_path, "", "DPO")[0].preference.max_tokens == 1024


def test_updates_are_counted_as_steps(tmp_path: Path) -> None:
    arguments = "steps_per_generation=8, gradient_accumulation_steps=2, num_iterations=3, max_steps=120, save_steps=24"
    config, _ = from_text(tmp_path, arguments)
    assert (config.rollout.prompts, config.training.mini_batches, config.training.epochs) == (8, 4, 3)
    assert (config.training.steps, config.run.save_every) == (10, 2)


def test_epochs_are_steps_where_the_rows_can_be_counted(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from datasets import load_dataset\n"
        "rows = load_dataset('json', data_files='a.jsonl', split='train[:60]')\n"
        "SFTTrainer(model='m', train_dataset=rows, args=SFTConfig(num_train_epochs=2, per_device_train_batch_size=8))\n"
    )
    config, _, _ = imported(path, facts=DataFacts(lambda name: 100))
    assert config.sft.updates == 15
    assert imported(path, facts=DataFacts(lambda name: 100), processes=4)[0].sft.updates == 4


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("my_rewards.helpful", None),
        ("'org/reward-model'", {"name": "model", "options": {"path": "org/reward-model"}}),
        ("graded", {"name": "scores:graded"}),
        ("accuracy_reward", {"name": "math"}),
    ],
)
def test_rewards_of_other_kinds(reward: str, part: dict[str, Any] | None, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from trl.rewards import accuracy_reward\nfrom scores import graded\nimport my_rewards\n"
        f"GRPOTrainer('m', reward_funcs={reward}, args=GRPOConfig('out'), train_dataset=make())\n"
    )
    _, made, _ = imported(path)
    if part is None:
        assert any("is not known without running the script" in note for note in made.notes)
    else:
        assert made.tree["reward"]["parts"] == [part]


def test_a_guarded_script_is_named_itself(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def score(completions, **kwargs):\n    return [0.0] * len(completions)\n"
        "def main():\n    GRPOTrainer('m', reward_funcs=score, args=GRPOConfig('out'), train_dataset=make()).train()\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    made = import_trl(path, tmp_path / "recipe.yaml", {}, DataFacts())
    assert made.tree["reward"]["parts"] == [{"name": "train.py:score"}]
    assert made.files == {}


def test_a_command_line_of_trl_is_read_like_its_script() -> None:
    config, made, rows = imported(SCRIPTS / "trl_dpo.sh")
    assert (made.command, config.model.path) == ("prefer", "Qwen/Qwen2-0.5B-Instruct")
    lora, stage = config.model.lora, config.preference
    assert (lora.rank, lora.alpha, lora.targets, lora.base) == (32, 16, ["q_proj", "v_proj"], "nf4")
    assert (stage.batch_size, stage.updates, stage.data[0].limit) == (
        2 * 8 * 4,
        200,
        1000,
    )  # four processes of accelerate
    assert rows["model_name_or_path"].verdict == "translated"
    assert rows["remove_unused_columns"].verdict == "same"


def test_a_reward_file_of_verl_is_no_script_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "verl.sh"
    path.write_text("python -m verl.trainer.main_ppo custom_reward_function.path=my/reward.py\n")
    with pytest.raises(UserError, match="no command runs TRL"):
        imported(path)


def test_what_sft_learns_from_and_its_clipping(tmp_path: Path) -> None:
    config, rows = from_text(tmp_path, "max_grad_norm=0, completion_only_loss=False", "SFT")
    assert config.sft.optimizer.clip_norm == 1e9
    assert rows["completion_only_loss"].verdict == "differs"
    assert from_text(tmp_path, "completion_only_loss=True", "SFT")[1]["completion_only_loss"].verdict == "same"


def test_arguments_that_are_not_in_the_script_are_said_to_be_defaults(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "args, model = TrlParser(GRPOConfig).parse_args()\nGRPOTrainer(model=model.path, args=args, train_dataset=rows)\n"
    )
    _, made, rows = imported(path)
    assert rows["args"].verdict == "differs"
    assert rows["model"] == TableRow(
        "model", "model.path", "differs", "the model is not known without running the script: set model.path"
    )
    assert made.tree["model"]["path"] == "path/to/model"


def test_a_yaml_of_trl_needs_its_trainer(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    text = "model_name_or_path: m\ndataset_name: rows.jsonl\nnum_generations: 4\nreward_funcs: [accuracy_reward, my.scores.brief]\n"
    path.write_text(text + "my_option: 1\n")
    with pytest.raises(UserError, match="give --trainer grpo or"):
        imported(path)
    config, _, rows = imported(path, trainer="grpo")
    assert (config.data.train[0].path, config.rollout.n) == ("rows.jsonl", 4)
    assert [part.name for part in config.reward.parts] == ["math", "my.scores:brief"]
    assert rows["my_option"].verdict == "none"
    (tmp_path / "run.sh").write_text("trl grpo --config grpo.yaml --num_generations 16\n")
    assert imported(tmp_path / "run.sh")[0].rollout.n == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "line 1: not valid Python"),
        ("print(1)", "no call of GRPOConfig"),
        ("GRPOConfig('a')\nDPOConfig('b')", "several trainers: choose one with --trainer grpo or --trainer dpo"),
    ],
)
def test_other_scripts_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        imported(path)


@pytest.mark.parametrize(
    "value", ["9**9**9", "'a' * 10**10", "'%999999999d' % 1", "2.0**4096", "1 / 0", "[][3]", "f(1)"]
)
def test_values_that_cannot_or_should_not_be_computed_are_rows(value: str, tmp_path: Path) -> None:
    rows = from_text(tmp_path, f"learning_rate={value}")[1]
    assert rows["learning_rate"].verdict == "differs"
