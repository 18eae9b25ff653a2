"""The distillation family learns toys: two teachers, a teacher of another tokenizer, and the policy as its own teacher with more to read.

The task maps one of four digits to another one, so a policy that guesses is right once in four. Each run takes a second or two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.metrics import read_metrics
from tests.made_tokenizers import merging
from tests.trainers.tiny import run_of

TEXT = """
model: {new: {hidden_size: 32, num_layers: 1, num_heads: 2, mlp_size: 64, max_positions: 32}}
data: {train: {task: sort_digits, limit: 4, options: {min_digits: 2, max_digits: 2}}}
reward: {workers: 1}
rollout: {prompts: 4, n: 16, max_tokens: 2}
training: {steps: 20, optimizer: {lr: 3.0e-3}}
algorithm: {kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 100, save_every: 100, threads: 1}
"""
WARM = """
warm_start:
  data: {path: ROWS}
  updates: 80
  batch_size: 32
  optimizer: {lr: 1.0e-2}
"""
ASK = "{k}>"
DIGITS = range(4)
QUICK = ["training.steps=10", "training.optimizer.lr=6.0e-3"]


def row(prompt: str, k: int, answer: int, kind: str = "") -> dict[str, str]:
    answer %= len(DIGITS)
    return {"prompt": prompt.format(k=k), "completion": str(answer), "answer": str(answer), "kind": kind}


def guesses(prompt: str) -> list[dict[str, str]]:
    return [row(prompt, k, answer) for k in DIGITS for answer in DIGITS]


def write(path: Path, rows: Iterable[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def model(folder: Path, rows: Iterable[dict[str, str]], *overrides: str) -> Path:
    """A model that has imitated these rows."""
    folder.mkdir()
    warm = WARM.replace("ROWS", str(write(folder / "seen.jsonl", rows)))
    still = ["training.steps=1", "training.optimizer.lr=1.0e-12"]
    return run_of(folder / "run", TEXT + warm, [*still, *overrides]) / "warm_start"


def accuracies(folder: Path, student: Path, rows: Path, *overrides: str) -> list[float]:
    """The accuracy of every step's samples."""
    data = f"data.train=[{{path: '{rows}', answer_key: answer}}]"
    started = ["model.new=null", f"model.path={student}", data, "reward.parts=exact"]
    found = read_metrics(run_of(folder, TEXT, [*started, *overrides]) / "metrics.jsonl")
    return [one["reward/accuracy"] for one in found if "reward/accuracy" in one]


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that guesses at `3>` and copies what stands in the context at `3>>4`; and the rows of the task."""
    folder = tmp_path_factory.mktemp("copier")
    copies = [row(f"{k}>>{answer}", k, answer) for k in DIGITS for answer in DIGITS]
    rows = [row(ASK, k, k + 1) for k in DIGITS]
    return model(folder / "model", [*guesses(ASK), *copies]), write(folder / "rows.jsonl", rows)


# --- several teachers ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory, copier: tuple[Path, Path]) -> dict[str, Path]:
    """A student that guesses, a teacher that adds one, a teacher that subtracts one, and rows of which each has half."""
    folder = tmp_path_factory.mktemp("school")
    up, down = ([row(ASK, k, k + d, kind) for k in DIGITS] for d, kind in ((1, "up"), (-1, "down")))
    return {
        "student": copier[0],
        "up": model(folder / "up", up),
        "down": model(folder / "down", down),
        "rows": write(folder / "rows.jsonl", [*up[:2], *down[2:]]),
    }


def teachers(school: dict[str, Path], *names: str) -> str:
    paths = ", ".join(f"{kind}: '{school[name]}'" for kind, name in zip(("up", "down"), names, strict=True))
    return f"algorithm.kl.reference={{name: teachers, column: kind, paths: {{{paths}}}}}"


def test_each_row_learns_from_its_own_teacher(school: dict[str, Path], tmp_path: Path) -> None:
    loss = [
        "algorithm.loss={name: divergence, alpha: 0, support: teacher, top: 5, rest: tail}",
        "algorithm.advantage=none",
    ]
    loss += ["algorithm.ratio=none", "algorithm.clip=none", *QUICK, teachers(school, "up", "down")]
    found = accuracies(tmp_path / "run", school["student"], school["rows"], *loss)
    assert found[0] < 0.4
    assert sum(found[-3:]) / 3 > 0.85
    wrong = [*loss[:-1], teachers(school, "up", "up")]
    assert sum(accuracies(tmp_path / "other", school["student"], school["rows"], *wrong)[-3:]) / 3 < 0.65


@pytest.mark.parametrize("preset", ["mopd", "iw_opd"])
def test_sampled_tokens_teach_too(preset: str, school: dict[str, Path], tmp_path: Path) -> None:
    more = [*QUICK, teachers(school, "up", "down")]
    found = accuracies(tmp_path / "run", school["student"], school["rows"], f"algorithm={preset}", *more)
    assert found[0] < 0.4
    assert sum(found[-3:]) / 3 > 0.7


def test_a_row_that_names_no_teacher_is_refused_before_the_run(school: dict[str, Path], tmp_path: Path) -> None:
    one = f"algorithm.kl.reference={{name: teachers, column: kind, paths: {{up: '{school['up']}'}}}}"
    with pytest.raises(
        UserError, match=r"kind is 'down', and algorithm\.kl\.reference\.paths has no teacher of that name"
    ):
        accuracies(tmp_path / "run", school["student"], school["rows"], "algorithm=mopd", one)


# --- a teacher with another tokenizer ---------------------------------------------------------------------------------------


def test_a_teacher_with_another_tokenizer_teaches(tmp_path: Path) -> None:
    """The student has one token for `>>`, with which every answer ends. The teacher spells it as two."""

    def spelled(k: int, answer: int) -> dict[str, str]:
        text = f"{answer % len(DIGITS)}>>"
        return {"prompt": f"{k}>", "completion": text, "answer": text}

    right = [spelled(k, k + 1) for k in DIGITS]
    teacher = model(tmp_path / "teacher", right)
    empty = tmp_path / "empty"
    shutil.copytree(teacher, empty)
    merging("012345678>", (">", ">")).save(empty)
    rows = write(tmp_path / "rows.jsonl", right)
    own = ["model.new=null", f"model.path={empty}", f"data.train=[{{path: '{rows}', answer_key: answer}}]"]
    guessed = [spelled(k, answer) for k in DIGITS for answer in DIGITS]
    student = model(tmp_path / "student", guessed, *own, "reward.parts=exact")
    found = accuracies(
        tmp_path / "run",
        student,
        rows,
        "algorithm=gold",
        f"algorithm.kl.reference.path={teacher}",
        "rollout.max_tokens=4",
        *QUICK,
    )
    assert found[0] < 0.4
    assert sum(found[-3:]) / 3 > 0.85
    logged = [one for one in read_metrics(tmp_path / "run" / "it" / "metrics.jsonl") if "actor/aligned" in one]
    assert min(one["actor/aligned"] for one in logged) > 0.9
    assert min(one["actor/taught"] for one in logged) == 1


# --- the policy with more to read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "steps"), [("sdft", 15), ("opsd", 15), ("sdpo", 20)])
def test_the_policy_is_its_own_teacher_with_more_in_its_context(
    preset: str, steps: int, copier: tuple[Path, Path], tmp_path: Path
) -> None:
    column = [] if preset == "sdpo" else ["algorithm.kl.context.column=answer", "algorithm.kl.context.place=user"]
    top = ["algorithm.loss.top=5"] if preset == "sdft" else []
    # The live policy as its own teacher drifts in so small a model, so its starting weights teach it here.
    top += ["algorithm.kl.reference=frozen"] if preset == "opsd" else []
    more = ["rollout.prompts=4", "rollout.n=32", f"training.steps={steps}", "algorithm.kl.context.text='>{context}'"]
    found = accuracies(tmp_path / "run", *copier, f"algorithm={preset}", *more, *column, *top)
    assert found[0] < 0.4
    assert sum(found[-3:]) / 3 > 0.65
