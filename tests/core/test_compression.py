"""Differences made small: what is lost in one message is in the next, and bytes are counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.core.compression import difference, pack, size_of, unpacked
from flat import simulate
from helpers import archive, audit, few, rounding, same, unlike
from tables import CASES, LR

pytestmark = pytest.mark.numeric

WAYS = ["int8", 0.01, 0.2, 1.0]
vectors = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


@few
@given(vectors, st.sampled_from([torch.float32, torch.float64]))
def test_a_byte_for_each_number_is_off_by_half_a_step_at_most(numbers, dtype):
    x = torch.tensor(numbers, dtype=dtype)
    packed = pack(x, "int8")
    step = float(x.abs().max()) / 127
    # the step, the division and the product are rounded, the last at the size of up to 127 steps
    assert float((packed.unpack() - x).abs().max()) <= step * (0.5 + 127 * rounding(3, dtype))
    assert (packed.unpack().abs() <= 2 * x.abs() + 1e-30).all()  # it never turns round, and zero stays zero
    assert packed.unpack().dtype == dtype and size_of(packed) == len(numbers) + x.element_size()


def test_numbers_next_to_nothing_do_not_turn_round():
    # in float16 the step 1.1e-5 / 127 rounds down to a multiple of 6e-8, so that the largest is more than 127 steps
    x = torch.tensor([1.1e-5, -1.1e-5, 5e-6], dtype=torch.float16)
    assert torch.equal(pack(x, "int8").unpack().sign(), x.sign())


@few
@given(vectors, st.floats(0.01, 1.0))
def test_the_largest_numbers_travel_whole_and_the_others_not(numbers, share):
    x = torch.tensor(numbers, dtype=torch.float64)
    packed, count = pack(x, share), max(1, round(share * len(numbers)))
    got = packed.unpack()
    sent = got != 0
    assert torch.equal(got[sent], x[sent]) and int(sent.sum()) <= count
    left_out = x[~sent].abs().max() if not sent.all() else torch.tensor(0.0)
    assert not sent.any() or float(left_out) <= float(x[sent].abs().min())
    assert size_of(packed) == count * (4 + 8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_on_its_way(way, bad):
    x = torch.arange(30.0)
    x[11] = bad
    assert not bool(torch.isfinite(pack(x, way).unpack()).all())
    assert torch.equal(pack(torch.zeros(30), way).unpack(), torch.zeros(30))


@pytest.mark.parametrize("way", WAYS)
def test_what_one_message_leaves_out_the_next_ones_bring(way):
    # a gradient that stays: the largest first until all is there; in bytes the error falls 254-fold with each message
    gradient, held, total = torch.from_numpy(np.random.default_rng(0).normal(size=100)), None, torch.zeros(100).double()
    for _ in range(8 if way == "int8" else round(1 / way)):
        sent, held = difference(gradient, held, way)
        total = total + unpacked(sent)
        assert torch.equal(total, held)  # the server has what the worker thinks that it has
    assert float((held - gradient).abs().max()) <= rounding(8) * gradient.abs().max()


FOUR = (
    dd.Quadratic(
        [[float((5 * i + 7 * k) % 9 - 4) for k in range(10)] for i in range(4)],
        [1.0, 2.0, 0.5, 1.5],
    ),
    dd.FixedSpeeds([0.5, 1.0, 2.5, 4.0]),
)


@pytest.mark.parametrize(("way", "wait_for"), [*((way, 1) for way in WAYS), ("int8", 2), (0.2, 2)])
def test_the_limit_of_dude_is_what_it_was(way, wait_for):
    for problem, speeds in (CASES["q3"], FOUR):
        lr, updates = (2.0**-7, 3500) if way == 0.01 else (2.0**-5, 1000)  # one number of ten takes ten messages for all
        method = dd.DuDe(lr, wait_for, memory="workers", compress=way)
        run = dd.simulate(method, problem, speeds, updates=updates, evaluation=dd.Evaluation(every=updates))
        assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=1e-8) and run.audit <= audit(run)


def test_a_message_that_loses_nothing_changes_nothing():
    (_, whole), (_, others) = (
        archive(dd.DuDe(LR, memory="workers", compress=way), *CASES["noisy"], updates=60) for way in (None, 1.0)
    )
    assert same(whole, others)


@pytest.mark.parametrize(
    ("method", "size"),
    [
        (dd.VanillaASGD(LR), 80),
        (dd.DuDe(LR, memory="workers"), 80),
        (dd.DuDe(LR, memory="workers", compress="int8"), 18),  # ten bytes and a float64
        (dd.DuDe(LR, memory="workers", compress=0.2), 24),  # two numbers and their places
    ],
)
def test_bytes_are_counted_and_cost_time(method, size):
    # down 80 bytes at 64 a second, up what is sent: 1.25 + seconds + size / 64
    run = simulate(method, *FOUR, updates=12, link=dd.speeds.Link(bandwidth=64.0))
    assert set(run.trace.bytes.tolist()) == {size}
    assert run.trace.time[0] == 80 / 64 + 0.5 + size / 64


def test_batched_runs_count_the_same_bytes():
    problem, speeds = dd.Digits(workers=3, hidden=4, batch_size=8), dd.FixedSpeeds([1.0, 2.0, 3.0])
    method = dd.DuDe(0.05, memory="workers", compress="int8")
    grid = {"algorithm": [method], "lr": [0.05, 0.1]}
    for run in dd.sweep(grid, problem, speeds, updates=12, compute=dd.Compute(batch=True)).runs:
        assert run.trace.bytes.tolist() == [len(run.x) + 4] * len(run.trace)


@pytest.mark.parametrize("way", ["int8", 0.25])
def test_a_rejected_message_is_not_remembered(way):
    class Spoilt(dd.Quadratic):
        def gradient(self, x, worker, draw):
            gradient, loss = super().gradient(x, worker, draw)
            return gradient * (math.nan if draw in (0, 3) else 1.0), loss

    problem = Spoilt(unlike(3, 4).settings["centers"])
    run = dd.simulate(dd.DuDe(2.0**-7, memory="workers", compress=way), problem, CASES["q3"][1], updates=5000)
    assert run.rejected == 6 and run.audit <= audit(run)
    assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("way", ["int4", 0.0, 1.5, -0.1, math.nan, True, 2, "0.1"])
def test_what_is_no_way_to_compress_is_refused(way):
    with pytest.raises(dd.BadInput, match=r"compress is .*; expected 'int8', or the share of numbers to be sent, above 0"):
        dd.DuDe(LR, memory="workers", compress=way)


def test_whole_gradients_are_not_compressed():
    with pytest.raises(dd.BadInput, match=r"compress is 'int8' with memory='server'"):
        dd.DuDe(LR, compress="int8")
