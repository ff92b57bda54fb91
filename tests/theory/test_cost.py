"""The cost model: what must hold for any constants, and a small case by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest

import dualdelay as dd
from dualdelay.theory import Footprint, Machine, Message, Plan, size
from dualdelay.theory import footprint as counting
from dualdelay.theory.cost import cost
from dualdelay.theory.machine import COPIED

SPEED = 1e10
MACHINE = Machine(
    cores=2,
    copying=(SPEED,) * len(COPIED),
    copying_beside=(SPEED / 2,) * len(COPIED),
    small=Message(0.001, 0.001, 0.001, 0.004),
    large=Message(0.002, 0.001, 0.001, 0.008),
    headed=Message(0.003, 0.0005, 0.0007, 0.009),
    sliced=Message(0.002, 0.001, 0.001, 0.002),
    shared=Message(0.0015, 0.0008, 0.0002, 0.004),
    shared_headed=Message(0.001, 0.0003, 0.0001, 0.005),
    shared_sliced=Message(0.0005, 0.0002, 0.0001, 0.001),
    cold=1.0,
    store=5e9,
    process=1e8,
)
DUDE = Footprint(
    {"weights": 4.0, "total": 8.0, "table": 16.0}, 16.0, False, 4.0, 4.0, 0.0, 1.0, False, True, 0.0, 40.0, 0.0
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_TIMED", 1000)  # how long a pass takes is nothing that is tested


def test_a_case_by_hand() -> None:
    """Ten million weights, four workers, one machine: every number of the prediction is written out."""
    found = cost(Plan(1e7, 4, machines=1), DUDE, MACHINE)
    beside = 0.0  # two cores share the memory's speed, while the other one is at work
    for _ in range(100):
        server = 0.0015 + (4 + 4 + 40 + 8) * 1e7 * (1 + beside) / SPEED
        job = 0.0008 + 8 * 1e7 * (1 + beside) / SPEED  # the message is copied, and the model read where it is
        beside = (job * 3 / 4 + 0.0002) / server  # but for the worker that waits for it
    assert found.server.seconds == pytest.approx(server)
    assert found.limits["cores"] == pytest.approx((server + job + 0.0002) / 0.9 / 2)  # a tenth of the time they wait
    assert found.limits["workers"] == pytest.approx((job + server + 0.0017) / 4)
    assert found.bottleneck == "server" and found.updates_per_second == pytest.approx(1 / server)
    vectors = 4 + 8 + 16 + 4 + (16 + 4) + 16 + 16  # state, initial weights, models, arriving, audit
    assert found.server.peak == pytest.approx(1e8 + 1e7 * vectors)
    assert found.processes[-1].peak == pytest.approx(1e8 + 1e7 * (4 + 4 + 4 + 8))  # and two messages in shared memory


def test_what_travels_in_the_request_costs_a_request_of_that_machine_or_one_of_several() -> None:
    here, apart = (cost(Plan(1e3, 4, machines=machines), DUDE, MACHINE).server.seconds for machines in (1, None))
    assert here == pytest.approx(0.0015 + (4 + 4 + 40) * 1e3 / SPEED, rel=0.01)
    assert apart == pytest.approx(0.001 + (4 + 4 + 40) * 1e3 / SPEED, rel=0.01)


def test_a_case_of_several_machines_by_hand() -> None:
    """The same with a machine for each process: vectors go through Ray's object store, and are freed after a second."""
    found = cost(Plan(1e7, 4), DUDE, MACHINE)
    server, job = 0.002 + (4 + 4 + 40) * 1e7 / SPEED + 4e7 / 5e9, 0.001 + 8e7 / SPEED + 4e7 / 5e9
    assert found.server.seconds == pytest.approx(server) and "cores" not in found.limits
    assert found.limits["workers"] == pytest.approx((job + server + 0.005) / 4)
    seconds = 1 / found.updates_per_second
    vectors = 4 + 8 + 16 + 4 + (16 + 4) + 4 + 16  # of what arrives only what is absorbed
    assert found.server.peak == pytest.approx(1e8 + 1e7 * (vectors + 4 * 2 * 1.0 / seconds))


def test_a_case_with_shards_by_hand() -> None:
    """The same in two shards, each with its own half of everything."""
    found = cost(Plan(1e7, 4, 2, machines=1), DUDE, MACHINE)
    between, beside = 0.0001 + 2 * 0.0001, 0.0
    for _ in range(100):
        shard = 0.0005 + (4 + 40) * 5e6 * (1 + beside) / SPEED  # it makes the next model where it is read
        job = 0.0003 + 2 * 0.0002 + (4 + 8) * 1e7 * (1 + beside) / SPEED  # it looks whether its message is finite
        work = 2 * shard + 0.001 + job + between
        beside = min(1.0, (work - shard - job / 4) / (work / 0.9 / 2))
    assert found.server.kind == "shard" and found.server.seconds == pytest.approx(shard)
    assert found.limits["head"] == pytest.approx(0.001)
    assert found.limits["cores"] == pytest.approx(work / 0.9 / 2)
    waited = 0.005 + 0.001 - 0.001 - 0.0003 - 0.0005 - 0.0002
    assert found.limits["workers"] == pytest.approx((job + shard + waited) / 4)
    own = 4 + 8 + 4 + 16
    assert found.server.peak == pytest.approx(1e8 + 1e7 * (own + 16 + (16 + 4) + 16) / 2)
    assert found.processes[0].kind == "head" and found.processes[0].peak == pytest.approx(1e8 + 1e7 * (4 + 12 + 12))
    caches = replace(MACHINE, copying=(1e3 * SPEED,) * 3 + (SPEED,) * (len(COPIED) - 3))
    caches = replace(caches, copying_beside=caches.copying)
    quick = cost(Plan(1e7, 4, 2, machines=1), DUDE, caches).server.seconds  # checksums are of what is in the cache
    assert quick == pytest.approx(0.0005 + 40 * 5e6 / SPEED, rel=1e-3)
    stepped = replace(DUDE, optimized=True)  # then it is not made block by block, and is copied
    slow = cost(Plan(1e7, 4, 2, machines=1), stepped, caches).server.seconds
    assert slow - quick == pytest.approx((4 + 8) * 5e6 / SPEED, rel=1e-3)
    apart = cost(Plan(1e7, 4, 2), DUDE, MACHINE)
    assert apart.server.seconds == pytest.approx(0.002 + (4 + 40) * 5e6 / SPEED + 2e7 / 5e9)
    seconds = 1 / apart.updates_per_second
    stored = 16 + (16 + 4) + 4 + 4 * 2 * 1.0 / seconds  # only what is absorbed, and a Ray that was started without us
    assert apart.server.peak == pytest.approx(1e8 + 1e7 * (own + stored) / 2)


def test_a_shard_that_steps_block_by_block_by_hand() -> None:
    """Its passes are those that were timed so, and take an eighth longer while others exchange vectors."""
    found = cost(Plan(1e7, 4, 2, machines=1), replace(DUDE, by_blocks=60.0), MACHINE)
    beside = 0.0
    for _ in range(100):
        shard = 0.0005 + 60 * 5e6 * (1 + beside / 8) / SPEED
        job = 0.0003 + 2 * 0.0002 + (4 + 8) * 1e7 * (1 + beside) / SPEED
        work = 2 * shard + 0.001 + job + 0.0003
        beside = min(1.0, (work - shard - job / 4) / (work / 0.9 / 2))
    assert found.server.seconds == pytest.approx(shard)
    several = replace(DUDE, by_blocks=60.0, arrivals=3.0, absorb=20.0)  # the others are as much slower or faster
    slow, quick = (cost(Plan(1e7, 4, 2), replace(several, absorb=a), MACHINE).server.seconds for a in (20.0, 0.0))
    assert slow - quick == pytest.approx(2 * 20 * 60 / 40 * 5e6 / SPEED)


def test_messages_are_slower_beside_vectors_that_the_caches_do_not_hold() -> None:
    warm = replace(MACHINE, copying_beside=MACHINE.copying)
    cold = replace(warm, cold=3.0)
    bytes_of_a_weight = 4 + 8 + 16 + 16 + 4 * (4 + 4 + 4)  # state, models, and messages and gradients of four workers
    for shards, message in ((0, MACHINE.shared), (2, MACHINE.shared_sliced)):
        for weights, times in ((COPIED[1] // bytes_of_a_weight, 1.0), (2**24 // bytes_of_a_weight, 1.4), (1e8, 3.0)):
            one, other = (cost(Plan(weights, 4, shards, machines=1), DUDE, m).server.seconds for m in (warm, cold))
            assert other - one == pytest.approx((times - 1) * message.server, rel=1e-3, abs=1e-9)
    assert cost(Plan(1e8, 4), DUDE, cold) == cost(Plan(1e8, 4), DUDE, warm)  # between machines it is not counted
    with pytest.raises(dd.BadInput, match=r"cold is 0.5; expected 1 or more"):
        replace(MACHINE, cold=0.5)


def test_what_the_caches_hold_is_copied_as_quickly_as_there() -> None:
    caches = replace(MACHINE, copying=(4 * SPEED,) * 3 + (SPEED,) * (len(COPIED) - 3))
    caches = replace(caches, copying_beside=caches.copying)
    held, beyond = 2**24 // (4 + 8 + 16 + 16 + 4 * (4 + 4 + 4)), 1e8
    for weights, speed in ((held, 4 * SPEED), (beyond, SPEED)):
        found = cost(Plan(weights, 4, machines=1), DUDE, caches).server.seconds
        assert found == pytest.approx(0.0015 + (4 + 4 + 40 + 8) * weights / speed)


def test_a_slow_line_is_the_bottleneck_and_more_shards_share_it() -> None:
    """A gradient of 4 GB on a line of 1e8 bytes per second takes 40 s; k shards take 40 / k, until workers are slower."""
    plan = Plan(1e9, 1000, bandwidth=1e8)
    rates = {k: cost(replace(plan, shards=k), DUDE, MACHINE) for k in (0, 1, 4, 16)}
    assert rates[0].bottleneck.startswith("lines") and rates[0].updates_per_second == pytest.approx(1 / 40)
    assert [rates[k].updates_per_second for k in (1, 4, 16)] == pytest.approx([1 / 40, 4 / 40, 16 / 40])
    assert rates[16].server.bytes_in == pytest.approx(4e9 / 16)


def test_without_lines_on_one_machine_and_with_a_thousandth_of_the_messages_a_line_is_no_limit() -> None:
    assert not any(
        name.startswith("lines") for name in cost(Plan(1e9, 10, machines=1, bandwidth=1e8), DUDE, MACHINE).limits
    )
    small = replace(DUDE, up=0.004, down=0.004)
    plan = Plan(1e9, 10, bandwidth=1e8)
    ratio = (
        cost(plan, DUDE, MACHINE).limits["lines to the server"] / cost(plan, small, MACHINE).limits["lines to the server"]
    )
    assert ratio == pytest.approx(1000)


def test_slow_gradients_make_the_workers_the_bottleneck_and_the_rate_is_theirs() -> None:
    found = cost(Plan(1e6, 10, gradient_seconds=100.0), DUDE, MACHINE)
    assert found.bottleneck == "workers" and found.updates_per_second == pytest.approx(10 / 100, rel=1e-3)
    waiting = cost(Plan(1e6, 10, gradient_seconds=100.0), replace(DUDE, arrivals=5.0, waits=True), MACHINE)
    assert waiting.gradients_per_second == pytest.approx((10 - 2) / 100, rel=1e-2)  # two idle on average
    together = cost(Plan(1e6, 10, gradient_seconds=100.0), replace(DUDE, arrivals=10.0, waits=True), MACHINE)
    assert together.gradients_per_second == pytest.approx(10 / 100, rel=1e-2)  # in step, nobody waits


def test_gradients_share_the_cores_of_one_machine_unless_a_gpu_takes_them() -> None:
    plan = Plan(1e6, 10, gradient_seconds=1.0, machines=1)
    assert cost(plan, DUDE, MACHINE).updates_per_second == pytest.approx(2.0, rel=0.05)  # two cores
    assert cost(replace(plan, gradient_cores=0.0), DUDE, MACHINE).updates_per_second == pytest.approx(10.0, rel=0.2)
    assert cost(replace(plan, machines=5), DUDE, MACHINE).updates_per_second == pytest.approx(10.0, rel=0.2)
    apart = Plan(1e3, 3, gradient_seconds=1.0, gradient_cores=2.0, machines=2)  # two of the workers beside no server
    assert cost(apart, DUDE, MACHINE).updates_per_second == pytest.approx(3 / 2 * 1.0, rel=0.02)


@pytest.mark.parametrize("gradient", [0.0, 0.01, 2.0])
def test_more_of_anything_is_never_slower_on_one_machine(gradient: float) -> None:
    """More cores, faster memory: also where gradients or shards fill the cores. A single worker takes turns with the
    server, which the model does not know: it is left out."""
    by_blocks = replace(DUDE, by_blocks=50.0)
    for weights, workers, shards in product((1e3, 1e6, 1e8), (4, 64), (0, 2)):
        plan, rates = Plan(weights, workers, shards, gradient, machines=1), []
        for cores in (1, 2, 4, 16, 64, 128):
            machine = replace(MACHINE, cores=cores, cold=2.0)
            faster = replace(machine, copying=(2 * SPEED,) * len(COPIED), copying_beside=(SPEED,) * len(COPIED))
            rates.append(cost(plan, by_blocks, machine).updates_per_second)
            assert cost(plan, by_blocks, faster).updates_per_second >= rates[-1] * (1 - 1e-6)
        assert all(more >= less * (1 - 1e-6) for less, more in pairwise(rates))


def test_no_process_is_busier_than_always_and_limits_are_never_beaten() -> None:
    for weights in (1e3, 1e6, 1e9, 7e10):
        for workers in (1, 10, 100_000):
            for shards in (0, 1, 8):
                for machines in (None, 1, 3):
                    plan = Plan(weights, workers, shards, 0.01, machines=machines, bandwidth=1e9, latency=0.001)
                    found = cost(plan, DUDE, MACHINE)
                    assert all(0 <= process.busy <= 1 and process.peak >= MACHINE.process for process in found.processes)
                    assert found.updates_per_second * max(found.limits.values()) == pytest.approx(1)
                    assert math.isfinite(found.updates_per_second)


def test_memory_that_does_not_fit_is_said() -> None:
    assert cost(Plan(1e9, 10, memory_per_process=1e12), DUDE, MACHINE).too_large == ()
    assert cost(Plan(1e9, 10, memory_per_process=5e10), DUDE, MACHINE).too_large == ("server",)
    assert cost(Plan(1e9, 10, memory_per_process=1e9), DUDE, MACHINE).too_large == ("server", "worker")


@pytest.mark.parametrize("name", sorted(dd.ALGORITHMS))
def test_every_method_has_a_size(name: str) -> None:
    assert size(dd.ALGORITHMS[name](lr=0.1), Plan(1e6, 24), machine=MACHINE).cost.updates_per_second > 0


def test_a_change_after_which_something_else_is_still_too_large_says_what_fits() -> None:
    found = size(dd.DuDe(lr=0.1), Plan(1e9, 64, memory_per_process=1.5e10), machine=MACHINE)
    assert found.cost.too_large == ("server", "worker")
    gains = {change.what.partition("=")[0]: change for change in found.changes}
    assert gains["shards"].cost.too_large == ("head", "worker") and not any(
        "fits" in word for word in gains["shards"].gains
    )
    sharded = size(dd.DuDe(lr=0.1), Plan(1e9, 64, 2, memory_per_process=1.5e10), machine=MACHINE)
    more = next(change for change in sharded.changes if change.what.startswith("shards="))
    assert sharded.cost.too_large == ("head", "shard", "worker") and "shard fits" in more.gains


def test_changes_are_told_where_they_help_and_only_there() -> None:
    plan, machine = Plan(1e5, 64, bandwidth=1.25e5, memory_per_process=2e7), replace(MACHINE, process=1e6)
    found = size(dd.DuDe(lr=0.1), plan, machine=machine)
    told, now = {change.what: change.cost for change in found.changes}, found.cost
    assert now.too_large == ("server",)
    shards = next(then for what, then in told.items() if what.startswith("shards="))
    assert not shards.too_large and shards.updates_per_second > now.updates_per_second
    assert told['memory="workers"'].server.peak < now.server.peak
    gains = {change.what.partition("=")[0]: change.gains for change in found.changes}
    assert gains["shards"] == ("faster", "smaller", "fits") and "faster" not in gains["gradient_table"]
    shell = {change.what: change.shell for change in found.changes}
    assert shell['memory="workers"'] == "memory=workers in --method" and shell['gradient_table="half"'] == "--table half"
    assert all(
        then.gradients_per_second >= 1.2 * now.gradients_per_second or then.server.peak <= now.server.peak / 1.2
        for then in told.values()
    )
    alone = size(dd.VanillaASGD(lr=0.1), Plan(1e3, 2, gradient_seconds=10.0), machine=MACHINE)
    assert alone.changes == ()  # nothing helps slow gradients


def test_where_workers_are_waited_for_it_is_said_what_their_turn_goes_to() -> None:
    plan = Plan(1e9, 2, bandwidth=1e9, latency=0.5, gradient_seconds=3.0)
    found = cost(plan, DUDE, MACHINE)
    assert found.turn["its model and message on lines"] == pytest.approx(8 + 2 * 0.5)
    assert sum(found.turn.values()) / 2 == pytest.approx(found.limits["workers"])
    assert found.job_seconds == pytest.approx(3 + found.turn["copies and messages"])


def test_no_more_shards_are_proposed_than_a_model_can_be_cut_into() -> None:
    machine = replace(MACHINE, process=1.0)  # so that more shards are always smaller, and would fit
    told = size(dd.DuDe(lr=0.1), Plan(300, 64, memory_per_process=1e3), machine=machine).changes
    assert {change.what for change in told if change.what.startswith("shards")} == {"shards=4"}


def test_a_prediction_prints_as_the_page_of_the_shell() -> None:
    page = str(size(dd.DuDe(lr=0.1), Plan(1e9, 4, 2, bandwidth=1e6, memory_per_process=2e10), machine=MACHINE))
    assert "DuDe" not in page and "dude[lr=0.1], 1e+09 weights, 4 workers, 2 shards, lines of 1 MB/s" in page
    assert "From one gradient of a worker to its next: 8e+03 s its model and message on lines" in page
    assert "No single change lets a head fit: it reads all weights at once" in page
    assert "No single change lets a worker fit" not in page and "too large" in page


def test_shards_are_refused_and_not_recommended_where_a_run_would_refuse_them() -> None:
    plan = Plan(1e6, 4, shards=2)
    with pytest.raises(dd.BadInput, match="the server of AutoDuDe cannot be cut into 2 shards"):
        size(dd.AutoDuDe(), plan, machine=MACHINE)
    with pytest.raises(dd.BadInput, match="with Adafactor cannot be cut into 2 shards"):
        size(dd.DuDe(lr=0.1), plan, dd.Server(optimizer="Adafactor"), machine=MACHINE)
    with pytest.raises(dd.BadInput, match="shards and downlink are given"):
        size(dd.DuDe(lr=0.1), plan, dd.Server(downlink="int8"), machine=MACHINE)
    whole = size(dd.AutoDuDe(), Plan(1e9, 64, memory_per_process=1e9), machine=MACHINE)
    assert not any(change.what.startswith("shards") for change in whole.changes)
    assert "cannot be cut into" in whole.why_no_shards
    for method, server in ((dd.DuDe(lr=0.1), dd.Server(downlink="int8")), (dd.DuDe(lr=0.1), dd.Server())):
        why = size(method, Plan(1e6, 4), server, machine=MACHINE).why_no_shards
        assert ("shards and downlink are given" in why) == (server.downlink is not None) == bool(why)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"weights": 0.5, "workers": 3}, "weights is 0.5; expected a whole number"),
        ({"weights": -1, "workers": 3}, "weights"),
        ({"weights": math.inf, "workers": 3}, "weights"),
        ({"weights": 10, "workers": 0}, "workers"),
        (
            {"weights": 10, "workers": 3, "shards": 11},
            "model of 10 weights; expected none, it is too small",
        ),
        ({"weights": 10, "workers": 3, "shards": -1}, "shards"),
        ({"weights": 10, "workers": 3, "bandwidth": 0.0}, "bandwidth"),
        ({"weights": 10, "workers": 3, "latency": -1.0}, "latency"),
        ({"weights": 10, "workers": 3, "machines": 0}, "machines"),
        ({"weights": 10, "workers": 3, "memory_per_process": 0.0}, "memory_per_process"),
        ({"weights": 10, "workers": 3, "gradient_seconds": math.nan}, "gradient_seconds"),
    ],
)
def test_plans_that_cannot_be_are_refused(given: dict[str, float], error: str) -> None:
    with pytest.raises(dd.BadInput, match=error):
        Plan(**given)
