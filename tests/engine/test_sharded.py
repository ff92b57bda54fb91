"""A sharded server on virtual time: the bits of a whole one, for every method that can be cut, whatever happens."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import dualdelay as dd
from dualdelay.core.aggregate import AggregateState
from dualdelay.core.state import ShapedState
from dualdelay.engine import shard
from dualdelay.engine.half import Half
from dualdelay.engine.loop import Loop
from dualdelay.engine.shard import ShardPlan, Store
from dualdelay.engine.sharded import ShardedLoop
from dualdelay.engine.slices import Slices
from dualdelay.runs.optimizer import Optimizer
from dualdelay.simulation.clocks import VirtualClock
from dualdelay.simulation.local_fleet import LocalFleet
from dualdelay.simulation.local_shards import LocalMessageFleet, LocalShards
from tables import ALGORITHMS, LR

pytestmark = pytest.mark.numeric

N, WEIGHTS = 4, 333
ROWS = [row for row, m in ALGORITHMS.items() if not isinstance(m.init(torch.zeros(1), N, dd.Draws(0, "s")), ShapedState)]


class Valley(dd.Problem):
    """Noisy gradients of many weights, of which some are not finite."""

    workers = N

    def start(self, seed: int) -> Tensor:
        return torch.linspace(-1.0, 1.0, WEIGHTS)

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        noise = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(1000 * worker + draw))
        gradient = x - worker + noise
        if worker != 1 and draw % 5 == 3:
            gradient[WEIGHTS - 1] = torch.nan
        return gradient, float(worker)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return {"objective": float(x.square().sum())}

    def fingerprint(self) -> str:
        return "valley"


def clock() -> VirtualClock:
    away = [dd.speeds.Absence(1, 6.0, 14.0)]
    return VirtualClock(dd.FixedSpeeds([1.0, 2.1, 3.3, 0.7]), changes=dd.speeds.announced(away))


def whole_server(method: dd.Algorithm[Any], optimizer: Optimizer | None = None, **options: Any) -> Loop:
    problem = Valley()
    fleet = LocalFleet(
        problem, clock() if method.away else VirtualClock(dd.FixedSpeeds([1.0, 2.1, 3.3, 0.7])), Half(method)
    )
    return Loop(method, problem, fleet, problem.start(0), optimizer=optimizer, **options)


def shards_of(method: dd.Algorithm[Any], count: int, optimizer: Optimizer | None = None, **options: Any) -> ShardedLoop:
    problem = Valley()
    x = problem.start(0)
    table = options.get("table_format", "full")
    plan = ShardPlan(method, N, 0, copy.deepcopy(optimizer), table, Slices(WEIGHTS, count), x.dtype)
    shards = LocalShards(plan, x)
    times = clock() if method.away else VirtualClock(dd.FixedSpeeds([1.0, 2.1, 3.3, 0.7]))
    fleet = LocalMessageFleet(problem, times, Half(method), shards=shards)
    return ShardedLoop(plan, problem, fleet, shards, optimizer=optimizer, **options)


def advanced(loop: Loop, count: int = 60) -> Loop:
    loop.begin()
    for _ in range(count):
        loop.advance()
    return loop


def agree(one: Loop, other: Loop) -> None:
    """The same weights, trace and decisions."""
    assert torch.equal(one.x, other.x)
    rows, others = one.rows_of(0, 0), other.rows_of(0, 0)
    for name in rows:
        assert rows[name].tolist() == others[name].tolist() or name == "loss", name
    assert one.recorder.events == other.recorder.events
    assert len(set(rows["fingerprint"].tolist())) > 3


@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_as_a_whole_server_through_absences_and_rejected_gradients(name: str) -> None:
    method = ALGORITHMS[name]
    one, other = advanced(whole_server(method)), advanced(shards_of(method, 3))
    agree(one, other)
    assert {event["kind"] for event in one.recorder.events} >= (
        {"rejected", "left", "joined"} if method.away else {"rejected"}
    )
    (state, exact), (found, audit) = one.state_of(0), other.state_of(0)
    assert torch.equal(state.weights, found.weights) and (audit is None) == (exact is None)
    if isinstance(state, AggregateState):
        assert audit is not None and audit < 1e-6


class Copying(Store):
    """Where models are copied, so that a shard moves its weights in place, as real ones do."""

    def copies(self, x: Tensor) -> bool:
        return True

    def put(self, sent: Any) -> Any:
        return copy.deepcopy(sent)


class Room:
    """Memory that weights are put to part by part, and in which workers read them."""

    def __init__(self, x: Tensor) -> None:
        self.x = torch.full_like(x, torch.nan)

    def part(self, start: int, stop: int) -> Tensor:
        return self.x[start:stop]

    def place(self) -> Tensor:
        return self.x


class Roomy(Copying):
    """Where weights are put part by part, while a step is made; there may be no room left for more than so many."""

    most: ClassVar[float] = math.inf

    def __init__(self) -> None:
        self.count = 0

    def room(self, x: Tensor) -> Room | None:
        self.count += 1
        return Room(x) if self.count <= self.most else None


@pytest.mark.parametrize("store", [Copying, Roomy], ids=["at once", "part by part"])
@pytest.mark.parametrize("name", ROWS)
def test_the_same_bits_where_shards_step_block_by_block(
    name: str, store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through absences, wakes and models of each worker's own, and with a checkpoint in between."""
    monkeypatch.setattr(shard, "BLOCK", 64)
    monkeypatch.setattr(shard, "Store", store)
    made, step = list[dd.Arrival](), shard.Shard._step_by_blocks
    monkeypatch.setattr(shard.Shard, "_step_by_blocks", lambda self, a: made.append(a) or step(self, a))
    method = ALGORITHMS[name]
    one, other = advanced(whole_server(method)), advanced(shards_of(method, 2), 30)
    saved, rows = copy.deepcopy(other.save_of(0)), copy.deepcopy(other.rows_of(0, 0))
    went_on = shards_of(method, 2)
    went_on.load(saved, rows)
    for loop in (other, went_on):
        for _ in range(30):
            loop.advance()
        agree(one, loop)
    assert len(made) > 30


@pytest.mark.parametrize("most", [math.inf, 3, 0])
def test_what_is_lent_where_it_is_never_changes(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shard does meanwhile, and whether there is room for the next version or not."""
    monkeypatch.setattr(shard, "BLOCK", 64)
    monkeypatch.setattr(Roomy, "most", most)
    method, x = dd.DuDe(LR, start="zeros"), torch.linspace(-1.0, 1.0, WEIGHTS)
    one = ShardPlan(method, N, 0, None, "full", Slices(WEIGHTS, 1), x.dtype).shard(0, x.clone(), Roomy())
    state, lent = method.init(x, N, dd.Draws(0, "server")), list[tuple[Tensor, Tensor]]()
    for key in range(8):
        gradient = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(key))
        one.push(key % N, (0, key), {"": gradient})
        one.step(((key % N, key, key), float(key), 1.0, 0.0, 4 * WEIGHTS, 1, 0), False, (0, key))
        method.step(state, dd.Arrival(dd.Job(key % N, key, key), gradient, float(key), 1.0, 0.0))
        if key == 5:
            one.save()  # which looks at the whole
        one.keep(key, None)
        assert torch.equal(one.lent(key), state.x)
        lent.append((one.lent(key), one.lent(key).clone()))
    assert all(torch.equal(now, then) for now, then in lent)


def test_messages_and_questions_in_the_middle_of_a_step_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "BLOCK", 64)
    method, x = dd.DuDe(LR, start="zeros"), torch.linspace(-1.0, 1.0, WEIGHTS)
    one = ShardPlan(method, N, 0, None, "full", Slices(WEIGHTS, 1), x.dtype).shard(0, x.clone(), Roomy())
    state = method.init(x, N, dd.Draws(0, "server"))
    gradients = [torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(key)) for key in range(8)]
    one.push(0, (0, 0), {"": gradients[0]})
    for key, gradient in enumerate(gradients):
        facts, turns = ((key % N, key, key), float(key), 1.0, 0.0, 4 * WEIGHTS, 1, 0), 0
        for turns, _ in enumerate(one.step_in_turns(facts, False, (0, key)), start=1):
            if turns == 1 and key + 1 < len(gradients):
                one.push((key + 1) % N, (0, key + 1), {"": gradients[key + 1]})
            assert not one.is_known(key) and (key == 0 or torch.equal(one.lent(key - 1), state.x))
        assert turns > 1
        method.step(state, dd.Arrival(dd.Job(key % N, key, key), gradient, float(key), 1.0, 0.0))
        one.keep(key, None)
        assert torch.equal(one.lent(key), state.x)


@dataclass
class TwoStepsState(dd.State):
    between: Tensor = field(default_factory=lambda: torch.zeros(0))  # the weights between the two


@dataclass(frozen=True)
class TwoSteps(dd.Algorithm[TwoStepsState]):
    """Moves the weights twice for every message, and keeps what it has read of them in the middle."""

    lr: float = LR
    columns: bool = False  # whether the second step size is a tensor, as of runs that advance together

    def init(self, x: Tensor, n: int, rng: dd.Draws) -> TwoStepsState:
        return TwoStepsState(x, n, between=torch.zeros_like(x))

    def step(self, s: TwoStepsState, a: dd.Arrival) -> list[dd.Order]:
        s.descend(a.value, self.lr)
        s.between = s.x
        s.descend(a.value.double(), torch.tensor([self.lr]) if self.columns else self.lr)
        return [dd.send(a.worker)]


@pytest.mark.parametrize("columns", [False, True])
def test_weights_that_a_method_reads_between_two_descents_stay_as_they_are(
    columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "BLOCK", 64)
    method, x = TwoSteps(columns=columns), torch.linspace(-1.0, 1.0, WEIGHTS)
    one = ShardPlan(method, N, 0, None, "full", Slices(WEIGHTS, 1), x.dtype).shard(0, x.clone(), Roomy())
    state = method.init(x, N, dd.Draws(0, "server"))
    for key in range(4):
        gradient = torch.randn(WEIGHTS, generator=torch.Generator().manual_seed(key))
        one.push(key % N, (0, key), {"": gradient})
        one.step(((key % N, key, key), float(key), 1.0, 0.0, 4 * WEIGHTS, 1, 0), False, (0, key))
        method.step(state, dd.Arrival(dd.Job(key % N, key, key), gradient, float(key), 1.0, 0.0))
        one.keep(key, None)
        assert torch.equal(one.lent(key), state.x)
    saved = one.save()["state"]
    assert torch.equal(saved["between"], state.between) and torch.equal(saved["weights"], state.x)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("text", ["SGD[momentum=0.9,nesterov=true]", "AdamW", "RMSprop[alpha=0.9]"])
def test_the_same_bits_with_an_optimizer_and_any_number_of_shards(text: str, count: int) -> None:
    method = dd.DuDe(LR)
    one = advanced(whole_server(method, Optimizer(text, "StepLR[step_size=9]", lr=LR)))
    agree(one, advanced(shards_of(method, count, Optimizer(text, "StepLR[step_size=9]", lr=LR))))


def test_the_same_bits_with_a_table_in_half_precision() -> None:
    method = dd.DuDe(LR)
    full = advanced(shards_of(method, 2))
    half = advanced(shards_of(method, 2, table_format="half"))
    agree(advanced(whole_server(method, table_format="half")), half)
    assert not torch.equal(full.x, half.x)


@pytest.mark.parametrize("name", ["dude", "dude workers", "fedbuff", "scaffold"])
def test_a_sharded_server_goes_on_from_a_checkpoint_with_the_same_bits(name: str) -> None:
    method = ALGORITHMS[name]
    straight, stopped = advanced(shards_of(method, 2)), advanced(shards_of(method, 2), 30)
    saved, rows = stopped.save_of(0), stopped.rows_of(0, 0)
    again = shards_of(method, 2)
    again.load(copy.deepcopy(saved), rows)
    assert torch.equal(again.x, stopped.x)
    assert [len(part) for part in again.shards.ask("weights")] == [128 + 64, WEIGHTS - 192]
    agree(advanced_from(again, 30), straight)


def advanced_from(loop: Loop, count: int) -> Loop:
    for _ in range(count):
        loop.advance()
    return loop


def test_a_head_has_stand_ins_for_vectors_alone() -> None:
    loop = advanced(shards_of(dd.DuDe(LR), 2))
    state = loop.state
    assert isinstance(state, AggregateState) and state.weights.shape == state.total.shape == (1,)
    assert state.version == loop.recorder.rows()["after"][-1] and len(loop.shards.ask("weights")) == 2
