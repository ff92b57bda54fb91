"""Python code of the user's own that the shell was told to run: ``mine.py``, or a module such as ``package.module``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import BadInput, nearest, require_path, shortened, shown
from .problem import Problem

MODULES: dict[str, ModuleType] = {}  # by name: what was loaded; real workers, which may not have the files, are sent it

_ADDED: list[str] = []  # folders on Python's path for the sake of what was loaded
_KEPT: list[bool] = []  # whether Python kept bytecode before any was loaded


def load(text: str) -> ModuleType:
    """The module that a text names, a file or a dotted name; loaded once."""
    require_path("the code to import", text)
    if text.endswith(".py") or os.sep in text:
        return _load_file(Path(text))
    if not all(part.isidentifier() for part in text.split(".")):
        raise BadInput(f"{shown(text)} is neither a file nor a module; expected mine.py or package.module.")
    _add_folder(Path())
    before = set(sys.modules)
    try:
        module = importlib.import_module(text)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{text}.".startswith(f"{error.name}."):
            raise BadInput(f"there is no module {shown(text)}; expected mine.py or package.module.") from None
        raise _broken(text, error) from error
    except (Exception, SystemExit) as error:
        raise _broken(text, error) from error
    if _lies_in(module, Path.cwd()):
        _remember(before, Path.cwd(), module)
    return module


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"there is no file {path}; expected a Python file, named from the folder that you are in.")
    name, place = path.stem, path.resolve()
    there = sys.modules.get(name)
    if there is not None and name in MODULES and Path(str(there.__file__)).resolve() == place:
        return there
    if not name.isidentifier() or there is not None or _is_elsewhere(name, place):
        why = "cannot be a module's name" if not name.isidentifier() else "is the name of another module"
        raise BadInput(f"{path} cannot be imported: {shown(name)} {why}. Rename the file.")
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None and spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), set(sys.modules)
    _add_folder(place.parent)
    sys.modules[name] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    _remember(before, place.parent, module)
    return module


def _is_elsewhere(name: str, place: Path) -> bool:
    """Whether Python would find another file by that name."""
    spec = importlib.util.find_spec(name)
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != place)


def _lies_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder.resolve()) and "site-packages" not in file


def _remember(before: set[str], folder: Path, module: ModuleType) -> None:
    """Note a module, and what it brought from its own folder."""
    brought = {name: sys.modules[name] for name in set(sys.modules) - before if _lies_in(sys.modules[name], folder)}
    MODULES.update({**brought, module.__name__: module})


def _add_folder(folder: Path) -> None:
    """Let what is loaded import its neighbours, as they are now; what is installed goes before them.

    Python takes kept bytecode for that of a file which has the same size and was changed in the same second.
    """
    if not _KEPT:
        _KEPT.append(not sys.dont_write_bytecode)
        sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.append(path)
        _ADDED.append(path)


def line_of(error: BaseException, *files: str | None) -> str:
    """Where in code of the user's own an error arose, such as " in line 4 of mine.py (load)"; "" if it was elsewhere."""
    places = {Path(file).resolve() for file in (*files, *(module.__file__ for module in MODULES.values())) if file}
    line, trace = "", error.__traceback__
    while trace is not None:  # the last of these is the innermost
        code = trace.tb_frame.f_code
        if Path(code.co_filename).resolve() in places:
            line = f" in line {trace.tb_lineno} of {Path(code.co_filename).name} ({code.co_name})"
        trace = trace.tb_next
    return line


def _broken(text: str, error: BaseException) -> BadInput:
    line = ""
    trace = error.__traceback__
    while trace is not None:  # where in the user's file it happened
        if Path(trace.tb_frame.f_code.co_filename).name == Path(text).name:
            line = f" in line {trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno is not None:
        line = f" in line {error.lineno}"
    why = shortened(" ".join(str(error).split()) or type(error).__name__)
    return BadInput(f"{text} cannot be imported: {type(error).__name__}{line}: {why}")


def names_code(text: str) -> bool:
    """Whether a text names code, as in ``mine.py:problem[workers=4]``, and not one of the things that have names."""
    return ":" in text.partition("[")[0]


def require_function(text: str) -> None:
    """Refuse a file where code in it is expected, with what it has; the file is read, and not run."""
    path = Path(text)
    if path.suffix != ".py":
        return
    require_path("the problem", text)
    if not path.is_file():
        raise BadInput(f"there is no file {path}; expected a Python file, named from the folder that you are in.")
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):  # what is wrong is told once it is imported
        body = []
    names = [part.name for part in body if isinstance(part, (ast.FunctionDef, ast.ClassDef)) and part.name[0] != "_"]
    has = f"it has: {', '.join(names)}." if names else "such as one that returns a dd.Problem."
    raise BadInput(f"{shown(text)} is a file, not a function in it; write {text}:FUNCTION; {has}")


def find(text: str) -> Any:
    """What stands behind ``mine.py:problem`` or ``package.module:function``."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise BadInput(f"{shown(text)} names no code; expected mine.py:problem or package.module:function.")
    module = load(place)
    if not hasattr(module, name):
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Problem) or (callable(value) and getattr(value, "__module__", "") == module.__name__)
        ]
        raise BadInput(f"{place} has no {shown(name)}; {nearest(name, known) if known else 'it defines no function.'}")
    return getattr(module, name)


def forget() -> None:
    """Take everything back that was loaded."""
    for name in MODULES:
        sys.modules.pop(name, None)
    MODULES.clear()
    for path in _ADDED:
        if path in sys.path:
            sys.path.remove(path)
    _ADDED.clear()
    if _KEPT:
        sys.dont_write_bytecode = not _KEPT.pop()
