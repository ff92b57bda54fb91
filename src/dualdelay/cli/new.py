"""dualdelay new: a file with a method that runs, to be changed into one's own."""

from __future__ import annotations

import keyword
import shlex

from ..core.errors import BadInput, shown
from ..runs.names import REGISTRIES
from ..storage.files import make_folder, write
from . import shared
from .flags import New

TEMPLATE = '''"""TITLE: authors, "paper", year; what is derived and not from the paper."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dualdelay.core import Arrival, IndependentWorkers, Orders, State, send
from dualdelay.core.draws import Draws
from dualdelay.core.settings import whole


@dataclass(kw_only=True)
class CLASSState(State):
    late: int = 0  # gradients that were too old so far


@dataclass(frozen=True)
class CLASS(IndependentWorkers[CLASSState]):
    """Vanilla ASGD that halves the step of gradients that are too old."""

    name, title = "NAME", "TITLE"
    colour, line, marker = "#5B8C5A", "--", "o"

    limit: int = whole(5)
    """Updates after which a gradient is too old."""

    def init(self, x: Tensor, n: int, rng: Draws) -> CLASSState:
        return CLASSState(x, n)

    def step(self, s: CLASSState, a: Arrival) -> Orders:
        too_old = s.version - a.version > self.limit
        s.late += too_old
        s.descend(a.value, self.lr / 2 if too_old else self.lr)  # x <- x - lr G
        return [send(a.worker)]
'''


NEXT = """FILE has a method that runs. Change it, and try it:

dualdelay compare 'NAME[lr=0.05]' 'vanilla[lr=0.05]' --import FILE --problem 'digits[alpha=0.1]' --time 20

In Python, from its folder: from NAME import CLASS"""


def _filled(text: str, name: str) -> str:
    words = name.split("_")
    kind, title = "".join(word.capitalize() for word in words), " ".join(words).capitalize()
    return text.replace("CLASS", kind).replace("NAME", name).replace("TITLE", title)


def new(flags: New) -> None:
    """Write a file with a method that runs."""
    name, folder = flags.name, flags.folder
    if not name.isidentifier() or not name.islower() or keyword.iskeyword(name):
        raise BadInput(f"the name is {shown(name)}; expected a word in small letters, such as half_steps.")
    path = folder / f"{name}.py"
    kinds = [kind for kind, registry in REGISTRIES.items() if name in registry]
    taken = [f"the package has {name!r} among its {kind.removesuffix('s')}s already" for kind in kinds]
    if taken or path.exists():
        raise BadInput(f"{taken[0] if taken else f'{path} exists'}; choose another name.")
    make_folder(folder)
    write(path, _filled(TEMPLATE, name).encode())
    shared.make_console(flags.json).print(_filled(NEXT, name).replace("FILE", shlex.quote(str(path))))
    shared.finish(flags.json, "new", file=str(path))
