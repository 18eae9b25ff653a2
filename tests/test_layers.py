"""The layering rule: a package imports only from packages below it, and the light parts stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import burnish

LAYERS = [
    "api",
    "cli",
    "report",
    "serve",
    "evaluation",
    "trainers",
    "distributed",
    "rollout",
    "gateway",
    "inference",
    "memory_plan",
    "training",
    "environments",
    "rewards",
    "sandbox",
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
MODULES = {
    p: ".".join(["burnish", *p.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__") for p in FILES
}

NAMES = set(MODULES.values())


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree; several tests read it."""
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(path: Path, runs: bool = False) -> Iterator[ast.AST]:
    """All statements of a file, at any depth; with `runs` without those for type checkers."""
    pending: list[ast.AST] = [parsed(path)]
    for node in pending:  # which grows
        yield node
        inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if runs and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            inner = node.orelse
        pending += [child for child in inner if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)]


def imported(path: Path) -> Iterator[str]:
    """The absolute names a file imports, wherever in it they stand."""
    package = ["burnish", *path.relative_to(ROOT).parts[:-1]]
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ([f"{base}.{alias.name}" for alias in node.names] if base == "burnish" else [base])


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "burnish" and len(parts) > 1 and parts[1] in LAYERS else None


def is_record(name: str) -> bool:
    """Whether a module has the torch-free records of algorithms, which `config` reads although they stand above it."""
    parts = name.split(".")
    is_named = any(part in ("spec", "presets") or part.endswith("_spec") for part in parts)
    return parts[:2] == ["burnish", "algorithms"] and is_named


def upward(path: Path, own: str) -> list[str]:
    above = [n for n in imported(path) if (other := layer_of(n)) and LAYERS.index(other) < LAYERS.index(own)]
    return [n for n in above if not (own == "config" and is_record(n))]


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


def test_the_records_of_algorithms_import_nothing_but_config_and_each_other() -> None:
    records = {p: name for p, name in MODULES.items() if is_record(name)}
    assert len(records) > 8
    for path in records:
        assert [n for n in imported(path) if layer_of(n) not in (None, "config") and not is_record(n)] == [], path


def test_the_rule_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "core" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import burnish.cli.main\nfrom burnish import data\nfrom ..run import files\ndef f():\n    from burnish.models.kernels import device\n"
    )
    assert upward(path, "core") == ["burnish.cli.main", "burnish.data", "burnish.run", "burnish.models.kernels"]
    assert upward(path, "cli") == []


def modules_needed(path: Path) -> set[str]:
    """The modules of burnish that a file imports, in functions too, and the packages they are in. Imports for type checkers do not count."""
    names = set()
    for node in statements(path, runs=True):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names]
    return {".".join(name[:end]) for name in parts for end in range(2, len(name) + 1)} & NAMES


def circles(needed: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, by Tarjan's algorithm."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in needed[module]:
            if other not in order:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for module in needed:
        if module not in order:
            visit(module)
    return [group for group in found if len(group) > 1]


def test_no_modules_import_each_other() -> None:
    """A package whose `__init__` names what its modules define is not in a circle with them: they need it only as the folder they are in."""
    needed = {name: modules_needed(path) - {name} for path, name in MODULES.items()}
    for name, others in needed.items():
        needed[name] = {other for other in others if not name.startswith(f"{other}.")}
    assert circles(needed) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


HEAVY = "{'torch', 'transformers', 'numpy', 'pyarrow', 'ray'}"
PARSE = """
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
load(TrainConfig, None, ["model.new.num_layers=1", "data.train.task=sort_digits"])
"""


REWARD_WORKER = "import burnish.rewards.worker, burnish.data.tasks.registry"


@pytest.mark.parametrize(
    "code", ["import burnish; dir(burnish)", PARSE, REWARD_WORKER], ids=["import", "parse a config", "reward worker"]
)
def test_the_light_parts_load_nothing_heavy(code: str) -> None:
    script = f"import sys, time\nt = time.perf_counter()\n{code}\nprint(f'{{time.perf_counter() - t:.3f}} s')\nprint(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, heavy = done.stdout.splitlines()
    print(f"{code.strip().splitlines()[0]}: {seconds}")  # shown by pytest -s; time never decides a test
    assert heavy == "[]"
