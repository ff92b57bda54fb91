"""How long jobs take: drawn once or for each job, at a pace that changes, drifts or comes in bursts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dualdelay as dd
from dualdelay.runs.names import describe, rebuild
from dualdelay.runs.seeds import seeded_speeds
from dualdelay.simulation import SPEEDS
from dualdelay.simulation.availability import AwaySpeeds, announced, on_off
from dualdelay.simulation.speeds import BurstySpeeds, ChangingSpeeds, DriftingSpeeds
from helpers import rounding
from own import NO_NUMBERS, differences, four, refused
from tables import CASES, LR

q3, fixed = CASES["q3"]


@pytest.mark.parametrize("std", [1.0, 5.0])
def test_truncated_normal_times_have_the_mean_and_deviation_of_the_distribution(std: float) -> None:
    # with a = -1/std and h = phi(a) / (1 - Phi(a)) the mean is 1 + std h and the variance std^2 (1 + a h - h^2):
    # 1.288 and 0.794^2 for std 1, 4.375 and 3.199^2 for std 5
    a, n = -1 / std, 60_000
    h = math.exp(-(a**2) / 2) / math.sqrt(2 * math.pi) / (1 - (1 + math.erf(a / math.sqrt(2))) / 2)
    mean, deviation = 1 + std * h, std * math.sqrt(1 + a * h - h**2)
    many, few = (dd.TruncatedNormalSpeeds(count, std=std, seed=1) for count in (n, 3))
    times = np.array([many.seconds(worker, 0) for worker in range(n)])
    assert times.min() > 0
    assert times.mean() == pytest.approx(mean, abs=4 * deviation / math.sqrt(n))
    assert times.std() == pytest.approx(deviation, rel=0.015)
    assert [few.seconds(i, 5, 9.0) for i in range(3)] == times[:3].tolist(), "drawn once for each worker, named by it"


RANDOM: dict[str, tuple[Any, dict[str, float], float, float]] = {  # settings; median and deviation of times of mean 1
    "exponential": (dd.speeds.ExponentialSpeeds, {}, math.log(2), 1.0),
    "lognormal": (dd.speeds.LognormalSpeeds, {"sigma": 0.5}, math.exp(-(0.5**2) / 2), math.sqrt(math.exp(0.5**2) - 1)),
    "pareto": (dd.speeds.ParetoSpeeds, {"shape": 4.0}, 3 / 4 * 2 ** (1 / 4), 1 / math.sqrt(4 * 2)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_times_have_the_mean_and_the_median_of_their_distribution(name: str) -> None:
    kind, settings, median, deviation = RANDOM[name]
    speeds, n = kind([2.0, 6.0], **settings), 20_000
    for worker, mean in enumerate([2.0, 6.0]):
        times = np.array([speeds.seconds(worker, draw) for draw in range(n)]) / mean
        assert times.min() > 0
        assert len(set(times[:100])) == 100
        assert times.mean() == pytest.approx(1.0, abs=5 * deviation / math.sqrt(n))
        assert (times < median).mean() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(n))


def test_a_job_that_ends_with_its_stretch_but_for_rounding_ends_there() -> None:
    # 4.6 * 5.6 is above the room by one bit, and 4.6 - room / 5.6 is zero: there is nothing left to wait for
    room = math.nextafter(4.6 * 5.6, 0.0)
    slow = ChangingSpeeds(dd.FixedSpeeds([4.6]), [room], [[5.6], [1.0]])
    assert AwaySpeeds(slow, [(0, room, None)]).seconds(0, 0) == room


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9, 1.0])
def test_drift_is_stationary_with_its_spread_and_correlation(keep: float) -> None:
    n, spread = 4000, 0.5
    speeds = DriftingSpeeds(dd.FixedSpeeds([2.0] * n), spread=spread, every=8.0, keep=keep, seed=3)
    logs = np.array([[math.log(speeds.stretch(w, 8.0 * k)[0]) for k in (0, 1, 2, 6)] for w in range(n)])
    error = 4 / math.sqrt(n)
    assert logs.mean(0) == pytest.approx([0.0] * 4, abs=spread * error)
    assert logs.std(0) == pytest.approx([spread] * 4, rel=error)
    correlations = np.corrcoef(logs.T)
    assert correlations[0] == pytest.approx([keep**k for k in (0, 1, 2, 6)], abs=error)
    assert correlations[1, 2] == pytest.approx(keep, abs=error)
    assert np.exp(logs).mean() == pytest.approx(math.exp(spread**2 / 2), rel=error)


def test_a_job_that_drifts_does_its_work_at_the_pace_of_each_stretch() -> None:
    speeds = DriftingSpeeds(dd.FixedSpeeds([10.0]), every=2.0, seed=5)
    end = 1.0 + speeds.seconds(0, 0, 1.0)
    edges = [1.0, *(2.0 * k for k in range(1, math.ceil(end / 2))), end]
    assert len(edges) > 4
    assert sum((b - a) / speeds.stretch(0, a)[0] for a, b in pairwise(edges)) == pytest.approx(10.0)


def test_bursts_have_their_share_of_the_time_and_their_slowness() -> None:
    n, usual, burst, factor = 3000, 6.0, 2.0, 8.0
    speeds = BurstySpeeds(dd.FixedSpeeds([1.0] * n), usual, burst, factor, seed=2)
    for time in (0.0, 3.0, 40.0):
        inside = np.mean([speeds.stretch(worker, time)[0] == factor for worker in range(n)])
        assert inside == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / n))
    assert {speeds.stretch(worker, 5.0)[0] for worker in range(n)} == {1.0, factor}
    # what is left of a state, from any moment on, has its mean
    for mean, wanted in ((usual, 1.0), (burst, factor)):
        left = [until - 5.0 for pace, until in (speeds.stretch(worker, 5.0) for worker in range(n)) if pace == wanted]
        assert np.mean(left) == pytest.approx(mean, abs=4 * mean / math.sqrt(len(left)))
    # a long job meets the mean pace: in a share of 3/4 of the time it is 1, in the rest 1/8
    long = BurstySpeeds(dd.FixedSpeeds([25_000.0]), usual, burst, factor, seed=2)
    assert long.seconds(0, 0) == pytest.approx(25_000 / (0.75 + 0.25 / factor), rel=0.05)


NEUTRAL: dict[str, Callable[[dd.SpeedModel], dd.SpeedModel]] = {
    "no spread": lambda inner: DriftingSpeeds(inner, spread=0.0, every=0.3),
    "factor 1": lambda inner: BurstySpeeds(inner, usual=0.7, burst=0.4, factor=1.0),
    "never away": lambda inner: AwaySpeeds(inner, []),
    "away later": lambda inner: AwaySpeeds(inner, [(0, 1e6, 2e6), (3, 1e7, None)]),
    "the same pace": lambda inner: ChangingSpeeds(inner, [0.3, 0.7, 1.1], [[1.0] * 4] * 4),
    "all": lambda inner: AwaySpeeds(DriftingSpeeds(BurstySpeeds(inner, 0.7, 0.4, 1.0), 0.0, 0.3), []),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_where_nothing_changes_the_times_are_those_of_the_inner_model_to_the_bit(name: str) -> None:
    speeds = NEUTRAL[name](four)
    for worker in range(4):
        for draw in range(20):
            start = 0.37 * draw
            assert speeds.seconds(worker, draw, start) == four.seconds(worker, draw, start)
            assert speeds.job(worker, draw, start, 3) == four.job(worker, draw, start, 3)
    runs = [dd.simulate(dd.DuDe(LR), CASES["noisy"][0], model, updates=30) for model in (speeds, four)]
    assert differences(*runs) == []


MODELS: dict[str, Callable[..., dd.SpeedModel]] = {  # by the inner model, and how much longer everything else takes
    "drifting": lambda inner=four, by=1.0: DriftingSpeeds(inner, 0.8, 2.0 * by, seed=1),
    "bursty": lambda inner=four, by=1.0: BurstySpeeds(inner, 4.0 * by, 2.0 * by, seed=1),
    "away": lambda inner=four, by=1.0: AwaySpeeds(inner, [(w, a * by, b * by) for w, a, b in on_off(4, 5.0, 2.0, 40.0)]),
    "all three": lambda inner=four, by=1.0: MODELS["away"](MODELS["drifting"](MODELS["bursty"](inner, by), by), by),
}


@pytest.mark.parametrize("name", MODELS)
def test_times_do_not_depend_on_the_order_in_which_they_are_asked_for(name: str) -> None:
    jobs = [(worker, draw, 1.7 * draw) for worker in range(4) for draw in range(25)]
    forth, back = MODELS[name](), MODELS[name]()
    times = {job: forth.seconds(*job) for job in jobs}
    assert {job: back.seconds(*job) for job in reversed(jobs)} == times
    assert {job: forth.seconds(*job) for job in jobs} == times


@pytest.mark.parametrize("name", MODELS)
def test_if_all_is_twice_as_slow_everything_takes_exactly_twice_as_long(name: str) -> None:
    slow = dd.speeds.ExponentialSpeeds([2.0 * mean for mean in four.means], seed=1)
    one = dd.simulate(dd.DuDe(LR), CASES["noisy"][0], MODELS[name](), updates=80)
    two = dd.simulate(dd.DuDe(LR), CASES["noisy"][0], MODELS[name](slow, 2.0), updates=80)
    assert (2 * one.trace.time == two.trace.time).all()
    assert (2 * one.trace.seconds == two.trace.seconds).all()
    assert one.x.equal(two.x)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_job_begun_later_never_ends_earlier(name: str) -> None:
    speeds = MODELS[name](dd.FixedSpeeds([1.0, 2.0, 0.5, 0.25]))
    for worker in range(4):
        ends = [start + speeds.seconds(worker, 0, start) for start in np.linspace(0, 50, 400).tolist()]
        assert (np.diff(ends) >= -rounding(200) * max(ends)).all()  # a job has that many stretches at most


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_rebuilt_from_its_description(name: str) -> None:
    speeds = MODELS[name]()
    back = rebuild("speeds", json.loads(json.dumps(describe(speeds))))
    assert back == speeds
    assert [back.seconds(2, k, 3.0 * k) for k in range(9)] == [speeds.seconds(2, k, 3.0 * k) for k in range(9)]


def test_the_seed_of_a_run_reaches_every_model_but_those_that_have_their_own() -> None:
    def nested(normal: int | None, bursty: int | None) -> dd.SpeedModel:
        inner = BurstySpeeds(dd.TruncatedNormalSpeeds(3, seed=normal), seed=bursty)
        return AwaySpeeds(DriftingSpeeds(inner, seed=5), [(0, 1.0, 2.0)])

    assert seeded_speeds(nested(None, None), 7) == nested(7, 7)
    assert seeded_speeds(fixed, 7) is fixed
    assert seeded_speeds(lambda seed: dd.TruncatedNormalSpeeds(3, std=1.0 + seed), 7) == dd.TruncatedNormalSpeeds(3, 8.0, 7)

    class Own(dd.SpeedModel):
        n = 3

        def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
            return 1.0

    own = Own()
    assert seeded_speeds(own, 7) is own


def test_every_model_is_on_the_page_about_simulated_workers() -> None:
    page = (Path(dd.__file__).parents[2] / "docs" / "how_to" / "workers.md").read_text()
    assert [name for name in SPEEDS if f"`{name}[" not in page] == []


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"a time of {time}": (lambda time=time: dd.FixedSpeeds([1.0, time, 4.0]), f"times[1] is {time}; expected")
        for time in (0.0, -2.0, math.nan, math.inf)
    },
    "no times": (lambda: dd.FixedSpeeds([]), "times is empty"),
    "a text": (lambda: dd.FixedSpeeds("[1,2,inf]"), "times is '[1,2,inf]'; expected one number for each worker"),
    "a text for a time": (lambda: dd.FixedSpeeds(["a"]), "'a'"),
    "a billion workers": (lambda: dd.TruncatedNormalSpeeds(10**9), "n is 1000000000"),
    "times beyond numbers": (lambda: dd.TruncatedNormalSpeeds(500, 1e308), "std 1e+308"),
    "speeds": (lambda: AwaySpeeds("fixed", []), "speeds is 'fixed'; expected a dd.SpeedModel"),
    "spread": (lambda: DriftingSpeeds(fixed, spread=-1), "spread is -1; expected a number from 0 to 10"),
    "keep": (lambda: DriftingSpeeds(fixed, keep=1.5), "keep is 1.5; expected a number from 0 to 1"),
    "every": (lambda: DriftingSpeeds(fixed, every=0), "every is 0"),
    "usual": (lambda: BurstySpeeds(fixed, usual=math.inf), "usual is inf"),
    "burst": (lambda: BurstySpeeds(fixed, burst=0), "burst is 0"),
    "factor": (lambda: BurstySpeeds(fixed, factor=0), "factor is 0"),
    "stretches": (lambda: DriftingSpeeds(fixed, every=1e-6).seconds(0, 0), "changes its pace more than 100,000 times"),
    "stretches of no length": (lambda: DriftingSpeeds(fixed, every=1e-320).seconds(0, 0), "worker 0"),
    "bursts": (lambda: BurstySpeeds(fixed, usual=1e-9, burst=1e-9).seconds(0, 0), "more than 100,000 times"),
    "changes": (lambda: DriftingSpeeds(fixed, every=1e-6).seconds(0, 0, 100.0), "have changed its pace about 1e+08 times"),
}


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    refused(*REFUSED[name])


NUMBERS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {  # by a setting, and what of NO_NUMBERS it takes
    "std": (lambda v: dd.TruncatedNormalSpeeds(3, v), []),
    "mean": (lambda v: dd.TruncatedNormalSpeeds(3, 1.0, mean=v), []),
    "times": (lambda v: dd.FixedSpeeds([1.0, v]), ["1"]),
    "means": (lambda v: dd.speeds.ExponentialSpeeds([1.0, v]), ["1"]),
    "seed": (lambda v: dd.speeds.ExponentialSpeeds([1.0], seed=v), [None]),
    "sigma": (lambda v: dd.speeds.LognormalSpeeds([1.0], sigma=v), []),
    "every": (lambda v: DriftingSpeeds(fixed, every=v), []),
    "factor": (lambda v: BurstySpeeds(fixed, factor=v), []),
    "changes": (lambda v: ChangingSpeeds(fixed, [v], [[1.0] * 3, [2.0] * 3]), ["1"]),
    "absences": (lambda v: announced([(0, v, None)]), ["1"]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_or_too_large_a_one_is_refused(name: str) -> None:
    make, taken = NUMBERS[name]
    for value in NO_NUMBERS:
        if value in taken:
            make(value)
        else:
            refused(lambda value=value: make(value), name, "expected")


# --- a user's own model ---


def raises(error: Exception) -> Any:
    raise error


GIVES: dict[str, Callable[[int], Any]] = {  # what a user's own speeds or link give, by the draw
    "negative": lambda draw: -1,
    "negative later": lambda draw: 1.0 if draw < 2 else -1e-9,
    "nan": lambda draw: math.nan,
    "None": lambda draw: None,
    "text": lambda draw: "1.5",
    "several": lambda draw: np.ones(2),
    "complex": lambda draw: 1j,
    "too large": lambda draw: 10**400,
    "raises": lambda draw: raises(TypeError("strange")),
    "raises later": lambda draw: 1.0 if draw < 2 else raises(ZeroDivisionError("strange")),
}


class OwnSeconds(dd.SpeedModel):
    n = 3

    def __init__(self, give: Callable[[int], Any]) -> None:
        self.give = give

    def seconds(self, worker: int, draw: int, start: float = 0.0) -> Any:
        return self.give(draw)


class OwnJob(OwnSeconds):
    def job(self, worker: int, draw: int, start: float, batches: int) -> Any:
        return self.give(draw)


@pytest.mark.parametrize("end", [{"updates": 9}, {"time": 9.0}], ids=["updates", "time"])
@pytest.mark.parametrize("kind", [OwnSeconds, OwnJob])
@pytest.mark.parametrize("what", GIVES)
def test_own_speeds_that_give_no_seconds_are_named(what: str, kind: type[OwnSeconds], end: dict[str, Any]) -> None:
    words = (f"{kind.__name__} raised", "strange", "mend its") if "raises" in what else (f"{kind.__name__} gave",)
    speeds = kind(GIVES[what])
    refused(lambda: dd.simulate(dd.DuDe(LR), q3, speeds, **end), *words, "of worker", "seconds, zero or more")


@pytest.mark.parametrize("what", GIVES)
def test_an_own_link_that_gives_no_seconds_is_named(what: str) -> None:
    class OwnLink(dd.speeds.Link):
        def seconds(self, size: int) -> Any:
            return GIVES[what](5)

    words = ("OwnLink raised", "strange") if "raises" in what else ("OwnLink gave",)
    fleet = dd.SimulatedFleet(fixed, link=OwnLink())
    refused(lambda: dd.simulate(dd.DuDe(LR), q3, fleet, updates=9), *words, "bytes", "seconds, zero or more")


def test_own_seconds_may_be_a_tensor() -> None:
    run = dd.simulate(dd.DuDe(LR), q3, OwnSeconds(lambda draw: torch.tensor(2.0)), updates=3)
    assert type(run.time) is float and run.time == 4.0  # the first update at 2 with all workers' gradients, two more at 4


def test_speeds_that_do_not_say_for_how_many_workers_they_are_or_fit_another_number_are_refused() -> None:
    class Countless(dd.SpeedModel):
        def seconds(self, worker: int, draw: int, start: float = 0.0) -> float:
            return 1.0

    for speeds, words in (
        (Countless(), "Countless does not say for how many workers it is"),
        (dd.FixedSpeeds([1.0, 2.0]), "2 workers"),
        ([1.0, 2.0, 4.0], "speeds is"),
    ):
        refused(lambda speeds=speeds: dd.simulate(dd.DuDe(LR), q3, speeds, updates=3), words)


@pytest.mark.parametrize("batches", [-1, math.nan, math.inf, None, "2", [1]], ids=repr)
def test_an_own_problem_whose_jobs_are_of_no_size_is_refused(batches: Any) -> None:
    class Own(dd.Quadratic):
        def batches(self, worker: int) -> Any:
            return batches

    problem = Own([[0.0], [6.0], [12.0]])
    words = ("batches", "worker 0", "expected a number of minibatches")
    refused(lambda: dd.simulate(dd.DuDe(LR), problem, fixed, updates=9), *words)
