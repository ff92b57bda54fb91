"""Asynchronous distributed training for PyTorch in which every worker counts the same, however slow it is."""

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
from .problems import Batches, Cifar10, Digits, LocalSteps, Network, Quadratic
from .runs.load import load
from .runs.replay import replay
from .runs.resume import resume
from .runs.runner import Interrupted
from .runs.settings import Compute, Evaluation, Reporting, Saving, Server, SimulatedFleet
from .runs.simulate import simulate, train
from .runs.sweep import Sweep, compare, sweep
from .simulation.speeds import FixedSpeeds, SpeedModel, TruncatedNormalSpeeds
from .workers.ray_fleet import RayFleet
from .workers.settings import FaultPolicy, FleetControl

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
