import pytest

import dualdelay as dd
from dualdelay.engine.monitor import Monitor
from dualdelay.runs.names import label
from helpers import stepping, unlike

SPEEDS = [1.0, 1.7, 2.9, 7.0]


@pytest.mark.parametrize(
    "algorithm",
    [
        dd.DuDe(lr=0.05),
        dd.DuDe(lr=0.05, wait_for=3),
        dd.DuDe(lr=0.05, start="busy"),
        dd.VanillaASGD(lr=0.05),
        dd.FedBuff(lr=0.05, buffer=3),
        dd.SyncSGD(lr=0.05),
    ],
    ids=lambda algorithm: label(algorithm),
)
@pytest.mark.parametrize("updates", [1, 2, 60])
def test_the_live_tau_max_is_that_of_the_trace(algorithm, updates):
    told = []
    run = dd.simulate(
        algorithm,
        unlike(4),
        dd.FixedSpeeds(SPEEDS),
        updates=updates,
        watch=dd.Reporting(log=[lambda version, values: told.append(values)]),
    )
    assert told[-1]["tau_max"] == run.delays.tau_max


def test_what_loggers_are_told():
    told = []
    run = dd.simulate(
        dd.DuDe(lr=0.05),
        unlike(4),
        dd.SimulatedFleet(dd.FixedSpeeds(SPEEDS), changes=[dd.speeds.leave(3, 20.0), dd.speeds.join(3, 30.0)]),
        time=50.0,
        watch=dd.Reporting(log=[lambda version, values: told.append((version, dict(values)))]),
    )
    version, values = told[-1]
    assert version == run.version
    assert values["faults/left"] == 1.0 and values["faults/joined"] == 1.0 and values["faults/crashed"] == 0.0
    rates = [values[f"worker/{worker}/rate"] for worker in range(4)]
    assert rates == sorted(rates, reverse=True) and rates[3] > 0
    assert sum(rates) / values["updates_per_second"] == pytest.approx(len(run.trace) / run.version)
    assert values["time"] == run.trace.time[-1]
    evaluations = [(version, values["objective"]) for version, values in told if "objective" in values]
    assert evaluations == list(zip(run.metrics.version.tolist(), run.metrics.objective.tolist(), strict=True))


@pytest.mark.parametrize("stays", [True, False])
def test_a_logger_that_raises_is_reported_once_and_told_no_more(stays, caplog):
    heard, others = [], []

    def broken(version, values):
        heard.append(version)
        if version >= 20:
            raise OSError("no space left on device")

    log = [broken, lambda version, values: others.append(version)] if stays else [broken]
    run = dd.simulate(
        dd.DuDe(0.05),
        unlike(4),
        dd.FixedSpeeds(SPEEDS),
        updates=60,
        evaluation=dd.Evaluation(every=5),
        watch=dd.Reporting(log=log),
    )
    assert run.version == 60 and heard == [0, 5, 10, 15, 20]
    assert [note for note in run.notes if "broken: OSError: no space left" in note and "off at version 20" in note] != []
    assert len(caplog.records) == 1 and "was switched off" in caplog.text
    assert others[-1:] == ([60] if stays else [])


def test_the_last_words_are_no_rate_of_an_instant():
    """Told again at once, the rates are those of the window before, not of a microsecond."""
    told = []
    monitor = None
    for loop in stepping(dd.VanillaASGD(lr=0.05), unlike(4), dd.FixedSpeeds(SPEEDS), 50):
        monitor = monitor or Monitor([lambda version, values: told.append(values)], loop, every=1000.0)
        monitor(loop, None)
    monitor.log_signs(loop)
    monitor.log_signs(loop)
    assert 0.5 < told[1]["updates_per_second"] / told[0]["updates_per_second"] <= 1.0
