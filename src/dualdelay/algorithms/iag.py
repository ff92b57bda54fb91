"""IAG: Blatt, Hero and Gauchman, "A Convergent Incremental Gradient Method with a Constant Step Size", 2007."""

from __future__ import annotations

from dataclasses import dataclass

from .siag import SIAG


@dataclass(frozen=True)
class IAG(SIAG):
    """sIAG with exact local gradients: one worker at a time, in turn, renews its own at the current model."""

    name, title = "iag", "IAG"
    colour, line, marker = "#A0522D", "8 2", "*"
    keeps, needs, wastes = "a gradient of each worker", "all data in every job", "the time of all workers but one"
    exact = True
