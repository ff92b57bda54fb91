"""How the server keeps its workers' last gradients, as they came, on the host, or in half the bytes, and their sum."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core.state import BLOCK
from helpers import audit, rounding
from own import Killed, differences, kill_at, mlp, shards
from tables import ALGORITHMS, CASES, LR

# bfloat16 has p = 8 binary digits, the leading one among them. Next to a number in [2^e, 2^(e+1)) its numbers are 2^(e-7)
# apart, so rounding to the nearest is off by at most 2^(e-8): by 2^-8 / (1 + 2^-8) of the number, a little less than
# 2^-8 (and not 2^-9: that is the bound for one more digit). So with rows R_i = G_i + E_i it is ||E_i|| <= 2^-8 ||G_i||, and
# the mean of the rows is off by at most 2^-8 (1/n) sum_i ||G_i||. Rounding a float64 by way of float32 adds 2^-24, which
# the gap between 2^-8 / (1 + 2^-8) and 2^-8 holds. Nothing of it depends on how often rows were replaced.
UNIT = 2.0**-8

FORMATS: tuple[Any, ...] = ("full", "half", "host")
TABLED: dict[str, dd.Algorithm[Any]] = {
    "dude": dd.DuDe(LR),
    "dude three": dd.DuDe(LR, wait_for=3),
    "dude zeros": dd.DuDe(LR, start="zeros"),
    "mifa": dd.MIFA(LR),
    "mifa active": dd.MIFA(LR, active=2),
    "siag": dd.SIAG(LR),
}
SPEEDS = dd.speeds.ExponentialSpeeds([0.5, 1.0, 2.0, 1.0], seed=5)
CENTERS = [[0.0, 1.0, 30.0], [2.0, -1.0, 1.0], [4.0, 0.01, 0.0], [-1.0, 3.0, 7.0]]


def noisy() -> dd.Quadratic:
    return dd.Quadratic(CENTERS, [1.0, 0.5, 2.0, 1.5], noise=0.5, seed=1)  # float64


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


def watched(method: Any, problem: dd.Problem, table: Any, speeds: Any = SPEEDS, **totals: Any) -> tuple[Any, Latest]:
    latest, evaluation = Latest(), dd.Evaluation(every=10**6)
    server = dd.Server(gradient_table=table)
    return dd.simulate(method, problem, speeds, server=server, watch=[latest], evaluation=evaluation, **totals), latest


@cache
def runs(name: str, kind: str) -> dict[str, tuple[Any, Latest]]:
    """A run with each kind of table."""
    return {table: watched(TABLED[name], PROBLEMS[kind](), table, updates=16) for table in FORMATS}


@pytest.mark.numeric
@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TABLED)
def test_the_sum_is_that_of_the_rows_kept(name: str, kind: str) -> None:
    for table, (run, _) in runs(name, kind).items():
        rows = [row.double() for row in run.state.table]
        assert run.audit <= audit(run)
        assert (run.state.total - sum(rows)).norm() <= audit(run) * sum(row.norm() for row in rows)
        assert {row.dtype for row in run.state.table} == {torch.bfloat16 if table == "half" else run.x.dtype}
        assert (run.state.total.dtype, run.x.dtype) == (torch.float64, PROBLEMS[kind]().start(0).dtype)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TABLED)
def test_a_table_on_the_host_changes_no_bit(name: str, kind: str) -> None:
    assert differences(runs(name, kind)["full"][0], runs(name, kind)["host"][0]) == []


@pytest.mark.numeric
@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", TABLED)
def test_at_every_step_rounded_rows_move_the_mean_by_no_more_than_their_last_digit(name: str, kind: str) -> None:
    (run, full), (_, half) = (runs(name, kind)[table] for table in ("full", "half"))
    assert max(full.off) <= audit(run)
    assert 1e-5 < max(half.off) <= UNIT


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "updates"), [("dude", 2000), ("dude three", 700)])
def test_the_error_of_rounded_rows_does_not_grow_with_the_steps(name: str, updates: int) -> None:
    run, latest = watched(TABLED[name], noisy(), "half", updates=updates)
    assert len(run.trace) >= 2000
    assert max(latest.off) <= UNIT
    early, late = latest.off[4:1000], latest.off[-1000:]
    assert sum(late) / len(late) < 1.5 * sum(early) / len(early)
    assert run.audit == 0.0  # sums of so few digits are exact in float64


@pytest.mark.numeric
def test_every_row_is_its_worker_s_last_gradient_to_eight_digits() -> None:
    run, latest = watched(dd.DuDe(LR), noisy(), "half", updates=50)
    assert sorted(latest.rows) == [0, 1, 2, 3]
    for worker, row in latest.rows.items():
        assert torch.equal(run.state.table[worker], row.to(torch.bfloat16))
        assert ((run.state.table[worker].double() - row).abs() <= UNIT * row.abs()).all()


@pytest.mark.numeric
@pytest.mark.parametrize("table", FORMATS)
def test_the_row_of_a_worker_that_leaves_leaves_the_sum(table: Any) -> None:
    changes = (dd.speeds.leave(1, 5.0), dd.speeds.leave(0, 9.0), dd.speeds.join(1, 12.0))
    run, _ = watched(dd.DuDe(LR), noisy(), table, dd.SimulatedFleet(SPEEDS, changes=changes), updates=80)
    assert [event["kind"] for event in run.trace.events] == ["left", "left", "joined"]
    assert (run.state.n, run.state.counted) == (3, 3)
    assert not run.state.table[0].any()
    assert run.audit <= audit(run)
    assert {row.dtype for row in run.state.table} == {torch.bfloat16 if table == "half" else torch.float64}


def state(x: Tensor, workers: int = 2, table: Any = "full") -> dd.AggregateState:
    return dd.AggregateState(x, workers, table_format=table)


@pytest.mark.parametrize("table", FORMATS)
def test_rows_longer_than_a_block_are_summed_piece_by_piece(table: Any) -> None:
    d, rng = BLOCK + 5_000, torch.Generator().manual_seed(1)
    rows = [torch.randn(d, generator=rng) for _ in range(6)]
    s = state(torch.zeros(d), table=table)
    for k, row in enumerate(rows):
        s.replace(k % 2, row)
    kept = [row.to(torch.bfloat16) if table == "half" else row for row in rows[-2:]]
    assert torch.equal(s.total, kept[0].double() + kept[1].double())


@pytest.mark.parametrize(("workers", "renewed"), [(2, 1000), (1500, 1500)])
def test_after_a_huge_gradient_the_sum_is_exact_again_once_it_is_added_up_anew(workers: int, renewed: int) -> None:
    s, small = state(torch.zeros(3), workers), torch.tensor([0.1, 0.2, 0.3])
    s.replace(0, small)
    s.replace(1, torch.full((3,), 1e30))  # beside which the first gradient has no digit in float64
    while s.replaced < renewed - 1:
        s.replace(1, small)
    assert s.audit({}) > 0.9, "it took both small gradients with it"
    s.replace(1, small)
    assert torch.equal(s.total, 2 * small.double())


def test_the_remainder_is_the_gradient_of_the_worker_that_lost_its_own() -> None:
    s, held = state(torch.zeros(2), 3), {k: {"gradient": torch.tensor([2.0**k, 1.0]).double()} for k in range(3)}
    s.table = None  # the workers keep their gradients, and send differences
    for worker, memory in held.items():
        s.replace(worker, memory["gradient"])
    assert s.remainder({k: held[k] for k in (0, 2)}).tolist() == [2.0, 1.0]
    assert s.audit(held) == 0.0
    s.leave(1, held.pop(1))
    assert (s.total.tolist(), s.counted, s.audit(held)) == ([5.0, 2.0], 2, 0.0)


@pytest.mark.parametrize("table", FORMATS)
def test_bfloat16_gradients_are_kept_exactly(table: Any) -> None:
    data = [(inputs.bfloat16(), targets) for inputs, targets in shards(4)]
    run, latest = watched(dd.DuDe(LR), dd.Network(mlp().bfloat16(), cross_entropy, data, 4), table, updates=12)
    assert max(latest.off) == 0.0  # sums of so few digits are exact in float64
    assert run.x.dtype == torch.bfloat16


@pytest.mark.numeric
def test_with_rounded_rows_dude_still_finds_the_minimiser() -> None:
    """Where it rests the mean of the rows is zero, so that of the gradients, x - x*, is at most the bound above."""
    problem = dd.Quadratic(CENTERS)
    run, _ = watched(dd.DuDe(0.05), problem, "half", dd.FixedSpeeds([1.0, 2.0, 3.0, 5.0]), updates=2500)
    distance = (run.x - problem.optimum()).norm()
    sizes = [problem.gradient(run.x, worker, 0)[0].norm() for worker in range(4)]
    assert distance <= 1.1 * UNIT * sum(sizes) / 4  # and a tenth for what is left of the way there
    assert distance < 0.01 * (problem.start(0) - problem.optimum()).norm()


@pytest.mark.numeric
@pytest.mark.parametrize("table", ["half", "host"])
@pytest.mark.parametrize(("name", "kind"), [("dude three", "float64"), ("mifa active", "float32")])
def test_a_run_that_was_stopped_ends_with_the_same_bits(name: str, kind: str, table: Any, tmp_path: Path) -> None:
    problem = PROBLEMS[kind]()
    case = TABLED[name], problem, SPEEDS
    options: dict[str, Any] = {"updates": 16, "checkpoint_every": 3, "server": dd.Server(gradient_table=table)}
    options["evaluation"] = dd.Evaluation(every=8)
    straight = dd.simulate(*case, folder=tmp_path / "straight", **options)
    with pytest.raises(Killed):
        dd.simulate(*case, folder=tmp_path / "killed", watch=[kill_at(11)], **options)
    given = problem if kind == "float32" else None  # what the folder cannot build again
    resumed: Any = dd.resume(tmp_path / "killed", problem=given)
    assert differences(resumed, straight) == []
    assert resumed.state.table_format == table
    assert {row.dtype for row in resumed.state.table} == {torch.bfloat16 if table == "half" else resumed.x.dtype}
    assert torch.equal(dd.replay(tmp_path / "killed", given).x, straight.x)


@pytest.mark.parametrize("name", ["dude workers", "dude two workers", "sync", "vanilla", "shuffled", "fedbuff"])
def test_methods_without_a_table_are_the_same_with_every_format(name: str) -> None:
    full, *others = (
        dd.simulate(ALGORITHMS[name], *CASES["noisy"], updates=20, server=dd.Server(gradient_table=table))
        for table in FORMATS
    )
    assert [differences(full, other) for other in others] == [[], []]


@pytest.mark.parametrize("table", ["quarter", "", None, 16])
def test_another_format_is_refused(table: Any) -> None:
    with pytest.raises(dd.BadInput, match="gradient_table is"):
        dd.Server(gradient_table=table)


class Mixed(dd.Quadratic):
    """Weights in float32, gradients in float64, as numpy code would give them."""

    def start(self, seed: int) -> Tensor:
        return super().start(seed).float()

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return super().gradient(x.double(), worker, draw)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return super().evaluate(x.double())


@pytest.mark.numeric
@pytest.mark.parametrize("method", [dd.DuDe(0.05), dd.DuDe(0.05, memory="workers"), dd.MIFA(0.05), dd.SIAG(0.05)])
def test_gradients_of_another_type_than_the_weights_are_converted(method: Any) -> None:
    run = dd.simulate(method, Mixed([[0.0], [6.0], [12.0]]), CASES["q3"][1], updates=1000)
    # a step that is less than a last digit of the weights is none
    assert float(run.x) == pytest.approx(6.0, abs=rounding(4, torch.float32) * 6 / method.lr)
    assert run.x.dtype == torch.float32


class Spike(dd.Quadratic):
    """One gradient that is huge, and finite."""

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        gradient, loss = super().gradient(x, worker, draw)
        return (gradient + 1e20 if (worker, draw) == (0, 5) else gradient), loss


@pytest.mark.numeric
def test_a_huge_gradient_leaves_no_trace_in_the_sum() -> None:
    # added to 1e20 and taken away again, the others' gradients are gone from a float64 sum; the table has them
    run = dd.simulate(dd.DuDe(1e-3), Spike([[0.0], [6.0], [12.0]]), CASES["q3"][1], updates=1500)
    assert run.audit <= audit(run)
