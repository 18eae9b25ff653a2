"""Self-play against earlier weights: exactly those weights play, none of their tokens is trained, and a run that dies finds them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.engine import Completion, Request
from burnish.inference.engine_wrappers import completion_logprobs
from burnish.inference.opponent_engine import OpponentEngine
from burnish.models.policy import PolicyModel
from burnish.rollout import opponents
from burnish.rollout.opponents import SnapshotFolder
from burnish.rollout.scoring import from_arrays
from burnish.run.journal import Journal
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.trainers.rl_run import checked_run
from burnish.training.learner import Learner
from tests.trainers.test_resume_everything import STEPS, Moment, at_step, dies, killing, result, updates
from tests.trainers.tiny import run_of

SHOWN = "{plugin: 'burnish.environments.games.demonstrations:demonstrations', options: {name: kuhn_poker, num: 64, noise: 0.3, options: {words: false, format: last_word}}}"
KUHN = f"""
model: {{new: {{hidden_size: 32, num_layers: 1, num_heads: 2, mlp_size: 64, max_positions: 128}}}}
data: {{train: {{task: kuhn_poker}}, template: {{kind: plain}}}}
environment: {{name: kuhn_poker, max_turns: 3, options: {{words: false, format: last_word}}}}
warm_start: {{data: {SHOWN}, updates: 30, batch_size: 32, max_tokens: 128, optimizer: {{lr: 1.0e-2}}}}
rollout: {{prompts: 8, n: 2, max_tokens: 8, opponents: {{name: pool, share: 0.6, every: 2, keep: 2}}}}
algorithm: rae
training: {{steps: {STEPS}, optimizer: {{lr: 1.0e-2}}}}
run: {{samples_every: 4, save_every: 3, keep_last: 1}}
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that begin with a model that knows the answers of the game."""
    folder = run_of(tmp_path_factory.mktemp("warm") / "run", KUHN, ["training.steps=1"]) / "warm_start"
    return ["model.new=null", f"model.path={folder}", "warm_start=null"]


def played(folder: Path) -> dict[int, list[Any]]:
    """The trajectories of each step, from the journal."""
    journal = Journal(folder / "journal")
    found = {}
    for event in journal.events:
        if event["event"] == "completed":
            arrays = journal.attachment(event["file"])
            assert arrays is not None
            found[event["step"]] = from_arrays(arrays)
    return found


@pytest.fixture(scope="module")
def spied(
    tmp_path_factory: pytest.TempPathFactory, warm: list[str]
) -> Iterator[tuple[Path, list[tuple[Request, Completion]]]]:
    """A run without a checkpoint before its end, so that the journal has all steps; with what every weights were asked and answered."""
    asked, heard = dict[str, Request](), list[tuple[Request, Completion]]()
    submit, check = OpponentEngine.submit, OpponentEngine._checked

    def submitting(self: OpponentEngine, requests: Any) -> None:
        asked.update({request.id: request for request in requests})
        submit(self, requests)

    def checking(self: OpponentEngine, completion: Completion) -> Completion:
        heard.append((asked.pop(completion.id), completion))
        return check(self, completion)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpponentEngine, "submit", submitting)
        patch.setattr(OpponentEngine, "_checked", checking)
        overrides = [*warm, "run.save_every=100", "training.steps=6", "rollout.opponents.at_once=2"]
        yield run_of(tmp_path_factory.mktemp("spied") / "run", KUHN, overrides), heard


def test_the_weights_that_play_are_those_of_the_snapshot(
    spied: tuple[Path, list[tuple[Request, Completion]]], tmp_path: Path, warm: list[str]
) -> None:
    folder, heard = spied
    against = [pair for pair in heard if pair[0].opponent is not None]
    assert {request.opponent for request, _ in against} == {0, 2, 4}
    loaded = load(TrainConfig, folder.parent / "tiny.yaml", [*warm, f"run.directory={tmp_path}"])
    with checked_run(loaded.config, loaded.resolved, loaded.base, "other") as (parts, _):
        policy: PolicyModel = parts.policy
    for version in (2, 4):
        policy.load_weights(folder / "opponents" / f"step-{version:06d}")
        own = [pair for pair in against if pair[0].opponent == version]
        assert own
        for request, completion in own:
            assert completion.version == version
            logp = completion_logprobs(policy.module, request.tokens, completion.tokens, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logp), torch.tensor(logp), atol=1e-4, rtol=0)
        policy.load_weights(folder / "checkpoints" / "step-000006")
        moved = [completion_logprobs(policy.module, r.tokens, c.tokens, 1.0) - c.logp for r, c in own]
        assert max(abs(gap).max() for gap in moved) > 0.05  # other weights would have been noticed


def test_only_the_policys_own_conversation_is_trained(spied: tuple[Path, list[tuple[Request, Completion]]]) -> None:
    folder, _ = spied
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    for step, trajectories in played(folder).items():
        against = [t for t in trajectories if "opponent" in t.metadata]
        for t in trajectories:
            versions = {int(v) for node in t.nodes if node.version is not None for v in node.version}
            assert versions == {step - 1}  # no token of a snapshot
        draws: dict[str, set[tuple[str | None, int | None]]] = {}
        for t in trajectories:
            draws.setdefault(f"{t.prompt_id}#{t.visit}", set()).add((t.role, t.metadata.get("opponent")))
        for (
            players
        ) in draws.values():  # all samples of a draw are self-play, or the policy is one player against one snapshot
            assert len(players) == 1 or {opponent for _, opponent in players} == {None}
        assert rows[step]["opponents/games"] == len(against)
        if against:
            share = [1.0 if t.reward > 0 else 0.5 if t.reward == 0 else 0.0 for t in against]
            assert rows[step]["opponents/win_rate"] == pytest.approx(sum(share) / len(share))
            ages = {(step - 1 - t.metadata["opponent"]) // 2 * 2 for t in against}
            named = {int(k.rpartition("=")[2]) for k in rows[step] if k.startswith("opponents/win_rate/age=")}
            assert named == ages
    assert {path.name for path in (folder / "opponents").iterdir()} == {f"step-{v:06d}" for v in (0, 2, 4, 6)}


DEATHS = {
    "between two mini-batches": Moment(Learner, "update", updates(1)),
    "a snapshot half written": Moment(opponents, "write_contents", lambda folder, contents: "step-000004" in folder.name, after=True),
    "a snapshot written, its step not committed": Moment(SnapshotFolder, "write", lambda own, version, policy: version == 4, after=True),
    "steps and snapshots after the checkpoint": Moment(Run, "commit", at_step(6)),
    "right after a checkpoint": Moment(Run, "checkpoint", at_step(6), after=True),
}  # fmt: skip


def test_a_run_that_dies_finds_its_opponents_and_baselines_again(tmp_path: Path, warm: list[str]) -> None:
    unbroken = run_of(tmp_path / "unbroken", KUHN, warm)
    expected = result(unbroken)
    for name, moment in DEATHS.items():
        with killing(moment):
            assert dies(lambda: run_of(tmp_path / "run", KUHN, warm)), f"the run never came to: {name}"
    (tmp_path / "run" / "it" / "opponents" / ".step-000006.tmp-1").mkdir()  # as a SIGKILL leaves it
    again = run_of(tmp_path / "run", KUHN, warm)
    found = result(again)
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []
    state = json.loads((again / "checkpoints" / f"step-{STEPS:06d}" / "trainer.json").read_text())
    assert set(state["role_baselines"]) == {"first", "second"}
    assert all(abs(value) > 1e-3 for value in state["role_baselines"].values())
    for folder in (unbroken, again):  # pool of the last step, and of the checkpoint before it
        kept = {path.name for path in (folder / "opponents").iterdir() if not path.name.startswith(".")}
        assert kept == {"step-000004", "step-000006", "step-000008"}


def test_a_damaged_snapshot_ends_the_run_and_says_so(tmp_path: Path, warm: list[str]) -> None:
    overrides = [*warm, "training.steps=3", "run.save_every=1", "rollout.opponents.every=3"]
    with killing(Moment(Run, "checkpoint", at_step(2), after=True)):
        assert dies(lambda: run_of(tmp_path / "run", KUHN, overrides))
    weights = tmp_path / "run" / "it" / "opponents" / "step-000000" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        UserError, match=r"the opponent of step 0 cannot be used .*model.safetensors.*restore it from a copy"
    ):
        run_of(tmp_path / "run", KUHN, overrides)


def test_adapters_alone_are_kept_and_the_base_is_shared(tmp_path: Path, warm: list[str]) -> None:
    overrides = [*warm, "model.lora={rank: 2}", "training.steps=3"]
    folder = run_of(tmp_path / "run", KUHN, [*overrides, "rollout.opponents.every=1"])
    names = {path.name for path in (folder / "opponents" / "step-000002").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    assert any(row.get("opponents/games", 0) > 0 for row in read_metrics(folder / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.source=ahead"], "does not go with rollout.source=ahead"),
        (["rollout.opponents={name: pool, keep: 1, at_once: 2}"], "cannot play out of a pool of keep=1"),
        (["algorithm.filters=[zero_signal]", "algorithm.refill.rounds=3"], "set algorithm.refill.rounds=1"),
        (["data.train={task: tic_tac_toe}", "environment={name: tic_tac_toe, max_turns: 5}", "algorithm=grpo", "warm_start=null"], "has no other: use a game of several players"),
        (["data.train={task: tic_tac_toe}", "environment={name: tic_tac_toe, max_turns: 5}", "rollout.opponents=none", "warm_start=null"], "environment tic_tac_toe has no roles"),
        (["algorithm={advantage: {name: hierarchical_grpo, episode_roles: [frist]}}"], "did you mean 'first'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run_of(tmp_path / "run", KUHN, overrides)
