"""How long messages travel, each way, by their size."""

from __future__ import annotations

import math
from typing import Any

import pytest

import dualdelay as dd
from helpers import heterogeneous
from own import NO_NUMBERS, refused


class Queued(dd.VanillaASGD):
    """Three jobs at the initial model wait at the worker."""

    def first(self, s: Any) -> Any:
        return [dd.send(0)] * 3

    def step(self, s: Any, a: Any) -> Any:
        super().step(s, a)
        return []


class Repeated(dd.VanillaASGD):
    """One model, and one more draw at it after every arrival."""

    def step(self, s: Any, a: Any) -> Any:
        super().step(s, a)
        return [dd.again(a.worker)]


SLOW = dd.speeds.Link(latency=0.25, bandwidth=32.0)  # a float64 takes 1/4 + 8/32 = 1/2 second each way
TRAVEL = [
    (dd.VanillaASGD, dd.speeds.Link(), [1.0, 2.0, 3.0]),
    (dd.VanillaASGD, SLOW, [2.0, 4.0, 6.0]),
    (Repeated, SLOW, [2.0, 3.75, 5.5]),  # the model is there already, so the order to go on has no bytes
    (Queued, dd.speeds.Link(), [1.0, 2.0, 3.0]),
    (Queued, SLOW, [2.0, 3.0, 4.0]),  # the models wait at the worker, so only the first way there and the ways back show
]


@pytest.mark.parametrize(("kind", "link", "times"), TRAVEL)
def test_messages_travel_and_seconds_count_the_computing_alone(kind: Any, link: Any, times: list[float]) -> None:
    run = dd.simulate(kind(0.1), heterogeneous(1), dd.SimulatedFleet(dd.FixedSpeeds([1.0]), link=link), updates=3)
    assert run.trace.time.tolist() == times
    assert run.trace.seconds.tolist() == [1.0] * 3


@pytest.mark.parametrize("setting", ["x", math.nan, -1.0, True, *NO_NUMBERS], ids=type)
def test_a_latency_that_is_no_time_is_refused(setting: Any) -> None:
    refused(lambda: dd.speeds.Link(setting), "latency", "expected")


@pytest.mark.parametrize("setting", ["x", math.nan, 0, -1.0], ids=str)
def test_a_bandwidth_that_carries_nothing_is_refused(setting: Any) -> None:
    refused(lambda: dd.speeds.Link(0.0, setting), "bandwidth", "expected")


def test_what_is_no_link_is_refused() -> None:
    refused(lambda: dd.SimulatedFleet(dd.FixedSpeeds([1.0]), link="fast"), "link is 'fast'; expected a dd.Link")
