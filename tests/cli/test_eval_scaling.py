"""`burnish eval --scaling`: one pool, the strategies themselves, resuming, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.model import Model, NewModel
from burnish.evaluation.completions import read_completions
from burnish.evaluation.pool_estimates import majority_at_k
from burnish.evaluation.result import by_question
from burnish.evaluation.session import EvalJob, OpenSession
from burnish.models.policy import load_policy

PLUGIN = '''
from burnish.evaluation.strategies.search import Choice

async def longest(search, n):
    """A strategy that is run, because only the built-in ones are answered by the pool."""
    nodes = await search.sample(search.root, n)
    return Choice(max(nodes, key=lambda node: (len(node.tokens), -node.index)))
'''
EVEN = (
    "def even(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 2 == 0\n"
    "def chars(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str))\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=1).save(path)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(PLUGIN)
    Path("e.py").write_text(EVEN)
    rows = [{"question": f"{i}>", "answer": "1"} for i in range(6)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(model: Path, *more: str) -> list[str]:
    plain = ["eval", str(model), "d.jsonl", "--reward", "e.py:even", "--temperature", "1", "--max-tokens", "8"]
    return [*plain, "reward.workers=1", "--out", "s", *more]


def test_strategies_share_a_pool_and_agree_with_their_own_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategies = [
        "majority",
        "best_of_n",
        "best_of_n@e.py:chars",
        "best_of_n@oracle",
        "best_of_n@self_certainty",
        "p.py:longest",
    ]
    scaling = ["--scaling", *strategies, "--budgets", "1", "2", "4", "--keep-trees"]
    assert main(command(model, *scaling)) == 0
    shown = capsys.readouterr()
    assert "scores-e.py-chars.jsonl: 24 samples" in shown.err
    found = json.loads(Path("s/scaling.json").read_text())
    points = {(p["strategy"], p["budget"]): p for p in found["points"]}
    assert len(points) == 18
    pool = read_completions(Path("s/pool.jsonl"))
    mean = sum(row["length"] for row in pool) / 24
    assert (found["pool_size"], found["answer_tokens"]) == (4, pytest.approx(mean))
    # With one sample everything is the mean accuracy of the pool.
    accuracy = sum(row["accuracy"] for row in pool) / 24
    for name in ("majority", "best_of_n@likelihood", "best_of_n@e.py:chars", "best_of_n@oracle"):
        assert points[name, 1]["accuracy"]["mean"] == pytest.approx(accuracy)
        assert points[name, 4]["tokens"] == pytest.approx(4 * mean)
    # With the whole pool it is what the strategy itself chooses.
    for name, verifier in (("best_of_n@likelihood", "likelihood"), ("best_of_n@oracle", "oracle")):
        own = ["--strategy", "best_of_n", "strategy.n=4", f"strategy.verifier={verifier}", "--out", f"own-{verifier}"]
        plain = [word for word in command(model) if word not in ("--out", "s")]
        assert main([*plain, *own]) == 0
        rows = read_completions(Path(f"own-{verifier}/d.jsonl"))
        assert points[name, 4]["accuracy"]["mean"] == pytest.approx(sum(row["accuracy"] for row in rows) / 6)
        assert points[name, 4]["tokens"] == pytest.approx(sum(row["search"]["tokens"] for row in rows) / 6)
    by_chars = points["best_of_n@e.py:chars", 4]
    assert by_chars["accuracy"]["mean"] == pytest.approx(points["p.py:longest", 4]["accuracy"]["mean"], abs=0.34)
    assert points["p.py:longest", 2]["estimate"] == "search"
    assert points["p.py:longest", 2]["cache_hit_rate"] == pytest.approx(1 / 2)
    oracle = [points["best_of_n@oracle", k]["accuracy"]["mean"] for k in (1, 2, 4)]
    assert oracle == sorted(oracle)
    assert points["best_of_n@oracle", 2]["is_oracle"] is True
    assert {p["strategy"] for p in found["envelope"]}.isdisjoint({"best_of_n@oracle"})
    assert points["majority", 2]["versus_majority"] is None
    versus = points["best_of_n@oracle", 4]["versus_majority"]
    assert versus["mean"] == pytest.approx(oracle[2] - points["majority", 4]["accuracy"]["mean"])
    # Self-certainty reads the question (two tokens and no more) and all tokens of each sample.
    reads = [points["best_of_n@self_certainty", k]["verifier_tokens"] for k in (1, 2, 4)]
    assert reads == pytest.approx([k * (2 + mean) for k in (1, 2, 4)])
    assert points["best_of_n@likelihood", 4]["verifier_tokens"] == points["majority", 4]["verifier_tokens"] == 0
    assert by_chars["verifier_tokens"] is points["best_of_n@oracle", 4]["verifier_tokens"] is None
    # What the pool answers has the same tokens at the same budget. The plug-in cost what it cost, and is compared with as many samples.
    equal = points["best_of_n@oracle", 4]
    assert (equal["versus_equal_tokens"], equal["equal_samples"]) == (versus, 4)
    longest = points["p.py:longest", 2]
    samples = longest["equal_samples"]
    assert samples == pytest.approx(longest["tokens"] / mean)
    groups = by_question(pool).values()

    def majority(k: int) -> float:
        values = [majority_at_k([r["answered"] for r in rows], [r["accuracy"] for r in rows], k) for rows in groups]
        return sum(values) / 6

    few, share = int(samples), samples - int(samples)
    assert share > 0
    expected = (1 - share) * majority(few) + share * majority(few + 1)
    assert longest["versus_equal_tokens"]["mean"] == pytest.approx(longest["accuracy"]["mean"] - expected)
    page = Path("s/scaling.html").read_text()
    assert page.count("<details class=tree>") == 18  # six questions at three budgets
    assert "<svg" in Path("s/scaling.svg").read_text()


def test_parts_that_are_there_are_not_made_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling = ["--scaling", "majority", "p.py:longest", "--budgets", "1", "2"]
    assert main(command(model, *scaling)) == 0
    first = json.loads(Path("s/scaling.json").read_text())
    before = {path.name: path.stat().st_mtime_ns for path in Path("s").glob("*.jsonl")}
    assert sorted(before) == ["p.py-longest-1.jsonl", "p.py-longest-2.jsonl", "pool.jsonl"]
    capsys.readouterr()
    # One part is cut as a kill leaves it, and one strategy is new.
    settings = json.loads(Path("s/p.py-longest-2.json").read_text())["settings"]
    lines = Path("s/p.py-longest-2.jsonl").read_text().splitlines()
    Path("s/p.py-longest-2.partial.jsonl").write_text(
        "\n".join([json.dumps({"settings": settings}), *lines[:3]]) + "\n"
    )
    for name in ("p.py-longest-2.json", "p.py-longest-2.jsonl"):
        Path("s", name).unlink()
    more = ["--scaling", "majority", "p.py:longest", "best_of_n@e.py:chars", "--budgets", "1", "2"]
    capsys.readouterr()
    assert main(command(model, *more)) == 0
    said = capsys.readouterr().err
    assert "3 are there already" in said
    assert "pool: 6 prompts" not in said
    again = json.loads(Path("s/scaling.json").read_text())
    assert [p["accuracy"] for p in again["points"][:4]] == [p["accuracy"] for p in first["points"]]
    after = {path.name: path.stat().st_mtime_ns for path in Path("s").glob("*.jsonl")}
    assert {name for name in before if after[name] != before[name]} == {"p.py-longest-2.jsonl"}
    Path("e.py").write_text(EVEN + "# changed\n")
    assert main(command(model, *more)) == 2
    assert "reward.content of e.py:even" in capsys.readouterr().err
    Path("e.py").write_text(EVEN)
    Path("s/scaling.html").unlink()
    assert main(["view", "s", "--report"]) == 0
    assert capsys.readouterr().out == "scaling: s/scaling.html\n"
    assert Path("s/scaling.html").is_file()


def test_searches_have_budgets_of_their_own_and_a_kill_leaves_the_points_before_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("q.py").write_text(PLUGIN.replace("def longest", "def first"))
    words = ["--scaling", "p.py:longest", "majority", "q.py:first", "--budgets", "1", "2", "4", "--search-budgets", "2"]
    started: list[str] = []
    run = OpenSession.run

    def killed(session: OpenSession, job: EvalJob) -> object:
        started.append(job.paths.name)
        if job.paths.name == "q.py-first-2":
            raise KeyboardInterrupt
        return run(session, job)

    monkeypatch.setattr(OpenSession, "run", killed)
    assert main(command(model, *words)) == 130
    assert started == ["pool", "p.py-longest-2", "q.py-first-2"]
    found = [(p["strategy"], p["budget"]) for p in json.loads(Path("s/scaling.json").read_text())["points"]]
    assert found == [("p.py:longest", 2), ("majority", 1), ("majority", 2), ("majority", 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scaling", "majorty"], "did you mean 'majority'"),
        (["--scaling", "majority@oracle"], "majority compares no scores, so it has no verifier"),
        (["--scaling", "majority", "majority"], "--scaling names majority twice"),
        (["--scaling", "single", "--budgets", "2", "4"], "single has none of the sizes 2, 4"),
        (["--scaling", "best_of_n@orakle"], "did you mean 'oracle'"),
        (["--scaling", "{name: p.py:longest, verifier: orakle}"], "did you mean 'oracle'"),
        (["--scaling", "--n", "4"], "--n has no effect with --scaling: the pool has as many samples"),
        (["--scaling", "--strategy", "majority"], "--strategy has no effect with --scaling"),
        (["--scaling", "--temperature", "0"], "at temperature 0 (the default) they are all alike"),
        (["--scaling", "--budgets", "0", "1"], "--budgets 0: expected numbers of answers of 1 or more"),
        (["reward.parts=format", "--scaling", "majority"], "strategy majority votes on equal answers, and no answer"),
        (
            ["--scaling", "--budgets", "1", "4", "--search-budgets", "2"],
            "--search-budgets 2: they are compared with majority",
        ),
        (["--budgets", "1"], "are the sizes of --scaling"),
        (["--search-budgets", "1"], "are the sizes of --scaling"),
        (["--scaling", "--out", "o.jsonl"], "is a folder of several files"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sampled(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(model, *arguments)) == 2
    assert message in capsys.readouterr().err
    assert not list(Path.cwd().glob("*/pool*"))
