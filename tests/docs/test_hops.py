"""The way of a run that DESIGN.md has is the one that the program takes.

``make pages`` writes it anew. A hop is a function of the room of runs, or one of another room that it
calls, in the order in which they are first entered. Left out are checks, properties and the parts of small values.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import dualdelay as dd
from transports import VirtualFleet

PAGE = Path(__file__).parents[2] / "DESIGN.md"
HOPS = re.compile(r"(?<=<!-- begin hops -->\n).*?(?=\n<!-- end hops -->)", re.S)
SOURCE = Path(dd.__file__).parent
OURS = str(SOURCE)
LEFT_OUT = re.compile(r"_?require|checked_|check_settings|_?is_|__(?!init__)")
PROBLEM, METHOD = dd.Quadratic([[0.0], [6.0], [12.0]]), dd.DuDe(0.1)


def frames_of_ours(frame: FrameType | None) -> list[FrameType]:
    """The frames of the package's functions, from the inside out."""
    frames = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS) and not frame.f_code.co_name.startswith("<"):
            frames.append(frame)
        frame = frame.f_back
    return frames


def room(frame: FrameType) -> str:
    return Path(frame.f_code.co_filename).relative_to(SOURCE).parts[0]


def named(frame: FrameType) -> tuple[str, Any]:
    """Where a function is, and the function, or the class that it makes an object of."""
    path = Path(frame.f_code.co_filename).relative_to(SOURCE).with_suffix("")
    thing: Any = importlib.import_module(".".join(["dualdelay", *path.parts]))
    qualified = frame.f_code.co_qualname.removesuffix(".__init__")
    for part in qualified.split("."):
        thing = inspect.getattr_static(thing, part)
    return f"`{'/'.join(path.parts)}.py` `{qualified}`", getattr(thing, "__func__", thing)


def hops(run: Callable[[], Any]) -> list[str]:
    """The hops from a verb to the method's first step."""
    rows: dict[str, str] = {}
    arrived = False

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal arrived
        if arrived or event != "call" or not frame.f_code.co_filename.startswith(OURS):
            return
        arrived = frame.f_code.co_qualname == "DuDe.step"
        frames = frames_of_ours(frame)
        if not frames or frames[0] is not frame or LEFT_OUT.match(frame.f_code.co_name):
            return
        if arrived or "runs" in map(room, frames[:2]):
            where, thing = named(frame)
            if not isinstance(thing, property) and room(frame) != "core":
                about = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ").replace("``", "`")
                rows.setdefault(where, about)

    run()  # what is imported on the way is now there
    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert arrived
    return [f"{k}. {where}: {about}" for k, (where, about) in enumerate(rows.items(), 1)]


def ways() -> str:
    """Both ways, as the page has them."""
    quiet = dd.Reporting(progress=False)  # and nothing is shown
    simulated = hops(lambda: dd.simulate(METHOD, PROBLEM, dd.FixedSpeeds([1.0, 2.0, 3.0]), updates=2, watch=quiet))
    real = hops(lambda: dd.train(METHOD, PROBLEM, VirtualFleet(), updates=2, watch=quiet))
    return "\n".join(["", "`dd.simulate`:", "", *simulated, "", "`dd.train`:", "", *real]) + "\n"


def test_the_way_of_a_run_is_the_one_on_the_page() -> None:
    assert HOPS.findall(PAGE.read_text()) == [ways()], "write it again: make pages"


if __name__ == "__main__":
    PAGE.write_text(HOPS.sub(lambda _: ways(), PAGE.read_text()))
