"""How the server keeps its workers' last gradients: as they came, on the host, or rounded to half the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core.draws import Draws
from flat import simulate
from helpers import audit
from own import Killed, differences, kill_at, mlp, shards
from tables import ALGORITHMS, CASES, LR

pytestmark = pytest.mark.numeric

# bfloat16 has p = 8 binary digits, the leading one among them. Next to a number in [2^e, 2^(e+1)) its numbers are 2^(e-7)
# apart, so rounding to the nearest is off by at most 2^(e-8): by 2^-8 / (1 + 2^-8) of the number, a little less than
# 2^-8 (and not 2^-9: that is the bound for one more digit). So with rows R_i = G_i + E_i it is ||E_i|| <= 2^-8 ||G_i||, and
# the mean of the rows is off by at most 2^-8 (1/n) sum_i ||G_i||. Rounding a float64 by way of float32 adds 2^-24, which
# the gap between 2^-8 / (1 + 2^-8) and 2^-8 holds. Nothing of it depends on how often rows were replaced.
UNIT = 2.0**-8

TABLED: dict[str, dd.Algorithm[Any]] = {
    "dude": dd.DuDe(LR),
    "dude three": dd.DuDe(LR, wait_for=3),
    "dude zeros": dd.DuDe(LR, start="zeros"),
    "mifa": dd.MIFA(LR),
    "mifa active": dd.MIFA(LR, active=2),
    "siag": dd.SIAG(LR),
}
SPEEDS = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 1.0], seed=5)


def noisy() -> dd.Quadratic:
    centers = [[0.0, 1.0, 30.0], [2.0, -1.0, 1.0], [4.0, 0.01, 0.0], [-1.0, 3.0, 7.0]]
    return dd.Quadratic(centers, [1.0, 0.5, 2.0, 1.5], noise=0.5, seed=1)  # float64


def net() -> dd.Network:
    return dd.Network(mlp(), cross_entropy, shards(4), 4)  # float32


PROBLEMS = {"float64": noisy, "float32": net}


class Latest:
    """A watch function that compares the server's mean with that of the gradients as they came, at every step."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}
        self.off: list[float] = []  # the distance of the two means over (1/n) sum_i ||G_i||

    def __call__(self, s: dd.AggregateState, a: dd.Arrival) -> None:
        self.rows[a.worker] = a.value.double()
        exact, size = sum(self.rows.values()) / s.n, sum(row.norm() for row in self.rows.values()) / s.n
        self.off.append(float((s.total / s.n - exact).norm() / size))


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TABLED)
def test_the_sum_is_that_of_the_rows_kept(name: str, kind: str) -> None:
    for table in ("full", "half", "host"):
        run = dd.simulate(
            TABLED[name],
            PROBLEMS[kind](),
            SPEEDS,
            updates=16,
            compute=dd.Compute(gradient_table=table),
            evaluation=dd.Evaluation(every=16),
        )
        state: Any = run.state
        assert run.audit <= audit(run)
        total = sum(row.double() for row in state.table)
        assert (state.total - total).norm() <= audit(run) * sum(row.double().norm() for row in state.table)
        expected = torch.bfloat16 if table == "half" else run.x.dtype
        assert {row.dtype for row in state.table} == {expected}
        assert {row.device.type for row in state.table} == {"cpu"}
        assert state.total.dtype == torch.float64
        assert run.x.dtype == PROBLEMS[kind]().start(0).dtype


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TABLED)
def test_on_the_host_nothing_changes(name: str, kind: str) -> None:
    full, host = (
        dd.simulate(
            TABLED[name],
            PROBLEMS[kind](),
            SPEEDS,
            updates=12,
            compute=dd.Compute(gradient_table=table),
            evaluation=dd.Evaluation(every=12),
        )
        for table in ("full", "host")
    )
    assert differences(full, host) == []


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TABLED)
def test_at_every_step_rounded_rows_move_the_mean_by_no_more_than_their_last_digit(name: str, kind: str) -> None:
    for table in ("full", "half"):
        latest = Latest()
        run = dd.simulate(
            TABLED[name],
            PROBLEMS[kind](),
            SPEEDS,
            updates=16,
            compute=dd.Compute(gradient_table=table),
            watch=[latest],
            evaluation=dd.Evaluation(every=16),
        )
        if table == "full":
            assert max(latest.off) <= audit(run)
        else:
            assert max(latest.off) <= UNIT
            assert max(latest.off) > 1e-5  # they are rounded


@pytest.mark.parametrize("name", ["dude", "dude three"])
def test_what_rounding_moves_does_not_grow_with_the_steps(name: str) -> None:
    latest = Latest()
    updates = 700 if name == "dude three" else 2000
    run = dd.simulate(
        TABLED[name],
        noisy(),
        SPEEDS,
        updates=updates,
        compute=dd.Compute(gradient_table="half"),
        watch=[latest],
        evaluation=dd.Evaluation(every=10**6),
    )
    assert len(run.trace) >= 2000
    assert max(latest.off) <= UNIT
    early, late = latest.off[4:1000], latest.off[-1000:]
    assert sum(late) / len(late) < 1.5 * sum(early) / len(early)
    assert run.audit == 0.0  # sums of so few digits are exact in float64


def test_every_row_is_the_gradient_that_came_last_to_eight_digits() -> None:
    latest = Latest()
    run = dd.simulate(dd.DuDe(LR), noisy(), SPEEDS, updates=50, compute=dd.Compute(gradient_table="half"), watch=[latest])
    state: Any = run.state
    for worker, row in latest.rows.items():
        assert torch.equal(state.table[worker], row.to(torch.bfloat16))
        assert ((state.table[worker].double() - row).abs() <= UNIT * row.abs()).all()


def test_a_worker_that_leaves_takes_its_rounded_row_along() -> None:
    changes = (dd.speeds.leave(1, 5.0), dd.speeds.leave(0, 9.0), dd.speeds.join(1, 12.0))
    for table in ("half", "host"):
        run = dd.simulate(
            dd.DuDe(LR),
            noisy(),
            dd.SimulatedFleet(SPEEDS, changes=changes),
            updates=80,
            compute=dd.Compute(gradient_table=table),
        )
        state: Any = run.state
        assert [event["kind"] for event in run.trace.events] == ["left", "left", "joined"]
        assert state.n == 3
        assert not state.table[0].any()
        assert run.audit <= audit(run)
        assert {row.dtype for row in state.table} == {torch.bfloat16 if table == "half" else torch.float64}


def test_long_rows_are_kept_as_short_ones_are() -> None:
    """Longer than a block, in which the sum is taken piece by piece."""
    d, rng = 70_000, torch.Generator().manual_seed(1)
    rows = [torch.randn(d, generator=rng) for _ in range(6)]
    for table in ("full", "half", "host"):
        x = torch.zeros(d)
        state = dd.DuDe(LR).init(x, 2, Draws(0, "server"))
        state.table_format = table
        for k, row in enumerate(rows):
            state.replace(k % 2, row)
        kept = [row.to(torch.bfloat16) if table == "half" else row for row in rows[-2:]]
        assert torch.equal(state.total, kept[0].double() + kept[1].double())


@pytest.mark.parametrize("table", ["full", "half", "host"])
def test_gradients_that_come_in_short_floats_are_kept_exactly(table: str) -> None:
    data = [(inputs.bfloat16(), targets) for inputs, targets in shards(4)]
    latest = Latest()
    problem = dd.Network(mlp().bfloat16(), cross_entropy, data, 4)
    run = dd.simulate(dd.DuDe(LR), problem, SPEEDS, updates=12, compute=dd.Compute(gradient_table=table), watch=[latest])
    assert max(latest.off) == 0.0  # sums of so few digits are exact in float64
    assert run.x.dtype == torch.bfloat16


def test_with_rounded_rows_dude_still_finds_the_minimiser() -> None:
    """Where it rests the mean of the rows is zero, so that of the gradients, A (x - x*), is at most the bound above."""
    problem = dd.Quadratic([[0.0, 1.0, 30.0], [2.0, -1.0, 1.0], [4.0, 0.01, 0.0], [-1.0, 3.0, 7.0]])
    run = dd.simulate(
        dd.DuDe(0.05),
        problem,
        dd.FixedSpeeds([1.0, 2.0, 3.0, 5.0]),
        updates=2500,
        compute=dd.Compute(gradient_table="half"),
    )
    optimum = problem.optimum()
    sizes = [problem.gradient(run.x, worker, 0)[0].norm() for worker in range(4)]
    assert (run.x - optimum).norm() <= 1.1 * UNIT * sum(sizes) / 4
    assert (run.x - optimum).norm() < 0.01 * (problem.start(0) - optimum).norm()


@pytest.mark.parametrize("table", ["half", "host"])
@pytest.mark.parametrize("name", ["dude three", "mifa active"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(name: str, table: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"updates": 16, "checkpoint_every": 3, "evaluate_every": 8, "table": table}
    for kind, make in PROBLEMS.items():
        again = make() if kind == "float32" else None
        straight = simulate(TABLED[name], make(), SPEEDS, folder=tmp_path / kind, **options)
        folder = tmp_path / f"{kind} killed"
        with pytest.raises(Killed):
            simulate(TABLED[name], make(), SPEEDS, folder=folder, watch=[kill_at(11)], **options)
        resumed = dd.resume(folder, problem=again)
        assert differences(resumed, straight) == []
        state: Any = resumed.state
        assert state.table_format == table
        assert {row.dtype for row in state.table} == {torch.bfloat16 if table == "half" else resumed.x.dtype}
        assert torch.equal(dd.replay(folder, again).x, straight.x)


@pytest.mark.parametrize("name", ["dude workers", "dude two workers", "sync", "vanilla", "shuffled", "fedbuff"])
def test_methods_without_a_table_do_not_care(name: str) -> None:
    runs = [
        dd.simulate(ALGORITHMS[name], *CASES["noisy"], updates=20, compute=dd.Compute(gradient_table=table))
        for table in ("full", "half", "host")
    ]
    assert differences(runs[0], runs[1]) == []
    assert differences(runs[0], runs[2]) == []


@pytest.mark.parametrize("table", ["quarter", "", None, 16])
def test_another_way_to_keep_a_table_is_refused(table: Any) -> None:
    for name in ("dude", "sync"):
        with pytest.raises(dd.BadInput, match="table is"):
            dd.simulate(ALGORITHMS[name], noisy(), SPEEDS, updates=1, compute=dd.Compute(gradient_table=table))
