"""The stock `tinker` package and unmodified recipes of tinker-cookbook, in an environment of their own, against a real server.

tinker-cookbook wants an older transformers than this package, so it runs by the interpreter that BURNISH_TINKER_PYTHON names
(`make test-tinker` makes one). There is no hub: a folder laid out like the hub (`org/name`) is the recipes' working directory.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.serve.tinker.requests import AdamOptions, Datum
from burnish.serve.tinker.training_model import TrainingModel
from tests.serve.conftest import architecture
from tests.serve.tinker.conftest import NAME, Server, Start

PYTHON = os.environ.get("BURNISH_TINKER_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs the packages tinker and tinker-cookbook: make test-tinker")
CLIENTS = Path(__file__).parent / "clients"
RECIPE_MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows; its renderer writes plain `User:` and `Assistant:` lines."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
STRAWBERRY = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)


def run_client(server: Server, *words: str, cwd: Path) -> str:
    """Run the client's interpreter; returns what it printed."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "hf"), "TINKER_TELEMETRY": "0"}
    target = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    done = subprocess.run(
        [PYTHON, *words], cwd=cwd, env=kept | offline | target, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}\n{server.log[-20:]}"
    return done.stdout


def test_every_call_of_the_client(serve_tinker: Start, tmp_path: Path) -> None:
    server = serve_tinker(tmp_path / "checkpoints")
    found: dict[str, Any] = json.loads(
        run_client(server, str(CLIENTS / "every_call.py"), NAME, cwd=tmp_path).splitlines()[-1]
    )
    assert (found["models"], found["rank"], found["num_outputs"]) == ([NAME], [4, 2], [1100, 1100])
    assert found["loss"][0] == pytest.approx(found["loss"][1])  # new adapters change nothing
    assert all(norm > 0 for norm in found["grad_norm"])
    assert (found["wide"], found["wide_equals_plain"]) == ([[39, 2], [39]], True)
    assert found["custom"]["loss:sum"] == pytest.approx(found["custom"]["squared"])
    assert found["ppo"] >= found["importance_sampling"]
    assert (found["samples"], found["ids"], found["distinct"]) == ([[5, 5]] * 3, 6, 3)
    assert found["kl"] != 0
    assert found["resumed"][0] == found["resumed"][1] == found["after_failures"]
    assert (found["saved"], found["run"]) == (True, 4)
    assert found["checkpoints"] == ["sampler_weights/weights", "weights/state"]
    assert [one["category"] for one in found["failures"]] == ["user"] * 3
    assert "not one of the model's" in found["failures"][2]["message"]


# --- recipes -----------------------------------------------------------------------------------------------------------------


def rendered(question: str, answer: str) -> str:
    """A row of the RL recipe with an answer, as the cookbook's renderer writes it."""
    first = f"User: How many r's are in strawberry?{SUFFIX}\n\nAssistant: {STRAWBERRY}\n\n"
    return f"{first}User: {question}{SUFFIX}\n\nAssistant: {answer}\n\nUser:"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    """A folder laid out like the hub: the tokenizer, and the two data sets that the recipes name."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / RECIPE_MODEL).mkdir(parents=True)
    tiny_tokenizer.save(folder / RECIPE_MODEL)
    sums, chats = folder / "openai/gsm8k", folder / "HuggingFaceH4/no_robots"
    for path in (sums, chats):
        (path / "data").mkdir(parents=True)
    questions = [f"What is {a}?" for a in range(8)] * 8
    write_rows(sums / "data/train.jsonl", [{"question": q, "answer": "so\n#### 1"} for q in questions])
    write_rows(sums / "data/test.jsonl", [{"question": q, "answer": "so\n#### 1"} for q in questions[:4]])
    (sums / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_dir: data\n---\n")
    talk = [[{"role": "user", "content": q}, {"role": "assistant", "content": "I do not know."}] for q in questions]
    write_rows(chats / "data/train.jsonl", [{"messages": messages} for messages in talk])
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def guesser(tiny_tokenizer: Tokenizer) -> PolicyModel:
    """A tiny model that has learnt to answer the RL recipe's questions with 1 or 2, each as often."""
    arch = architecture(tiny_tokenizer.vocab_size, 1024)
    model = Decoder(arch)
    initialise(model, seed=2, std=0.1)
    base = PolicyModel(model, tiny_tokenizer, None, "")
    learner = TrainingModel(base, None, seed=0, token_budget=8192)
    rows = []
    for answer in ("\\boxed{1}", "\\boxed{2}"):
        tokens = tiny_tokenizer.encode(rendered("What is 5?", answer))
        start = len(tiny_tokenizer.encode(rendered("What is 5?", "").removesuffix(" \n\nUser:")))
        weights = (np.arange(1, len(tokens)) >= start).astype(np.float32)
        inputs = {"target_tokens": np.array(tokens[1:]), "weights": weights / weights.sum()}
        rows.append(Datum(np.array(tokens[:-1]), inputs))
    loss = 0.0
    for _ in range(120):
        loss = learner.forward_backward(rows, "cross_entropy", {}).metrics["loss:sum"] / 2
        learner.optim_step(AdamOptions(learning_rate=1e-2))
    assert loss < 0.1, loss
    return PolicyModel(learner.module.requires_grad_(False), tiny_tokenizer, None, "")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_supervised_recipe_learns_saves_and_resumes(serve_tinker: Start, guesser: PolicyModel, hub: Path) -> None:
    server = serve_tinker(hub / "checkpoints", base=guesser, aliases=frozenset({RECIPE_MODEL}))
    words = ["-m", "tinker_cookbook.recipes.sl_loop", f"model_name={RECIPE_MODEL}", "log_path=sl", "batch_size=8"]
    words += ["learning_rate=0.01", "lora_rank=8", "save_every=2", "max_length=512"]
    run_client(server, *words, "max_steps=4", cwd=hub)
    first = metrics(hub / "sl")
    assert [row["step"] for row in first] == [0, 1, 2, 3]
    assert first[3]["train_mean_nll"] < 0.9 * first[0]["train_mean_nll"]
    saved = hub / "sl/checkpoints.jsonl"
    saved.write_text(
        saved.read_text().splitlines(keepends=True)[0]
    )  # as if it had been killed after the save before step 2
    run_client(server, *words, "max_steps=4", cwd=hub)
    again = metrics(hub / "sl")[4:]
    assert [row["step"] for row in again] == [2, 3]
    assert [row["train_mean_nll"] for row in again] == [row["train_mean_nll"] for row in first[2:]]


def test_the_rl_recipe_learns(serve_tinker: Start, guesser: PolicyModel, hub: Path) -> None:
    server = serve_tinker(hub / "checkpoints", base=guesser, aliases=frozenset({RECIPE_MODEL}))
    words = ["-m", "tinker_cookbook.recipes.rl_loop", f"model_name={RECIPE_MODEL}", "log_path=rl", "batch_size=8"]
    words += ["group_size=8", "learning_rate=0.02", "lora_rank=8", "max_tokens=16", "save_every=0"]
    run_client(server, *words, cwd=hub)
    rewards = [row["reward/total"] for row in metrics(hub / "rl")]
    assert len(rewards) == 8
    assert rewards[0] < 0.8
    assert max(rewards[-3:]) > 0.85


def test_the_librarys_rl_loop_learns_with_a_kl_penalty_to_the_base(
    serve_tinker: Start, guesser: PolicyModel, hub: Path
) -> None:
    server = serve_tinker(hub / "checkpoints", base=guesser, aliases=frozenset({RECIPE_MODEL}))
    run_client(server, str(CLIENTS / "kl_to_base.py"), RECIPE_MODEL, "kl", cwd=hub)
    rows = metrics(hub / "kl")
    assert len(rows) == 6
    # New adapters leave the base as it is, and the sampler's log-probs are the learner's.
    assert rows[0]["kl_policy_base"] == pytest.approx(0, abs=1e-5)
    assert all(abs(row["optim/kl_sample_train_v1"]) < 1e-5 for row in rows)
    assert rows[-1]["kl_policy_base"] > 0.005
    assert max(row["env/all/reward/total"] for row in rows) > rows[0]["env/all/reward/total"] + 0.15
    assert "test/env/all/reward/total" in rows[-1]
