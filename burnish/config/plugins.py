"""Plug-ins from a file: `path/to/file.py:name` wherever a reward, data source, sampler, slot function or environment goes.

The file is imported once per process under a name derived from its path, so a plug-in may keep module state and
may import its neighbours (its folder is on `sys.path` while it loads). Options from the config are checked against
the function's signature before anything runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, nearest


def is_plugin(name: str) -> bool:
    """Whether a config value names a plug-in rather than something built in."""
    path, _, attribute = name.rpartition(":")
    return path.endswith(".py") and attribute.isidentifier()


def load_plugin(spec: str, base: str | Path | None = None) -> Any:
    """The object `name` in `path/to/file.py:name`; relative paths are tried from `base`, then from the working directory."""
    if not is_plugin(spec):
        raise UserError(f"plug-in {spec!r} is not of the form path/to/file.py:name")
    raw, _, attribute = spec.rpartition(":")
    candidates = [Path(raw)] if Path(raw).is_absolute() or base is None else [Path(base) / raw, Path(raw)]
    path = next((c for c in candidates if c.is_file()), None)
    if path is None:
        raise UserError(f"plug-in {spec!r}: no such file (looked at {', '.join(str(c) for c in candidates)})")
    module = _import_file(path.resolve(), spec)
    if not hasattr(module, attribute):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise UserError(f"plug-in {spec!r}: {path} defines no {attribute!r}{nearest(attribute, public)}")
    return getattr(module, attribute)


def _import_file(path: Path, spec: str) -> Any:
    name = "burnish_plugin_" + hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"plug-in {spec!r}: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's file raises is theirs to see, and to fix
        del sys.modules[name]
        raise UserError(f"plug-in {spec!r}: importing {path} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def check_options(function: Callable[..., Any], options: Mapping[str, Any], where: str) -> None:
    """Refuse options the function does not take, naming the nearest parameter."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # a builtin without a signature: Python itself will complain when it is called
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for key in options:
        if key not in parameters:
            raise UserError(
                f"{where}: unknown option {key!r}{nearest(key, parameters)} (takes: {', '.join(parameters)})"
            )
