"""On-policy distillation in whole runs: a larger model teaches a smaller one, as reward or as loss, with any source."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.model import NewModel
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.run.metrics import read_metrics
from tests.trainers.test_resume_everything import MOMENTS, STEPS, dies, killing, result
from tests.trainers.tiny import TINY, WARM, run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

TAUGHT = """
model: {new: {hidden_size: 32, num_layers: 1, num_heads: 2, mlp_size: 64, max_positions: 64}}
"""
AS_LOSS = "algorithm.kl={reward: {coef: 0}, loss: {estimator: full, coef: 1}}"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider model that has seen the task for longer."""
    text = TINY.replace(TINY.split("\n")[1], TAUGHT.strip()) + WARM
    folder = tmp_path_factory.mktemp("teacher") / "run"
    return run_of(folder, text, ["training.steps=1"]) / "warm_start"


def overrides(warm: Path, teacher: Path, *more: str) -> list[str]:
    start = ["model.new=null", f"model.path={warm}", "algorithm=on_policy_distillation"]
    return [*start, f"algorithm.kl.reference.path={teacher}", *more]


def gaps(folder: Path, name: str) -> list[float]:
    return [row[name] for row in read_metrics(folder / "metrics.jsonl") if name in row]


def test_the_policy_comes_nearer_to_its_teacher(tmp_path: Path, warm: Path, teacher: Path) -> None:
    more = ["rollout.prompts=12", "training.steps=12", "training.optimizer.lr=0.003"]
    found = gaps(run_of(tmp_path / "run", TINY, overrides(warm, teacher, *more)), "actor/kl_reward")
    assert sum(found[-3:]) < 0.8 * sum(found[:3])


@pytest.mark.parametrize("source", ["ahead", "{name: async, max_staleness: 0}"])
def test_the_teacher_judges_what_any_source_samples(source: str, tmp_path: Path, warm: Path, teacher: Path) -> None:
    here, there = (
        gaps(run_of(tmp_path / name, TINY, overrides(warm, teacher, f"rollout.source={value}")), "actor/kl_reward")
        for name, value in (("here", "sync"), ("there", source))
    )
    assert len(here) == len(there) == 4
    assert here[0] == pytest.approx(there[0], rel=1e-5)  # of the same samples


def test_as_a_loss_over_the_vocabulary_it_comes_nearer_too(tmp_path: Path, warm: Path, teacher: Path) -> None:
    more = [AS_LOSS, "rollout.prompts=12", "training.steps=12", "rollout.n=1"]
    folder = run_of(tmp_path / "run", TINY, overrides(warm, teacher, *more))
    found = gaps(folder, "actor/kl_ref")
    assert sum(found[-3:]) < 0.6 * sum(found[:3])
    assert gaps(folder, "actor/kl_reward") == []


def test_the_likeliest_tokens_alone_give_another_and_smaller_kl(tmp_path: Path, warm: Path, teacher: Path) -> None:
    whole, top = (
        gaps(run_of(tmp_path / name, TINY, overrides(warm, teacher, AS_LOSS, *more)), "actor/kl_ref")
        for name, more in (("whole", []), ("top", ["algorithm.kl.loss.top=2"]))
    )
    assert top[0] < whole[0]  # the first step's samples are the same


def test_an_outcome_beside_the_teacher_changes_the_run(tmp_path: Path, warm: Path, teacher: Path) -> None:
    alone, both = (
        read_metrics(run_of(tmp_path / name, TINY, overrides(warm, teacher, *more)) / "metrics.jsonl")
        for name, more in (("alone", []), ("both", ["algorithm.advantage.outcome=1"]))
    )
    assert alone[0]["actor/kl_reward"] == both[0]["actor/kl_reward"]
    assert alone[-1]["actor/kl_reward"] != both[-1]["actor/kl_reward"]


KILLED = (
    "between two mini-batches",
    "answers written, not scored",
    "a step after a checkpoint",
    "right after a checkpoint",
)


def test_a_run_that_dies_again_and_again_ends_as_one_that_never_did(tmp_path: Path, warm: Path, teacher: Path) -> None:
    kl = "algorithm.kl={loss: {estimator: full, coef: 0.1, top: 4}, adaptive: {target: 0.01, horizon: 50}}"
    steps = [f"training.steps={STEPS}", "training.mini_batches=2", "run.save_every=3", "reward.workers=1"]
    settings = overrides(warm, teacher, kl, *steps, "algorithm.advantage.outcome=0.5")
    expected = result(run_of(tmp_path / "unbroken", TINY, settings))
    for name in KILLED:
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(tmp_path / "run", TINY, settings)), f"the run never came to: {name}"
    found = result(run_of(tmp_path / "run", TINY, settings))
    assert [k for k in expected if found[k] != expected[k]] == []


def test_a_teacher_of_another_tokenizer_is_refused_before_anything_is_made(tmp_path: Path, warm: Path) -> None:
    tokenizer = Tokenizer.from_characters("0123456789<")
    other = Decoder(new_architecture(NewModel(hidden_size=16, num_layers=1, num_heads=2), tokenizer.vocab_size))
    initialise(other, 0)
    (tmp_path / "other").mkdir()
    PolicyModel(other, tokenizer, None, "").save(tmp_path / "other")
    with pytest.raises(UserError, match="another tokenizer than the policy"):
        run_of(tmp_path / "run", TINY, overrides(warm, tmp_path / "other"))
    assert not (tmp_path / "run" / "it").exists()
