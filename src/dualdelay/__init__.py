"""Asynchronous distributed training for PyTorch in which every worker counts the same, however slow it is."""

__version__ = "0.1.0"

from .algorithms import (
    ALGORITHMS,
    MIFA,
    SIAG,
    DuDe,
    FedBuff,
    ShuffledASGD,
    SyncSGD,
    UniformASGD,
    VanillaASGD,
)
from .clocks import join, leave
from .comparison import compare
from .config import label, parse
from .core import Algorithm, Arrival, Job, Order, Problem, again, cancel, send, wake
from .delays import Delays, delay_grids
from .draws import Draws
from .drive import Interrupted
from .errors import BadInput, DualDelayError, ReplayMismatch, RunFailed
from .loggers import TensorBoard
from .problems import PROBLEMS, Cifar10, Digits, LocalSteps, Logistic, Network, Quadratic, without_batchnorm
from .ray_fleet import RayFleet
from .recorded import replay, resume
from .result import EarlyStop, Run
from .run import simulate, train
from .speeds import (
    SPEEDS,
    ChangingSpeeds,
    ExponentialSpeeds,
    FixedSpeeds,
    Link,
    LognormalSpeeds,
    ParetoSpeeds,
    RecordedSpeeds,
    SpeedModel,
    TruncatedNormalSpeeds,
)
from .state import AggregateState, State, aggregate
from .sweep import Sweep, sweep
from .trace import Table, Trace

__all__ = [
    "ALGORITHMS",
    "MIFA",
    "PROBLEMS",
    "SIAG",
    "SPEEDS",
    "AggregateState",
    "Algorithm",
    "Arrival",
    "BadInput",
    "ChangingSpeeds",
    "Cifar10",
    "Delays",
    "Digits",
    "Draws",
    "DuDe",
    "DualDelayError",
    "EarlyStop",
    "ExponentialSpeeds",
    "FedBuff",
    "FixedSpeeds",
    "Interrupted",
    "Job",
    "Link",
    "LocalSteps",
    "Logistic",
    "LognormalSpeeds",
    "Network",
    "Order",
    "ParetoSpeeds",
    "Problem",
    "Quadratic",
    "RayFleet",
    "RecordedSpeeds",
    "ReplayMismatch",
    "Run",
    "RunFailed",
    "ShuffledASGD",
    "SpeedModel",
    "State",
    "Sweep",
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
    "join",
    "label",
    "leave",
    "parse",
    "replay",
    "resume",
    "send",
    "simulate",
    "sweep",
    "train",
    "wake",
    "without_batchnorm",
]
