"""The settings that ``dualdelay train`` and ``dualdelay compare`` share; each field is a flag, its text the help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .comparison import reseeded
from .config import parse
from .core import Problem
from .errors import BadInput
from .result import EarlyStop
from .speeds import Link, SpeedModel

MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]


@dataclass(frozen=True)
class Common:
    """What every simulation can be told."""

    problem: str = "digits"
    """What is trained, such as 'digits[workers=10,alpha=0.1]'. See: dualdelay list problems"""
    speeds: str = "truncated_normal[std=1]"
    """How fast the workers are, such as 'fixed[times=[1,2,4]]'. See: dualdelay list speeds"""
    updates: MaybeInt = None
    """Stop after so many server updates."""
    time: MaybeFloat = None
    """Stop at this simulated time; arrivals at exactly that time count."""
    folder: MaybePath = None
    """Where the run is kept, so that it can be resumed and replayed; by default a new folder under runs/."""
    checkpoint_every: MaybeInt = None
    """Save after every so many updates; by default about twenty times in all."""
    keep: int = 3
    """How many checkpoints stay."""
    evaluate_every: MaybeInt = None
    """Evaluate the model after every so many updates."""
    evaluate_seconds: MaybeFloat = None
    """Evaluate the model at every so many simulated seconds; by default fifty times in all."""
    latency: float = 0.0
    """Seconds that a message takes, whatever its size; the paper has none."""
    bandwidth: MaybeFloat = None
    """Bytes per second at which messages travel; the paper has no limit."""
    metric: str = "objective"
    """What early stopping looks at."""
    target: MaybeFloat = None
    """Stop early when the metric is this good."""
    patience: MaybeInt = None
    """Stop early after so many evaluations without a new best metric."""
    bad: Literal["retry", "stop"] = "retry"
    """What happens when a gradient is not finite: the worker tries again, or the run stops."""
    threads: int = 1
    """How many threads torch uses; small models are faster with one, and another number gives other bits."""
    start: MaybePath = None
    """Initial weights, a model.safetensors of an earlier run."""
    json: bool = False
    """Print one line of JSON at the end, and everything else to standard error."""

    def options(self) -> dict[str, Any]:
        """The arguments of ``simulate`` that these settings stand for."""
        names = (
            "updates",
            "time",
            "checkpoint_every",
            "keep",
            "evaluate_every",
            "evaluate_seconds",
            "bad",
            "start",
            "threads",
        )
        early = self.target is not None or self.patience is not None
        if not early and self.metric != "objective":
            raise BadInput(
                f"metric {self.metric} is given, but neither target nor patience; give one of them to stop by it."
            )
        stop = EarlyStop(self.metric, self.target, self.patience) if early else None
        return {name: getattr(self, name) for name in names} | {"stop": stop, "link": Link(self.latency, self.bandwidth)}

    def problem_and_speeds(self, seed: int) -> tuple[Problem, SpeedModel]:
        """What is trained by whom; a seed or number of workers that the texts leave out is filled in."""
        problem: Problem = parse("problem", self.problem)
        if "seed=" not in self.problem:
            problem = problem.reseeded(seed)
        speeds: SpeedModel = parse("speeds", self.speeds, n=problem.workers)
        return problem, speeds if "seed=" in self.speeds else reseeded(speeds, seed)
