"""Who sits where, and what is refused before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.explain import plan_text
from burnish.config.loading import load
from burnish.config.placement import ACTOR, ROLLOUT, LocalPlacement, RayPlacement, describe_processes
from burnish.config.schema import TrainConfig
from burnish.core.dispatch import WorkerLost
from burnish.distributed import placement
from burnish.distributed.placement import check_layout, check_placement, plan_layout
from burnish.distributed.ray_roles import open_cluster
from burnish.distributed.role_workers import RolloutWorker, TrainingWorker
from burnish.run.run_directory import MAY_CHANGE
from tests.distributed.toy_run import TOY, config_of

BASIC = ["model.new.num_layers=1", "data.train.task=sort_digits"]
IN_ONE = ["placement=ray", "placement.pools={a: {}}", "placement.roles={actor: a, rollout: a}"]
APART = ["placement=ray", "placement.pools={a: {}, b: {}}", "placement.roles={actor: a, rollout: b, reference: b}", "algorithm.kl.loss.coef=0.1"]  # fmt: skip
SCORED = ["placement=ray", "placement.pools={a: {}, b: {}}", "placement.roles={actor: a, rollout: a, reward: b}"]
BESIDE = ["placement=ray", "placement.pools={a: {}, b: {}}", "placement.roles={actor: a, rollout: b, critic: b}", "algorithm=ppo"]  # fmt: skip


def bundles(layout: str, workers: int, engines: int, on_gpu: bool = False) -> tuple[int, list[int], list[int]]:
    made = plan_layout(RayPlacement(workers=workers, engines=engines, layout=layout), on_gpu)
    return len(made.bundles), *([slot.bundle for slot in made.slots[group]] for group in (ACTOR, ROLLOUT))


def test_colocated_processes_share_bundles_and_split_ones_do_not() -> None:
    assert bundles("colocated", 2, 2) == (2, [0, 1], [0, 1])
    assert bundles("colocated", 1, 3) == (3, [0], [0, 1, 2])
    assert bundles("split", 1, 3) == (4, [0], [1, 2, 3])


def test_who_shares_a_bundle_asks_for_his_part_of_it() -> None:
    made = plan_layout(RayPlacement(workers=1, engines=2, cpus=4), on_gpu=True)
    assert made.bundles == [{"CPU": 4, "GPU": 1}] * 2
    assert [slot.resources for slot in made.slots[ACTOR]] == [{"CPU": 2, "GPU": 0.5}]
    assert [slot.resources for slot in made.slots[ROLLOUT]] == [{"CPU": 2, "GPU": 0.5}, {"CPU": 4, "GPU": 1}]
    for k in range(2):
        assert sum(s.resources["CPU"] for slots in made.slots.values() for s in slots if s.bundle == k) == 4


def test_consecutive_processes_are_on_one_machine_and_colocated_ones_stay_so() -> None:
    made = plan_layout(RayPlacement(workers=4, engines=2, engine_tensor=2), on_gpu=True)
    placed = made.sorted_by_machine(["x", "y", "x", "y"])
    assert [slot.bundle for slot in placed.slots[ACTOR]] == [0, 2, 1, 3]
    assert [slot.bundle for slot in placed.slots[ROLLOUT]] == [0, 2]
    for k in range(4):
        assert sum(s.resources["GPU"] for slots in placed.slots.values() for s in slots if s.bundle == k) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["placement.engines=3"], "placement.engine_tensor=2 does not divide placement.engines=3"),
        (["placement.engines=2", "rollout.engine=transformers"], "needs the native decoder"),
        (["placement.engines=2", "model.lora={rank: 2, base: nf4}", "model.new=null", "model.path=a"], "in 4 bits"),
        (["placement.engines=2", "rollout.exact=true"], "rollout.exact needs placement=local"),
    ],
)
def test_engines_that_cannot_be_divided_are_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_of(tmp_path, "placement.engine_tensor=2", *overrides)


def test_a_run_may_continue_on_any_other_placement() -> None:
    assert {f"placement.{key}" for key in RayPlacement.model_fields} <= set(MAY_CHANGE)


def test_engines_of_several_processes_are_named_in_the_plan(tmp_path: Path) -> None:
    config = config_of(tmp_path, "placement.engines=4", "placement.engine_tensor=2")
    assert "1 worker and 2 engines of 2 processes" in describe_processes(config.placement)


POOLS = {"train": {"places": 2, "cpus": 2}, "more": {"places": 1}, "checks": {"places": 2, "gpu": False}}
ROLES = {"actor": "train", "rollout": "train", "reference": "more", "critic": "more", "reward": "checks"}
POOLED = {"pools": POOLS, "roles": ROLES}


def test_roles_of_a_pool_take_turns_and_pools_are_apart() -> None:
    wanted = RayPlacement(**POOLED)
    made = plan_layout(wanted, on_gpu=True)
    assert made.bundles == [{"CPU": 2, "GPU": 1}] * 2 + [{"CPU": 1, "GPU": 1}] + [{"CPU": 1}] * 2
    assert {role: [slot.bundle for slot in slots] for role, slots in made.slots.items()} == {
        "actor": [0, 1],
        "rollout": [0, 1],
        "reference": [2],
        "critic": [2],
        "reward": [3, 4],
    }
    assert made.slots["critic"][0].resources == {"CPU": 0.5, "GPU": 0.5}
    assert made.slots["reward"][0].resources == {"CPU": 1}
    assert wanted.share_pool("actor", "rollout")
    assert not wanted.share_pool("reference", "rollout")
    assert [wanted.size(role) for role in ROLES] == [2, 2, 1, 1, 2]
    assert [wanted.cpus_of(role) for role in ROLES] == [2, 2, 1, 1, 1]


def test_a_reference_in_the_actors_pool_is_in_its_processes() -> None:
    made = plan_layout(
        RayPlacement(pools={"all": {}}, roles={"actor": "all", "rollout": "all", "reference": "all"}), False
    )
    assert set(made.slots) == {"actor", "rollout"}


@pytest.mark.parametrize(
    ("options", "on_gpu", "nodes", "words"),
    [
        (
            POOLED,
            False,
            [{"CPU": 4}],
            r"needs 7 CPUs \(pool train for actor, rollout: 2 places of 2 CPUs; pool more for reference, critic: 1 place of 1 CPU; "
            r"pool checks for reward: 2 places of 1 CPU\), it has 4: lower the places or cpus of placement.pools",
        ),
        (POOLED, True, [{"CPU": 8, "GPU": 2}], r"needs 3 GPUs .*it has 2"),
        (POOLED, False, [{"CPU": 3}] * 1 + [{"CPU": 1}] * 9, r"needs 2 places of 2 CPU, .* has 1 such places"),
        (
            {"engines": 2, "layout": "split"},
            False,
            [{"CPU": 2}],
            r"needs 3 CPUs \(1 worker and 2 engines, split, 1 CPU each\), it has 2",
        ),
        ({"workers": 2}, True, [{"CPU": 8, "GPU": 1}], r"needs 2 GPUs .*it has 1"),
        (
            {"workers": 2, "cpus": 3},
            False,
            [{"CPU": 4}, {"CPU": 2}],
            r"needs 2 places of 3 CPU, each on one machine, and it has 1 such places",
        ),
        ({}, True, [{"CPU": 4}, {"GPU": 1}], r"needs 1 places of 1 CPU and 1 GPU, each on one machine, and it has 0"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_numbers(options: dict, on_gpu: bool, nodes: list, words: str) -> None:
    wanted = RayPlacement(**options)
    with pytest.raises(UserError, match=words):
        check_layout(wanted, plan_layout(wanted, on_gpu), nodes, "it")


def test_a_possible_layout_is_not_refused() -> None:
    wanted = RayPlacement(workers=2, engines=3, cpus=2)
    check_layout(wanted, plan_layout(wanted, False), [{"CPU": 3}, {"CPU": 5}], "it")


def test_a_run_that_cannot_be_placed_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placement, "num_usable_cpus", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "toy.yaml").write_text(TOY)
    command = ["train", str(tmp_path / "toy.yaml"), "placement=ray", "placement.engines=2", "placement.layout=split"]
    for more in ([], ["--dry-run"]):
        assert main([*command, f"run.directory={tmp_path}", "run.name=never", *more]) == 2
        said = "".join(capsys.readouterr())
        assert "needs 3 CPUs (1 worker and 2 engines, split, 1 CPU each), this machine has 2" in said
    assert not (tmp_path / "never").exists()


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "burnish.distributed.ray_cluster", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[ray\]'"), open_cluster(config_of(tmp_path)):
        pass


def test_one_process_needs_no_cluster() -> None:
    config = load(TrainConfig, None, BASIC).config
    assert isinstance(config.placement, LocalPlacement)
    check_placement(config.placement)
    with open_cluster(config) as cluster:
        assert cluster is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["placement.workers=2"], "placement.workers: local has no option 'workers'; it belongs to placement ray"),
        (["parallel.tensor=2"], "parallel has no effect with placement=local"),
        (["placement=ray", "placement.workers=3", "parallel.tensor=2"], "placement.workers=3: parallel: .* does not make 3 processes"),
        (["placement=ray", "placement.workers=2", "parallel.tensor=2", "training.activations=selective"], "use recompute or keep"),
        (["placement=ray", "rollout.mismatch=stale"], "rollout.mismatch needs placement=local"),
        (["placement=ray", "rollout.exact=true"], "rollout.exact needs placement=local"),
        (["placement=ray", "model.device=cuda:1"], "Ray gives each process its GPU"),
        (["placement=ray", "placement.workers=2", "training.layers=compiled"], "training.layers=compiled needs placement.workers=1"),
        (["placement=ray", "placement.layout=spilt"], "did you mean 'split'"),
        (["placement=ray", "placement.roles={actor: a}"], "roles.actor=a: there is no such pool"),
        (["placement=ray", "placement.pools={train: {}}", "placement.roles={actor: trian}"], "did you mean 'train'"),
        (["placement=ray", "placement.pools={a: {}}", "placement.roles={actor: a}"], "roles.rollout must name the pool"),
        ([*IN_ONE, "placement.pools={a: {}, b: {}}"], "pools.b has no effect: no role works there"),
        ([*IN_ONE, "placement.workers=2"], "workers has no effect with pools"),
        ([*IN_ONE, "placement.roles.critic=a"], "placement.roles.critic has no effect: the algorithm has no critic"),
        ([*IN_ONE, "placement.roles.reference=a", "algorithm.kl.reference=none", "algorithm.kl.loss.coef=0"], "placement.roles.reference has no effect"),
        ([*APART, "algorithm.kl.reference=ema"], "algorithm.kl.reference=ema follows the policy's weights"),
        ([*APART, "algorithm.kl.loss.estimator=full"], "compares whole distributions during the policy's update"),
        ([*APART, "placement.pools={a: {gpu: false}, b: {}}"], "leaves the actor without a GPU"),
        ([*IN_ONE, "placement.pools={a: {places: 3}}", "parallel.tensor=2"], "placement.pools.a.places=3: parallel: .* does not make 3 processes"),
        ([*SCORED, 'reward.parts=[{name: judge, options: {url: "http://a/v1", model: m}}]'], "every part of the reward is a judge"),
        ([*IN_ONE, "placement.pools={a: {gpu: false}}", "model.device=cuda"], "model.device=cuda, but placement.pools.a.gpu=false"),
        ([*BESIDE, "rollout.source=async"], "rollout.source=async samples while the learner trains, but in one pool"),
        ([*IN_ONE, "rollout.source=ahead"], "in one pool they take turns: give them pools of their own"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_or_cannot_be_done_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load(TrainConfig, None, [*BASIC, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        [*SCORED, 'reward.parts=[{name: judge, options: {url: "http://a/v1", model: m}}, task]'],
        [*IN_ONE, "placement.pools={a: {gpu: false}}", "model.device=cpu"],
        [*BESIDE, "placement.roles.critic=a", "rollout.source=async"],
    ],
)
def test_what_is_next_to_that_is_not_refused(overrides: list[str]) -> None:
    load(TrainConfig, None, [*BASIC, *overrides])


@pytest.mark.parametrize("more", [[], ["parallel.tensor=2"], ["model.lora.base=nf4"]])
def test_adapters_are_trained_by_several_workers(more: list[str]) -> None:
    some = ["model.path=somewhere", "model.lora={}", "data.train.task=sort_digits", "placement=ray"]
    load(TrainConfig, None, [*some, "placement.workers=2", *more])
    with pytest.raises(UserError, match="cannot split matrices in 4 bits"):
        load(TrainConfig, None, [*some, "placement.workers=2", "parallel.tensor=2", "model.lora.base=nf4"])


def test_the_plan_of_a_dry_run_names_the_processes() -> None:
    config = load(TrainConfig, None, [*BASIC, "placement=ray", "placement.engines=2"]).config
    assert "processes           1 worker and 2 engines, colocated, 1 CPU each" in plan_text(config)
    assert "processes" not in plan_text(load(TrainConfig, None, BASIC).config)
    config = load(TrainConfig, None, [*BASIC, *IN_ONE]).config
    assert "processes           pool a for actor, rollout: 1 place of 1 CPU" in plan_text(config)


def test_a_process_computes_with_as_many_threads_as_it_has_cpus(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        for kind, more in ((TrainingWorker, (None,)), (RolloutWorker, ())):
            kind(config_of(tmp_path, "placement.cpus=2"), tmp_path, *more)
            assert torch.get_num_threads() == 2
            torch.set_num_threads(1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("failures", [2, 3])
def test_a_ray_that_does_not_start_is_tried_again_and_then_a_loss_not_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: int
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    from burnish.distributed import ray_cluster

    tried = []

    def too_slow(**options: object) -> None:
        tried.append(options)
        if len(tried) <= failures:
            raise Exception("the node timed out during startup")  # as Ray does

    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "init", too_slow)
    if failures == 2:
        assert ray_cluster._connect()
    else:
        with pytest.raises(WorkerLost, match="Ray did not start on this machine, tried 3 times: the node timed out"):
            ray_cluster._connect()
    assert len(tried) == 3
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert capsys.readouterr().err.count("Ray did not start (the node timed out during startup); trying again") == 2


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("{ray}/core/src/ray/gcs/gcs_server", r"/gcs_server'\. Its files are on a disk that is mounted noexec"),
        ("/tmp/ray/session_latest", r"may not use /tmp/ray/session_latest: .* set RAY_TMPDIR"),
        (None, r"may not use one of its files: .* set RAY_TMPDIR"),
    ],
)
def test_ray_that_may_not_use_its_files_is_not_started_again(
    file: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    from burnish.distributed import ray_cluster

    tried = []

    def forbidden(**options: object) -> None:
        tried.append(options)
        raise PermissionError(13, "Permission denied", file and file.format(ray=Path(ray.__file__).parent))

    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "init", forbidden)
    with pytest.raises(UserError, match=words):
        ray_cluster._connect()
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("mode", "permissions", "error", "warning"),
    [
        (None, None, "asks for no token: every program .* RAY_AUTH_MODE=disabled if nothing else", ""),
        ("disabled", None, None, "asks for no token"),
        ("token", 0o644, None, "chmod 600"),
        ("token", 0o600, None, ""),
    ],
)
def test_a_cluster_without_a_token_is_refused_and_an_open_token_file_is_named(
    mode: str | None, permissions: int | None, error: str | None, warning: str,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ray = pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    from burnish.distributed import ray_cluster

    for name in (ray_cluster.AUTH_MODE, ray_cluster.AUTH_TOKEN):
        monkeypatch.delenv(name, raising=False)
    if mode is not None:
        monkeypatch.setenv(ray_cluster.AUTH_MODE, mode)
    if permissions is not None:
        (tmp_path / "token").write_text("5" * 64)
        (tmp_path / "token").chmod(permissions)
    monkeypatch.setenv(ray_cluster.AUTH_TOKEN_PATH, str(tmp_path / "token"))
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    if error is None:
        assert ray_cluster._connect()
    else:
        with pytest.raises(UserError, match=error):
            ray_cluster._connect()
    said = capsys.readouterr().err
    assert warning in said
    assert said.startswith("burnish: WARNING: ") == bool(warning)
