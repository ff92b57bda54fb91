"""A run's specification as its folder holds it: plain values, from which the run can be built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from ..core.errors import BadInput
from ..core.settings import check_settings, positive, thread_count, types_of, whole
from . import files

Description = dict[str, Any]  # a name with its settings, or the class of something that no name can build
_HOW_LONG = ("updates", "time", "environment", "keep", "checkpoint_every")  # and where, and how often it is saved
_COMPUTED = ("environment", "together")  # on which machine, and in which company
_SIMULATED = ("speeds", "link", "changes", "device", "precision", "batch")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What config.json says of a run."""

    dualdelay: str  # the version that wrote it
    algorithm: Description
    problem: Description
    fingerprint: str  # of the problem
    seed: int
    start: str  # a digest of the initial weights
    layout: list[list[Any]]  # where in the flat weights each entry of the state dict is: name, first number, shape
    updates: int | None = whole(None, low=0)
    time: int | float | None = None
    optimizer: dict[str, Any] | None  # with its schedule
    on_nonfinite: Literal["retry", "leave", "stop"]
    uplink: str | int | float | None
    downlink: str | int | float | None
    table: Literal["full", "half", "host"]
    metrics: list[str]
    keep_best: str | None
    stop: dict[str, Any] | None
    evaluate_every: int | None = whole(None)
    evaluate_seconds: int | float | None = positive(None)
    evaluate_samples: int | None = whole(None)
    evaluate_limit: int | float | None
    evaluates_by_default: bool
    keep: int = whole()
    checkpoint_every: int | None = whole(None)
    threads: int = thread_count()
    server_threads: int = thread_count()
    environment: dict[str, str]
    together: int = whole(1)  # runs that were computed side by side
    # simulated workers
    speeds: Description | None = None
    link: Description | None = None
    changes: list[list[Any]] | None = None
    device: str | None = None
    precision: str | None = None
    batch: bool | None = None
    # real workers
    fleet: Description | None = None
    room: int = whole(0, low=0)
    ranks: int = whole(1)  # processes of each worker; where there is one, as before there could be more, nothing is written

    def __post_init__(self) -> None:
        kind: Any = type(self)
        types = types_of(kind)
        invalid = [f.name for f in fields(self) if not _is_a(types[f.name], getattr(self, f.name))]
        invalid += [name for name in _SIMULATED if (getattr(self, name) is None) != self.real]
        if not invalid:
            valid = {
                "layout": all(map(_is_layout_entry, self.layout)),
                "metrics": all(isinstance(name, str) for name in self.metrics),
                "optimizer": self.optimizer is None or self.optimizer.keys() >= {"optimizer", "schedule"},
            }
            invalid = [name for name in valid if not valid[name]]
        if invalid:
            raise BadInput(f"no valid {', '.join(invalid)}")
        check_settings(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunRecord:
        """The record that such plain values are; refuses any others."""
        names = {f.name for f in fields(cls)}
        if lacking := sorted(names - values.keys() - {"ranks"}):
            raise BadInput(f"no valid {', '.join(lacking)}")
        if unknown := sorted(values.keys() - names):
            raise BadInput(f"{', '.join(unknown)}, which is unknown")
        return cls(**values)

    @property
    def real(self) -> bool:
        """Whether the workers were processes of their own."""
        return self.fleet is not None

    def values(self) -> dict[str, Any]:
        """The plain values that ``from_json`` reads."""
        return {name: value for name, value in asdict(self).items() if name != "ranks" or self.ranks > 1}

    @property
    def digest(self) -> str:
        """A digest of all of it."""
        return files.json_digest(self.values())

    @property
    def key(self) -> str:
        """Identifies a run's files by what it computes, not by how long, on which machine and how often it is saved."""
        return files.json_digest({name: value for name, value in self.values().items() if name not in _HOW_LONG})

    def differences(self, other: RunRecord) -> list[str]:
        """The settings that another record has otherwise, but for where and in which company the run was computed."""
        names = [f.name for f in fields(self) if f.name not in _COMPUTED]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def _is_a(kind: Any, value: object) -> bool:
    """Whether a value has an annotated type; what lists and dicts hold is not looked at."""
    if get_origin(kind) is Literal:
        return isinstance(value, str)
    if isinstance(kind, UnionType):
        return any(_is_a(part, value) for part in get_args(kind))
    plain = get_origin(kind) or kind
    return isinstance(value, plain) and (plain is bool or not isinstance(value, bool))


def _is_layout_entry(value: Any) -> bool:
    if not isinstance(value, list) or [type(part) for part in value] != [str, int, list]:
        return False
    return value[1] >= 0 and all(_is_a(int, size) and size >= 0 for size in value[2])
