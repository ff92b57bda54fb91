import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # before an optimiser's first step, which imports Triton: kernels run without a GPU

import dualdelay as dd
from own import METHODS
from tables import ALGORITHMS, DUDES

os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "(?s).*"  # before Ray is imported: the tests kill workers on purpose
torch.set_num_threads(1)  # the tensors are tiny: a second thread would mostly wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray run by themselves: two clusters on one machine would find each other.

    Those are the files named after it, what asks for ``ray_here``, and what is marked by hand. Those with clusters of
    their own come last, because they end the Ray that the others share. As another kind of processor each method but DuDe
    has one row: what differs there is torch's arithmetic, not a method's settings.
    """
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        first = {type(method): row for row, method in reversed(ALGORITHMS.items())}
        several = {row for row, method in ALGORITHMS.items() if row not in DUDES and first[type(method)] != row}
        items[:] = [item for item in items if getattr(item, "callspec", None) is None or _row(item) not in several]
    items.sort(key=lambda item: item.path.stem == "test_ray_cluster")
    for item in items:
        if item.path.stem.startswith("test_ray") or "ray_here" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)


def _row(item: pytest.Item) -> object:
    """The row of the table of methods that a test is about, if it is about one."""
    values = getattr(item, "callspec").params  # noqa: B009
    return values.get("row", values.get("name"))


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
        with staying_here(True):
            ray.init("local", include_dashboard=False, num_cpus=64, log_to_driver=True, configure_logging=False)
        streams.remove_handler("ray_print_logs")  # what workers print is kept in a run's folder, and not shown


@pytest.fixture
def own_methods() -> Iterator[None]:
    """A user's own methods stand in the table of algorithms while a test lasts."""
    dd.ALGORITHMS.update(METHODS)
    yield
    for name in METHODS:
        del dd.ALGORITHMS[name]
