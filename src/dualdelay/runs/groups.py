"""Groups of runs that advance together, and several such groups side by side, each run with a folder of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..batching.replicas import Apart, Replicas
from ..core.environment import environment
from ..core.errors import BadInput
from ..engine.loop import passed
from ..engine.result import Run
from ..engine.trace import Table
from ..simulation.clocks import VirtualClock
from ..simulation.gradients import Batch, Round
from ..simulation.local_fleet import LocalFleet
from ..storage.files import Damaged, pack
from ..storage.folder import Folder, digest_of
from .drive import Interrupted, ending, finish, fraction, interruptible, nothing_due
from .plan import Plan
from .setup import layout_of, require_same, schedule_of


@dataclass
class Replica:
    """One run of a group: what it is to compute, where it is kept, and what came of it."""

    plan: Plan
    path: Path | None
    run: Run | None = None  # once it has ended; None at the end: it has to be done again by itself
    folder: Folder | None = field(default=None, init=False)
    config: dict[str, Any] = field(default_factory=dict, init=False)
    judged: int = field(default=0, init=False)  # evaluations that early stopping has seen

    def prepare(self, fingerprint: str, together: int) -> None:
        """Look at the run's folder if there is one; so many runs are computed together."""
        self.config = self.plan.config
        if self.path is not None:
            names = {"start": digest_of(self.plan.x), "layout": layout_of(self.plan.problem)}
            self.config = {**self.config, "fingerprint": fingerprint, **names}
            if self.path.exists():
                self.folder = Folder(self.path)
                require_same(self.config, self.folder)
                self.config = self.folder.config()
            else:
                self.config |= {"environment": environment(), "together": together}

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end before."""
        try:
            return self.folder is not None and self.folder.result() is not None
        except Damaged:  # it is written again
            return False

    def create(self) -> None:
        """Make the run's folder if it has none."""
        if self.path is not None and self.folder is None:
            self.folder = Folder.create(self.path, self.config, self.plan.x, self.plan.problem.fixed())

    def close(self) -> None:
        """Others may write to the run's folder."""
        if self.folder is not None:
            self.folder.close()


class Group:
    """Runs that share a schedule, from their beginning or their last common checkpoint to their ends."""

    def __init__(self, replicas: Sequence[Replica], turn: Round, which: Sequence[int]) -> None:
        """``which`` are their problems' numbers in the round."""
        plan = replicas[0].plan
        self.replicas, self._plan = replicas, plan
        clock = VirtualClock(plan.speeds, plan.link, plan.changes)
        self._fleet = LocalFleet(plan.problem, clock, plan.algorithm.message, gradients=Batch(turn, which))
        self._loop = Replicas(
            [replica.plan.algorithm for replica in replicas],
            [replica.plan.problem for replica in replicas],
            self._fleet,
            torch.stack([replica.plan.x for replica in replicas]),
            seed=plan.seed,
            schedule=schedule_of(plan.config),
            metrics=plan.metrics,
            keep_best=plan.config["keep_best"],
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
            elif due is None or loop.stuck:
                raise nothing_due(loop)
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
                elif passed(every, before, loop.state.version):
                    self.save()
        self._fleet.close()

    def _begin(self) -> None:
        """Begin, or go on from the newest checkpoint that all runs have; those that parted since go on by themselves."""
        for replica in self.replicas:
            if replica.folder is not None:
                replica.folder.hold()
        try:
            saved = self._saved_together()
            if saved is None:
                self._loop.begin()
            else:
                self._loop.load_all(*saved)
                self._loop.catch_up()
                self._saved = len(self._loop.recorder), self._loop.moment
        except Apart:
            self._loop.going.clear()
            return
        for k, replica in enumerate(self.replicas):
            if replica.plan.stop is not None:
                replica.plan.stop(self._loop.evaluations[k].table)  # says so if there is nothing to stop by
            if replica.path is not None and k == 0:
                pack(self._loop.save_of(k), {})  # says so if something cannot be saved
        for k, replica in enumerate(self.replicas):
            replica.create()
            if replica.folder is not None:
                replica.folder.rewind(*((None,) if saved is None else (saved[0][k], saved[1][k])))

    def _saved_together(self) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] | None:
        """What all runs saved at the newest moment for which it is whole, and their traces up to there."""
        folders = [replica.folder for replica in self.replicas if replica.folder is not None]
        if len(folders) < len(self.replicas):
            return None
        for moment in sorted(set.intersection(*(folder.moments() for folder in folders)), reverse=True):
            try:
                found = [folder.load(moment) for folder in folders]
            except BadInput:  # damaged: an older one may be whole
                continue
            good = [part for part in found if part is not None and part[0]["moment"] == moment]
            if len(good) == len(folders):
                return [content for content, _, _ in good], [rows for _, rows, _ in good]
        return None

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
            rows = self._loop.evaluations[k].rows
            if replica.plan.stop is not None and len(rows) > replica.judged:
                replica.judged = len(rows)
                if replica.plan.stop(self._loop.evaluations[k].table):
                    self._finish(k, "stop", max(self._loop.now, rows[-1]["time"]))

    def _end(self, ended: str, now: float) -> None:
        self.save()
        self._loop.check()
        for k in sorted(self._loop.going):
            rows = self._loop.evaluations[k].rows
            self._finish(k, ended, max([now, *(row["time"] for row in rows[-1:])]) if ended == "updates" else now)

    def _finish(self, k: int, ended: str, now: float) -> None:
        """A run is at its end: write down what is left to write, and look at it no more."""
        loop, replica = self._loop, self.replicas[k]
        evaluation = loop.evaluations[k]
        rows = ending(evaluation.rows, loop.state.version, now, lambda: loop.row(k, now))
        state, error = loop.state_of(k)
        plan, table = replica.plan, Table.of(rows, rows[0])
        best = evaluation.best if evaluation.best is not None and evaluation.best.x is not None else None
        weights = best.x if ended == "stop" and best is not None else None
        notes = tuple(f"{what}: {how}" for what, how in evaluation.failures.items())
        run = Run(
            *(plan.algorithm, plan.problem, state, loop.trace_of(k), table, now, ended, error, replica.path, notes),
            *(evaluation.workers.table(), best, None if weights is None else weights.cpu()),
        )
        if replica.folder is not None:
            if loop.moment != self._saved[1]:  # it stops between two checkpoints
                replica.folder.save(loop.save_of(k), loop.recorder.of(k, self._saved[0]), plan.keep)
            finish(replica.folder, run, loop.moment, replica.config)
        replica.close()
        replica.run = run
        loop.going.discard(k)


def advance_all(groups: Sequence[Group], turns: Sequence[Round], report: Callable[[float], None]) -> None:
    """Bring all groups to their ends side by side, with the gradients that they wait for taken together."""
    under_way = [(group, group.advance()) for group in groups]
    saved = any(replica.path is not None for group in groups for replica in group.replicas)
    acting: Group | None = None  # in the middle of a step
    with interruptible(saved) as interrupted:
        try:
            while under_way:
                going = []
                for acting, steps in under_way:
                    if next(steps, "ended") is None:
                        going.append((acting, steps))
                under_way, acting = going, None
                for turn in turns:
                    turn.evaluate()
                report((len(groups) - len(under_way) + sum(group.share for group, _ in under_way)) / len(groups))
                if interrupted[0]:
                    raise Interrupted("the runs were saved; the same sweep goes on where they are")
        except BaseException:
            for group, _ in under_way:
                if group is not acting:
                    group.save()
            raise
        finally:
            for group in groups:
                for replica in group.replicas:
                    replica.close()
