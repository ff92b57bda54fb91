"""Workers' data: tensors or datasets of any structure, given, or built by a function when they are first needed."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.weak import WeakTensorKeyDictionary

from ..core import Samples
from ..core.draws import Draws
from ..core.errors import BadInput, plain_number, require_several, require_workers, shown
from .flat_module import bits
from .generators import seeded
from .minibatches import Collate

_DEEPEST = 8  # levels of a setting
_MOST_CLASSES = 100  # beyond which whole numbers are taken for something else
_CPU = torch.device("cpu")
_copies: Any = WeakTensorKeyDictionary()  # by tensor and then by device, so that splits of the same data share one copy


def _moved(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device; the same one each time, for as long as the original lives."""
    if tensor.device == torch.device(device):
        return tensor
    copies: dict[str, Tensor] = _copies.setdefault(tensor, {})
    if device not in copies:
        copies[device] = tensor.to(device)
    return copies[device]


def _mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure of tuples, lists, dicts and other mappings with every tensor in it replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        parts = {key: _mapped(function, part) for key, part in value.items()}
        return parts if type(value) is dict else cast("Any", type(value))(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(function, part) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, part) for part in value)
    return value


def _tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a structure, in order."""
    tensors: list[Tensor] = []
    _mapped(tensors.append, value)
    return tensors


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch of any structure on a device; an object that is no tensor but has a method ``to`` is moved as well."""
    if isinstance(batch, Tensor) or hasattr(batch, "to"):
        return batch.to(device)
    return _mapped(lambda tensor: tensor.to(device), batch)


def _as_tensors(value: Any) -> Any:
    """Numpy arrays in a structure as tensors, which share their memory."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _as_tensors(part) for key, part in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_as_tensors(part) for part in value)
    return value


def _is_columns(value: Any) -> bool:
    """Whether a structure holds nothing but tensors, so that its rows are the samples."""
    if isinstance(value, (Mapping, tuple)):
        parts = list(value.values() if isinstance(value, Mapping) else value)
        return len(parts) > 0 and all(map(_is_columns, parts))
    return isinstance(value, Tensor)


def refuse_no_columns(name: str, data: Any) -> None:
    """Refuse a structure in which something is no tensor or array, and frames of pandas or polars alone, by its place."""
    if isinstance(data, (Mapping, tuple)):
        for key, part in data.items() if isinstance(data, Mapping) else enumerate(data):
            refuse_no_columns(f"{name}[{key!r}]", part)
            if not isinstance(part, (Mapping, tuple, Tensor, np.ndarray)):
                raise BadInput(
                    f"{name}[{key!r}] is a {type(part).__name__}; expected a tensor or an array with a row for each "
                    "sample, such as torch.tensor(...) of it."
                )
    elif hasattr(data, "to_numpy") and not isinstance(data, Dataset):
        raise BadInput(
            f"{name} is a {type(data).__name__}; expected a tensor or an array with a row for each sample: for inputs give "
            "torch.tensor(frame.to_numpy()).float(), for classes torch.tensor(column.to_numpy())."
        )


class Shard:
    """One worker's data, whose samples and batches may have any structure.

    Either tensors with a row for each sample, as one tensor or in tuples and dicts such as ``(inputs, targets)``; or a
    dataset, a list or anything else with ``__len__`` and ``__getitem__``, whose samples ``collate`` makes a batch of, by
    default torch's ``default_collate``. A ``Subset`` of a ``TensorDataset`` stays what it is: numbers of rows in tensors
    that other workers share.
    """

    def __init__(self, data: Any, name: str, collate: Collate | None = None) -> None:
        self.name, self._collate = name, collate
        self.rows: Tensor | None = None  # this worker's rows of the columns, if other workers have the others
        self.columns: Any = None  # the tensors, in their structure; None: a dataset
        self._dataset: Any = None
        if isinstance(data, Subset) and isinstance(data.dataset, TensorDataset):
            self.rows = torch.as_tensor(data.indices, dtype=torch.int64)
            data = data.dataset.tensors
        if isinstance(data, list) and len(data) == 2 and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
            data = tuple(data)
        refuse_no_columns(name, data)
        try:
            data = _as_tensors(data)
        except TypeError as error:  # texts, for instance
            raise BadInput(f"{name} holds an array that torch cannot take ({error}); expected numbers.") from None
        if _is_columns(data):
            lengths = [len(column) if column.ndim else -1 for column in _tensors_in(data)]
            if len(set(lengths)) > 1:
                pair = len(lengths) == 2
                counts = f"{lengths[0]} inputs and {lengths[1]} targets" if pair else f"tensors of {lengths} rows"
                raise BadInput(f"{name} has {counts}; expected as many rows in every tensor, one for each sample.")
            self.columns, self.size = data, lengths[0] if self.rows is None else len(self.rows)
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (tuple, Mapping, str)):
            self._dataset, self.size = data, len(data)
        else:
            raise BadInput(
                f"{name} is a {type(data).__name__}; expected tensors with a row for each sample, such as a pair (inputs, "
                "targets) or a dict of them, or a dataset with __len__ and __getitem__."
            )
        if self.size <= 0:
            raise BadInput(f"{name} is empty; give every worker at least one sample, or leave that worker out.")
        self._derive()

    def __getstate__(self) -> dict[str, Any]:
        """Other workers' rows stay where they are, also those that a pickled view would bring along."""
        own = _without_base if self.rows is None else (lambda column: column[self.rows])
        return {**self.__dict__, "columns": _mapped(own, self.columns), "rows": None, "pair": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._derive()

    def _derive(self) -> None:
        """Keep at hand what every batch asks for."""
        columns = self.columns
        simple = type(columns) is tuple and len(columns) == 2 and all(isinstance(part, Tensor) for part in columns)
        # the tensors of inputs and targets, if that is what the data are and batches are rows of them
        self.pair: tuple[Tensor, Tensor] | None = columns if simple and self._collate is None else None
        self._device = None if columns is None else _tensors_in(columns)[0].device

    def _changed(self, **changes: Any) -> Shard:
        shard = object.__new__(Shard)  # copy.copy would copy the rows, as for a pickle
        shard.__dict__.update(self.__dict__, **changes)
        shard._derive()
        return shard

    @property
    def kind(self) -> Hashable:
        """What samples of one minibatch must have in common: types and shapes; None unless the data are a pair."""
        return None if self.pair is None else tuple((part.dtype, part.shape[1:]) for part in self.pair)

    @property
    def runs_user_code(self) -> bool:
        """Whether a dataset or a collate function of the user's own makes the batches."""
        return self.columns is None or self._collate is not None

    def on(self, device: str) -> Shard:
        """The same data on a device; a dataset stays where it is."""
        if self.columns is None:
            return self
        rows = None if self.rows is None else self.rows.to(device)
        return self._changed(columns=_mapped(lambda column: _moved(column, device), self.columns), rows=rows)

    def some(self, rows: Tensor) -> Shard:
        """These samples alone."""
        if self.columns is None:
            return self._changed(_dataset=Subset(self._dataset, rows.tolist()), size=len(rows))
        rows = rows.to(self._device)
        return self._changed(rows=rows if self.rows is None else self.rows[rows], size=len(rows))

    def chosen(self, samples: Samples, place: int) -> Shard:
        """The samples that are asked for, in their order; so many of them are the same each time at the same place."""
        if isinstance(samples, tuple):
            return self.some(torch.arange(samples[0], min(samples[1], self.size)))
        if samples is None or samples >= self.size:
            return self
        return self.some(torch.from_numpy(Draws(0, "evaluation").permutation(self.size, place)[:samples]).sort().values)

    def batch(self, rows: Tensor) -> Any:
        """These samples as one batch."""
        if self.columns is None:
            many = getattr(self._dataset, "__getitems__", None)  # datasets that can read many samples at once have it
            return self._collated(list(many(rows.tolist())) if many else [self._dataset[row] for row in rows.tolist()])
        if self._device != _CPU:
            rows = rows.to(self._device)
        rows = rows if self.rows is None else self.rows[rows]
        if self._collate is not None:
            return self._collated([_mapped(partial(torch.select, dim=0, index=row), self.columns) for row in rows.tolist()])
        if self.pair is not None:
            return self.pair[0].index_select(0, rows), self.pair[1].index_select(0, rows)
        return _mapped(lambda column: column.index_select(0, rows), self.columns)

    def _collated(self, samples: list[Any]) -> Any:
        if self._collate is not None:
            return self._collate(samples)
        try:
            return default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise BadInput(
                f"the samples of {self.name} cannot be put into one batch ({str(error).splitlines()[0]}); give the network "
                "batch_size=dd.Batches(..., collate_fn=...), a function that makes a batch of a list of samples, for "
                "instance one that pads them."
            ) from error

    def touch(self) -> None:
        """Run the user's code that makes batches once, if there is any."""
        if self.runs_user_code:
            self.batch(torch.tensor([0]))

    def pieces(self, size: int | None = None, together: int = 1) -> Iterator[tuple[int, Any]]:
        """All samples in order, in batches of at most ``size``, each with the number of samples in it.

        By default 1,024, or on a GPU 16,384, where a batch costs about the same whatever its size; for so many models
        ``together`` as many less.
        """
        size = size or max(1, (1024 if self._device in (None, _CPU) else 16_384) // together)
        for start in range(0, self.size, size):
            count = min(size, self.size - start)
            if self.runs_user_code or self.rows is not None:
                yield count, self.batch(torch.arange(start, start + count))
            else:
                yield count, _mapped(partial(torch.narrow, dim=0, start=start, length=count), self.columns)

    def classes(self) -> dict[str, int] | None:
        """How many samples there are of each class, if targets are whole numbers and not too many different ones."""
        targets = None if self.pair is None else self.pair[1] if self.rows is None else self.pair[1][self.rows]
        if targets is None or targets.ndim != 1 or targets.is_floating_point() or targets.is_complex():
            return None
        values, counts = np.unique(targets.cpu().numpy(), return_counts=True)
        if len(values) > _MOST_CLASSES:
            return None
        return dict(zip(map(str, values.tolist()), counts.tolist(), strict=True))

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a dataset its length and three samples."""
        into.update(str(self.size).encode())
        few = torch.tensor([0, self.size // 2, self.size - 1])
        _hash(self.batch(few if self.runs_user_code else torch.arange(self.size)), into)


def _without_base(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a view into a larger one."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.detach().clone()


def _hash(value: Any, into: Any) -> None:
    """Add a batch of any structure to a hash."""
    if isinstance(value, Tensor):
        into.update(f"{value.dtype}{tuple(value.shape)}".encode())
        into.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            into.update(repr(key).encode())
            _hash(part, into)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _hash(part, into)
    elif isinstance(value, np.ndarray):
        into.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        into.update(repr(value).encode())
    else:  # its address would make it another each time
        into.update(type(value).__qualname__.encode())


def name_of(function: Any) -> str:
    """What a function is called where it was defined."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def described(function: Any) -> str:
    """What a function is called where it was defined, and the settings of an object, or of one that has arguments already.

    Settings are plain values, tensors, arrays, and what is made of them: what is the same in every process.
    """
    if isinstance(function, partial):
        settings: Any = [function.func, function.args, function.keywords]
    elif isinstance(function, nn.Module):
        parts = {name: _public(part) for name, part in function.named_modules()}
        settings = [parts, dict(function.state_dict())]
    else:
        settings = None if hasattr(function, "__qualname__") else _public(function)
    return f"{name_of(function)} {_plain(settings)}" if settings else name_of(function)


def _public(thing: Any) -> dict[str, Any]:
    """The attributes of an object that are not its own business."""
    return {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}


def _plain(value: Any, depth: int = 0) -> Any:
    """A value in words that are the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, Tensor):
        return [str(value.dtype), tuple(value.shape), hashlib.sha256(bits(value)).hexdigest()]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, Mapping):
        return [[str(key), _plain(part, depth + 1)] for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(part, depth + 1) for part in value]
    return name_of(value)


def _is_function(data: Any) -> bool:
    return callable(data) and not hasattr(data, "__getitem__")


def _call(function: Callable[..., Any], *place: int) -> Any:
    """What the function gives, with the global generators seeded by the place alone: the same in every process."""
    with seeded(Draws(0, "data").key(*place)):
        return function(*place)


class Shards:
    """Each worker's data; those that a function built are kept in this process and out of every pickle."""

    def __init__(self, data: Any, workers: int | None, collate: Collate | None = None, name: str = "shards") -> None:
        self.function = data if _is_function(data) else None
        workers = plain_number(workers)
        self.device: str | None = None  # where they are put; None: they stay where they are
        self.kept: dict[int, Shard] = {}
        self._collate, self._name = collate, name
        self._merged: tuple[Any, list[tuple[list[int], Tensor, Tensor]]] | None = None  # and the shards it is made of
        if self.function is not None:
            if workers is None:
                raise BadInput("shards is a function; say with workers= for how many workers it builds data.")
            require_workers("workers", workers)
            self.workers = workers
            return
        if not hasattr(data, "__len__"):
            require_several(name, data, "each worker's data")
            data = list(data)
        self.workers = len(data)
        if self.workers == 0:
            raise BadInput(f"{name} is empty; expected the data of at least one worker.")
        if workers not in (None, self.workers):
            hint = "; leave workers= out" if name == "shards" else ""
            raise BadInput(f"workers is {shown(workers)}, but {name} holds the data of {self.workers}{hint}.")
        for worker, part in enumerate(data):
            if part is not None or name == "shards":
                self.kept[worker] = Shard(part, f"{name}[{worker}]", collate)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": {} if self.function is not None else self.kept, "_merged": None}

    def on(self, device: str) -> Shards:
        """The same data on a device."""
        moved = copy.copy(self)
        moved.device, moved.kept = device, {worker: shard.on(device) for worker, shard in self.kept.items()}
        return moved

    def extended(self, workers: int) -> Shards:
        """The same function for more workers; what was built is kept for both."""
        extended = copy.copy(self)
        extended.workers = workers
        return extended

    def get(self, worker: int) -> Shard | None:
        """A worker's data, built and kept at first use; None if it has none."""
        if self.function is not None and worker not in self.kept:
            shard = self.build(worker)
            if shard is not None:
                self.kept[worker] = shard
        return self.kept.get(worker)

    def build(self, worker: int) -> Shard | None:
        """What the function gives for a worker, which is not kept."""
        if self.function is None or not 0 <= worker < self.workers:
            raise BadInput(f"worker is {worker}; expected one of 0..{self.workers - 1}.")
        try:
            data = _call(self.function, worker)
        except Exception as error:  # whatever a user's function raises
            what = "held-out data" if self._name == "held_out" else "data"
            said = f"{self._name}({worker}) raised {type(error).__name__}: {error}"
            error.add_note(f"the {what} of worker {worker} could not be built: {said}")  # of a traceback the last line
            raise
        if data is None:
            return None
        shard = Shard(data, f"{'shard' if self._name == 'shards' else self._name}({worker})", self._collate)
        return shard if self.device is None else shard.on(self.device)

    def merged(self, shards: Sequence[Shard], most: int) -> list[tuple[list[int], Tensor, Tensor]]:
        """Groups of workers whose pairs of tensors together have at most ``most`` samples, each as one batch."""
        key, known = tuple(map(id, shards)), self._merged
        if known is None or known[0] != key:
            groups: list[list[int]] = [[]]
            for worker, shard in enumerate(shards):
                fits, group = shard.pair is not None and shard.size <= most, groups[-1]
                alike = not group or shards[group[0]].kind == shard.kind
                if not fits or not alike or sum(shards[k].size for k in group) + shard.size > most:
                    groups.append([])
                if fits:
                    groups[-1].append(worker)
            batches = list[tuple[list[int], Tensor, Tensor]]()
            for workers in (group for group in groups if len(group) > 1):
                pairs = [shards[k].batch(torch.arange(shards[k].size)) for k in workers]
                inputs, targets = map(torch.cat, zip(*pairs, strict=True))
                batches.append((workers, inputs, targets))
            self._merged = known = (key, batches)  # not before it is whole: runs of other threads read it
        return known[1]

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a function its name."""
        if self.function is not None:
            into.update(f"{self.workers} {self._name} of {name_of(self.function)}".encode())
            return
        for shard in self.kept.values():
            shard.digest(into)


class TestData:
    """The data on which the server measures accuracy, if there are any; what a function built stays out of every pickle."""

    def __init__(self, data: Any) -> None:
        self.device: str | None = None
        self._function = data if _is_function(data) else None
        self._shard = None if data is None or self._function is not None else Shard(data, "test")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shard": None if self._function is not None else self._shard}

    @property
    def runs_user_code(self) -> bool:
        """Whether a function or a dataset of the user's own makes the batches."""
        return self._function is not None or (self._shard is not None and self._shard.runs_user_code)

    @property
    def size(self) -> int:
        """The number of samples; zero before a function has built them."""
        return 0 if self._shard is None else self._shard.size

    def on(self, device: str) -> TestData:
        """The same data on a device."""
        moved = copy.copy(self)
        moved.device, moved._shard = device, None if self._shard is None else self._shard.on(device)
        return moved

    def accuracy(self, model: Callable[[Any], Any], share: float = 1.0) -> float:
        """The share of samples whose largest output is their class; nan if there are none or targets are no classes.

        With a ``share`` below 1 so large a part of the samples is looked at, 256 at least, the same each time.
        """

        def alone(inputs: Any) -> Any:
            outputs = model(inputs)
            return outputs[None] if isinstance(outputs, Tensor) else outputs

        return self.accuracies(alone, 1, share)[0]

    def accuracies(self, models: Callable[[Any], Any], count: int, share: float = 1.0) -> list[float]:
        """The same of so many models at once, which give outputs (count, samples, ...)."""
        if self._shard is None and self._function is not None:
            built = Shard(_call(self._function), "test()")
            self._shard = built if self.device is None else built.on(self.device)
        if self._shard is None:
            return [math.nan] * count
        shard = self._shard.chosen(max(256, round(share * self.size)) if share < 1 else None, -1)
        correct = []
        for _, batch in shard.pieces(together=count):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                return [math.nan] * count
            inputs, targets = batch if self.device is None else on_device(batch, torch.device(self.device))
            with torch.no_grad():
                outputs = models(inputs)
            classes = isinstance(targets, Tensor) and not targets.is_floating_point()
            if not classes or not isinstance(outputs, Tensor) or outputs.ndim != targets.ndim + 2:
                return [math.nan] * count
            correct.append((outputs.argmax(2) == targets).flatten(1).sum(1))
        return [number / shard.size for number in torch.stack(correct).sum(0).tolist()]

    def require_pairs(self) -> None:
        """Refuse data that are given and of which no accuracy can be measured."""
        if self._shard is not None:
            batch = self._shard.batch(torch.tensor([0]))
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise BadInput(
                    f"test gives a batch that is a {type(batch).__name__}; expected pairs (inputs, classes). Measure what "
                    "you want to know of other data by functions: metrics={'accuracy': lambda model, batch: ...}."
                )

    def digest(self, into: Any) -> None:
        """Add the data to a hash; of a function its name."""
        if self._function is not None:
            into.update(f"test data of {name_of(self._function)}".encode())
        elif self._shard is not None:
            self._shard.digest(into)


def objectives(losses: Sequence[float], sizes: Sequence[int], scales: Sequence[float]) -> dict[str, float]:
    """The two means of the workers' losses, nan of none: F = (1/n) sum_i scale_i F_i, and that over all samples pooled."""
    objective = sum(scale * loss for scale, loss in zip(scales, losses, strict=True)) / (len(losses) or math.nan)
    pooled = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / (sum(sizes) or math.nan)
    return {"objective": objective, "pooled_loss": pooled}


def digest(*parts: Any) -> Any:
    """A hash of plain values, to be fed with data."""
    return hashlib.sha256(repr(parts).encode())
