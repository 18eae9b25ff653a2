"""Each tracker with its real package and its local store: one run, stopped and resumed, is read back from the files.

The packages are 40 to 95 MB each, so `make test` does without them. `make test-trackers` installs all five and runs this file.
"""

from __future__ import annotations

import glob
import json
import sqlite3
from pathlib import Path

import pytest
import yaml

from burnish.config.trackers import Mlflow, SwanLab, TensorBoard, TrackerSlot, Trackio, Wandb
from burnish.run.samples import write_samples
from burnish.run.trackers import tracker_process
from burnish.run.trackers.tracker_process import Trackers

CONFIG = {"seed": 1, "model": {"path": None, "new": {"hidden_size": 16}}, "rollout": {"stop": ["a"]}}
VALUES = {1: 0.015625, 2: 0.03125, 3: 0.0625}
"""reward/mean by step, with numbers that occur nowhere else."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "MLFLOW_TRACKING_URI",
        "WANDB_MODE",
        "WANDB_API_KEY",
        "SWANLAB_MODE",
        "TRACKIO_DIR",
        "TRACKIO_SPACE_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("FLUSH_S", "QUIET_S"):  # a slow machine must not decide
        monkeypatch.setattr(tracker_process, name, 600.0)
    path = tmp_path / "runs" / "sorting-0"
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (path / "report.html").write_text("<html><body>the report</body></html>")
    return path


def track(run: Path, tracker: TrackerSlot) -> list[str]:
    """Two starts of a run: steps 1 and 2, then a resume that repeats step 2. Returns what was reported."""
    pytest.importorskip(tracker.module, reason=f"{tracker.name} is not installed: make test-trackers")
    said: list[str] = []
    rows = [{"prompt": "31>", "completion": "13;", "reward": 1.0, "group": "g", "sample": 0}]
    for steps in ((1, 2), (2, 3)):
        trackers = Trackers([tracker], run, CONFIG, said.append)
        for step in steps:
            values = {"reward/mean": VALUES[step], "validation/greedy/accuracy": 0.5, "note": "text"}
            trackers.log(step, values | {"validation/greedy/accuracy/length=3": float("nan")})
        trackers.samples(steps[-1], "train", write_samples(run / "samples", steps[-1], "train", rows))
        trackers.attach_report(run / "report.html")
        trackers.close(is_failed=False)
    log = (run / "trackers" / f"{tracker.name}.log").read_text()
    assert not [line for line in said if "failed" in line or "killed" in line], log[-3000:]
    assert said[-1].startswith(f"tracker {tracker.name}: 2 steps")
    return said


def test_tensorboard(run: Path) -> None:
    track(run, TensorBoard())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    tensors = found.Tags()["tensors"]
    assert {"config/text_summary", "samples/train/text_summary", "report/text_summary"} <= set(tensors)
    scalars = {e.step: e.value for e in found.Scalars("reward/mean")}
    assert scalars == VALUES
    assert "hidden_size: 16" in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| 31> | 13; |" in found.Tensors("samples/train/text_summary")[0].tensor_proto.string_val[0].decode()


def test_wandb(run: Path) -> None:
    said = track(run, Wandb(tags=["a"]))
    kept = json.loads((run / "trackers" / "wandb.json").read_text())["id"]
    assert f"wandb: offline; `wandb sync {run}/wandb/offline-run-*-{kept}` sends it later" in said
    folders = [Path(path) for path in glob.glob(f"{run}/wandb/offline-run-*-{kept}")]
    assert len(folders) == 2
    content = b"".join((folder / f"run-{kept}.wandb").read_bytes() for folder in folders)
    for text in (b"reward/mean", b"0.015625", b"0.03125", b"0.0625", b"hidden_size"):
        assert text in content
    tables = [
        json.loads(file.read_text()) for folder in folders for file in folder.glob("files/media/table/samples/*.json")
    ]
    assert [table["data"][0][4:6] for table in tables] == [["31>", "13;"]] * 2
    assert [f.read_text() for folder in folders for f in folder.glob("files/media/html/report*.html")] == [
        (run / "report.html").read_text()
    ] * 2


def test_mlflow(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    track(run, Mlflow(tags={"team": "a"}))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.parent / "mlflow").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("burnish").experiment_id])
    assert found.info.run_id == json.loads((run / "trackers" / "mlflow.json").read_text())["id"]
    assert (found.info.run_name, found.info.status, found.data.tags["team"]) == ("sorting-0", "FINISHED", "a")
    assert found.data.params["model.new.hidden_size"] == "16"
    assert [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "reward/mean")] == [*VALUES.items()]
    assert "validation/greedy.accuracy.length_3" in found.data.metrics
    files = {a.path for folder in (None, "samples") for a in client.list_artifacts(found.info.run_id, folder)}
    assert {"config.yaml", "report.html", "samples/train-000002.json", "samples/train-000003.json"} <= files


def test_swanlab(run: Path) -> None:
    track(run, SwanLab())
    kept = json.loads((run / "trackers" / "swanlab.json").read_text())["id"]
    folders = sorted((run / "swanlab").glob(f"run-*-{kept}*"))
    assert len(folders) == 2
    lines = [
        json.loads(line) for f in folders for log in f.glob("logs/*/*.log") for line in log.read_text().splitlines()
    ]
    points = {line["index"]: line["data"] for line in lines if line["data"] in VALUES.values()}
    assert points == VALUES
    assert all("hidden_size" in (folder / "files" / "config.yaml").read_text() for folder in folders)
    media = "".join(path.read_text() for f in folders for path in f.glob("media/**/*") if path.is_file())
    assert "31>" in media or "31\\u003e" in media
    assert "the report" in media


def test_trackio(run: Path) -> None:
    track(run, Trackio())
    kept = json.loads((run / "trackers" / "trackio.json").read_text())["id"]
    with sqlite3.connect(run.parent / "trackio" / "burnish.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
        ((artifact,),) = database.execute("select name from artifacts").fetchall()
    assert {name for name, _, _ in rows} == {f"sorting-0-{kept[:6]}"}
    logged = [(step, json.loads(text)) for _, step, text in rows]
    assert [(step, values["reward/mean"]) for step, values in logged if "reward/mean" in values] == [*VALUES.items()]
    tables = [values["samples/train"]["_value"] for _, values in logged if "samples/train" in values]
    assert [table[0]["prompt"] for table in tables] == ["31>", "31>"]
    assert json.loads(config)["model.new.hidden_size"] == 16
    assert artifact == "sorting-0-report"
