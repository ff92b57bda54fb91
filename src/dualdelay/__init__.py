"""Asynchronous distributed training for PyTorch in which every worker counts the same, however slow it is."""

from . import algorithms, problems, theory
from . import simulation as speeds
from .algorithms import (
    ALGORITHMS,
    MIFA,
    SIAG,
    AutoDuDe,
    DuDe,
    FedBuff,
    ShuffledASGD,
    SyncSGD,
    UniformASGD,
    VanillaASGD,
)
from .core import Algorithm, Arrival, Job, Problem, State, again, cancel, send, wake
from .core.aggregate import AggregateState
from .core.draws import Draws
from .core.errors import BadInput, DualDelayError, ReplayMismatch, RunFailed
from .core.version import __version__ as __version__
from .engine.result import EarlyStop, Run
from .problems import Cifar10, Digits, LocalSteps, Network, Quadratic
from .runs.load import load
from .runs.replay import replay
from .runs.resume import resume
from .runs.runner import Interrupted
from .runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
from .runs.simulate import simulate, train
from .runs.sweep import Sweep, compare, sweep
from .simulation.speeds import FixedSpeeds, SpeedModel, TruncatedNormalSpeeds
from .workers.ray_fleet import RayFleet

__all__ = [
    "ALGORITHMS",
    "MIFA",
    "SIAG",
    "AggregateState",
    "Algorithm",
    "Arrival",
    "AutoDuDe",
    "BadInput",
    "Cifar10",
    "Compute",
    "Digits",
    "Draws",
    "DuDe",
    "DualDelayError",
    "EarlyStop",
    "Evaluation",
    "FedBuff",
    "FixedSpeeds",
    "Interrupted",
    "Job",
    "LocalSteps",
    "Network",
    "Problem",
    "Quadratic",
    "RayFleet",
    "ReplayMismatch",
    "Reporting",
    "Run",
    "RunFailed",
    "Saving",
    "Server",
    "ShuffledASGD",
    "SimulatedFleet",
    "SpeedModel",
    "State",
    "Sweep",
    "SyncSGD",
    "TruncatedNormalSpeeds",
    "UniformASGD",
    "VanillaASGD",
    "again",
    "algorithms",
    "cancel",
    "compare",
    "load",
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
