"""The names of things: ``dude[lr=0.05,wait_for=3]`` on the shell, {"name": "dude", "lr": 0.05} in a run's folder."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..algorithms import ALGORITHMS
from ..core import own_code
from ..core.errors import BadInput, DualDelayError, nearest, shortened, shown
from ..core.texts import literal, parse_call, require_parameters, require_text, split
from ..problems import PROBLEMS
from ..simulation import SPEEDS
from ..simulation.link import Link, SharedLink
from ..workers.ray_fleet import RayFleet
from ..workers.sites.fleet import SiteFleet
from . import own

_ALTERNATIVES = 10_000  # that one text may stand for

_LONGEST_FOLDER = 200  # characters of a folder's name: file systems take 255 bytes, and something is put around it

REGISTRIES: dict[str, dict[str, Any]] = {
    "algorithm": ALGORITHMS,
    "problem": PROBLEMS,
    "speeds": SPEEDS,
    "link": {"link": Link, "shared_link": SharedLink},
    "fleet": {"ray": RayFleet, "sites": SiteFleet},
}

HEADINGS = {"algorithm": "algorithms", "problem": "problems", "speeds": "speeds", "fleet": "fleets"}  # that list knows


def known(kind: str, name: str) -> Any:
    """The class of that name, ours or another's that was imported or is installed; None if there is none."""
    return REGISTRIES[kind].get(name) or own.registered(kind, name)


def parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """What a class takes, by name; the settings of a small value among them, such as ``FaultPolicy``, one by one."""
    taken: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if _is_group(parameter.default):
            taken |= parameters(type(parameter.default))
        elif parameter.kind is not parameter.VAR_KEYWORD:
            taken[name] = parameter
    return taken


def _is_group(value: Any) -> bool:
    """Whether a setting is a small value of several, which texts and folders hold one by one."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and not _is_registered(value)


def _is_registered(value: Any) -> bool:
    return any(type(value) is ours for registry in REGISTRIES.values() for ours in registry.values())


def _grouped(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given one by one as a class takes them."""
    grouped = dict(values)
    for name, parameter in inspect.signature(kind).parameters.items():
        if _is_group(parameter.default):
            own = {key: grouped.pop(key) for key in parameters(type(parameter.default)) if key in grouped}
            grouped[name] = dataclasses.replace(parameter.default, **own)
    return grouped


def build(kind: str, name: str, values: Mapping[str, Any]) -> Any:
    """Make the algorithm, problem or speed model of that name."""
    thing = known(kind, name)
    if thing is None:
        raise BadInput(f"there is no {own.word(kind)} {shown(name)}; {_hint(kind, name)}")
    if kind == "problem" and not isinstance(thing, type):  # a function that a plugin offers
        return own.make_problem(name, thing, values)
    require_parameters(name, parameters(thing), values)
    try:
        return thing(**_grouped(thing, values))
    except DualDelayError:
        raise
    except Exception as error:  # whatever becomes of a value that nobody thought of
        why = shortened(str(error) or type(error).__name__)
        raise BadInput(f"{name} cannot be made from {shown(dict(values))}: {why}") from error


def _hint(kind: str, name: str) -> str:
    """What to do about a name that nothing of a kind has: a file of that name may have been meant, or a class."""
    if kind in own.IMPORTED and name.isidentifier() and len(name) < _LONGEST_FOLDER and Path(f"{name}.py").is_file():
        return f"{name}.py is here: to take it from there, add --import {name}.py"
    classes = {thing.__name__.lower(): known for known, thing in REGISTRIES[kind].items()}
    if (bare := name.lower().replace("_", "").replace("-", "")) in classes:
        return f"did you mean {classes[bare]!r}?"
    return nearest(name, [*REGISTRIES[kind], *own.everything(kind)], f"dualdelay list {HEADINGS.get(kind, 'all')}")


def call(text: str, **defaults: Any) -> tuple[str, dict[str, Any]]:
    """The name and the settings of a text such as ``dude[lr=0.05]``; ``defaults`` are for what is named inside it."""
    return parse_call(text, lambda part: _value(part, defaults))


def parse(kind: str, text: str, **defaults: Any) -> Any:
    """Make what a text such as ``dude[lr=0.05]`` names; ``defaults`` fill in what it has and the text leaves out.

    A problem may be code of the user's own, ``mine.py:problem``, and then a function of the seed.
    """
    name, values = call(text, **defaults)
    if kind == "problem":
        own_code.require_function(name)
    if kind == "problem" and own_code.names_code(name):
        return own.make_problem(name, own_code.find(name), values)
    if defaults and (thing := known(kind, name)) is not None:
        taken = parameters(thing)
        values = {key: value for key, value in defaults.items() if key in taken} | values
    return build(kind, name, values)


def alternatives(text: str) -> list[str]:
    """Every text that one with alternatives stands for: ``dude[lr=0.01|0.05]`` for two, in the order of their values."""
    require_text(text)
    name, bracket, rest = text.strip().partition("[")
    if "|" not in rest or not rest.endswith("]"):
        return [text]
    choices = []
    for part in split(rest[:-1]):
        key, equals, values = part.partition("=")
        choices.append([f"{key}{equals}{value.strip()}" for value in split(values, "|")] or [part])
    if (count := math.prod(map(len, choices))) > _ALTERNATIVES:
        raise BadInput(f"{shown(text)} stands for {count:,} alternatives; expected {_ALTERNATIVES:,} at most.")
    return [f"{name}{bracket}{','.join(chosen)}]" for chosen in itertools.product(*choices)]


def _value(text: str, defaults: Mapping[str, Any]) -> Any:
    value, name = literal(text), text.partition("[")[0]
    for kind in REGISTRIES:
        if value == text and "[" in text and known(kind, name) is not None:
            return parse(kind, text, **defaults)
    return value


def settings(thing: Any) -> dict[str, Any]:
    """What builds a thing again, by parameter; {} if it cannot say."""
    if not dataclasses.is_dataclass(thing):
        return dict(getattr(thing, "settings", {}))
    values = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing) if f.init and f.repr}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= settings(value) if _is_group(value) else {name: value}
    return flat


def describe(thing: Any) -> dict[str, Any]:
    """A thing as plain values: its name and settings, or for a class that is not in our tables its Python name alone."""
    for registry in REGISTRIES.values():
        for name, ours in registry.items():
            if type(thing) is ours:
                try:
                    return {"name": name} | {key: _plain(value) for key, value in settings(thing).items()}
                except TypeError:
                    break  # it was made from something that has no name
    known_by: dict[str, Any] = {"class": type(thing).__qualname__}
    if dataclasses.is_dataclass(thing):
        known_by["repr"] = repr(thing)
    if not hasattr(thing, "fingerprint"):  # a problem has one, of its data
        declared = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        public = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
        known_by |= {"has": {name: _in_words(value) for name, value in public.items() if name not in declared}}
    return known_by


def _in_words(value: Any) -> str:
    """A value in words that are the same for equal values in every process; a long one by its digest."""
    text = repr(value.tolist()) if hasattr(value, "tolist") else repr(value)
    if " at 0x" in text:  # of a function or a thing without a repr: what it is called has to do
        text = getattr(value, "__qualname__", type(value).__qualname__)
    return text if len(text) < 200 else f"{text[:50]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _plain(value: Any) -> Any:
    if _is_registered(value):
        description = describe(value)
        if "name" not in description:
            raise TypeError(f"a {type(value).__name__} has no name")
        return description
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no name")


def rebuild(kind: str, description: Mapping[str, Any], given: Any = None, *, verb: str = "resume") -> Any:
    """The thing that was described; what the user gave again to ``dd.VERB`` is taken instead if it fits the description."""
    if given is not None:
        if describe(given) != description:
            was, now = (shortened(str(one), 800) for one in (dict(description), describe(given)))
            raise BadInput(f"the recorded {kind} is {was}, but {now} was given; pass the same.")
        return given
    if not isinstance(description.get("name"), str):
        if (thing := _of_own_class(kind, description)) is not None:
            return thing
        raise BadInput(
            f"the recorded {kind} is a {description.get('class')}, which cannot be built from its name. Pass it again, in "
            f"Python: dd.{verb}(folder, {kind}=...)."
        )
    values = {key: _rebuilt(value) for key, value in description.items() if key != "name"}
    return build(kind, description["name"], values)


def _of_own_class(kind: str, description: Mapping[str, Any]) -> Any:
    """A thing of a class that was imported or is installed, from its recorded repr; None unless it gives just that."""
    kind_of_thing = own.of_class(kind, str(description.get("class")))
    if kind_of_thing is None:
        return None
    try:
        written = ast.parse(str(description.get("repr")), mode="eval").body
        if not isinstance(written, ast.Call) or written.args:
            return None
        values = {str(setting.arg): ast.literal_eval(setting.value) for setting in written.keywords}
        thing = kind_of_thing(**values)
    except (
        SyntaxError,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
    ):  # it was made from something else than numbers
        return None
    return thing if describe(thing) == description else None


def _rebuilt(value: Any) -> Any:
    if isinstance(value, Mapping):
        for kind, registry in REGISTRIES.items():
            if value.get("name") in registry:
                return rebuild(kind, value)
    return value


def label(thing: Any) -> str:
    """The short text for legends and tables: the name, and the settings that are not the defaults."""
    description = describe(thing)
    name = str(description.get("name") or own.name_of(thing) or description.get("class"))
    taken = parameters(type(thing))
    changed = {key: v for key, v in settings(thing).items() if key in taken and _differs(v, taken[key].default)}
    inside = ",".join(f"{key}={_text(value)}" for key, value in changed.items())
    return f"{name}[{inside}]" if inside else name


def _differs(value: Any, default: Any) -> bool:
    if isinstance(value, list) and isinstance(default, tuple):  # as a folder holds it
        value = tuple(value)
    try:
        return bool(value != default)
    except (TypeError, ValueError, RuntimeError):  # an array, say, which is nobody's default
        return True


def _text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError):
        return label(value) if _is_registered(value) or dataclasses.is_dataclass(value) else _in_words(value)


def slug(text: str) -> str:
    """A label as part of a folder's name, without what means something to a shell."""
    name = re.sub(r"[^A-Za-z0-9_.=+-]+", "-", text).strip("-")
    if len(name) <= _LONGEST_FOLDER:
        return name
    return f"{name[: _LONGEST_FOLDER - 17]}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def stem(label: str, seed: int, *places: str) -> str:
    """The name of a run's folder among those of others; ``places`` tell its problem and its speeds from other ones."""
    if not places:
        return f"{slug(label)}-seed{seed}"
    parts = "-".join([slug(label), *map(distinct, places)])
    return f"{slug(parts)}-seed{seed}"


_PLAIN = re.compile(r"[\w.:]+(\[\w+=[\w.+]+(,\w+=[\w.+]+)*\])?", re.ASCII)  # what a slug keeps apart
_LONGEST_PLACE = 60


def distinct(text: str) -> str:
    """A label as part of a folder's name that no other label has, if need be by a digest."""
    name = slug(text)
    if _PLAIN.fullmatch(text) and len(name) <= _LONGEST_PLACE:
        return name
    return f"{name[:_LONGEST_PLACE].rstrip('-')}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
