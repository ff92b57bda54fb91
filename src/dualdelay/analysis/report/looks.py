"""The colour, dashes and marks of each curve: those of its method, and others for each of the method's variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core import Algorithm
from ...runs.names import known
from ..figures import colour_of
from .entries import Entry

_OWN = ("#661100", "#44AA99", "#332288", "#882255", "#AA4499", "#999933")  # of users' methods that have no colour
_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
_VARIANTS = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKS = dict(
    zip(
        "os^v<>DdPXphH8*.",
        (
            *("circle", "square", "triangle-up", "triangle-down", "triangle-left", "triangle-right", "diamond"),
            *("diamond-tall", "cross", "x", "pentagon", "hexagon", "hexagon2", "octagon", "star", "circle-open"),
        ),
        strict=True,
    )
)
_SPREAD = 0.45  # how far the shades of a method's variants are from its colour


def looks(runs: Sequence[Entry]) -> dict[str, dict[str, str]]:
    """A look for each curve, in the curves' order; of a method's variants the first is the darkest."""
    variants: dict[str, list[str]] = {}
    for run in runs:
        own = variants.setdefault(run.method, [])
        own += [] if run.curve in own else [run.curve]
    found: dict[str, dict[str, str]] = {}
    classes = {run.method: type(run.run.algorithm) for run in runs if run.run is not None and run.run.algorithm is not None}
    kinds: list[Any] = [classes.get(method) or known("algorithm", method) or Algorithm for method in variants]
    taken = {(_dash(kind.line), _MARKS.get(kind.marker, "circle")) for kind in kinds}  # the methods' own, and then others
    marks, used, unknown = list(_MARKS.values()), set[tuple[str, str]](), 0
    pairs = [(_VARIANTS[k % len(_VARIANTS)], marks[(k + k // 48) % len(marks)]) for k in range(1, 97)]
    for kind, labels in zip(kinds, variants.values(), strict=True):
        colour = colour_of(kind)
        if colour is None:
            colour, unknown = _OWN[unknown % len(_OWN)], unknown + 1
        for k, label in enumerate(labels):
            shade = 0.0 if len(labels) == 1 else _SPREAD * (2 * k / (len(labels) - 1) - 1)
            look = (_dash(kind.line), _MARKS.get(kind.marker, "circle"))
            if k or look in used:
                look = next((pair for pair in pairs if pair not in taken), look)
            taken.add(look)
            used.add(look)
            dash, mark = look
            found[label] = {"colour": _shaded(colour, shade), "dash": dash, "mark": mark}
    return {label: found[label] for label in dict.fromkeys(run.curve for run in runs)}


def _dash(line: str) -> str:
    """A kind of line as the browser's library writes it; solid for one that is none of ours."""
    parts = line.split()
    if line in _DASHES or not all(part.isdecimal() for part in parts):
        return _DASHES.get(line, "solid")
    return ",".join(f"{2 * int(part)}px" for part in parts)


def _shaded(colour: str, amount: float) -> str:
    """A colour mixed with black (below zero) or white."""
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    target = 255 if amount > 0 else 0
    return "#" + "".join(f"{round(part + (target - part) * abs(amount)):02X}" for part in parts)
