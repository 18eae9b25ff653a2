"""Names functions and classes of a Python program so that worker processes can load them, as plug-ins do.

Rewards, tools and environments run in worker processes, which know an object by `path/to/file.py:name`
(`burnish.config.plugins`). An object reaches them in the first of these ways that works:

- An object at the top level of an importable file is named by that file.
- An object of a notebook cell or of the script itself is written to a file as source, with what it uses: imports, helper functions and
  classes, constants. The script is not imported again, because that would start the training once more.
- What source cannot hold, such as a closure, is written by cloudpickle, if that is installed.

Anything else is refused with the reason.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import linecache
import os
import pickle
import pickletools
import re
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from burnish.config.errors import UserError

PROGRAM_MODULES = ("__main__", "__mp_main__")
"""Modules that worker processes cannot import: a script, a notebook, a prompt."""
LAMBDA = "<lambda>"
MODULE_NAMES = ("__name__", "__doc__", "__package__", "__loader__", "__spec__", "__builtins__", "__debug__")
"""Names that every module has for itself."""


class CannotWrite(Exception):
    """The source of an object cannot be written. The message is the reason."""


def is_sendable(value: Any) -> bool:
    """Whether a value is a function or a class, or another callable that stands for one."""
    return callable(value) and not isinstance(value, ModuleType)


def object_name(value: Any) -> str:
    """The name under which a file defines an object."""
    name = getattr(value, "__name__", None) or type(value).__name__
    return name if name.isidentifier() else "function"


def file_of(value: Any) -> str | None:
    """The plug-in name of an object that worker processes can import as it is; None if they cannot."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    if module is None or module.__name__ in PROGRAM_MODULES or getattr(module, name, None) is not value:
        return None
    if _is_found_by_workers(module):
        return f"{module.__name__}:{name}"
    if "." not in module.__name__ and not hasattr(module, "__path__") and getattr(module, "__file__", None):
        return f"{Path(str(module.__file__)).resolve()}:{name}"
    return None


def written_source(value: Any) -> str:
    """The text of a file that defines an object under its name."""
    try:
        return _SourceFile().text(value)
    except CannotWrite as error:
        reason = str(error)
    return _pickled_source(value, reason)


# --- Source ---------------------------------------------------------------------------------------------------------------


class _SourceFile:
    """A file that grows by the definitions that an object needs, each after those it needs itself."""

    def __init__(self) -> None:
        self.folders: dict[str, None] = {}
        self.imports: dict[str, None] = {}
        self.blocks: list[str] = []
        self.defined: dict[str, Any] = {}
        self.has_future_annotations = False

    def text(self, value: Any) -> str:
        """The file, with `value` as its last definition."""
        self._define(object_name(value), value)
        head = ['"""Written from a Python program, for worker processes and for a later resume."""', ""]
        if self.has_future_annotations:
            head += ["from __future__ import annotations", ""]
        head += _path_lines(self.folders)
        return "\n".join([*head, *self.imports, *([""] if self.imports else []), "\n\n".join(self.blocks)])

    def _define(self, name: str, value: Any, user: str = "") -> None:
        """Write what makes `name` mean `value`. `user` is the function that uses it."""
        if name in self.defined:
            if self.defined[name] is not value:
                raise CannotWrite(f"two things called {name!r} are used, from different modules: rename one")
            return
        self.defined[name] = value  # first, because functions may call each other
        if isinstance(value, ModuleType):
            self._import(value, f"import {value.__name__}", name, value.__name__)
        elif _is_imported(value):
            module = sys.modules[value.__module__]
            self._import(module, f"from {module.__name__} import {value.__name__}", name, value.__name__)
        elif isinstance(value, type) or isinstance(inspect.unwrap(value), FunctionType):  # or of functools.lru_cache
            self._write_definition(name, value)
        else:
            self.blocks.append(self._constant(name, value, user) + "\n")

    def _import(self, module: ModuleType, statement: str, name: str, given: str) -> None:
        if module.__name__ in PROGRAM_MODULES:
            raise CannotWrite(f"{name} is the program itself, which worker processes cannot import")
        if not _is_found_by_workers(module) and (folder := _root_folder(module)) is not None:
            self.folders[str(folder)] = None
        self.imports[statement if name == given else f"{statement} as {name}"] = None

    def _write_definition(self, name: str, value: Any) -> None:
        if value.__name__ == LAMBDA:
            raise CannotWrite("it is a lambda, whose source is part of another line: give it a name with def")
        # A decorated function is its own source with the decorator, if that uses functools.wraps.
        inner = value if isinstance(value, type) else inspect.unwrap(value)
        if variables := _closure_variables(inner):
            raise CannotWrite(f"{name} is a closure over {', '.join(variables)}: pass them as arguments with defaults")
        source = _source_of(inner)
        functions = [inner] if isinstance(inner, FunctionType) else _methods(inner)
        names = functions[0].__globals__ if functions else vars(sys.modules[value.__module__])
        self.has_future_annotations |= names.get("annotations") is __future__.annotations
        for function in functions:
            _check_defaults(name, function)
        for used in _global_names(source):
            if used not in names and not hasattr(builtins, used) and "<locals>" in inner.__qualname__:
                raise CannotWrite(f"{name} uses {used}, a variable of the function in which it is defined")
            if used in names and used != value.__name__:
                self._define(used, names[used], name)
                if isinstance(names[used], ModuleType):
                    self._import_submodules(source, used, names[used])
        alias = "" if name == value.__name__ else f"\n\n{name} = {value.__name__}\n"
        self.blocks.append(f"{source}{alias}")

    def _import_submodules(self, source: str, name: str, module: ModuleType) -> None:
        """Import the submodules that a definition reaches through a module: `xml` alone does not bring `xml.dom.minidom`."""
        for path in _attribute_paths(source, name):
            for end in range(1, len(path) + 1):
                inner = sys.modules.get(".".join([module.__name__, *path[:end]]))
                if inner is None:
                    break
                self._import(inner, f"import {inner.__name__}", inner.__name__, inner.__name__)

    def _constant(self, name: str, value: Any, user: str) -> str:
        """The assignment of a value: as a literal, or pickled."""
        if isinstance(value, re.Pattern):
            self.imports["import re"] = None
            return f"{name} = re.compile({value.pattern!r}, {value.flags})"
        text = _ordered_repr(value)
        try:
            literal = ast.literal_eval(text)
            if literal == value and type(literal) is type(value):
                return f"{name} = {text}"
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass  # not a literal
        kind, data = f"{type(value).__module__}.{type(value).__qualname__}", b""
        try:
            data = pickle.dumps(value)
            reason = "its class is defined in the program itself" if b"__main__" in data else ""
        except Exception as error:  # noqa: BLE001 -- whatever pickling this object raises is the reason
            reason = f"{type(error).__name__}: {error}"
        if reason:
            raise CannotWrite(f"{user or name} uses {name}, a {kind}, which cannot be written to a file ({reason})")
        self.imports["import pickle"] = None
        self.folders |= _pickled_folders(data)
        return f"{name} = pickle.loads({data!r})  # {kind}"


def _is_imported(value: Any) -> bool:
    """Whether a value is a function or class that another module than the program defines."""
    module, name = sys.modules.get(str(getattr(value, "__module__", ""))), getattr(value, "__name__", None)
    if module is None or module.__name__ in PROGRAM_MODULES or not isinstance(name, str):
        return False
    return getattr(module, name, None) is value


def _path_lines(folders: Iterable[str]) -> list[str]:
    """The lines of a file that let it import from the program's own folders."""
    appended = [f"sys.path.append({folder!r})  # the program imports from here" for folder in folders]
    return ["import sys", "", *appended, ""] if appended else []


def _pickled_folders(data: bytes) -> dict[str, None]:
    """The program's own folders from which pickled bytes import: the modules of its classes and functions are named in them."""
    named = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str) and arg in sys.modules]
    modules = [sys.modules[name] for name in named if name not in PROGRAM_MODULES]
    folders = [_root_folder(module) for module in modules if not _is_found_by_workers(module)]
    return {str(folder): None for folder in folders if folder is not None}


def _check_defaults(user: str, function: FunctionType) -> None:
    """Refuse the source of a function with a default `weight=weight`, if that variable has another value now, as after a loop."""
    for parameter in inspect.signature(function).parameters.values():
        given = parameter.default
        if given is not parameter.empty:
            node = _default_expression(function, parameter.name)
            if isinstance(node, ast.Name) and function.__globals__.get(node.id, given) is not given:
                raise CannotWrite(f"{user} has a default {parameter.name}={node.id}, and {node.id} has changed since")


def _default_expression(function: FunctionType, parameter: str) -> ast.expr | None:
    """The default of a parameter in the source of a function; None if it has none there."""
    definition = ast.parse(_source_of(function)).body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(reversed(positional), reversed(arguments.defaults), strict=False)]
    pairs += [(arg, node) for arg, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if node]
    return next((node for arg, node in pairs if arg.arg == parameter), None)


def _attribute_paths(source: str, name: str) -> list[list[str]]:
    """The attributes that a definition reads from a name: `["dom", "minidom"]` for `xml.dom.minidom`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        path: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        if path and isinstance(inner, ast.Name) and inner.id == name:
            found.append(path)
    return found


def _ordered_repr(value: Any) -> str:
    """The repr of a value. That of a set is in order, so that the same program always writes the same file."""
    if type(value) is not set or not value:
        return repr(value)
    return f"{{{', '.join(sorted(map(repr, value)))}}}"


def _source_of(value: Any) -> str:
    """The source of a function or class, from its file or its notebook cell."""
    try:
        source = _class_source(value) if isinstance(value, type) else inspect.getsource(value)
    except (OSError, TypeError) as error:
        raise CannotWrite(f"its source is not known ({error}), as at a prompt without history") from error
    return textwrap.dedent(source).rstrip() + "\n"


def _closure_variables(value: Any) -> list[str]:
    """The variables of enclosing functions that a function, or a method of a class, uses."""
    functions = [value] if isinstance(value, FunctionType) else _methods(value)
    return sorted({name for function in functions for name in function.__code__.co_freevars} - {"__class__"})


def _methods(value: type) -> list[FunctionType]:
    """The functions that the body of a class defines, without what decorators such as `dataclass` add."""
    members = [member for member in vars(value).values() if isinstance(member, FunctionType)]
    functions = [
        inspect.unwrap(member) for member in members if member.__qualname__.startswith(f"{value.__qualname__}.")
    ]
    return [
        function
        for function in functions
        if function.__globals__.get("__name__") == value.__module__ and function.__code__.co_filename != "<string>"
    ]


def _class_source(value: type) -> str:
    """The source of a class. `inspect.getsource` does not find classes of notebook cells before Python 3.13.

    Their methods know the cell. A class without any, such as a dataclass, is looked up in the cells that were run, last first.
    """
    for method in _methods(value):
        text = "".join(linecache.getlines(method.__code__.co_filename))  # empty for methods that a decorator made
        if found := _class_in(text, value.__name__, method.__code__.co_firstlineno):
            return found
    for cell in reversed(vars(sys.modules[value.__module__]).get("In", [])):
        if found := _class_in(cell, value.__name__):
            return found
    return inspect.getsource(value)


def _class_in(text: str, name: str, line: int | None = None) -> str | None:
    """The source of the class of this name in a text, the one around `line` if that is given; None if there is none."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:  # a cell with IPython's magics
        return None
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == name and node.end_lineno is not None:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if line is None or first <= line <= node.end_lineno:
                return "".join(text.splitlines(True)[first - 1 : node.end_lineno])
    return None


def _global_names(source: str) -> list[str]:
    """The names that a definition looks up outside of itself, in its decorators, defaults and annotations too."""

    def found(table: symtable.SymbolTable, is_top: bool) -> Iterator[str]:
        for symbol in table.get_symbols():
            is_looked_up = symbol.is_referenced() and not symbol.is_assigned() if is_top else symbol.is_global()
            if is_looked_up and symbol.get_name() not in MODULE_NAMES:
                yield symbol.get_name()
        for child in table.get_children():
            yield from found(child, is_top=False)

    return list(dict.fromkeys(found(symtable.symtable(source, "<object>", "exec"), is_top=True)))


# --- Modules --------------------------------------------------------------------------------------------------------------


def _is_found_by_workers(module: ModuleType) -> bool:
    """Whether a worker process, whose path has installed packages, PYTHONPATH and burnish alone, can import a module."""
    folder = _root_folder(module)
    if folder is None:
        return True
    import burnish

    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [*site.getsitepackages(), site.getusersitepackages(), str(Path(burnish.__file__).parents[1])]
    folders = [*installed, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return folder in {Path(one).resolve() for one in folders if one} | _editable_folders(module)


def _editable_folders(module: ModuleType) -> set[Path]:
    """The folder of a package that a finder or a .pth file, and not the program, put on the path."""
    on_path = {Path(one).resolve() for one in sys.path if one}
    folder = _root_folder(module)
    return {folder} if folder is not None and folder not in on_path else set()


def _root_folder(module: ModuleType) -> Path | None:
    """The folder from which a module is imported; None for a built-in one."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    depth = module.__name__.count(".") + (path.name == "__init__.py")
    return path.parents[depth]


# --- cloudpickle ----------------------------------------------------------------------------------------------------------


def _pickled_source(value: Any, reason: str) -> str:
    """A file that loads an object from its bytes. `reason` is why its source could not be written."""
    name = object_name(value)
    if find_spec("cloudpickle") is None:
        raise UserError(
            f"{name} cannot be sent to worker processes: {reason}. Change that, or move it to a file of its own and import it from "
            "there, or `pip install cloudpickle`, which can send more"
        )
    import cloudpickle

    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(
            f"{name} cannot be sent to worker processes: {reason}; and cloudpickle says {type(error).__name__}: {error}. Create what "
            "cannot be sent inside the function, or move it to a file of its own and import it from there"
        ) from error
    version = ".".join(map(str, sys.version_info[:2]))
    return (
        f'"""Written by cloudpickle from a Python program. It loads in Python {version} only."""\n'
        f"# Not as source: {' '.join(reason.split())}.\n\n"
        + "\n".join(_path_lines(_pickled_folders(data)))
        + f"\nimport cloudpickle\n\n{name} = cloudpickle.loads({data!r})\n"
    )
