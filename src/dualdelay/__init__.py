"""Asynchronous distributed training for PyTorch in which every worker counts the same, however slow it is."""

from . import theory
from .algorithms import (
    ACED,
    ALGORITHMS,
    CA2FL,
    FADAS,
    IAG,
    MIFA,
    SAG,
    SAGA,
    SIAG,
    AutoDuDe,
    DelayAdaptiveASGD,
    DuDe,
    FedAsync,
    FedBuff,
    FedFix,
    GeneralizedASGD,
    MaleniaSGD,
    RennalaSGD,
    RescaledASGD,
    RingleaderASGD,
    RingmasterASGD,
    ShuffledASGD,
    SyncBySpeed,
    SyncSGD,
    UniformASGD,
    VanillaASGD,
)
from .analysis.loggers import TensorBoard
from .core import Algorithm, Arrival, Job, Order, Problem, again, cancel, send, wake
from .core.aggregate import AggregateState, aggregate
from .core.draws import Draws
from .core.errors import BadInput, DualDelayError, ReplayMismatch, RunFailed
from .core.state import State
from .core.version import __version__ as __version__
from .engine.delays import Delays, delay_grids
from .engine.result import EarlyStop, Run
from .engine.trace import Table, Trace
from .problems import (
    PROBLEMS,
    Cifar10,
    Clipped,
    Digits,
    FullGradients,
    LocalSteps,
    Logistic,
    Network,
    Quadratic,
    without_batchnorm,
)
from .runs.comparison import compare
from .runs.drive import Interrupted
from .runs.names import label, parse
from .runs.recorded import load, replay, resume
from .runs.run import simulate, train
from .runs.sweep import Sweep, sweep
from .simulation.availability import SPEEDS, Absence, AwaySpeeds, dropouts, on_off, told
from .simulation.clocks import join, leave
from .simulation.link import Link
from .simulation.paces import BurstySpeeds, DriftingSpeeds
from .simulation.speeds import (
    ChangingSpeeds,
    ExponentialSpeeds,
    FixedSpeeds,
    LognormalSpeeds,
    ParetoSpeeds,
    RecordedSpeeds,
    SpeedModel,
    TruncatedNormalSpeeds,
)
from .workers.ray_fleet import RayFleet

__all__ = [
    "ACED",
    "ALGORITHMS",
    "CA2FL",
    "FADAS",
    "IAG",
    "MIFA",
    "PROBLEMS",
    "SAG",
    "SAGA",
    "SIAG",
    "SPEEDS",
    "Absence",
    "AggregateState",
    "Algorithm",
    "Arrival",
    "AutoDuDe",
    "AwaySpeeds",
    "BadInput",
    "BurstySpeeds",
    "ChangingSpeeds",
    "Cifar10",
    "Clipped",
    "DelayAdaptiveASGD",
    "Delays",
    "Digits",
    "Draws",
    "DriftingSpeeds",
    "DuDe",
    "DualDelayError",
    "EarlyStop",
    "ExponentialSpeeds",
    "FedAsync",
    "FedBuff",
    "FedFix",
    "FixedSpeeds",
    "FullGradients",
    "GeneralizedASGD",
    "Interrupted",
    "Job",
    "Link",
    "LocalSteps",
    "Logistic",
    "LognormalSpeeds",
    "MaleniaSGD",
    "Network",
    "Order",
    "ParetoSpeeds",
    "Problem",
    "Quadratic",
    "RayFleet",
    "RecordedSpeeds",
    "RennalaSGD",
    "ReplayMismatch",
    "RescaledASGD",
    "RingleaderASGD",
    "RingmasterASGD",
    "Run",
    "RunFailed",
    "ShuffledASGD",
    "SpeedModel",
    "State",
    "Sweep",
    "SyncBySpeed",
    "SyncSGD",
    "Table",
    "TensorBoard",
    "Trace",
    "TruncatedNormalSpeeds",
    "UniformASGD",
    "VanillaASGD",
    "again",
    "aggregate",
    "cancel",
    "compare",
    "delay_grids",
    "dropouts",
    "join",
    "label",
    "leave",
    "load",
    "on_off",
    "parse",
    "replay",
    "resume",
    "send",
    "simulate",
    "sweep",
    "theory",
    "told",
    "train",
    "wake",
    "without_batchnorm",
]
