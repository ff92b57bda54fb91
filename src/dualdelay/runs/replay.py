"""Recompute a recorded run in its recorded order, and check that every bit agrees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..core import Algorithm, Problem
from ..core.devices import using_precision, using_threads
from ..core.environment import differences, environment
from ..core.errors import BadInput, ReplayMismatch, require_positive
from ..engine.evaluation import Best
from ..engine.events import EventKind
from ..engine.loop import Loop
from ..engine.result import Run
from ..engine.table import Column
from ..storage.files import Damaged
from ..storage.folder import Folder, digest_of
from ..storage.record import RunRecord
from .fleets import make_loop, open_fleet
from .optimizer import Maker
from .record import GivenAgain, spec_of
from .runner import result
from .settings import Reporting, Watch
from .showing import showing
from .spec import RecordedFleet, RunSpec, for_this_thread, require_totals

_CLOSE, _EARLY = 1e-3, 100  # how well the losses of the first arrivals agree when a run is computed in other company


def replay(
    folder: str | Path,
    problem: Problem | None = None,
    *,
    rtol: float | None = None,
    algorithm: Algorithm[Any] | None = None,
    optimizer: Maker = None,
    schedule: Maker = None,
    watch: Sequence[Watch] | Reporting = (),
) -> Run:
    """Recompute a recorded run, simulated or real, in its recorded order; raises ReplayMismatch unless every bit agrees.

    Arguments:
        folder: the folder of a finished run.
        problem, algorithm, optimizer, schedule: what is your own and cannot be built from the folder, as in ``resume``.
        rtol: compare losses and final weights to this relative tolerance, and the order exactly: for another kind of
            machine. Without it bits have to agree, which they do on the same kind of processor with the same libraries; the
            error names what differs.
        watch: as in ``simulate``.

    Where a run went on on another kind of machine, the replay goes on from the weights that it had there, and ``notes`` say
    how near the replayed ones were. A run that a sweep computed side by side with others is recomputed by itself, which
    gives other last digits: then the order must agree exactly and the first losses to a thousandth, and ``notes`` says how
    far apart the weights end.

    Example:
        >>> dd.replay("runs/mine").same_bits
        True
    """
    if rtol is not None:
        require_positive("rtol", rtol)
    place = Folder(Path(folder))
    damage: list[str] = []  # a replay may find out what is wrong with files that are not as they were written
    record, result, trace = place.record(), place.finished(), place.trace(damage)
    require_totals(record.updates, record.time)
    fleet = RecordedFleet(trace, None if record.threads == record.server_threads else record.threads, record.ranks)
    with (
        using_threads(record.server_threads),
        using_precision(record.device or "cpu", record.precision or "float32"),
        nullcontext() if problem is None else for_this_thread(problem) as own,
        showing(Reporting.of(watch), f"replay of {place.path.name}", record.updates, record.time) as shown_to,
    ):
        spec = spec_of(record, place, GivenAgain(own, algorithm, optimizer, schedule), fleet, "replay", ReplayMismatch)
        try:
            with open_fleet(spec) as recorded:
                replayed = _Replay(place, spec, record, result, make_loop(spec, recorded), rtol, damage)
                run = replayed.run(shown_to.watch)
            if damage:
                raise Damaged(f"{damage[0]}, although what was replayed agrees with it.")
            return run
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            if damage and not isinstance(error, BadInput):  # a trace that makes no sense at all
                raise Damaged(damage[0]) from error
            raise


class _Replay:
    """A recorded run that is being recomputed."""

    def __init__(
        self,
        place: Folder,
        spec: RunSpec,
        record: RunRecord,
        result: Mapping[str, Any],
        loop: Loop,
        rtol: float | None,
        damage: list[str],
    ) -> None:
        assert isinstance(spec.fleet, RecordedFleet)
        self._place, self._spec, self._record, self._result, self._loop = place, spec, record, result, loop
        self._trace, self._damage, self._rtol = spec.fleet.trace, damage, rtol
        self._notes: list[str] = []
        self._worst, self._exact = 0.0, True  # how far losses were apart, relative to them, and whether no bit differed
        self._elsewhere: list[str] = []  # where the run went on, on another kind of machine
        best = result.get("best_version")
        self._best_version = -1 if best is None else int(best)
        self._best: Tensor | None = None

    def run(self, watch: Sequence[Watch]) -> Run:
        """Recompute it to its end."""
        loop, row = self._loop, 0
        loop.begin()
        self._keep()
        while (event := loop.fleet.peek()) is not None:
            a = loop.advance()
            if event.kind is EventKind.MACHINE:
                self._continue_from_kept(row, event.worker, event.text)
            self._keep()
            if a is not None:
                self._compare(row, a.worker)
                row += 1
                for function in watch:
                    function(loop.state, a)
        return self._ended()

    def _keep(self) -> None:
        if self._best is None and self._loop.state.version == self._best_version:
            self._best = self._loop.state.x

    def _continue_from_kept(self, row: int, worker: int, text: str) -> None:
        """Another kind of machine was at work from here on: the rest is compared from the weights that it began with."""
        self._elsewhere.append(f"from arrival {row} on {'' if worker < 0 else f'worker {worker} was '}elsewhere ({text})")
        kept = self._place.kept_aside(row) if worker < 0 else None
        if kept is None:
            return
        here, there = self._loop.state.x.double(), kept["state"]["weights"].to(self._loop.state.x.device).double()
        distance = float((here - there).norm()) / (float(there.norm()) or 1.0)
        self._notes.append(
            f"from arrival {row} on it was computed on another kind of machine ({text}); there the replayed weights were "
            f"{distance:.1e} from those it had, and the replay went on from those"
        )
        self._loop.restore(kept)

    def _compare(self, row: int, worker: int) -> None:
        trace = self._trace
        replayed = {name: column[0] for name, column in self._loop.recorder.rows(row).items()}
        for name in ("version", "after", "loss", "fingerprint"):
            same = replayed[name].tobytes() == trace[name][row].tobytes()
            self._exact = self._exact and same
            if not same and name == "loss" and (self._rtol is not None or self._record.together > 1):
                same = self._is_near(float(replayed[name]), float(trace[name][row]), row)
            elif not same and name == "fingerprint":
                same = self._rtol is not None or self._record.together > 1
            if not same:
                raise self._mismatch(row, worker, replayed, name)

    def _is_near(self, replayed: float, recorded: float, row: int) -> bool:
        if math.isnan(replayed) and math.isnan(recorded):
            return True
        size = max(abs(replayed), abs(recorded), 1e-6 * float(np.nanmax(np.abs(self._trace.loss[: row + 1]))))
        self._worst = max(self._worst, abs(replayed - recorded) / size) if size else self._worst
        if self._rtol is not None:
            return abs(replayed - recorded) <= self._rtol * size
        return row >= _EARLY or bool(np.isclose(replayed, recorded, _CLOSE))

    def _mismatch(self, row: int, worker: int, replayed: Mapping[str, Column], name: str) -> ReplayMismatch:
        after, draw, version = replayed["after"], replayed["draw"], replayed["version"]
        return ReplayMismatch(
            f"version {after} differs: at arrival {row} (worker {worker}, job number {draw}, taken at version {version}) "
            f"the recorded {name} is {self._trace[name][row]}, replayed it is {replayed[name]}. {self._why()}"
        )

    def _why(self) -> str:
        """What may be the reason, as far as it was recorded."""
        reasons = [*self._damage, *differences(self._record.environment, environment()), *self._elsewhere]
        if not reasons:
            return (
                "The processor, torch, numpy and the libraries for matrices are those of the record: the code, the data or "
                "the record itself have changed, or the method draws numbers that no seed names (use the rng of init)."
            )
        hint = "" if self._rtol is not None else " To compare numbers instead of bits: dd.replay(folder, rtol=1e-3)."
        return f"What is not as it was recorded: {'; '.join(reasons)}.{hint}"

    def _ended(self) -> Run:
        place, loop, result_then = self._place, self._loop, self._result
        early = result_then["ended"] == "stop" and self._best is not None
        x = self._best if early and self._best is not None else loop.state.x
        recorded, replayed = place.weights("model", self._damage), loop.problem.state_dict(x)
        distance = _distance(recorded, replayed)
        if self._record.together > 1 and self._rtol is None:
            others = self._record.together - 1
            self._notes.append(
                f"it was computed side by side with {others} others: alone the weights end {distance:.1e} apart"
            )
        elif self._rtol is not None and distance > self._rtol:
            raise ReplayMismatch(
                f"the final weights are {distance:.1e} apart, more than rtol={self._rtol:g}. {self._why()}"
            )
        elif self._rtol is not None and distance > 0:
            self._notes.append(f"losses agree to {self._worst:.1e} and the final weights to {distance:.1e}, not to the bit")
        elif self._rtol is None and not _same(recorded, replayed):
            raise ReplayMismatch(
                f"version {loop.state.version} differs: the final weights are not those of model.safetensors. {self._why()}"
            )
        if self._best is not None:
            name, value = result_then["best_metric"], result_then["best_value"]
            loop.evaluation.best = Best(name, False, math.nan if value is None else value, self._best_version, self._best)
        time, metrics = float(result_then["time"]), place.table("metrics")
        run = result(loop, 0, self._spec, metrics, time, "replay", self._notes, place, returns_best=early)
        exact = self._exact and _same(recorded, replayed)
        return replace(run, workers=place.table("workers"), same_bits=exact)


def _distance(recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> float:
    """How far apart two state dicts are, relative to the first."""
    if {name: x.shape for name, x in recorded.items()} != {name: x.shape for name, x in replayed.items()}:
        return math.inf
    apart = math.sqrt(math.fsum(float((replayed[name].double() - x.double()).norm()) ** 2 for name, x in recorded.items()))
    size = math.sqrt(math.fsum(float(x.double().norm()) ** 2 for x in recorded.values()))
    return apart / size if size else apart


def _same(recorded: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> bool:
    return {name: digest_of(x) for name, x in recorded.items()} == {name: digest_of(x) for name, x in replayed.items()}
