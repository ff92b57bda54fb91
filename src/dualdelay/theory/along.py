"""The constants along a run: theory means the largest over all models met, and the start is only one of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core import Arrival, Problem
from ..core.errors import require_kind, require_whole
from ..core.state import State
from ..engine.trace import Table
from .constants import Constants, constants


class Moment(NamedTuple):
    """The constants at one model of a run."""

    version: int
    time: float
    constants: Constants


class Along:
    """A ``watch`` function that measures the problem's constants at every ``every``-th model of a run.

    For any run, fresh or recorded: ``dd.simulate(..., watch=[along])`` or ``dd.replay(folder, watch=[along])``. It measures
    off the clock and changes nothing. The model before the first update is seen only if that update takes more than one
    arrival; ``constants(problem, seed=...)`` measures there. Updates between two arrivals are seen at the second.

    problem: what is measured, usually the run's own problem.
    every: updates from one measurement to the next.
    options: those of ``constants``: draws, seed, iterations, threads.
    """

    def __init__(self, problem: Problem, every: int, **options: Any) -> None:
        require_kind("problem", problem, Problem, "dd.Digits(workers=10)")
        require_whole("every", every, 1)
        self._problem, self._every, self._options = problem, every, options
        self._due = 0
        self.moments: list[Moment] = []

    def __call__(self, state: State, arrival: Arrival) -> None:
        """Look at a run after an arrival."""
        if state.version >= self._due:
            self._due = (state.version // self._every + 1) * self._every
            found = constants(self._problem, state.x, **self._options)
            self.moments.append(Moment(state.version, arrival.time, found))

    @property
    def table(self) -> Table:
        """The values as columns; ``heterogeneity`` is the workers' mean, and ``worst_smoothness`` the largest L_i."""
        rows = []
        for version, time, found in self.moments:
            row = {"version": version, "time": time, "cost": found.cost}
            for name in ("smoothness", "curvature", "variance", "gap", "gradient"):
                row[name] = getattr(found, name).value
            row["heterogeneity"] = sum(each.value for each in found.heterogeneity) / len(found.heterogeneity)
            row["worst_smoothness"] = max(each.value for each in found.smoothnesses)
            rows.append(row)
        names = ("smoothness", "worst_smoothness", "curvature", "variance", "heterogeneity", "gap", "gradient", "cost")
        return Table.of(rows, ("version", "time", *names))
