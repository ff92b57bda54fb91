"""Any torch module as a problem: flat weights, each worker's own data, one named minibatch per job."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..core import Problem, Samples
from ..core.batched_gradients import BatchedGradients, OneAtATime
from ..core.devices import lower
from ..core.draws import Draws
from ..core.errors import (
    BadInput,
    DualDelayError,
    RunFailed,
    plain_number,
    require_one_of,
    require_positive,
    require_several,
    shortened,
    shown,
)
from .batchnorm import refuse_batchnorm
from .data import Shard, Shards, TestData, described, digest, objectives, on_device
from .dense import is_cross_entropy
from .flat_module import FlatModule, bits, copied, flat_weights, refuse_hooks_of_weights
from .generators import seeded
from .inspection import count_operations, is_samplewise, refuse_impure, refuse_sums
from .minibatches import Batches, Minibatches, portion
from .splits import Dealt
from .stacked import Stacked, StackedModule

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[Any, Any], Tensor]
WorkerMetric = Callable[[Any, Any], Any]
Weighting = Literal["equal", "samples"]
MeanLoss = tuple[Tensor | float, Tensor | None]  # and its gradient, if it was computed

_COLUMNS = {
    "time", "version", "worker", "loss", "samples", "objective", "pooled_loss", "gradient_norm", "answered", "share",
}  # fmt: skip
_MERGED = 2048  # samples of several workers that are evaluated in one call
_SAME = 1e-3  # how far the sum of a gradient's parts may be from the whole, relative to their sizes
_CALL, _FLOPS = 2e-4, 3e10  # seconds that a call takes whatever its size, and operations in a second: rules of thumb


class Network(Problem):
    """A module and a loss, with each worker's own data.

    model: a module, whose weights are where runs start, or a function that makes one, called under the run's seed.
    loss: a function of outputs and targets that gives the mean over a minibatch of pairs (inputs, targets). Without it,
        and without ``step``, a batch is a dict and the model gives the loss itself: ``model(**batch).loss``.
    shards: each worker's data: tensors with a row for each sample, in tuples or dicts such as (inputs, targets), or a
        map-style dataset; or a function of the worker's number that builds them, called at first use, in the process that
        computes for that worker, and under a seed.
    batch_size: samples per gradient, one number or one for each worker; or ``Batches``, for batches without replacement,
        samples of varying length, dropout or random augmentation.
    step: instead of a loss, a function of the module and a batch of any structure that gives the mean loss.
    workers: how many; needed if ``shards`` is a function.
    held_out: each worker's held-out data, given like ``shards``; None for a worker that has none. They stay where they are.
    metrics: functions of the module and a batch, each giving the mean over the batch, by name. They are measured where the
        data are, on each worker's held-out data or, without those, on its own; ``run.workers`` has them worker by worker,
        ``run.metrics`` combined as the losses are in F.
    test: data on which accuracy is measured at the server, or a function without arguments that builds them.
    seed: names the minibatches; None: the run's own seed does.
    weights: how workers count in F: "equal", as in the paper; by their number of "samples"; or a list of numbers.
    full_gradient: whether evaluation computes the norm of the full gradient, at the price of a backward pass over all data.

    Parameters with ``requires_grad=False`` stay as they are and are no part of the flat weights.
    """

    measures = True

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss | None = None,
        shards: Sequence[Any] | Callable[[int], Any] | None = None,
        batch_size: int | Sequence[int] | Batches = 64,
        *,
        step: Step | None = None,
        workers: int | None = None,
        held_out: Sequence[Any] | Callable[[int], Any] | None = None,
        metrics: Mapping[str, WorkerMetric] | None = None,
        test: Any = None,
        seed: int | None = None,
        weights: Weighting | Sequence[float] = "equal",
        full_gradient: bool = True,
    ) -> None:
        seed = plain_number(seed)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise BadInput(f"metrics is {shown(metrics)}; expected functions of the module and a batch, by name.")
        if shards is None:
            raise BadInput("there are no shards; give each worker's data, or a function of the worker's number.")
        if loss is not None and step is not None:
            raise BadInput("both loss and step are given; a step computes the loss itself, so leave one of them out.")
        for name, function in (("loss", loss), ("step", step)):
            if isinstance(function, type) or not (function is None or callable(function)):
                instance = f", such as {function.__name__}()" if isinstance(function, type) else ""
                raise BadInput(
                    f"{name} is {shown(function)}; expected a function, or an instance that can be called{instance}."
                )
        batches = batch_size if isinstance(batch_size, Batches) else Batches(batch_size)
        self._shards, self._test_data = Shards(shards, workers, batches.collate_fn), TestData(test)
        self.workers = self._shards.workers
        self.groups = shards.groups if isinstance(shards, Dealt) else None  # that each worker has, by their names
        self._has_held_out = held_out is not None
        held_out = [None] * self.workers if held_out is None else held_out
        self._held_out = Shards(held_out, self.workers, batches.collate_fn, "held_out")
        self.seed, self.own_seed = seed or 0, seed is not None
        self._options = (batches.size, batches.replacement, weights)
        self.minibatches = Minibatches(self.workers, batches.size, self.seed, batches.replacement)
        for worker, shard in self._shards.kept.items():
            self.minibatches.require_enough(worker, shard.size, f"worker {worker}")
        self._weights = self._checked_weights(weights)
        self.unit: float | None = None  # the workers' mean number of samples, where they count by samples
        self.loss, self._step, self.full_gradient = loss, step, full_gradient
        self._loss_and_step = described(loss), described(step)  # before they are used, which may change them
        self._stochastic, self._evaluation_size = batches.stochastic, batches.evaluation_size
        self._metrics = dict(metrics or {})
        self._split: set[tuple[int, int]] = set()  # workers, and in how many parts their minibatches may be computed
        self._failed: set[tuple[int, str]] = set()  # workers and metrics that raised there, and are not called again
        held_out_loss = ("held_out_loss",) if self._has_held_out else ()
        self.metric_names = (*held_out_loss, *(name for name in self._metrics if name != "accuracy"))
        self.accuracy_at_workers = "accuracy" in self._metrics
        self._require_names(test)
        self._draws = Draws(self.seed, "stochastic")
        self._plain_loss = type(self).loss_on is Network.loss_on and step is None
        self._build_model = None if isinstance(model, nn.Module) else model
        module = model if isinstance(model, nn.Module) else self._built_model(0)
        refuse_hooks_of_weights(module)
        self.net = FlatModule(copied(module))
        self.precision = "float32"
        refuse_batchnorm(self.net.module)
        self._samplewise = loss is not None and is_samplewise(self.net.module)
        self._initial = self.net.weights.clone()
        self._costs: tuple[float, float] | None = None
        self._test_data.require_pairs()
        if self._shards.kept:
            try:
                self._probe(0, self._shards.kept.values())
            except DualDelayError:
                raise
            except Exception as error:  # whatever a user's model, loss or data raise
                said = f"{type(error).__name__}: {error}"
                raise BadInput(f"worker 0's first gradient could not be computed: {said}. {self._advice(error)}") from error
            self._probe_metrics()

    def _checked_weights(self, weights: Weighting | Sequence[float]) -> Weighting | list[float]:
        if isinstance(weights, str):
            require_one_of("weights", weights, get_args(Weighting))
            return weights
        require_several("weights", weights, "numbers, one for each worker")
        numbers = list(map(plain_number, weights))
        if len(numbers) != self.workers:
            raise BadInput(f"weights has {len(numbers)} numbers; expected {self.workers}, one for each worker.")
        for worker, number in enumerate(numbers):
            require_positive(f"weights[{worker}]", number)
        return [self.workers * number / math.fsum(numbers) for number in numbers]

    def _require_names(self, test: Any) -> None:
        taken = sorted(_COLUMNS & set(self._metrics))
        if taken or ("accuracy" in self._metrics and test is not None):
            what = f"{taken}, which are columns already" if taken else "'accuracy', which test= gives"
            raise BadInput(f"metrics has {what}; choose other names.")
        for name, metric in self._metrics.items():
            if not isinstance(name, str) or not callable(metric):
                what = f"{shown(name)}: {shown(metric)}"
                raise BadInput(f"metrics has {what}; expected a name and a function of the module and a batch.")

    # --- the first use of a model and of data ---

    def _built_model(self, seed: int) -> nn.Module:
        assert self._build_model is not None
        with seeded(Draws(seed, "weights").key()):
            module = self._build_model()
        if not isinstance(module, nn.Module):
            raise BadInput(f"model() gave a {type(module).__name__}; expected a torch.nn.Module.")
        return module

    def _probe(self, worker: int, shards: Iterable[Shard]) -> None:
        """Refuse a model, loss or data whose gradient is not that of the job's name, or of a sum instead of a mean."""
        unit, self.unit = self.unit, self.unit or 1.0  # a worker's scale is of no matter here, and may not be known yet
        try:
            refuse_impure(self.net.module, lambda: self.gradient(self._initial, worker, 0)[0], shards, self._stochastic)
        finally:
            self.unit = unit
        shard, rows = self._shards.kept[worker], self.indices(worker, 0)

        def loss(times: int) -> float:
            with self.net.evaluating(self._initial), self._seeded(0), torch.no_grad():
                return float(self.loss_on(self.net.module, self._batch(shard, rows.repeat(times))))

        refuse_sums(loss)

    def _advice(self, error: BaseException) -> str:
        """What to do where a first gradient could not be computed: often data and weights are of different types."""
        if isinstance(error, RuntimeError) and "type" in str(error):  # torch has a dozen ways to say so
            return (
                f"The model's weights are {self._initial.dtype}: give inputs of that type, with .float(), say, and classes "
                "as whole numbers, with .long()."
            )
        return "Look at the model, at the loss, and at what a batch of the data is."

    def _probe_metrics(self) -> None:
        """Refuse a metric that raises on the first batch; later, and where data are built elsewhere, it is switched off."""
        with self.net.evaluating(self._initial), self._seeded(0):
            batch = self._batch(self._shards.kept[0], self.indices(0, 0))
            for name in self._metrics:
                try:
                    self._metric(name, batch)
                except DualDelayError:
                    raise
                except Exception as error:  # whatever a user's function raises
                    raise BadInput(
                        f"metric {name!r} raised {type(error).__name__} on a batch of worker 0: {error}. It is called with "
                        "the module and a batch of any size, and gives the mean over it."
                    ) from error

    def _shard(self, worker: int) -> Shard:
        """A worker's data; those that a function builds are kept if gradients on them are pure."""
        if worker in self._shards.kept:
            return self._shards.kept[worker]
        shard = self._shards.build(worker)
        if shard is None:
            raise BadInput(f"shards({worker}) gave None; expected that worker's data.")
        self.minibatches.require_enough(worker, shard.size, f"shard({worker})")
        self._shards.kept[worker] = shard
        try:
            self._probe(worker, [shard])
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, DualDelayError):
                error.add_note(f"worker {worker}'s first gradient could not be computed. {self._advice(error)}")
            del self._shards.kept[worker]  # so that the next use is refused as well
            raise
        return shard

    def shards(self) -> list[Shard]:
        """Every worker's data."""
        return [self._shard(worker) for worker in range(self.workers)]

    # --- minibatches and gradients ---

    def start(self, seed: int) -> Tensor:
        if self._build_model is None:
            return self._initial.clone()
        return flat_weights(self._built_model(seed)).to(self._initial.device)

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, as positions in the worker's own data."""
        return self.minibatches.rows(worker, draw, self._shard(worker).size).clone()

    def samples(self, worker: int) -> int | None:
        return self._shard(worker).size

    def classes(self, worker: int) -> Mapping[str, int] | None:
        return self._shard(worker).classes()

    def epoch(self, worker: int) -> int:
        return self.minibatches.epoch(worker, self._shard(worker).size)

    def _seeded(self, key: int) -> AbstractContextManager[None]:
        """The global generators start from a key, if anything draws from them."""
        return seeded(key) if self._stochastic else nullcontext()

    def _batch(self, shard: Shard, rows: Tensor) -> Any:
        return self._here(shard.batch(rows))

    def _here(self, batch: Any) -> Any:
        """A batch where the module is."""
        return batch if self._initial.is_cpu else on_device(batch, self._initial.device)

    def loss_on(self, module: nn.Module, batch: Any) -> Tensor:
        """The mean loss of the module, with the weights it has, over a batch."""
        if self._step is not None:
            loss = self._step(module, batch)
        elif self.loss is None:
            if not isinstance(batch, Mapping):
                raise BadInput(
                    f"a batch is a {type(batch).__name__}, and neither loss nor step is given; expected a dict that the "
                    "model takes by name, model(**batch).loss. Give loss= for pairs, or step= for anything else."
                )
            loss = _loss_of(module(**batch))
        else:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, (tuple, list, Mapping)) else ""
                raise BadInput(
                    f"a batch is a {type(batch).__name__}{size}, and a loss takes a pair (inputs, targets). Give "
                    "step=lambda model, batch: ... instead of a loss for batches of another structure."
                )
            loss = self.loss(module(batch[0]), batch[1])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
            raise BadInput(f"the loss {what}; expected a tensor of one number, the mean over the minibatch.")
        return loss

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        return self._gradient_on(x, worker, self.indices(worker, draw), draw)

    def gradient_part(self, x: Tensor, worker: int, draw: int, part: int, parts: int) -> tuple[Tensor, float]:
        self._require_parts(worker, parts)
        rows = self.indices(worker, draw)
        mine = rows[portion(len(rows), part, parts)]
        if not len(mine):
            return torch.zeros_like(self._initial, device=x.device), 0.0
        share = len(mine) / len(rows)
        gradient, loss = self._gradient_on(x, worker, mine, draw, part)
        return gradient * share, loss * share

    def require_parts(self, parts: int) -> None:
        """Refuse so many parts of a gradient that do not add up to it, by worker 0's data if they are here."""
        if 0 in self._shards.kept:
            self._require_parts(0, parts)

    def _require_parts(self, worker: int, parts: int) -> None:
        """The same by a worker's data, once; where random numbers are drawn, nobody can tell."""
        if self._stochastic or (worker, parts) in self._split:
            return
        self._split.add((worker, parts))
        whole, _ = self.gradient(self._initial, worker, 0)
        pieces = [self.gradient_part(self._initial, worker, 0, part, parts)[0].double() for part in range(parts)]
        apart = float((sum(pieces, start=torch.zeros_like(whole).double()) - whole.double()).norm())
        size = math.fsum(float(piece.norm()) for piece in [whole, *pieces])
        if apart > max(_SAME, 30 * torch.finfo(whole.dtype).eps) * size:
            self._split.discard((worker, parts))
            raise BadInput(
                f"worker {worker}'s first gradient in {parts} parts is {apart / size:.1e} from the whole, relative to its "
                "size; expected the same up to rounding. The loss has to be a mean over the minibatch in which each sample "
                "counts alike and by itself: no weights of classes, no mean over the words that are not padding, nothing "
                "that compares samples. Change that, or use ranks=1."
            )

    def _gradient_on(self, x: Tensor, worker: int, rows: Tensor, *place: int) -> tuple[Tensor, float]:
        """The gradient of the mean loss over these of a worker's samples, and that loss; ``place`` names its draws."""
        self.net.weights.copy_(x)
        if self._stochastic:
            with seeded(self._draws.key(worker, *place)):
                gradient, mean = self._gradient_of(self._batch(self._shard(worker), rows))
        else:
            gradient, mean = self._gradient_of(self._batch(self._shard(worker), rows))
        if gradient.device != x.device:
            gradient = gradient.to(x.device)
        return self._scaled(gradient, worker), mean

    def _gradient_of(self, batch: Any) -> tuple[Tensor, float]:
        """The gradient of the mean loss over a batch, and that loss."""
        dense = self.net.dense if self._plain_loss and self.precision == "float32" and is_cross_entropy(self.loss) else None
        if dense is not None and _is_pair(batch) and (done := dense.gradient(*batch)) is not None:
            return done
        loss = self._lower_loss_on(batch)
        if not loss.requires_grad:
            raise BadInput("the loss has no gradient: it does not depend on the model's weights; look at the loss or step.")
        gradient, mean = self.net.gradient(loss), loss.item()
        if dense is not None and _is_pair(batch):
            dense.compare(batch[0], batch[1], gradient, mean)
        return gradient, mean

    def _lower_loss_on(self, batch: Any) -> Tensor:
        if self.precision == "float32":
            return self.loss_on(self.net.module, batch)
        with lower(self.precision, self._initial.device):
            return self.loss_on(self.net.module, batch)

    # --- how workers count ---

    @property
    def scales(self) -> list[float]:
        """Each F_i's factor in F = (1/n) sum_i scale_i F_i."""
        return [self._scale(worker) for worker in range(self.workers)]

    def _scale(self, worker: int, size: int | None = None) -> float:
        """A worker's factor, by its number of samples ``size`` if its data are elsewhere."""
        if self._weights == "equal":
            return 1.0
        if isinstance(self._weights, list):
            return self._weights[worker]
        if self.unit is None:
            self.unit = math.fsum(shard.size for shard in self.shards()) / self.workers
        return (self._shard(worker).size if size is None else size) / self.unit

    def _scaled(self, gradient: Tensor, worker: int) -> Tensor:
        scale = self._scale(worker)
        return gradient if scale == 1.0 else gradient * scale

    @property
    def needs_sample_counts(self) -> bool:
        return self._weights == "samples" and self._shards.function is not None and self.unit is None

    def set_mean_samples(self, unit: float) -> None:
        self.unit = unit

    # --- evaluation ---

    def _mean_loss(self, shard: Shard, worker: int, gradient: bool) -> MeanLoss:
        """The mean loss over a shard's samples, and its gradient if wanted, in float64 and still on the device."""
        loss = torch.zeros((), dtype=torch.float64, device=self._initial.device)
        total = torch.zeros_like(self._initial, dtype=torch.float64) if gradient else None
        for count, batch in shard.pieces(self._evaluation_size):
            share = count / shard.size
            with torch.set_grad_enabled(gradient):
                part = self.loss_on(self.net.module, self._here(batch))
            if total is not None:
                total += share * self._scaled(self.net.gradient(part).to(total.device), worker)
            loss += share * part.detach().double().reshape(())
        return loss, total

    def _merged_losses(self, shards: Sequence[Shard]) -> dict[int, MeanLoss]:
        """The losses of workers with few samples, several in one call; the sum of their gradients stands with the first."""
        assert self.loss is not None
        merged: dict[int, MeanLoss] = {}
        for workers, inputs, targets in self._shards.merged(shards, _MERGED):
            sizes = [shards[worker].size for worker in workers]
            with torch.set_grad_enabled(self.full_gradient):
                outputs = torch.split(self.net.module(inputs), sizes)
                losses = [self.loss(*part) for part in zip(outputs, torch.split(targets, sizes), strict=True)]
                if any(loss.numel() != 1 for loss in losses):
                    return {}  # taken one by one, they are refused
            gradient: Tensor | None = None
            if self.full_gradient:
                total = torch.stack([loss.reshape(()) * self._scale(w) for loss, w in zip(losses, workers, strict=True)])
                gradient = self.net.gradient(total.sum()).double()
            values = torch.stack([loss.detach().reshape(()) for loss in losses]).tolist()
            merged |= {worker: (value, None) for worker, value in zip(workers, values, strict=True)}
            merged[workers[0]] = (values[0], gradient)
        return merged

    def _measured(self, worker: int, samples: Samples, merged: MeanLoss | None = None) -> dict[str, Any]:
        """What a worker measures with the weights that the module has; metrics come with its last samples."""
        shard = self._shard(worker)
        chosen = shard.chosen(samples, worker)
        with self._seeded(0):  # random augmentation is the same each time
            loss, gradient = merged or self._mean_loss(chosen, worker, self.full_gradient and not isinstance(samples, int))
        part = {"loss": float(loss), "samples": chosen.size, "size": shard.size, "gradient": gradient}
        if isinstance(samples, tuple) and samples[1] < shard.size:
            return part
        return part | self._measured_metrics(worker, samples if isinstance(samples, int) else None)

    def _measured_metrics(self, worker: int, samples: int | None) -> dict[str, Any]:
        """A worker's metrics; one that raises is nan from then on, and its error is reported once."""
        if not self._metrics and not self._has_held_out:
            return {}
        shard = self._held_out.get(worker) if self._has_held_out else self._shard(worker)
        if shard is None:
            return {"metrics": dict.fromkeys((*self.metric_names, *self._metrics), math.nan), "tested": 0}
        shard = shard.chosen(samples, worker)
        metrics, errors = dict.fromkeys(self._metrics, 0.0), dict[str, str]()
        with self._seeded(0):
            for count, batch in shard.pieces(self._evaluation_size) if self._metrics else ():
                batch = self._here(batch)
                for name in self._metrics:
                    try:
                        value = math.nan if (worker, name) in self._failed else self._metric(name, batch)
                    except Exception as error:  # whatever a user's function raises
                        self._failed.add((worker, name))
                        value, errors[name] = math.nan, f"{type(error).__name__}: {error}"
                    metrics[name] += count / shard.size * value
            if self._has_held_out:
                metrics["held_out_loss"] = float(self._mean_loss(shard, worker, False)[0])
        return {"metrics": metrics, "tested": shard.size} | ({"errors": errors} if errors else {})

    def _metric(self, name: str, batch: Any) -> float:
        """A user's metric of the module, with the weights it has, on a batch."""
        with torch.no_grad():
            value = self._metrics[name](self.net.module, batch)
            try:
                if isinstance(value, (str, bytes, bytearray)):
                    raise TypeError("a text is none")
                return float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise BadInput(f"metric {name!r} gave {shown(value)}; expected one number, a mean ({error}).") from None

    def measure(self, x: Tensor, worker: int, samples: Samples = None) -> dict[str, Any]:
        """A worker's loss, its number of samples, that loss's gradient if wanted, in float64, and the metrics."""
        return self._measured_by([worker], x, samples)[worker]

    def _measured_by(self, workers: Sequence[int], x: Tensor, samples: Samples) -> dict[int, dict[str, Any]]:
        for worker in workers:  # data are built before the module has its weights: at first use they are tried with others
            self._shard(worker)
            self._held_out.get(worker)
        plain = self._samplewise and not self._stochastic and self._evaluation_size is None
        with self.net.evaluating(x):
            merged = self._merged_losses(self.shards()) if plain and samples is None and len(workers) > 1 else {}
            return {worker: self._measured(worker, samples, merged.get(worker)) for worker in workers}

    def assess(self, x: Tensor, samples: Samples = None) -> tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]:
        if type(self).evaluate is not Network.evaluate:  # a user's own
            return self.evaluate(x), {}
        parts = self._measured_by(range(self.workers), x, samples)
        return self.combine(x, parts), parts

    def assess_all(
        self, x: Tensor, samples: Samples = None
    ) -> list[tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]]:
        if not self._assesses_all():
            return super().assess_all(x, samples)
        gradient = self.full_gradient and samples is None
        shards = [shard.chosen(samples, worker) for worker, shard in enumerate(self.shards())]
        with self.net.evaluating(x[0]):  # which has the mode; the weights are those of each run
            module = StackedModule(self.net, x)
            losses, gradients = module.mean_losses(self.loss, shards, self.scales, gradient)
            share = sum(shard.size for shard in shards) / sum(shard.size for shard in self.shards())
            accuracies = iter(self._test_data.accuracies(module, len(x), share))
        assessed: list[tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]] = []
        for k, row in enumerate(losses):
            parts: dict[int, dict[str, Any]] = {
                worker: {"loss": loss, "samples": shard.size, "size": self._shard(worker).size, "gradient": None}
                for worker, (loss, shard) in enumerate(zip(row, shards, strict=True))
            }
            if gradients is not None:
                parts[0]["gradient"] = gradients[k]
            assessed.append((self._combined(parts, lambda _: next(accuracies)), parts))
        return assessed

    def _assesses_all(self) -> bool:
        """Whether models can be evaluated at once: layers and data are plain, and nothing of it is a user's own."""
        kind = type(self)
        own = (kind.evaluate, kind.combine, kind._measured) != (Network.evaluate, Network.combine, Network._measured)
        if own or self._metrics or self._has_held_out or self._evaluation_size is not None or self._stochastic:
            return False
        shards = self.shards()
        alike = len({shard.kind for shard in shards}) == 1 and shards[0].kind is not None
        return self._samplewise and alike and self._batches_are_pairs(shards) and not self._test_data.runs_user_code

    @staticmethod
    def _batches_are_pairs(shards: Sequence[Shard]) -> bool:
        return all(shard.pair is not None and not shard.runs_user_code for shard in shards)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.combine(x, self._measured_by(range(self.workers), x, None))

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        """The metrics, with F over the workers that answered; accuracy on test data is measured here."""
        return self._combined(parts, lambda share: self._accuracy(x, share))

    def _combined(self, parts: Mapping[int, Mapping[str, Any]], accuracy: Callable[[float], float]) -> dict[str, float]:
        workers = sorted(parts)  # so that their order of answering is of no matter
        measured = [parts[worker] for worker in workers]
        sizes = [part.get("size", part["samples"]) for part in measured]
        scales = [self._scale(worker, size) for worker, size in zip(workers, sizes, strict=True)]
        complete = len(workers) == self.workers and self.unit is None  # then they have mean 1
        factor = 1.0 if complete or not workers else len(workers) / math.fsum(scales)
        scales = [factor * scale for scale in scales]
        share = sum(part["samples"] for part in measured) / (sum(sizes) or math.nan)
        numbers = objectives([part["loss"] for part in measured], sizes, scales)
        numbers |= {"accuracy": accuracy(share), "gradient_norm": math.nan}
        gradients = [part["gradient"] for part in measured if part["gradient"] is not None]
        if gradients:
            numbers["gradient_norm"] = factor * float(torch.stack(gradients).sum(0).norm()) / len(workers)
        tested = [(scale, part["metrics"]) for scale, part in zip(scales, measured, strict=True) if part.get("tested")]
        for name in (*self.metric_names, *(["accuracy"] if self.accuracy_at_workers else [])):
            total = math.fsum(scale * metrics[name] for scale, metrics in tested)
            numbers[name] = total / math.fsum(scale for scale, _ in tested) if tested else math.nan
        return {**numbers, "answered": float(len(workers)), "share": share}

    def _accuracy(self, x: Tensor, share: float) -> float:
        with self.net.evaluating(x), seeded(0) if self._test_data.runs_user_code else nullcontext():
            return self._test_data.accuracy(self.net.module, share)

    def few_samples(self) -> int | None:
        # a gradient is a pass forward and twice as much backward; of a small network most of it is the call itself
        return 3 * max(self.minibatches.sizes) + min(512, int(_CALL * _FLOPS / 4) // len(self._initial))

    def costs(self) -> tuple[float, float] | None:
        if self._costs is None:
            shards, rows = self.shards(), self.indices(0, 0)
            self.net.weights.copy_(self._initial)
            with self._seeded(0):
                operations = count_operations(lambda: self.loss_on(self.net.module, self._batch(shards[0], rows)))
            per_sample = operations / len(rows)
            samples = sum(shard.size for shard in shards)
            merged = -(-samples // _MERGED) if self._samplewise and not self._stochastic else 0
            calls = max(merged, sum(-(-shard.size // 1024) for shard in shards if not merged or shard.size > _MERGED))
            passes = 3.0 if self.full_gradient else 1.0
            tested = (1.0 if self._metrics else 0.0) * samples
            total = (passes * samples + tested + self._test_data.size) * per_sample
            self._costs = (_CALL + 3.0 * len(rows) * per_sample / _FLOPS, calls * passes * _CALL / 2 + total / _FLOPS)
        return self._costs

    # --- the module's weights ---

    def model(self, x: Tensor) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        return self.net.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.net.state_dict(x)

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.net.flat(state_dict)

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return self.net.layout()

    def fixed(self) -> dict[str, Tensor]:
        moving = {name for name, _, _ in self.net.layout()}
        return {name: tensor for name, tensor in self.net.state_dict(self._initial).items() if name not in moving}

    def fingerprint(self) -> str:
        loss, step = self._loss_and_step
        hashed = digest(self.net.description, loss, self._options, self.seed, self._stochastic, self.full_gradient)
        if self._step is not None:
            hashed.update(step.encode())
        with self._seeded(0):  # augmented samples are drawn anew each time
            self._shards.digest(hashed)
            self._test_data.digest(hashed)
            self._held_out.digest(hashed)
        for tensor in self.net.fixed():
            hashed.update(bits(tensor))
        return str(hashed.hexdigest())

    def data_fingerprint(self, worker: int) -> str:
        hashed = digest(worker)
        with self._seeded(0):
            self._shard(worker).digest(hashed)
        return str(hashed.hexdigest())

    # --- the same problem with another seed, for another thread, on another device, with more workers, among others ---

    def reseeded(self, seed: int) -> Network:
        """The same data and model with other minibatches."""
        other = copy.copy(self)  # one module and one copy of the data for both
        other.seed, other.own_seed, other._draws = seed, True, Draws(seed, "stochastic")
        other.minibatches = self.minibatches.reseeded(seed)
        return other

    @property
    def unseeded(self) -> str:
        start = "" if self._build_model is None else " and initial weights"
        return f"its data are given, so a seed names its minibatches{start} alone"

    @property
    def parallel(self) -> bool:
        return not self._stochastic and not any(shard.runs_user_code for shard in self.shards())

    @property
    def workplace(self) -> object:
        return self.net

    def twin(self) -> Network:
        other = copy.copy(self)
        other.net = self.net.on(self._initial.device)
        other.minibatches = self.minibatches.reseeded(self.seed)  # threads must not share the blocks in it
        return other

    def on(self, device: str, precision: str = "float32") -> Network:
        if (torch.device(device), precision) == (self._initial.device, self.precision):
            return self
        other = copy.copy(self)
        other.net, other._initial, other.precision = self.net.on(device), self._initial.to(device), precision
        other._shards, other._held_out = self._shards.on(device), self._held_out.on(device)
        other._test_data = self._test_data.on(device)
        return other

    def extended(self, workers: int) -> Network:
        if self._shards.function is None or (self._has_held_out and self._held_out.function is None):
            super().extended(workers)  # which refuses
        if isinstance(self._weights, list):
            raise BadInput("weights has no numbers for the workers who may join; use 'equal' or 'samples'.")
        other = copy.copy(self)
        other.workers = workers
        other._shards, other._held_out = self._shards.extended(workers), self._held_out.extended(workers)
        other.minibatches = self.minibatches.extended(workers)
        return other

    @property
    def batch_key(self) -> Hashable:
        kinds = {shard.kind for shard in self.shards()}
        if not self.parallel or self.minibatches.size is None or len(kinds) > 1 or None in kinds or self.loss is None:
            return OneAtATime
        place = (str(self._initial.device), self.precision)
        return self.net.signature(), self.loss, self.minibatches.size, place, kinds.pop()

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        if self.batch_key is OneAtATime:
            return OneAtATime(problems)
        try:
            return Stacked([problem for problem in problems if isinstance(problem, Network)])
        except DualDelayError:
            raise
        except torch.OutOfMemoryError as error:  # a run is not to have other bits because a GPU is full just now
            raise RunFailed(
                f"a few gradients of this model at once do not fit into what is free of {self._initial.device}: free some "
                "of it, or take them one after the other, dd.Compute(batch=False)."
            ) from error
        except Exception as error:  # whatever vmap raises of layers that it does not know
            why = shortened(" ".join(str(error).split()), 200)
            warnings.warn(
                f"many gradients of this model cannot be taken in one call ({why}): they are taken one after the other, "
                "which is slower where runs go side by side.",
                stacklevel=2,
            )
            return OneAtATime(problems)


def _is_pair(batch: Any) -> bool:
    return type(batch) is tuple and len(batch) == 2 and type(batch[0]) is type(batch[1]) is Tensor


def _loss_of(output: Any) -> Any:
    """The loss that a model has computed itself, as those of Hugging Face give it."""
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    raise BadInput(
        f"model(**batch) gave a {type(output).__name__} without a loss, and neither loss nor step is given. Give the step: "
        "step=lambda model, batch: model(**batch)[0], say."
    )
