"""The layering rule: a package imports only from packages below it, and the light parts stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import burnish

LAYERS = [
    "cli",
    "report",
    "serve",
    "evaluation",
    "trainers",
    "controller",
    "rollout",
    "training",
    "environments",
    "rewards",
    "data",
    "models",
    "algorithms",
    "run",
    "core",
    "config",
]
"""From the top to the bottom."""

ROOT = Path(burnish.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """The absolute names a file imports, wherever in it they stand."""
    package = ["burnish", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ([f"{base}.{alias.name}" for alias in node.names] if base == "burnish" else [base])


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "burnish" and len(parts) > 1 and parts[1] in LAYERS else None


def upward(path: Path, own: str) -> list[str]:
    return [n for n in imported(path) if (other := layer_of(n)) and LAYERS.index(other) < LAYERS.index(own)]


def test_every_package_has_its_place_in_the_list() -> None:
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} <= set(LAYERS)


@pytest.mark.parametrize("package", [layer for layer in LAYERS if (ROOT / layer).is_dir()])
def test_no_file_imports_upward(package: str) -> None:
    wrong = {
        str(p.relative_to(ROOT)): names
        for p in FILES
        if p.is_relative_to(ROOT / package) and (names := upward(p, package))
    }
    assert wrong == {}


def test_the_rule_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "core" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import burnish.cli.main\nfrom burnish import data\nfrom ..run import files\ndef f():\n    from burnish.models.ops import rope\n"
    )
    assert upward(path, "core") == ["burnish.cli.main", "burnish.data", "burnish.run", "burnish.models.ops"]
    assert upward(path, "cli") == []


HEAVY = "{'torch', 'transformers', 'numpy', 'pyarrow', 'ray'}"
PARSE = """
from burnish.config.load import load
from burnish.config.schema import TrainConfig
load(TrainConfig, None, ["model.new.num_layers=1", "data.train.task=sort_digits"])
"""


@pytest.mark.parametrize("code", ["import burnish", PARSE], ids=["import", "parse a config"])
def test_the_light_parts_load_nothing_heavy(code: str) -> None:
    script = f"import sys, time\nt = time.perf_counter()\n{code}\nprint(f'{{time.perf_counter() - t:.3f}} s')\nprint(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    print(f"{code.strip().splitlines()[0]}: {seconds}")  # shown by pytest -s; time never decides a test
    assert heavy == "[]"
