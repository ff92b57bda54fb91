"""The fold: arrivals in, orders out, with everything recorded on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..core import Algorithm, Arrival, Job, Memory, Orders, Problem
from ..core.aggregate import AggregateState, TableFormat
from ..core.devices import placed
from ..core.draws import Draws
from ..core.errors import BadInput, DualDelayError, RunFailed
from ..core.state import ShapedState, Snapshot, State, Stepper, checksum
from ..core.work import checked_memory, expected_parts
from .evaluation import Evaluations, Metric, Row, Schedule
from .events import Event, EventKind
from .fleet import Fleet
from .half import METHOD, Kept, checked_model, is_own
from .table import Column
from .trace import Recorder, Trace

log = logging.getLogger("dualdelay")

OnNonfinite = Literal["retry", "leave", "stop"]

_NOT_FINITE = "values that are not finite"
_IN_A_ROW = 10  # rejected values from one worker before the run gives up, or the worker has to leave
_SMALL = 1 << 16  # bytes of weights that are kept until the fingerprints of several are taken in one call
_IN_VAIN = 100  # arrivals and wakes for each worker without an update, after which a run asks whether there will be one


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
        on_nonfinite: OnNonfinite | None = "retry",
        optimizer: Stepper | None = None,
        table_format: TableFormat = "full",
        keep_best: str | None = None,
    ) -> None:
        """Without a ``schedule`` nothing is evaluated; ``on_nonfinite`` is None in a replay, where the record decides."""
        self.algorithm, self.problem, self.fleet = algorithm, problem, fleet
        self.state: State = algorithm.init(x, problem.workers, Draws(seed, "server"))
        self.state.optimizer = optimizer
        if isinstance(self.state, AggregateState):
            self.state.table_format = table_format
        if isinstance(self.state, ShapedState):
            places = {first: list(shape) for _, first, shape in problem.layout()}  # tied parameters have several names
            self.state.layout = [[first, places[first]] for first in sorted(places)]
        self._shapes = _checked_shapes(algorithm, x)
        self._one_shape = list(self._shapes.values()) == [tuple(x.shape)]
        self._names_models = type(algorithm).model is not Algorithm.model
        self.recorder = Recorder()
        self.now = 0.0  # the time of what happened last
        self._schedule, self._on_nonfinite = schedule or Schedule(), on_nonfinite
        self._is_evaluated = schedule is not None
        tolerant = fleet.real and on_nonfinite == "leave"
        self.evaluation = Evaluations(problem, metrics, keep_best, forgiving=fleet.real, tolerant=tolerant)
        self.evaluations = [self.evaluation]  # of each run, where several advance with one loop (batching.Replicas)
        self.going = {0}  # the runs that have not ended
        self.skipped_evaluations = 0  # those that would have taken too much of the workers' time
        self._evaluation_seconds = 0.0  # that the server has spent
        self._evaluations_by_time = 0  # so far
        self._evaluated_version = -1  # the last one
        self._overdue: float | None = None  # the time of an evaluation that was scheduled and not made
        self._rejected_in_a_row: dict[int, int] = {}  # by worker
        self._checksum: tuple[int, int | Tensor] = (-1, 0)  # a version and that of its weights
        self._since_update = 0  # arrivals and wakes
        self._ended: Job | None = None  # the job that is being absorbed
        may_fail = is_own(algorithm) or (optimizer is not None and optimizer.own)
        self._snapshot = Snapshot(self.state) if may_fail else None  # a user's own step may fail half way
        self.consistent = True  # whether nothing is half done, so that all of it can be saved

    @property
    def rows(self) -> list[Row]:
        """The evaluations so far."""
        return self.evaluation.rows

    @property
    def x(self) -> Tensor:
        """The current model, flat."""
        return self.state.x

    @property
    def moment(self) -> int:
        """How much has happened: it grows with every arrival, other event and evaluation by time."""
        return len(self.recorder) + len(self.recorder.events) + self._evaluations_by_time

    @property
    def stuck(self) -> bool:
        """Whether some worker will never come back, and much has happened since without an update."""
        if self._since_update < _IN_VAIN * self.problem.workers or not self.fleet.never_ending:
            return False
        return self.algorithm.waits or not self.fleet.expects_more

    def begin(self) -> None:
        """Evaluate the initial model and give out the first jobs; workers that evaluate themselves have those before."""
        self._require_fields()
        self.fleet.begin()
        if self._is_evaluated and not self.fleet.evaluates:
            self.evaluate(0.0)
        self._carry_out(self._decided("first", self._first))
        if self._is_evaluated and self.fleet.evaluates:
            self.evaluate(0.0)

    def evaluate(self, time: float) -> None:
        """Evaluate the current model: now, or in a fleet whose workers do it, as soon as they have."""
        version, samples, limit = self.state.version, self._schedule.samples, self._schedule.limit
        if not self.fleet.evaluates:
            if limit is not None and self._evaluation_seconds > limit * time and self.rows:
                self.skipped_evaluations += 1
                return
            begin = self.fleet.stopwatch()
            self.evaluation.add(self.evaluation.of(time, version, self.x, samples))
            self._evaluation_seconds += self.fleet.stopwatch() - begin
        elif version != self._evaluated_version and not self.fleet.evaluate(
            time, version, self.state.weights, samples, limit
        ):
            self.skipped_evaluations += 1
        self._evaluated_version = version

    def take_evaluation(self) -> None:
        """Record what the workers have found out about a model."""
        self.evaluation.add(self.evaluation.combined(self.fleet.take_evaluation()))

    def evaluate_before(self, time: float) -> bool:
        """Evaluate at the scheduled times before ``time``: nothing more can arrive by then. Was there any?"""
        seconds, before = self._schedule.seconds, self._evaluations_by_time
        while seconds is not None and (self._evaluations_by_time + 1) * seconds < time:
            self.evaluate((self._evaluations_by_time + 1) * seconds)
            self._evaluations_by_time += 1  # if it fails it is still to be done
        return self._evaluations_by_time > before

    def evaluate_overdue(self) -> None:
        """Make the evaluation that was scheduled when the run was stopped, if there is one."""
        if self._overdue is not None:
            self.evaluate(self._overdue)
            self._overdue = None

    def advance(self) -> Arrival | None:
        """Let the next event happen; returns the arrival if one was absorbed."""
        fleet, s = self.fleet, self.state
        event = fleet.peek()
        assert event is not None, "nothing is due"
        kind, before, orders = event.kind, s.version, Orders()
        a, fault, absorbed = None, "", None
        if kind is EventKind.ARRIVAL or kind.ends_job:
            a = self._arrival(event)
            fault = "" if kind is EventKind.FAILED else self._fault(a)
            absorbed = a if kind is EventKind.ARRIVAL and not fault else None
        if absorbed is not None:
            self._ended = absorbed.job
            orders = self._undoable("step", self._absorb, absorbed)
            self._ended = None
        elif kind is EventKind.WAKE:
            orders = self._undoable("on_wake", self._wake, event.time)
        self.consistent = False  # not before: a step that fails is undone, and then nothing has happened
        fleet.pop()
        self.now = event.time
        if absorbed is not None:
            fleet.accept(absorbed)
            if self._rejected_in_a_row:
                self._rejected_in_a_row.pop(absorbed.worker, None)
        elif a is not None:
            self._retry(a, event, fault)
        elif kind is EventKind.WAKE:
            self.recorder.event(kind, event.time, s.version)
        else:
            orders = self._change(event)
        self._since_update = self._since_update + 1 if s.version == before else 0
        if orders:
            self._carry_out(orders)
        if absorbed is not None:  # recorded while the workers are busy again
            self.recorder.arrival(absorbed, s.version, self._fingerprint())
        self.consistent = True
        if s.version != before and passed(self._schedule.updates, before, s.version):
            self._overdue = event.time
            self.evaluate_overdue()
        return absorbed

    # What the method decides, and where its state changes.

    def _first(self) -> Orders:
        return self.algorithm.first(self.state)

    def _absorb(self, a: Arrival) -> Orders:
        if self.state.optimizer is not None and not a.parts:
            self.state.optimizer.observe(self.state.weights, a.value)
        return self.algorithm.step(self.state, a)

    def _wake(self, time: float) -> Orders:
        return self.algorithm.on_wake(self.state, time)

    def _leave(self, worker: int, held: Memory | None) -> Orders:
        return self.algorithm.leave(self.state, worker, *(() if held is None else (held,)))

    def _join(self, worker: int) -> Orders:
        return self.algorithm.join(self.state, worker)

    def _arrival(self, event: Event) -> Arrival:
        try:
            return self.fleet.arrival(event)
        except DualDelayError:
            raise
        except Exception as error:
            raise RunFailed(f"worker {event.worker} could not compute its job number {event.draw}: {error}") from error

    def _fault(self, a: Arrival) -> str:
        """What is wrong with a message, in words; empty if nothing is."""
        weights, value, shapes = self.state.weights, a.value, self._shapes
        dtype = weights.dtype
        if self._one_shape and not a.parts and value.shape == weights.shape and value.dtype == dtype:  # nearly always
            return "" if self.fleet.finite(a) else _NOT_FINITE
        parts: Mapping[str, Tensor] = a.parts
        if not parts:
            if len(shapes) > 1:
                return f"one tensor without a name; expected {expected_parts(shapes)}"
            parts = {next(iter(shapes)): a.value}
        if parts.keys() != shapes.keys():
            return f"the tensors {', '.join(parts) or 'none'}; expected {expected_parts(shapes)}"
        for name, part in parts.items():
            of = f" for {name!r}" if a.parts else ""
            if tuple(part.shape) != shapes[name]:
                return f"shape {tuple(part.shape)}{of}, expected {shapes[name]}"
            if part.dtype != dtype:
                return f"numbers of type {part.dtype}{of}, expected {dtype}"
        return "" if self.fleet.finite(a) else _NOT_FINITE

    def _carry_out(self, orders: Orders) -> None:
        s = self.state
        own = partial(checked_model, self.algorithm, s) if self._names_models else None
        self.fleet.carry_out(orders, s.version, s.weights if self.fleet.copies_models else s.x, own)

    def _undoable(self, rule: str, decide: Callable[..., Orders], *given: Any) -> Orders:
        """What the algorithm decides; if that raises, the state is as it was."""
        if self._snapshot is not None:
            self._snapshot.take()
        self.consistent = False
        try:
            orders = self._decided(rule, decide, *given)
        except BaseException:
            self.consistent = self._snapshot is not None and self._snapshot.restore()
            raise
        self.consistent = True
        return orders

    def _decided(self, rule: str, decide: Callable[..., Orders], *given: Any) -> Orders:
        """What the algorithm decides; refuses one that moves the model without a new version, since that names it."""
        s, weights, mark = self.state, self.state.weights, self.state.weights._version
        version, descents = s.version, s.descents
        orders = decide(*given)
        descended, wrong = s.descents - descents, ""
        if not descended and weights._version != mark:
            wrong = "wrote into state.x; move it with state.descend(...)."
        elif not descended and s.weights is not weights:
            wrong = "replaced state.weights without a new version; move it with state.descend(...)."
        elif s.version != version + descended:
            set_to = f"set state.version from {version} to {s.version}"
            wrong = f"{set_to}; leave it alone: state.descend(...) moves the weights and counts."
        elif not isinstance(orders, list):
            wrong = f"returned {orders!r}; expected a list of orders."
        if wrong:
            raise BadInput(f"{type(self.algorithm).__name__}.{rule} {wrong}")
        self.fleet.check(orders, self._ended)
        return orders

    def _change(self, event: Event) -> Orders:
        """Something other than a job's end: who is present and what the workers remember."""
        s, before, orders = self.state, self.state.version, Orders()
        match event.kind:
            case EventKind.IDLE:
                return orders
            case EventKind.EVALUATED:
                self.take_evaluation()
                return orders
            case EventKind.LEFT:
                if not self.algorithm.away:  # what is saved still has its job, so it can be resumed
                    raise self._over(
                        f"worker {event.worker} is gone ({event.text}), and {type(self.algorithm).__name__} would wait for "
                        "it. Resume when it is back, or use a method that lets workers go (dude, vanilla)."
                    )
                held = _memory(self.fleet.remove(event.worker))
                orders = self._decided("leave", self._leave, event.worker, held)
            case EventKind.JOINED:
                orders = self._decided("join", self._join, event.worker)
            case EventKind.WEIGHED:
                self.problem.set_mean_samples(float(event.text))
            case EventKind.LOST:
                self.fleet.forget(event.worker)
            case EventKind.RESTORED:
                others = self.memories() if self.algorithm.asks_others else {}
                memory = self._recovered(event.worker, others)
                self.fleet.restore(event.worker, None if memory is None else {METHOD: memory})
        self.recorder.event(event.kind, event.time, s.version, event.worker, version=before, text=event.text)
        return orders

    def _recovered(self, worker: int, others: Mapping[int, Memory]) -> Memory | None:
        """What the method has a worker go on with that has lost what it kept."""
        memory = self.algorithm.recover(self.state, worker, others)
        return checked_memory(memory, type(self.algorithm).__name__, worker)

    def memories(self) -> dict[int, Memory]:
        """What each worker keeps for the method."""
        return {worker: memory for worker, kept in self.fleet.held().items() if (memory := _memory(kept)) is not None}

    def _over(self, why: str) -> RunFailed:
        """The run cannot go on from here; what has happened is done and can be saved."""
        self.consistent = True
        return RunFailed(why)

    def _retry(self, a: Arrival, event: Event, what: str) -> None:
        """A job came to nothing: its worker does it again with another draw and is late, or has to leave."""
        recorded = event.kind is not EventKind.ARRIVAL  # a worker's error, or in a replay
        text = event.text if recorded else what if self.fleet.real else ""
        kind = event.kind if recorded else EventKind.REJECTED
        self.recorder.event(kind, a.time, self.state.version, *a.job, text=text)
        self.fleet.retry(a.job, a.steps)
        if kind is EventKind.FAILED:
            return
        count = self._rejected_in_a_row[a.worker] = self._rejected_in_a_row.get(a.worker, 0) + 1
        noun = "a gradient" if self._shapes.keys() == {"gradient"} else f"a message of {type(self.algorithm).__name__}"
        gradient = f"{noun} with {what} (job number {a.job.draw} at version {a.version}"
        gradient += f", number {count} in a row)" if count > 1 else ")"
        if self.fleet.real:
            log.warning("worker %d sent %s; it was rejected, and the job is done again", a.worker, gradient)
        if self._on_nonfinite == "stop" or (self._on_nonfinite == "retry" and count >= _IN_A_ROW):
            advice = "Lower lr, look at that worker's data,"
            if what != _NOT_FINITE:
                advice = "Have the method's work and its shapes(x) agree, look at the problem's gradients,"
            raise self._over(
                f"worker {a.worker} sent {gradient}. Nothing of it was used. {advice} or let such a worker leave: "
                "dd.Server(on_nonfinite='leave')."
            )
        if self._on_nonfinite == "leave" and count >= _IN_A_ROW:
            del self._rejected_in_a_row[a.worker]
            self.fleet.expel(a.worker, f"it sent {gradient}")

    def _require_fields(self) -> None:
        """Refuse what a method keeps in its state beside the fields: it would be lost when the run is resumed."""
        beside = sorted(vars(self.state).keys() - {f.name for f in fields(self.state)})
        if beside:
            raise BadInput(
                f"{type(self.algorithm).__name__} keeps {', '.join(beside)} in a {type(self.state).__name__}, which has no "
                "such field, so that it could not be saved. Extend dd.State: a dataclass with a field for it."
            )

    def _fingerprint(self) -> int | Tensor:
        """The checksum of the weights, which every gradient so far has gone into; small weights themselves, for later."""
        s = self.state
        if self._checksum[0] != s.version:
            is_small = s.weights.ndim == 1 and s.weights.is_cpu and s.weights.nbytes <= _SMALL
            self._checksum = (s.version, s.x if is_small else checksum(s.weights))
        return self._checksum[1]

    def save(self) -> dict[str, Any]:
        """Everything needed to continue later, as plain values and tensors."""
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
            "evaluations_by_time": self._evaluations_by_time,
            "overdue": self._overdue,
            "rejected_in_a_row": list(self._rejected_in_a_row.items()),
        }

    def load(self, saved: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
        """Continue from what was saved, with the trace's rows up to there."""
        self.restore(saved)
        self.recorder.extend(rows)
        self.recorder.events = saved["events"]
        self.evaluation.load(saved["evaluation"])
        self._evaluations_by_time, self._overdue, self.now = saved["evaluations_by_time"], saved["overdue"], saved["now"]
        self._rejected_in_a_row = dict(saved["rejected_in_a_row"])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """The server, its optimiser and its workers are what they were when that was saved."""
        self._checksum = (-1, 0)
        device, on_host = self.state.weights.device, saved["state"].get("table_format") == "host"
        for name, value in saved["state"].items():
            setattr(self.state, name, value if name == "table" and on_host else placed(value, device))
        saved = placed({name: value for name, value in saved.items() if name != "state"}, device)
        if self.state.optimizer is not None:
            self.state.optimizer.load(saved["optimizer"])
        self.fleet.load(saved["fleet"])

    # What a runner asks of each run that advances with this loop; here there is one, number 0.

    def drop_diverged(self) -> None:
        """Leave aside the runs that have to be done again by themselves; a single one is none of those."""

    def save_of(self, k: int, folder: Path | None = None) -> dict[str, Any]:
        """What run k needs to continue later; who keeps a part of it may write that to the folder by itself."""
        return self.save()

    def rows_of(self, k: int, start: int) -> dict[str, Column]:
        """The rows of run k's trace from ``start`` on."""
        return self.recorder.rows(start)

    def trace_of(self, k: int) -> Trace:
        """Run k's trace so far."""
        return self.recorder.trace()

    def assess_ahead(self) -> None:
        """The models of all runs that are going are about to be evaluated on all data: those of several, at once."""

    def evaluation_of(self, k: int, time: float, samples: int | None = None) -> Row | None:
        """A row of metrics about run k's current model, which is not added yet."""
        return self.evaluations[k].of(time, self.state.version, self.x, samples)

    def state_of(self, k: int) -> tuple[State, float | None]:
        """What run k's server knows, and the audit of its sum if it has one."""
        s = self.state
        return s, s.audit(self.memories()) if isinstance(s, AggregateState) else None


def _checked_shapes(algorithm: Algorithm[Any], x: Tensor) -> dict[str, tuple[int, ...]]:
    """The tensors of a message as a method declares them; refuses what is no such thing."""
    shapes = algorithm.shapes(x)
    try:
        declared = {str(name): tuple(int(size) for size in shape) for name, shape in dict(shapes).items()}
    except (TypeError, ValueError):
        declared = {}
    if not declared or not all(declared.values()):
        raise BadInput(
            f"{type(algorithm).__name__}.shapes gave {shapes!r:.200}; expected each tensor's name and shape, of one axis "
            'or more, such as {"moved": tuple(x.shape), "norm": (1,)}.'
        )
    return declared


def _memory(kept: Kept | None) -> Memory | None:
    """Of what a worker keeps, what is the method's."""
    return None if kept is None else kept.get(METHOD)


def passed(every: int | None, before: int, after: int) -> bool:
    """Whether a multiple of ``every`` lies between two versions: several updates may be made in one step."""
    return every is not None and before // every != after // every
