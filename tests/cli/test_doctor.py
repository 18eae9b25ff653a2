"""`burnish doctor`."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from burnish.cli import doctor
from burnish.cli.main import main
from burnish.config.extras import EXTRAS, install_hint


def test_every_extra_of_the_package_has_a_use_and_distributions() -> None:
    rows = {row.name: row for row in doctor.extras()}
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(rows) == {f"[{extra}]" for extra in project["optional-dependencies"]}
    assert rows["[dev]"].mark == doctor.OK  # these tests run, so it is there
    for extra in EXTRAS:
        assert doctor.distributions(extra)


def test_an_absent_extra_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(doctor, "installed", lambda name: name != "math-verify")
    marks = {row.name: (row.mark, row.text) for row in doctor.extras()}
    assert marks["[math]"][0] == doctor.ABSENT
    assert "pip install -e '.[math]'" in marks["[math]"][1]
    assert marks["[tasks]"][0] == doctor.OK
    monkeypatch.chdir(tmp_path)  # pip knows the package by its name, wherever it is installed from
    assert {row.name: row.text for row in doctor.extras()}["[math]"] == (
        "the math reward (math-verify): pip install 'burnish[math]' (no math-verify)"
    )


def test_every_error_about_an_extra_says_what_it_brings() -> None:
    assert install_hint("mcp") == "pip install 'burnish[mcp]' (brings tools of MCP servers)"
    root = Path(doctor.__file__).parents[1]
    written = [p.name for p in root.rglob("*.py") if re.search(r"pip install (-e )?'(burnish|\.)\[", p.read_text())]
    assert written == ["extras.py"]


def test_an_old_torch_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.01)
    for asked, mark in (("2.11", doctor.OK), ("99.0", doctor.WRONG)):
        monkeypatch.setattr(doctor, "required_torch", lambda asked=asked: asked)
        assert {row.name: row.mark for row in doctor.python_and_torch()}["torch"] == mark


def test_a_module_that_fails_to_import_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        if name == "burnish.core.random_keys":
            raise NameError("a slip")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert next((r.mark, r.text) for r in doctor.self_check()) == (
        doctor.WRONG,
        "burnish.core.random_keys: NameError: a slip",
    )


def test_a_module_of_an_absent_extra_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_uvicorn(name: str) -> None:
        if name == "burnish.serve.http_server":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.setattr(importlib, "import_module", without_uvicorn)
    assert doctor.WRONG in [row.mark for row in doctor.self_check()]  # it is installed here: then it is one
    monkeypatch.setattr(doctor, "installed", lambda name: name != "uvicorn")
    assert doctor.WRONG not in [row.mark for row in doctor.self_check()]


def test_the_required_torch_is_the_one_of_the_package() -> None:
    assert doctor.required_torch() == "2.11"


def test_it_prints_every_section_and_exits_0(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "MATMUL_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "self_check", lambda: [doctor.ReportRow(doctor.WRONG, "import", "broken")])
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line[4:22].strip() for line in lines}
    assert {"python", "torch", "threads", "matmul", "memory", "disk", "[math]", "reward isolation", "import"} <= names
    assert lines[-1] == "1 things need attention"
