"""Plug-ins (`path/to/file.py:name`, `package.module:name`) and references to other stages (`stage:NAME`, `run:NAME`).

Rewards, data sources, samplers, slot functions and environments can be plug-ins. A file is imported once per process under a name derived
from its path, so it may keep module state. It may import other files of its folder: the folder is put at the end of `sys.path`, so that a
`random.py` or `datasets.py` in it never replaces an installed module. A module is imported under its own name, so relative imports inside
its package work. Options from the config are checked against the function's signature before anything runs.

`stage:NAME` stands for the output of a stage, `run:NAME` for its run folder.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean

PLUGIN_FORMS = "path/to/file.py:name or package.module:name"
REFERENCE_PATTERN = re.compile(r"(stage|run):([\w-]+)")
_import_lock = threading.RLock()
_plugin_folders: set[Path] = set()
"""Folders that were added to `sys.path` for plug-ins."""


def is_plugin(name: str) -> bool:
    """Whether a config value names a plug-in."""
    return is_plugin_file(name) or is_plugin_module(name)


def is_plugin_file(name: str) -> bool:
    """Whether the name has the form `path/to/file.py:name`."""
    path, _, attribute = name.rpartition(":")
    return path.endswith(".py") and attribute.isidentifier()


def is_plugin_module(name: str) -> bool:
    """Whether the name has the form `package.module:name`."""
    module, _, attribute = name.partition(":")
    pieces = module.split(".")
    return pieces[-1] != "py" and all(piece.isidentifier() for piece in (*pieces, attribute))


def load_plugin(spec: str, base: str | Path | None = None) -> Any:
    """The object that a plug-in names. Relative paths are tried from `base`, then from the working directory."""
    if is_plugin_module(spec):
        module = _import_module(spec, base)
    elif is_plugin_file(spec):
        with _import_lock:  # another thread must not see a module of which half has run
            module = _import_file(_find_file(spec, base), spec)
    else:
        raise UserError(f"plug-in {spec!r} is not of the form {PLUGIN_FORMS}")
    attribute = spec.rpartition(":")[2]
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(
            f"plug-in {spec!r}: {module.__file__} defines no {attribute!r}{did_you_mean(attribute, public)}"
        )
    return getattr(module, attribute)


def plugin_source(spec: str, base: str | Path | None = None) -> Path | None:
    """The file of a plug-in, or None. The parent packages of a module are imported, the module itself is not."""
    if is_plugin_file(spec):
        return next((path for path in _candidates(spec, base) if path.is_file()), None)
    _add_to_sys_path(base, Path.cwd())
    name = spec.partition(":")[0]
    _check_module_conflict(name.partition(".")[0], [Path(base or "."), Path()], spec)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent package is missing or is a plain module
        return None
    except (Exception, SystemExit) as error:
        raise _import_failed(spec, f"the package of {name}", error) from error
    return Path(found.origin) if found is not None and found.origin is not None and found.has_location else None


def _candidates(spec: str, base: str | Path | None) -> list[Path]:
    raw = spec.rpartition(":")[0]
    return [Path(raw)] if Path(raw).is_absolute() or base is None else [Path(base) / raw, Path(raw)]


def _find_file(spec: str, base: str | Path | None) -> Path:
    candidates = _candidates(spec, base)
    path = next((c for c in candidates if c.is_file()), None)
    if path is None:
        raise UserError(f"plug-in {spec!r}: no such file (looked at {', '.join(str(c) for c in candidates)})")
    return path.resolve()


def _add_to_sys_path(*folders: str | Path | None) -> None:
    """Append folders to `sys.path`, after installed packages. They stay there for imports inside functions."""
    for folder in folders:
        if folder is not None and str(place := Path(folder).resolve()) not in sys.path:
            sys.path.append(str(place))
            _plugin_folders.add(place)
    importlib.invalidate_caches()


def _import_module(spec: str, base: str | Path | None) -> Any:
    name = spec.partition(":")[0]
    _add_to_sys_path(base, Path.cwd())
    _check_module_conflict(name.partition(".")[0], [Path(base or "."), Path()], spec)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        parents = [name.rsplit(".", k)[0] for k in range(name.count(".") + 1)]
        if isinstance(error, ModuleNotFoundError) and error.name in parents:
            looked = f"it is neither installed nor in {base or Path.cwd()}"
            raise UserError(f"plug-in {spec!r}: there is no module {error.name!r}; {looked}") from error
        raise _import_failed(spec, name, error) from error


def _import_file(path: Path, spec: str) -> Any:
    name = "burnish_plugin_" + hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"plug-in {spec!r}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    _add_to_sys_path(path.parent)
    for imported in _imported_modules(path):
        _check_module_conflict(imported, [path.parent], spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user must see whatever the file raises
        del sys.modules[name]
        raise _import_failed(spec, str(path), error) from error
    return module


def _import_failed(spec: str, what: str, error: BaseException) -> UserError:
    hint = ""
    if isinstance(error, ImportError) and "relative import" in str(error):
        hint = "; a single file has no package: name it as package.module:name instead"
    return UserError(f"plug-in {spec!r}: importing {what} failed: {type(error).__name__}: {error}{hint}")


def _check_module_conflict(name: str, folders: Sequence[Path], spec: str) -> None:
    """Refuse a plug-in that would import a file of another plug-in: a process has one module per name."""
    files = [folder / path for folder in folders for path in (f"{name}.py", f"{name}/__init__.py")]
    wanted = next((file.resolve() for file in files if file.is_file()), None)
    try:
        found = importlib.util.find_spec(name) if wanted is not None else None
    except (ImportError, ValueError):  # loaded in another way: the import reports the problem
        return
    if found is None or found.origin is None or not found.has_location:
        return
    origin = Path(found.origin).resolve()
    folder = origin.parents[1] if origin.name == "__init__.py" else origin.parent
    if origin != wanted and folder in _plugin_folders:
        raise UserError(
            f"plug-in {spec!r} needs {wanted} as module {name!r}, but that name is taken by {origin} of another plug-in: rename one of the two"
        )


def _imported_modules(path: Path) -> Iterator[str]:
    """The top-level modules that a file imports anywhere; none if it is not valid Python."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):  # the import reports it
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def check_options(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
    """Refuse options that the function does not take, with the nearest parameter."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call reports it
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for key in options:
        if key not in parameters:
            raise UserError(
                f"{where}: unknown option {key!r}{did_you_mean(key, parameters)} (takes: {', '.join(parameters)})"
            )


def find_references(tree: Any) -> Iterator[tuple[str, str]]:
    """Every `stage:NAME` and `run:NAME` among the values of a tree, as (kind, name)."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from find_references(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from find_references(value)
    elif isinstance(tree, str) and (found := REFERENCE_PATTERN.fullmatch(tree)):
        yield found[1], found[2]


def resolve_references(tree: Any, paths: dict[str, str]) -> Any:
    """The tree with every reference replaced by its path in `paths`."""
    if isinstance(tree, dict):
        return {key: resolve_references(value, paths) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [resolve_references(value, paths) for value in tree]
    if isinstance(tree, str) and REFERENCE_PATTERN.fullmatch(tree):
        return paths[tree]
    return tree


def is_reference(value: Any) -> bool:
    """Whether a value refers to the output or the run of a stage."""
    return isinstance(value, str) and REFERENCE_PATTERN.fullmatch(value) is not None
