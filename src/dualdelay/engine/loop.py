"""The fold: arrivals in, orders out, with everything written down on the way."""

from __future__ import annotations

import logging
import time as clock
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from ..core import Algorithm, Arrival, Orders, Problem
from ..core.aggregate import AggregateState
from ..core.devices import placed
from ..core.draws import Draws
from ..core.errors import BadInput, DualDelayError, RunFailed
from ..core.state import Before, State, Stepper, checksum
from .evaluation import Evaluation, Metric, Row, Schedule
from .events import Due
from .fleet import Fleet
from .trace import Column, Recorder, Trace

log = logging.getLogger("dualdelay")

_IN_A_ROW = 10  # rejected values from one worker before the run gives up, or the worker
_IN_VAIN = 100  # arrivals and wakes for each worker without an update, after which a run asks whether there will be one
_OF_JOBS = ("arrival", "rejected", "failed", "wake")


class Loop:
    """A run under way: an algorithm's state, the fleet that serves it, and the record of both."""

    def __init__(
        self,
        algorithm: Algorithm[Any],
        problem: Problem,
        fleet: Fleet,
        x: Tensor,
        *,
        seed: int = 0,
        schedule: Schedule | None = None,
        metrics: Mapping[str, Metric] | None = None,
        on_nonfinite: str = "retry",
        optimizer: Stepper | None = None,
        table: str = "full",
        keep_best: str | None = None,
    ) -> None:
        self.algorithm, self.problem, self.fleet = algorithm, problem, fleet
        self.state: State = algorithm.init(x, problem.workers, Draws(seed, "server"))
        self.state.optimizer = optimizer
        if isinstance(self.state, AggregateState):
            self.state.kept = table
        self.recorder = Recorder()
        self.now = 0.0  # the time of what happened last
        self._schedule, self._on_nonfinite = schedule or Schedule(), on_nonfinite
        self._evaluates = schedule is not None
        tolerant = fleet.real and on_nonfinite == "leave"
        self.evaluation = Evaluation(problem, metrics, keep_best, forgiving=fleet.real, tolerant=tolerant)
        self.evaluations = [self.evaluation]  # of each run, where several advance with one loop (batching.Replicas)
        self.going = {0}  # the runs that are still looked at
        self._spent = 0.0  # seconds that the server has evaluated for
        self.left_out = 0  # evaluations that would have taken too much of the workers' time
        self._ticks = 0  # evaluations by simulated time so far
        self._streaks: dict[int, int] = {}  # rejected values in a row, by worker
        self._checksum: tuple[int, int | Tensor] = (-1, 0)  # of the newest version seen
        self._looked_at = -1  # the version evaluated last
        self._still = 0  # arrivals and wakes since the last update
        self._owed: float | None = None  # the time of an evaluation that is due and was not made
        made_here = type(algorithm).__module__.partition(".")[0] == __name__.partition(".")[0]
        own = not made_here or (optimizer is not None and optimizer.own)
        self._before = Before(self.state) if own else None  # a user's own step may fail half way
        self.whole = True  # whether nothing is half done, so that all of it can be saved

    @property
    def rows(self) -> list[Row]:
        """The evaluations so far."""
        return self.evaluation.rows

    @property
    def moment(self) -> int:
        """How much has happened: it grows with every arrival, other event and scheduled evaluation."""
        return len(self.recorder) + len(self.recorder.events) + self._ticks

    @property
    def stuck(self) -> bool:
        """Whether somebody will never come back, and much has happened since without an update."""
        vain = self._still >= _IN_VAIN * self.problem.workers and bool(self.fleet.never)
        return vain and (self.algorithm.waits or not self.fleet.hope)

    def begin(self) -> None:
        """Evaluate the start and give out the first jobs; workers that evaluate themselves have those before."""
        self._require_fields()
        self.fleet.begin()
        if self._evaluates and not self.fleet.measures:
            self.look(0.0)
        self._carry_out(self._decided(lambda: self.algorithm.first(self.state), "first"))
        if self._evaluates and self.fleet.measures:
            self.look(0.0)

    def look(self, time: float) -> None:
        """Evaluate the current model: now, or in a fleet whose workers do it, as soon as they have."""
        version, samples, limit = self.state.version, self._schedule.samples, self._schedule.limit
        if not self.fleet.measures:
            if limit is not None and self._spent > limit * time and self.rows:
                self.left_out += 1
                return
            begin = clock.perf_counter()
            self.evaluation.add(self.evaluation.of(time, version, self.state.x, samples))
            self._spent += clock.perf_counter() - begin
        elif self._looked_at != version and not self.fleet.measure(time, version, self.state.weights, samples, limit):
            self.left_out += 1
        self._looked_at = version

    def measured(self) -> None:
        """Take what the workers have found out about a model."""
        self.evaluation.add(self.evaluation.combined(self.fleet.measured()))

    def evaluate_before(self, time: float) -> bool:
        """Evaluate at the scheduled moments that lie before ``time``: nothing more can arrive by then. Was there any?"""
        seconds, before = self._schedule.seconds, self._ticks
        while seconds is not None and (self._ticks + 1) * seconds < time:
            self.look((self._ticks + 1) * seconds)
            self._ticks += 1  # if it fails it is still to be done
        return self._ticks > before

    def catch_up(self) -> None:
        """Make the evaluation that was due when the run was stopped, if there is one."""
        if self._owed is not None:
            self.look(self._owed)
            self._owed = None

    def advance(self) -> Arrival | None:
        """Go to what happens next; returns the arrival if one was absorbed."""
        due, s = self.fleet.peek(), self.state
        assert due is not None, "nothing is due"
        a = self._compute(due) if due.kind in _OF_JOBS else None
        steps = a is not None and (a.job is None or (due.kind != "failed" and self._is_gradient(a)))
        before, arrival, orders = s.version, None, Orders()
        if a is not None and steps:
            orders = self._step(a)  # first: if it fails, nothing has happened
        self.whole = False
        self.fleet.pop()
        self.now = due.time
        if a is None:
            orders = self._change(due)
        elif a.job is None:
            self.recorder.event("wake", a.time, s.version)
        elif due.kind == "failed":
            orders = self._again(a, due)
        elif not steps:
            orders = self._reject(a, due)
        else:
            arrival = a
            self.fleet.accept(a)
            self._streaks.pop(a.worker, None)
        self._still = self._still + 1 if s.version == before else 0
        if orders:
            self._carry_out(orders)
        if arrival is not None:  # written down while the workers are busy again
            self.recorder.arrival(arrival, s.version, self._fingerprint())
        self.whole = True
        if passed(self._schedule.updates, before, s.version):
            self._owed = due.time
            self.catch_up()
        return arrival

    def _is_gradient(self, a: Arrival) -> bool:
        weights = self.state.weights
        return a.value.shape == weights.shape and a.value.dtype == weights.dtype and self.fleet.finite(a)

    def _carry_out(self, orders: Orders) -> None:
        s = self.state
        self.fleet.carry_out(orders, s.version, s.weights if self.fleet.copies else s.x)

    def _step(self, a: Arrival) -> Orders:
        if self._before is not None:
            self._before.remember()
        self.whole = False
        try:
            orders = self._decided(lambda: self.algorithm.step(self.state, a), "step")
        except BaseException:
            self.whole = self._before is not None and self._before.put_back()
            raise
        self.whole = True
        return orders

    def _decided(self, decide: Callable[[], Orders], name: str) -> Orders:
        """What the algorithm decides; refuses one that moves the model without a new version, since that names it."""
        s, weights, mark = self.state, self.state.weights, self.state.weights._version
        version, descents = s.version, s.descents
        orders = decide()
        method, made = f"{type(self.algorithm).__name__}.{name}", s.descents - descents
        if not made and weights._version != mark:
            raise BadInput(f"{method} wrote into state.x; move it with state.descend(...).")
        if not made and s.weights is not weights:
            raise BadInput(f"{method} replaced state.weights without a new version; move it with state.descend(...).")
        if s.version != version + made:
            raise BadInput(
                f"{method} set state.version from {version} to {s.version}; leave it alone: state.descend(...) moves the "
                "weights and counts."
            )
        if not isinstance(orders, list):
            raise BadInput(f"{method} returned {orders!r}; expected a list of orders.")
        self.fleet.check(orders)
        return orders

    def _compute(self, due: Due) -> Arrival:
        try:
            return self.fleet.arrival(due)
        except DualDelayError:
            raise
        except Exception as error:
            raise RunFailed(f"worker {due.worker} could not compute its job number {due.draw}: {error}") from error

    def _change(self, due: Due) -> Orders:
        """Something other than a job's end: who is there and what they remember."""
        s, before, orders = self.state, self.state.version, Orders()
        if due.kind in ("idle", "evaluated"):
            if due.kind == "evaluated":
                self.measured()
            return orders
        if due.kind == "left":
            if type(self.algorithm).leave is Algorithm.leave:  # what is saved still has its job, so it can be resumed
                raise self._over(
                    f"worker {due.worker} is gone ({due.text}), and {type(self.algorithm).__name__} would wait for it. "
                    "Resume when it is back, or use a method that lets workers go (dude, vanilla)."
                )
            held = self.fleet.depart(due.worker)
            kept = () if held is None else (held,)
            orders = self._decided(lambda: self.algorithm.leave(s, due.worker, *kept), "leave")
        elif due.kind == "joined":
            orders = self._decided(lambda: self.algorithm.join(s, due.worker), "join")
        elif due.kind == "weighed":
            self.problem.set_mean_samples(float(due.text))
        elif due.kind == "lost":
            self.fleet.forget(due.worker)
        elif due.kind == "restored":
            if not isinstance(s, AggregateState):
                raise self._over(
                    f"worker {due.worker} lost what it kept, and {type(self.algorithm).__name__} has no sum to rebuild it "
                    "from; use one that has (dude)."
                )
            self.fleet.restore(due.worker, s.rest(self.fleet.held()))
        self.recorder.event(due.kind, due.time, s.version, due.worker, version=before, text=due.text)
        return orders

    def _over(self, why: str) -> RunFailed:
        """The run cannot go on from here; what has happened is done and can be saved."""
        self.whole = True
        return RunFailed(why)

    def _again(self, a: Arrival, due: Due) -> Orders:
        """A job came to nothing at its worker, which does it again with another draw."""
        assert a.job is not None
        self.recorder.event(due.kind, a.time, self.state.version, *a.job, text=due.text)
        self.fleet.retry(a)
        return []

    def _reject(self, a: Arrival, due: Due) -> Orders:
        """Count a value that is no gradient; its worker does the job again and is late, or has to leave."""
        assert a.job is not None
        shape, expected = tuple(a.value.shape), tuple(self.state.weights.shape)
        what = "values that are not finite" if shape == expected else f"shape {shape}, expected {expected}"
        text = due.text if due.kind == "rejected" else what if self.fleet.real else ""  # in a replay as it was recorded
        self.recorder.event("rejected", a.time, self.state.version, *a.job, text=text)
        self.fleet.retry(a)
        streak = self._streaks[a.worker] = self._streaks.get(a.worker, 0) + 1
        said = f"a gradient with {what} (job number {a.job.draw} at version {a.job.version}"
        said += f", number {streak} in a row)" if streak > 1 else ")"
        if self.fleet.real:
            log.warning("worker %d sent %s; it was rejected, and the job is done again", a.worker, said)
        if self._on_nonfinite == "stop" or (self._on_nonfinite == "retry" and streak >= _IN_A_ROW):
            raise self._over(
                f"worker {a.worker} sent {said}. Nothing of it was used. Lower lr, look at that worker's data, or let such "
                "a worker leave: dd.Server(on_nonfinite='leave')."
            )
        if self._on_nonfinite == "leave" and streak >= _IN_A_ROW:
            del self._streaks[a.worker]
            self.fleet.dismiss(a.worker, f"it sent {said}")
        return []

    def _require_fields(self) -> None:
        """Refuse what a method keeps in its state beside the fields: it would be lost when the run is resumed."""
        more = sorted(vars(self.state).keys() - {f.name for f in fields(self.state)})
        if more:
            raise BadInput(
                f"{type(self.algorithm).__name__} keeps {', '.join(more)} in a {type(self.state).__name__}, which has no "
                "such field, so that it could not be saved. Extend dd.State: a dataclass with a field for it."
            )

    def _fingerprint(self) -> int | Tensor:
        """The checksum of the current weights, which every gradient used so far has gone into."""
        if self._checksum[0] != self.state.version:
            self._checksum = (self.state.version, checksum(self.state.weights))
        return self._checksum[1]

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, as plain values and tensors."""
        self._require_fields()
        state = {f.name: getattr(self.state, f.name) for f in fields(self.state) if f.name != "optimizer"}
        optimizer = self.state.optimizer
        return {
            "arrivals": len(self.recorder),
            "moment": self.moment,
            "now": self.now,
            "state": {name: value for name, value in state.items() if not isinstance(value, Draws)},
            "optimizer": None if optimizer is None else optimizer.save(),
            "fleet": self.fleet.save(),
            "events": self.recorder.events,
            "evaluation": self.evaluation.save(),
            "ticks": self._ticks,
            "owed": self._owed,
            "streaks": list(self._streaks.items()),
        }

    def check(self) -> None:
        """Leave aside the runs that have to be done again by themselves; a single one is none of those."""

    def save_of(self, k: int) -> dict[str, Any]:
        """What run k needs to go on later."""
        return self.save()

    def rows_of(self, k: int, start: int) -> dict[str, Column]:
        """The rows of run k's trace from ``start`` on."""
        return self.recorder.rows(start)

    def trace_of(self, k: int) -> Trace:
        """Run k's trace so far."""
        return self.recorder.trace()

    def row_of(self, k: int, time: float, samples: int | None = None) -> Row | None:
        """A row of metrics about run k's current model."""
        return self.evaluations[k].of(time, self.state.version, self.state.x, samples)

    def state_of(self, k: int) -> tuple[State, float | None]:
        """What run k's server knows, and the audit of its sum if it has one."""
        s = self.state
        return s, s.error(self.fleet.held()) if isinstance(s, AggregateState) else None

    def load(self, saved: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
        """Go on from what was saved, with the trace's rows up to there."""
        self.restore(saved)
        self.recorder.extend(rows)
        self.recorder.events = saved["events"]
        self.evaluation.load(saved["evaluation"])
        self._ticks, self._owed, self.now = saved["ticks"], saved["owed"], saved["now"]
        self._streaks = dict(saved["streaks"])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The server, its optimiser and its workers are what they were when that was saved."""
        self._checksum = (-1, 0)
        device, host = self.state.weights.device, saved["state"].get("kept") == "host"
        for name, value in saved["state"].items():
            setattr(self.state, name, value if name == "table" and host else placed(value, device))
        saved = placed({name: value for name, value in saved.items() if name != "state"}, device)
        if self.state.optimizer is not None:
            self.state.optimizer.load(saved["optimizer"])
        self.fleet.load(saved["fleet"])


def passed(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` lies between two versions: several updates may be made in one step."""
    return every is not None and before // every != after // every
