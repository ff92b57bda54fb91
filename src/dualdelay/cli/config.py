"""Commands as TOML: what a folder's command.toml holds, and what --config reads.

A file says what is computed, not what may be trusted: code of the user's own and clusters that it names are used only if
the command line names them again.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ..core.errors import BadInput, nearest, require_one_of, require_path, shortened, shown
from ..core.own_code import names_code
from ..core.texts import parse_call
from .flags import DEFAULT_PROBLEM, Compare, Train

FILE = "command.toml"
_CLUSTER = ("cluster", "cluster_cpus", "cluster_gpus", "insecure")
_ELSEWHERE = ("folder", "tensorboard", "json", "config", *_CLUSTER)  # where something goes or is computed is said anew
_TRUST = ("address", "host", "insecure")  # settings of a fleet that say whom to trust
_UNSAID = {"imports": (), "problem": DEFAULT_PROBLEM, "fleet": "simulated", "cluster": None}


def _key(name: str) -> str:
    """A field as it is called on the shell and in the file."""
    return "import" if name == "imports" else name.replace("_", "-")


def _flat(kind: Any) -> dict[str, Any]:
    """The types of all flags of a command by their fields' names, those that commands share among them."""
    hints: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        hints |= _flat(hint) if is_dataclass(hint) else {name: hint}
    return hints


def _values(flags: Any) -> dict[str, Any]:
    """The values of all flags of a command by their fields' names."""
    values: dict[str, Any] = {}
    for field in fields(flags):
        value = getattr(flags, field.name)
        values |= _values(value) if is_dataclass(value) else {field.name: value}
    return values


def written(command: str, flags: Train | Compare, folder: Path) -> bytes:
    """A command as TOML, with a comment that says how to run it again."""
    import tomli_w

    values = {name: value for name, value in _values(flags).items() if name not in _ELSEWHERE and value not in (None, ())}
    table = {_key(name): _plain(value) for name, value in values.items()}
    again = ["dualdelay", command, "--config", shlex.quote(str(folder / FILE)), *_named_again(values)]
    comments = [
        "A command of dualdelay. To run it again, in the folder where it was run first:",
        f"  {' '.join(again)}",
        "Flags on the command line win over what stands here. The new runs get a folder of their own, or that of --folder.",
    ]
    if command == "compare":
        comments.append(f"With --folder {shlex.quote(str(folder))} what is there is not computed again.")
    text = "".join(f"# {line}\n" for line in comments)
    return f"{text}\n{tomli_w.dumps({'command': command, **table})}".encode()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _named_again(values: Mapping[str, Any]) -> list[str]:
    """The flags that no file decides."""
    words = [word for file in values.get("imports", ()) for word in ("--import", shlex.quote(file))]
    if names_code(values.get("problem", "")):
        words += ["--problem", shlex.quote(values["problem"])]
    if trusted := _trusts(values.get("fleet", "")):
        words += ["--fleet", shlex.quote(trusted)]
    if cluster := values.get("cluster"):
        words += ["--cluster", shlex.quote(cluster)]
    return words


def _trusts(fleet: str) -> str:
    """The text of a fleet, if it says whom to trust."""
    return fleet if fleet and any(name in parse_call(fleet)[1] for name in _TRUST) else ""


def read(path: Path, command: str, kind: Any) -> tuple[Any, list[str]]:
    """The flags that a file holds, but for those that no file decides; these are given back as words to be said again."""
    values = _read(path)
    if (other := values.pop("command", command)) != command:
        raise BadInput(
            f"{path} is of the command {shown(other)}; run it with: dualdelay {shortened(str(other))} --config {path}"
        )
    if "insecure" in values:
        raise BadInput(f"{path} has 'insecure', which no file decides: leave it out, and say --insecure if that is right.")
    hints = {_key(name): (name, hint) for name, hint in _flat(kind).items() if name not in ("config",)}
    known: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("_", "-")
        if name not in hints:
            raise BadInput(f"{path} has {shown(key)}, which is no flag of dualdelay {command}; {nearest(name, hints)}")
        field, hint = hints[name]
        known[field] = _fitting(f"{path} says of {key}", hint, value)
    lacking = [field.name for field in fields(kind) if field.name in hints and field.default is MISSING]
    for name in lacking:
        if name not in known:
            raise BadInput(f"{path} has no {name}; add a line such as: {_EXAMPLES[name]}")
    again = _named_again(known)
    for name in ("imports", *(name for name in ("problem", "fleet", "cluster") if f"--{name}" in again)):
        known.pop(name, None)
    own = {field.name for field in fields(kind)}
    shared = {name: value for name, value in known.items() if name not in own}
    return kind(**{name: known[name] for name in known if name in own}, common=_common(kind)(**shared)), again


_EXAMPLES = {"algorithm": 'algorithm = "dude[lr=0.05]"', "algorithms": 'algorithms = ["dude[lr=0.05]", "sync[lr=0.5]"]'}


def _common(kind: Any) -> Any:
    return get_type_hints(kind)["common"]


def _read(path: Path) -> dict[str, Any]:
    require_path("config", path)
    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise BadInput(
            f"the file {path} cannot be read ({error.strerror}); expected a TOML file, such as {FILE}."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{path} is no TOML: {shortened(str(error))}") from None


def _fitting(what: str, hint: Any, value: Any) -> Any:
    """A value of a file as its flag takes it; refuses one of another type."""
    kinds = [kind for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if kind is not NoneType]
    kind: Any = kinds[0]
    if get_origin(kind) is Literal:
        require_one_of(what, value, get_args(kind))
        return value
    if get_origin(kind) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(_fitting(what, get_args(kind)[0], one) for one in values)
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        Path: "the path of a file or folder",
    }
    if kind is float and type(value) in (int, float):
        return float(value)
    if kind is int and type(value) is float and value.is_integer():  # 1e3, as on the command line
        return int(value)
    if kind is Path and type(value) is str:
        return Path(value)
    if type(value) is not kind:
        raise BadInput(f"{what} {shown(value)}; expected {words[kind]}.")
    return value


def require_said_again(flags: Train | Compare, again: list[str], command: str, words: list[str]) -> None:
    """Refuse a command whose file names code or clusters that the command line does not."""
    said, lacking = _values(flags), list[str]()
    for flag, value in zip(again[::2], again[1::2], strict=True):
        name = "imports" if flag == "--import" else flag.removeprefix("--")
        if said[name] == _UNSAID[name]:
            lacking += [flag, value]
    if lacking:
        raise BadInput(
            f"the file names code of your own or whom to trust ({' '.join(lacking)}), which no file decides: if that is "
            f"right, say so again: dualdelay {command} {shlex.join(words)} {' '.join(lacking)}"
        )


def code_of(folder: Path) -> tuple[list[str], str | None]:
    """The files and the problem of the user's own that the command of a run or of its comparison named, to be shown."""
    for place in (folder, folder.parent):
        with suppress(BadInput):
            values = _read(place / FILE)
            files, problem = values.get("import", []), values.get("problem")
            good = isinstance(files, list) and all(isinstance(file, str) for file in files)
            return files if good else [], problem if isinstance(problem, str) and names_code(problem) else None
    return [], None
