import gc
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ["TRITON_INTERPRET"] = "1"  # before an optimiser's first step, which imports Triton: kernels run without a GPU

import dualdelay as dd
from dualdelay.runs import processes
from own import METHODS
from tables import ALGORITHMS, DUDES

os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "(?s).*"  # before Ray is imported: the tests kill workers on purpose
pytest_plugins = ["browser"]
processes.AFTER = math.inf  # sweeps stay in this process, where tests count and change things, unless a test says otherwise
settings.register_profile("busy", deadline=None)  # a machine may be busy
settings.load_profile("busy")
gc.disable()  # until the tests begin: what is collected stays
torch.set_num_threads(1)  # the tensors are tiny: a second thread would mostly wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # which who starts tests in the background may have switched off


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray run by themselves: two clusters on one machine would find each other.

    Those are the files named after it, what asks for ``ray_here``, and what is marked by hand. Those with clusters of
    their own come last, because they end the Ray that the others share.
    """
    if not items or not items[0].config.getoption("every_case"):
        items[:] = _some_cases(items)
    items.sort(key=lambda item: item.path.stem in ("test_cluster", "test_ray_cluster"))
    for item in items:
        if {"cluster", "site", "pages", "documented"} & set(
            getattr(item, "fixturenames", ())
        ):  # raylets, pages of the docs
            item.add_marker(pytest.mark.slow)
        if item.path.stem.startswith("test_ray") or "ray_here" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)


def pytest_collection_finish() -> None:
    """Torch and thousands of tests stay until the end: the garbage collector need not look through them again and again."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that leaves no case out."""
    parser.addoption("--every-case", action="store_true", help="every case of every table, which takes twice as long")


_OTHERS = ALGORITHMS.keys() - DUDES


def _is_of_others(item: pytest.Item) -> bool:
    """Whether a test is about a method that is not DuDe."""
    case = getattr(item, "callspec", None)
    method = case and case.params.get("method")
    return _row(item) in _OTHERS or (isinstance(method, dd.Algorithm) and type(method) is not dd.DuDe)


def _some_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """Every row of DuDe's meets each case of a law; those of other methods meet each law, and each case some of them.

    As another kind of processor DuDe's rows meet each case, and of what is not about it each test has one: what differs
    there is torch's arithmetic.
    """
    elsewhere = bool(os.environ.get("ATEN_CPU_CAPABILITY"))
    few = [item for item in items if (_row(item) not in DUDES if elsewhere else _is_of_others(item))]
    left_out = {item.nodeid for item in few} - (_first_cases(few) if elsewhere else _covering(few))
    return [item for item in items if item.nodeid not in left_out]


def _row(item: pytest.Item) -> object:
    """The row of the table of methods that a test is about, if it is about one."""
    case = getattr(item, "callspec", None)
    return None if case is None else case.params.get("row", case.params.get("name"))


def _first_cases(items: list[pytest.Item]) -> set[str]:
    """The names of the first case of each test."""
    return set({item.nodeid.split("[")[0]: item.nodeid for item in reversed(items)}.values())


def _covering(items: list[pytest.Item]) -> set[str]:
    """The names of tests enough that of each table of cases every value of every parameter is there."""
    chosen, seen = set[str](), set[tuple[str, str, int]]()
    for all_new in (True, False):  # first cases that share no value, then what is still missing
        for item in items:
            params = vars(item)["callspec"].params.items()  # a row is a parameter, so each has some
            values = {(item.nodeid.split("[")[0], name, id(value)) for name, value in params}
            if values.isdisjoint(seen) if all_new else not values <= seen:
                chosen.add(item.nodeid)
                seen |= values
    return chosen


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, where the test is."""
    here = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(here)


@pytest.fixture
def in_time() -> Iterator[None]:
    """What takes longer than two minutes never ends, which is a failure like any other."""

    def late(*_: object) -> None:
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def ray_here() -> None:
    """One Ray on loopback for all tests that need one; each run still starts processes of its own."""
    import ray
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as streams

    import real
    from dualdelay.workers.ray_fleet import staying_here
    from dualdelay.workers.security import own_token

    ray.cloudpickle.register_pickle_by_value(real)  # the workers do not have this folder on their path
    own_token()
    if not ray.is_initialized():
        with staying_here(True), chdir(Path(__file__).parent):  # its processes stay there: a test's folder goes
            ray.init("local", include_dashboard=False, num_cpus=64, log_to_driver=True, configure_logging=False)
        streams.remove_handler("ray_print_logs")  # what workers print is kept in a run's folder, and not shown


@pytest.fixture
def own_methods() -> Iterator[None]:
    """A user's own methods stand in the table of algorithms while a test lasts."""
    dd.ALGORITHMS.update(METHODS)
    yield
    for name in METHODS:
        del dd.ALGORITHMS[name]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts programs on the path, alone with the system's own."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")

    def install(name: str, script: str) -> None:
        (place / name).write_text(f"#!/bin/sh\n{script}\n")
        (place / name).chmod(0o755)

    return install
