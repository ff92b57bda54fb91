"""Compressed differences: what one message leaves out the next ones bring, and bytes are counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import dualdelay as dd
from dualdelay.core.compression import difference, pack, size_of, unpacked
from helpers import archive, audit, few, heterogeneous, rounding, same
from own import Holes, mlp, shards
from tables import CASES, LR

pytestmark = pytest.mark.numeric

WAYS = ["int8", 0.01, 0.2, 1.0]
# no numbers so small that their step, 1/127 of them, has fewer digits than others
vectors = st.lists(st.floats(-1e6, 1e6, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0), min_size=1, max_size=40)


@few
@given(vectors, st.sampled_from([torch.float32, torch.float64]))
def test_a_byte_for_each_number_is_off_by_half_a_step_and_by_no_more_than_the_number(numbers, dtype):
    x = torch.tensor(numbers, dtype=dtype)
    packed = pack(x, "int8")
    step, error = float(x.abs().max()) / 127, (packed.unpack() - x).abs()
    # the step, the division and the product are rounded, the last at the size of up to 127 steps
    assert float(error.max()) <= step * (0.5 + 127 * rounding(3, dtype))
    assert (error <= x.abs() * (1 + rounding(3, dtype))).all(), "a number keeps its sign or becomes zero, and zero stays"
    assert packed.unpack().dtype == dtype and size_of(packed) == len(numbers) + x.element_size()


def test_numbers_next_to_zero_keep_their_sign():
    # in float16 the step 1.1e-5 / 127 rounds down to a multiple of 6e-8, so that the largest is more than 127 steps
    x = torch.tensor([1.1e-5, -1.1e-5, 5e-6], dtype=torch.float16)
    assert torch.equal(pack(x, "int8").unpack().sign(), x.sign())


@few
@given(vectors, st.floats(0.01, 1.0))
def test_the_largest_numbers_are_sent_exactly_and_the_others_not_at_all(numbers, share):
    x = torch.tensor(numbers, dtype=torch.float64)
    packed, count = pack(x, share), max(1, round(share * len(numbers)))
    received = packed.unpack()
    assert sorted(received.abs().tolist()) == sorted([*sorted(x.abs().tolist())[-count:], *[0.0] * (len(x) - count)])
    assert ((received == x) | (received == 0)).all()
    assert size_of(packed) == count * (4 + 8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_arrives_as_one(way, bad):
    x = torch.arange(30.0)
    x[11] = bad
    assert not bool(torch.isfinite(pack(x, way).unpack()).all())


@pytest.mark.parametrize("way", WAYS)
def test_zeros_arrive_as_zeros(way):
    assert torch.equal(pack(torch.zeros(30), way).unpack(), torch.zeros(30))


@pytest.mark.parametrize("way", WAYS)
def test_what_one_message_leaves_out_the_next_ones_bring(way):
    # a gradient that stays: the largest first until all is there; in bytes the error falls 254-fold with each message
    gradient, held, total = torch.from_numpy(np.random.default_rng(0).normal(size=100)), None, torch.zeros(100).double()
    for _ in range(8 if way == "int8" else round(1 / way)):
        sent, held = difference(gradient, held, way)
        total = total + unpacked(sent)
        assert held.keys() == {"gradient"} and torch.equal(total, held["gradient"]), "the server has what the worker holds"
    assert float((held["gradient"] - gradient).abs().max()) <= rounding(8) * gradient.abs().max()


FOUR = (
    dd.Quadratic([[float((5 * i + 7 * k) % 9 - 4) for k in range(10)] for i in range(4)], [1.0, 2.0, 0.5, 1.5]),
    dd.FixedSpeeds([0.5, 1.0, 2.5, 4.0]),
)


@pytest.mark.parametrize(("way", "wait_for"), [("int8", 1), (0.01, 1), (0.2, 1), ("int8", 2), (0.2, 2)])
def test_the_limit_of_dude_is_the_minimiser(way, wait_for):
    # F has curvature 5/4 in all directions, so T steps leave exp(-5/4 lr T) = 1e-15 of the way; where parts of a gradient
    # wait for later messages, more: with two numbers of ten 1e-10, with one of ten a smaller step is needed
    problem, speeds = FOUR
    lr = 2.0**-7 if way == 0.01 else 2.0**-5
    method, updates = dd.DuDe(lr, wait_for, memory="workers", compress=way), round(28 / lr)
    run = dd.simulate(method, problem, speeds, updates=updates, evaluation=dd.Evaluation(every=updates))
    assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=1e-8) and run.audit <= audit(run)


def test_a_message_that_leaves_nothing_out_changes_nothing():
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
def test_bytes_are_counted_and_take_time(method, size):
    # down 80 bytes at 64 a second, up what is sent: 1.25 + seconds + size / 64
    problem, speeds = FOUR
    run = dd.simulate(method, problem, dd.SimulatedFleet(speeds, link=dd.speeds.Link(bandwidth=64.0)), updates=12)
    assert set(run.trace.bytes.tolist()) == {size}
    assert run.trace.time[0] == 80 / 64 + 0.5 + size / 64


def test_runs_side_by_side_count_the_same_bytes():
    problem, speeds = dd.Network(mlp(), cross_entropy, shards(), 4), dd.FixedSpeeds([1.0, 2.0, 3.0])
    grid = {"algorithm": [dd.DuDe(0.05, memory="workers", compress="int8")], "lr": [0.05, 0.1]}
    for run in dd.sweep(grid, problem, speeds, updates=12, compute=dd.Compute(batch=True)).runs:
        assert run.trace.bytes.tolist() == [len(run.x) + 4] * len(run.trace)


@pytest.mark.parametrize("way", ["int8", 0.25])
def test_a_worker_does_not_hold_what_was_rejected(way):
    problem = Holes(heterogeneous(3, 4).settings["centers"])  # of curvature 1: 1600 steps leave exp(-25) of the way
    method, speeds = dd.DuDe(LR, memory="workers", compress=way), dd.FixedSpeeds([1.0, 2.0, 4.0])
    run = dd.simulate(method, problem, speeds, updates=1600, evaluation=dd.Evaluation(every=1600))
    assert run.rejected > 100 and run.audit <= audit(run)
    assert torch.allclose(run.x, problem.optimum(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("way", ["int4", 0.0, 1.5, -0.1, math.nan, True, 2, "0.1"])
def test_what_is_no_way_to_compress_is_refused(way):
    with pytest.raises(dd.BadInput, match=r"compress is .*; expected 'int8', or the share of numbers to be sent, above 0"):
        dd.DuDe(LR, memory="workers", compress=way)


def test_whole_gradients_are_not_compressed():
    with pytest.raises(dd.BadInput, match=r"compress is 'int8' with memory='server'"):
        dd.DuDe(LR, compress="int8")
