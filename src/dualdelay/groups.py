"""Groups of runs that advance together, and several such groups side by side, each run with a folder of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .clocks import VirtualClock
from .drive import Interrupted, ctrl_c, fraction
from .errors import RunFailed
from .evaluation import Schedule
from .folder import Folder, config_digest
from .gradients import Batch, Round
from .local_fleet import LocalFleet
from .plan import Plan
from .replicas import Replicas
from .result import Run, plain
from .setup import identified, require_same, versions
from .trace import Table


@dataclass
class Replica:
    """One run of a group: what it is to compute, where it is kept, and what came of it."""

    plan: Plan
    path: Path | None
    run: Run | None = None  # once it has ended; None at the end: it has to be done again by itself
    folder: Folder | None = field(default=None, init=False)
    config: dict[str, Any] = field(default_factory=dict, init=False)
    judged: int = field(default=0, init=False)  # evaluations that early stopping has seen

    def open(self, together: int) -> None:
        """Take or make the run's folder; so many runs are computed together."""
        self.config = self.plan.config
        if self.path is not None:
            self.config = identified(self.config, self.plan.problem, self.plan.x)
            if self.path.exists():
                self.folder = Folder(self.path)
                require_same(self.config, self.folder)
                self.config = self.folder.config()
            else:
                self.config |= {"versions": versions(), "together": together}
                self.folder = Folder.create(self.path, self.config, self.plan.x)


class Group:
    """Runs that share a schedule, from their beginning or their last common checkpoint to their ends."""

    def __init__(self, replicas: Sequence[Replica], turn: Round, which: Sequence[int], together: int) -> None:
        """``which`` are their problems' numbers in the round, ``together`` how many runs are in it."""
        plan = replicas[0].plan
        self.replicas, self._plan, self._together = replicas, plan, together
        clock = VirtualClock(plan.speeds, plan.link, plan.changes)
        self._fleet = LocalFleet(plan.problem, clock, plan.algorithm.message, gradients=Batch(turn, which))
        self._loop = Replicas(
            [replica.plan.algorithm for replica in replicas],
            [replica.plan.problem for replica in replicas],
            self._fleet,
            torch.stack([replica.plan.x for replica in replicas]),
            seed=plan.seed,
            schedule=Schedule(plan.config["evaluate_every"], plan.config["evaluate_seconds"]),
            metrics=plan.metrics,
            table=plan.table,
        )
        plan.require_rules(self._loop.state)
        self._saved = 0, -1  # arrivals and moment of the last checkpoint

    @property
    def share(self) -> float:
        """How much of the way is done."""
        return fraction(self._loop, self._plan.updates, self._plan.time)

    def advance(self) -> Iterator[None]:
        """Go on to the end, and pause where a gradient is needed that is not known."""
        loop, updates, limit, every = self._loop, self._plan.updates, self._plan.time, self._plan.checkpoint_every
        self._begin()
        twentieth = int(20 * self.share)
        while loop.going:
            self._stop_early()
            due = self._fleet.peek()
            if updates is not None and loop.state.version >= updates:
                self._end("updates", loop.now)
            elif due is None:
                raise RunFailed("nothing is in flight and nothing is due: the algorithm gave nobody anything to do.")
            elif limit is not None and due.time > limit:
                loop.evaluate_before(math.nextafter(limit, math.inf))
                self._stop_early()
                self._end("time", limit)
            elif loop.evaluate_before(due.time):
                continue
            else:
                while not self._fleet.ready:
                    yield
                before = loop.state.version
                loop.advance()
                if every is None and twentieth != int(20 * self.share):
                    twentieth = int(20 * self.share)
                    self.save()
                elif every is not None and loop.state.version != before and loop.state.version % every == 0:
                    self.save()
        self._fleet.close()

    def _begin(self) -> None:
        """Begin, or go on from the newest checkpoint that all runs have."""
        for replica in self.replicas:
            replica.open(self._together)
        folders = [replica.folder for replica in self.replicas]
        common = [set() if folder is None else folder.moments() for folder in folders]
        for moment in sorted(set.intersection(*common), reverse=True):
            loaded = [None if folder is None else folder.load(moment) for folder in folders]
            good = [found for found in loaded if found is not None and found[0]["moment"] == moment]
            if len(good) == len(loaded):
                self._loop.load_all([content for content, _, _ in good], [rows for _, rows, _ in good])
                self._saved = len(self._loop.recorder), self._loop.moment
                break
        else:
            self._loop.begin()
        for folder in folders:
            if folder is not None:
                folder.clear_after(*self._saved)
        for k, replica in enumerate(self.replicas):
            if replica.plan.stop is not None:
                replica.plan.stop(self._loop.table_of(k))  # says so if there is nothing to stop by

    def save(self) -> None:
        """Write a checkpoint of every run that is still going."""
        loop = self._loop
        if self.replicas[0].folder is None or loop.moment == self._saved[1] or loop.moment == 0:
            return
        loop.check()
        for k in sorted(loop.going):
            folder = self.replicas[k].folder
            assert folder is not None
            folder.save(loop.save_of(k), loop.recorder.of(k, self._saved[0]), self._plan.keep)
        self._saved = len(loop.recorder), loop.moment

    def _stop_early(self) -> None:
        for k in sorted(self._loop.going):
            replica = self.replicas[k]
            if replica.plan.stop is not None and len(self._loop.rows_of[k]) > replica.judged:
                replica.judged = len(self._loop.rows_of[k])
                if replica.plan.stop(self._loop.table_of(k)):
                    self._finish(k, "stop", max(self._loop.now, self._loop.rows_of[k][-1]["time"]))

    def _end(self, ended: str, now: float) -> None:
        self.save()
        self._loop.check()
        for k in sorted(self._loop.going):
            rows = self._loop.rows_of[k]
            self._finish(k, ended, max([now, *(row["time"] for row in rows[-1:])]) if ended == "updates" else now)

    def _finish(self, k: int, ended: str, now: float) -> None:
        """A run is at its end: write down what is left to write, and look at it no more."""
        loop, replica = self._loop, self.replicas[k]
        rows = loop.rows_of[k]
        if rows and rows[-1]["version"] == loop.state.version and math.isclose(rows[-1]["time"], now, rel_tol=1e-12):
            rows = [*rows[:-1], {**rows[-1], "time": now}]
        else:
            rows = [*rows, loop.row(k, now)]
        state, error = loop.state_of(k)
        plan, table = replica.plan, Table.of(rows, rows[0])
        run = Run(plan.algorithm, plan.problem, state, loop.trace_of(k), table, now, ended, error, replica.path)
        if replica.folder is not None:
            if loop.moment != self._saved[1]:  # it stops between two checkpoints
                replica.folder.save(loop.save_of(k), loop.recorder.of(k, self._saved[0]), plan.keep)
            result = {**plain(run.summary()), "moment": loop.moment, "config": config_digest(replica.config)}
            replica.folder.finish(run.trace, run.metrics, run.state_dict(), result)
        replica.run = run
        loop.going.discard(k)


def advance_all(groups: Sequence[Group], turns: Sequence[Round], report: Callable[[float], None]) -> None:
    """Bring all groups to their ends side by side, with the gradients that they wait for taken together."""
    under_way = [(group, group.advance()) for group in groups]
    saved = any(replica.path is not None for group in groups for replica in group.replicas)
    with ctrl_c(saved) as interrupted:
        try:
            while under_way:
                under_way = [(group, steps) for group, steps in under_way if next(steps, "ended") is None]
                for turn in turns:
                    turn.evaluate()
                report((len(groups) - len(under_way) + sum(group.share for group, _ in under_way)) / len(groups))
                if interrupted[0]:
                    raise Interrupted("the runs were saved; the same sweep goes on where they are")
        except BaseException:
            for group, _ in under_way:
                group.save()
            raise
