"""Methods, problems and speed models of others: of files that --import names, and of packages that are installed.

A package offers them by entry points, such as half_steps = "mine:HalfSteps" under
[project.entry-points."dualdelay.algorithms"]; the other groups are dualdelay.problems and dualdelay.speeds. They are loaded
when a name is not known otherwise.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..algorithms import ALGORITHMS
from ..core import Algorithm, Problem, own_code
from ..core.errors import BadInput, DualDelayError, shortened, shown
from ..core.texts import require_parameters
from ..problems import PROBLEMS
from ..simulation import SPEEDS
from ..simulation.speeds import SpeedModel
from .seeds import ProblemOf

_log = logging.getLogger("dualdelay")

_KINDS: dict[str, tuple[type, Mapping[str, Any]]] = {
    "algorithm": (Algorithm, ALGORITHMS),
    "problem": (Problem, PROBLEMS),
    "speeds": (SpeedModel, SPEEDS),
}
_GROUPS = {"algorithm": "dualdelay.algorithms", "problem": "dualdelay.problems", "speeds": "dualdelay.speeds"}

IMPORTED: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}


def import_code(text: str) -> list[str]:
    """Load a file or a module and register what it defines under its ``name``; returns these names."""
    module, names = own_code.load(text), []
    for thing in vars(module).values():
        if not isinstance(thing, type) or not f"{thing.__module__}.".startswith(f"{module.__name__}."):
            continue
        for kind, (base, _) in _KINDS.items():
            name = vars(thing).get("name", "")
            if issubclass(thing, base) and isinstance(name, str) and name:
                _require_free(kind, name, thing, text)
                IMPORTED[kind][name] = thing
                names.append(name)
    return names


def _require_free(kind: str, name: str, thing: Any, where: str) -> None:
    if not name.isidentifier():
        raise BadInput(f"{where} names a {word(kind)} {shown(name)}; expected a word, such as half_steps.")
    taken = "dualdelay has" if name in _KINDS[kind][1] else ""
    if IMPORTED[kind].get(name, thing) is not thing:
        taken = "another file that was imported has"
    if taken:
        raise BadInput(f"{where} names a {word(kind)} {name!r}, but {taken} one of that name; choose another name.")


def word(kind: str) -> str:
    """What one thing of a kind is called in messages."""
    return "speed model" if kind == "speeds" else kind


def forget() -> None:
    """Take everything back that was imported."""
    for registry in IMPORTED.values():
        registry.clear()
    own_code.forget()


@functools.cache
def plugins(kind: str) -> dict[str, Any]:
    """What installed packages offer of a kind, by name; the broken and those with a name of ours are left out."""
    known: dict[str, Any] = {}
    for point in entry_points(group=_GROUPS[kind]) if kind in _GROUPS else ():
        try:
            thing = _plugin(kind, point, known)
        except (Exception, SystemExit) as error:  # whatever happens when others' code is loaded
            why = str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
            _log.warning("the plugin %s is left out: %s", f"{point.name} = {point.value}", shortened(" ".join(why.split())))
        else:
            known[point.name] = thing
    return known


def _plugin(kind: str, point: EntryPoint, known: Mapping[str, Any]) -> Any:
    base, ours = _KINDS[kind]
    if point.name in ours or point.name in known:
        whose = "dualdelay" if point.name in ours else "another plugin"
        raise BadInput(f"{whose} has one of the name {point.name!r}")
    thing = point.load()
    good = issubclass(thing, base) if isinstance(thing, type) else kind == "problem" and callable(thing)
    if not good:
        raise BadInput(f"it is {shown(thing)}, not a class of dd.{base.__name__}")
    return thing


def registered(kind: str, name: str) -> Any:
    """What was imported or is offered by a plugin under a name; None if nothing is."""
    return IMPORTED.get(kind, {}).get(name) or plugins(kind).get(name)


def everything(kind: str) -> dict[str, Any]:
    """All that was imported or is offered by plugins, by name."""
    return {**plugins(kind), **IMPORTED.get(kind, {})}


def name_of(thing: Any) -> str | None:
    """The name under which the class of a thing was imported; plugins are asked only once they are loaded."""
    loaded = [plugins(kind) for kind in _KINDS if plugins.cache_info().currsize]
    for registry in (*IMPORTED.values(), *loaded):
        for name, known in registry.items():
            if type(thing) is known:
                return name
    return None


def of_class(kind: str, name: str) -> Any:
    """The class of that Python name that was imported or is offered by a plugin; None if there is none."""
    return next((thing for thing in everything(kind).values() if getattr(thing, "__qualname__", None) == name), None)


def make_problem(text: str, thing: Any, values: Mapping[str, Any]) -> ProblemOf:
    """The problem that code gives: itself, or what a function returns, which may be one of the seed."""
    if isinstance(thing, Problem):
        if values:
            raise BadInput(f"{text} is a problem, which takes no settings; leave out the brackets.")
        return thing
    if not callable(thing):
        raise BadInput(f"{text} is {shown(thing)}; expected a function that returns a dd.Problem, or a problem.")
    known = dict(inspect.signature(thing).parameters)
    known = {key: p for key, p in known.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    seed = _seed_of(thing, known)
    given = {key: p for key, p in known.items() if key != seed}
    require_parameters(text, known if seed in values else given, values)
    if seed is None or seed in values:
        return _called(text, thing, values)
    return lambda number: _called(text, thing, {**values, seed: number})


def _seed_of(thing: Callable[..., Any], known: Mapping[str, inspect.Parameter]) -> str | None:
    """Which parameter is the run's seed: the one of that name, or a function's only one that has no default."""
    if isinstance(thing, type):
        return None  # a problem's class: the run's seed is given to its draws
    if "seed" in known:
        return "seed"
    needed = [key for key, p in known.items() if p.default is p.empty]
    return needed[0] if len(known) == len(needed) == 1 else None


def _called(text: str, thing: Callable[..., Any], values: Mapping[str, Any]) -> Problem:
    try:
        problem = thing(**values)
    except DualDelayError:
        raise
    except Exception as error:
        why = shortened(" ".join(str(error).split()) or type(error).__name__)
        module = sys.modules.get(getattr(thing, "__module__", ""))
        where = own_code.line_of(error, getattr(module, "__file__", None))
        raise BadInput(f"{text} could not be made: {type(error).__name__}{where}: {why}") from error
    if not isinstance(problem, Problem):
        raise BadInput(f"{text} gave {shown(problem)}; expected a dd.Problem, such as dd.Network(...).")
    return problem
