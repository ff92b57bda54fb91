"""Asynchronous distributed training for PyTorch in which every worker counts the same, however slow it is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import algorithms, problems, theory
    from . import simulation as speeds
    from .algorithms import ALGORITHMS
    from .algorithms.auto import AutoDuDe
    from .algorithms.dude import DuDe
    from .algorithms.fedbuff import FedBuff
    from .algorithms.mifa import MIFA
    from .algorithms.shuffled import ShuffledASGD
    from .algorithms.siag import SIAG
    from .algorithms.sync import SyncSGD
    from .algorithms.uniform import UniformASGD
    from .algorithms.vanilla import VanillaASGD
    from .core import Algorithm, Arrival, Job, Problem, RunningJob, State, again, cancel, poll, send, wake
    from .core.aggregate import AggregateState
    from .core.draws import Draws
    from .core.errors import BadInput, DualDelayError, ReplayMismatch, RunFailed
    from .core.version import __version__ as __version__
    from .engine.result import EarlyStop, Run
    from .engine.table import Table
    from .problems import Batches, Cifar10, Digits, Languages, LocalSteps, Network, Quadratic
    from .runs.load import load
    from .runs.replay import replay
    from .runs.resume import resume
    from .runs.runner import Interrupted
    from .runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
    from .runs.simulate import simulate, train
    from .runs.sweep import Sweep, compare, grid, sweep
    from .simulation.speeds import FixedSpeeds, SpeedModel, TruncatedNormalSpeeds
    from .workers.ray_fleet import RayFleet
    from .workers.ray_tasks import Cluster
    from .workers.settings import FaultPolicy, FleetControl
    from .workers.sites.fleet import SiteFleet

__all__ = [
    "ALGORITHMS",
    "MIFA",
    "SIAG",
    "AggregateState",
    "Algorithm",
    "Arrival",
    "AutoDuDe",
    "BadInput",
    "Batches",
    "Cifar10",
    "Cluster",
    "Compute",
    "Digits",
    "Draws",
    "DuDe",
    "DualDelayError",
    "EarlyStop",
    "Evaluation",
    "FaultPolicy",
    "FedBuff",
    "FixedSpeeds",
    "FleetControl",
    "Interrupted",
    "Job",
    "Languages",
    "LocalSteps",
    "Network",
    "Problem",
    "Quadratic",
    "RayFleet",
    "ReplayMismatch",
    "Reporting",
    "Run",
    "RunFailed",
    "RunningJob",
    "Saving",
    "Server",
    "ShuffledASGD",
    "SimulatedFleet",
    "SiteFleet",
    "SpeedModel",
    "State",
    "Sweep",
    "SyncSGD",
    "Table",
    "TruncatedNormalSpeeds",
    "UniformASGD",
    "VanillaASGD",
    "again",
    "algorithms",
    "cancel",
    "compare",
    "grid",
    "load",
    "poll",
    "problems",
    "replay",
    "resume",
    "send",
    "simulate",
    "speeds",
    "sweep",
    "theory",
    "train",
    "wake",
]

# where each name is defined: a module is imported when one of its names is asked for, so that the shell need not wait for
# torch to say what it can do
_HOMES = {
    "algorithms": ("ALGORITHMS",),
    "algorithms.auto": ("AutoDuDe",),
    "algorithms.dude": ("DuDe",),
    "algorithms.fedbuff": ("FedBuff",),
    "algorithms.mifa": ("MIFA",),
    "algorithms.shuffled": ("ShuffledASGD",),
    "algorithms.siag": ("SIAG",),
    "algorithms.sync": ("SyncSGD",),
    "algorithms.uniform": ("UniformASGD",),
    "algorithms.vanilla": ("VanillaASGD",),
    "core": ("Algorithm", "Arrival", "Job", "Problem", "RunningJob", "State", "again", "cancel", "poll", "send", "wake"),
    "core.aggregate": ("AggregateState",),
    "core.draws": ("Draws",),
    "core.errors": ("BadInput", "DualDelayError", "ReplayMismatch", "RunFailed"),
    "core.version": ("__version__",),
    "engine.result": ("EarlyStop", "Run"),
    "engine.table": ("Table",),
    "problems": ("Batches", "Cifar10", "Digits", "Languages", "LocalSteps", "Network", "Quadratic"),
    "runs.load": ("load",),
    "runs.replay": ("replay",),
    "runs.resume": ("resume",),
    "runs.runner": ("Interrupted",),
    "runs.settings": ("Compute", "Evaluation", "Reporting", "Saving", "Server", "SimulatedFleet"),
    "runs.simulate": ("simulate", "train"),
    "runs.sweep": ("Sweep", "compare", "grid", "sweep"),
    "simulation.speeds": ("FixedSpeeds", "SpeedModel", "TruncatedNormalSpeeds"),
    "workers.ray_fleet": ("RayFleet",),
    "workers.ray_tasks": ("Cluster",),
    "workers.sites.fleet": ("SiteFleet",),
    "workers.settings": ("FaultPolicy", "FleetControl"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = {"algorithms": "algorithms", "problems": "problems", "speeds": "simulation", "theory": "theory"}


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name in _MODULES:
        value: Any = import_module(f".{_MODULES[name]}", __name__)
    elif name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    else:
        rooms = _MODULES if name[0].isupper() else {}  # a class may be in one of these
        there = [room for room, module in rooms.items() if hasattr(import_module(f".{module}", __name__), name)]
        instead = "".join(f"; it is {__name__}.{room}.{name}" for room in there)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
