"""Any torch module as a problem: flat weights, each worker's own data, one named minibatch per job."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..core import Problem, Samples
from ..core.batched_gradients import BatchedGradients, OneAtATime
from ..core.devices import lower
from ..core.draws import Draws
from ..core.errors import (
    BadInput,
    DualDelayError,
    plain_number,
    require_one_of,
    require_positive,
    require_several,
    require_whole,
    shortened,
    shown,
)
from .batchnorm import refuse_batchnorm
from .data import Collate, Minibatches, Shard, digest, objectives, on_device
from .flat_module import FlatModule, bits, flat_weights
from .generators import seeded
from .purity import refuse_impure, refuse_sums
from .samplewise import flops_of, takes_samples_one_by_one
from .shards import Shards, TestData, name_of
from .stacked import Stacked

Loss = Callable[[Any, Any], Tensor]
Step = Callable[[Any, Any], Tensor]
SiteMetric = Callable[[Any, Any], Any]

_COLUMNS = {
    "time",
    "version",
    "worker",
    "loss",
    "samples",
    "objective",
    "pooled_loss",
    "gradient_norm",
    "answered",
    "share",
}
_TOGETHER = 2048  # samples of several workers that are evaluated in one call
_CALL, _FLOPS = 2e-4, 3e10  # seconds that a call takes whatever its size, and operations in a second: rules of thumb


class Network(Problem):
    """A module and a loss, with each worker's own data.

    model: a module, whose weights are where runs start, or a function that makes one, called under the run's seed.
    loss: a function of outputs and targets that gives the mean over a minibatch of pairs (inputs, targets). Without it,
        and without ``step``, a batch is a dict and the model gives the loss itself: ``model(**batch).loss``.
    shards: each worker's data: tensors with a row for each sample, in tuples or dicts such as (inputs, targets), or a
        map-style dataset; or a function of the worker's number that builds them, called at first use, in the process that
        computes for that worker, and under a seed.
    batch_size: samples per gradient, one number or one for each worker.
    step: instead of a loss, a function of the module and a batch of any structure that gives the mean loss.
    collate_fn: makes a batch of a list of samples, as in torch's DataLoader; for samples of varying length, say.
    workers: how many; needed if ``shards`` is a function.
    held_out: each worker's held-out data, given like ``shards``; None for a worker that has none. They stay where they are.
    metrics: functions of the module and a batch, each giving the mean over the batch, by name. They are measured where the
        data are, on each worker's held-out data or, without those, on its own; ``run.workers`` has them worker by worker,
        ``run.metrics`` combined as the losses are in F.
    test: data on which accuracy is measured at the server, or a function without arguments that builds them.
    seed: names the minibatches; None: the run's own seed does.
    replacement: whether a minibatch is drawn with replacement, as in the paper.
    weights: how workers count in F: "equal", as in the paper; by their number of "samples"; or a list of numbers.
    stochastic: seed the global generators of torch, numpy and Python by the job's name around each gradient, for dropout
        or random augmentation. Runs in several threads take turns with them; they are the process's, so while such a run
        computes in one thread, code of your own in another should not draw from them.
    full_gradient: whether evaluation computes the norm of the full gradient, at the price of a backward pass over all data.
    evaluation_batch: samples in one call of an evaluation; None: 1,024, or 16,384 on a GPU. A metric that is no mean over
        batches, such as an AUC, needs so many that all held-out data are in one.

    Parameters with ``requires_grad=False`` stay as they are and are no part of the flat weights.
    """

    measures = True

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss | None = None,
        shards: Sequence[Any] | Callable[[int], Any] | None = None,
        batch_size: int | Sequence[int] = 64,
        *,
        step: Step | None = None,
        collate_fn: Collate | None = None,
        workers: int | None = None,
        held_out: Sequence[Any] | Callable[[int], Any] | None = None,
        metrics: Mapping[str, SiteMetric] | None = None,
        test: Any = None,
        seed: int | None = None,
        replacement: bool = True,
        weights: str | Sequence[float] = "equal",
        stochastic: bool = False,
        full_gradient: bool = True,
        evaluation_batch: int | None = None,
    ) -> None:
        seed = plain_number(seed)
        if metrics is not None and not isinstance(metrics, Mapping):
            raise BadInput(f"metrics is {shown(metrics)}; expected functions of the module and a batch, by name.")
        if shards is None:
            raise BadInput("there are no shards; give each worker's data, or a function of the worker's number.")
        if loss is not None and step is not None:
            raise BadInput("both loss and step are given; a step computes the loss itself, so leave one of them out.")
        self._shards, self._test_data = Shards(shards, workers, collate_fn), TestData(test)
        self.workers = self._shards.workers
        self._held_out = None if held_out is None else Shards(held_out, self.workers, collate_fn, "held_out")
        self.seed, self.own_seed = seed or 0, seed is not None
        self._options = (batch_size, replacement, weights)
        self.minibatches = Minibatches(self.workers, batch_size, self.seed, replacement)
        for worker, shard in self._shards.kept.items():
            self.minibatches.require_enough(worker, shard.size, f"worker {worker}")
        self._weights = self._checked_weights(weights)
        self.unit: float | None = None  # the samples of a worker that counts as one, where workers count by samples
        evaluation_batch = plain_number(evaluation_batch)
        if evaluation_batch is not None:
            require_whole("evaluation_batch", evaluation_batch, 1)
        self._evaluation_batch = evaluation_batch
        self.loss, self._step, self._stochastic, self.full_gradient = loss, step, stochastic, full_gradient
        self._metrics = dict(metrics or {})
        self._failed: set[tuple[int, str]] = set()  # workers and metrics that raised there, and are not called again
        held = ("held_out_loss",) if self._held_out is not None else ()
        self.metric_names = (*held, *(name for name in self._metrics if name != "accuracy"))
        self.accuracy_at_workers = "accuracy" in self._metrics
        self._require_names(test)
        self._draws = Draws(self.seed, "stochastic")
        self._make = None if isinstance(model, nn.Module) else model
        module = copy.deepcopy(model) if isinstance(model, nn.Module) else self._made(0)
        self.net, self.precision = FlatModule(module), "float32"
        refuse_batchnorm(self.net.module)
        self._samplewise = loss is not None and takes_samples_one_by_one(self.net.module)
        self._given = self.net.weights.clone()
        self._costs: tuple[float, float] | None = None
        self._test_data.require_pairs()
        if self._shards.kept:
            try:
                self._probe(0, self._shards.kept.values())
            except DualDelayError:
                raise
            except Exception as error:  # whatever a user's model, loss or data raise
                raise BadInput(
                    f"worker 0's first gradient could not be computed: {type(error).__name__}: {error}. Look at the model, "
                    "at the loss, and at what a batch of the data is."
                ) from error
            self._try_metrics()

    def _checked_weights(self, weights: str | Sequence[float]) -> str | list[float]:
        if isinstance(weights, str):
            require_one_of("weights", weights, ("equal", "samples"))
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
                raise BadInput(
                    f"metrics has {shown(name)}: {shown(metric)}; expected a name and a function of the module and a batch."
                )

    def shards(self) -> list[Shard]:
        """Every worker's data."""
        return [self._shard(worker) for worker in range(self.workers)]

    def _shard(self, worker: int) -> Shard:
        return self._shards.kept.get(worker) or self._first(worker)

    def _first(self, worker: int) -> Shard:
        """Have a worker's data built and keep them, if gradients on them are pure."""
        shard = self._shards.build(worker)
        self.minibatches.require_enough(worker, shard.size, f"shard({worker})")
        self._shards.kept[worker] = shard
        try:
            self._probe(worker, [shard])
        except BaseException:
            del self._shards.kept[worker]  # so that the next use is refused as well
            raise
        return shard

    def _probe(self, worker: int, shards: Iterable[Shard]) -> None:
        """Refuse a model, loss or data whose gradient is not that of the job's name, or of a sum instead of a mean."""
        unit, self.unit = self.unit, self.unit or 1.0  # whatever workers count, what is tried here is not changed by it
        try:
            refuse_impure(self.net.module, lambda: self.gradient(self._given, worker, 0)[0], shards, self._stochastic)
        finally:
            self.unit = unit
        shard, rows = self._shards.kept[worker], self.indices(worker, 0)

        def loss(times: int) -> float:
            with self.net.evaluating(self._given), self._seeded(0), torch.no_grad():
                return float(self.loss_on(self.net.module, self._batch(shard, rows.repeat(times))))

        refuse_sums(loss)

    def _try_metrics(self) -> None:
        """Refuse a metric that raises on the first batch; later, and where data are built elsewhere, it is switched off."""
        batch = self._batch(self._shards.kept[0], self.indices(0, 0))
        with self.net.evaluating(self._given), self._seeded(0), torch.no_grad():
            for name, metric in self._metrics.items():
                try:
                    _number(name, metric(self.net.module, batch))
                except DualDelayError:
                    raise
                except Exception as error:  # whatever a user's function raises
                    raise BadInput(
                        f"metric {name!r} raised {type(error).__name__} on a batch of worker 0: {error}. It is called with "
                        "the module and a batch of any size, and gives the mean over it."
                    ) from error

    def _seeded(self, key: int) -> AbstractContextManager[None]:
        """The global generators start at a place, if anything draws from them."""
        return seeded(key) if self._stochastic else nullcontext()

    def _made(self, seed: int) -> nn.Module:
        assert self._make is not None
        with seeded(Draws(seed, "weights").key()):
            module = self._make()
        if not isinstance(module, nn.Module):
            raise BadInput(f"model() gave a {type(module).__name__}; expected a torch.nn.Module.")
        return module

    def start(self, seed: int) -> Tensor:
        return self._given.clone() if self._make is None else flat_weights(self._made(seed)).to(self._given.device)

    def indices(self, worker: int, draw: int) -> Tensor:
        """The samples of a job, as positions in the worker's own data."""
        return self.minibatches.rows(worker, draw, self._shard(worker).size).clone()

    def samples(self, worker: int) -> int | None:
        return self._shard(worker).size

    def epoch(self, worker: int) -> int:
        return self.minibatches.epoch(worker, self._shard(worker).size)

    def _batch(self, shard: Shard, rows: Tensor) -> Any:
        return self._here(shard.batch(rows))

    def _here(self, batch: Any) -> Any:
        """A batch where the module is."""
        return batch if self._given.is_cpu else on_device(batch, self._given.device)

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
        if not isinstance(loss, Tensor):
            raise BadInput(
                f"the loss is a {type(loss).__name__}; expected a tensor of one number, the mean over the batch."
            )
        if loss.numel() != 1:
            raise BadInput(f"the loss has shape {tuple(loss.shape)}; expected one number, the mean over the minibatch.")
        return loss

    def gradient(self, x: Tensor, worker: int, draw: int) -> tuple[Tensor, float]:
        rows = self.indices(worker, draw)
        self.net.weights.copy_(x)
        with self._seeded(self._draws.key(worker, draw)):
            batch = self._batch(self._shard(worker), rows)
            with lower(self.precision, x.device):
                loss = self.loss_on(self.net.module, batch)
        if not loss.requires_grad:
            raise BadInput("the loss has no gradient: it does not depend on the model's weights; look at the loss or step.")
        return self._scaled(self.net.gradient(loss).to(x.device), worker), loss.item()

    @property
    def scales(self) -> list[float]:
        """Each F_i's factor in F = (1/n) sum_i scale_i F_i."""
        return [self._scale(worker) for worker in range(self.workers)]

    @property
    def needs_sample_counts(self) -> bool:
        """Whether workers count by samples that only they can count."""
        return self._weights == "samples" and self._shards.function is not None and self.unit is None

    def set_mean_samples(self, unit: float) -> None:
        self.unit = unit

    def extended(self, workers: int) -> Network:
        held = self._held_out
        if self._shards.function is None or (held is not None and held.function is None):
            super().extended(workers)  # which refuses
        if isinstance(self._weights, list):
            raise BadInput(
                "weights has a number for each worker and none for those who may join; use 'equal' or 'samples'."
            )
        other = copy.copy(self)
        other.workers, other._shards = workers, self._shards.extended(workers)
        other._held_out = None if held is None else held.extended(workers)
        other.minibatches = self.minibatches.extended(workers)
        return other

    def _scale(self, worker: int, size: int | None = None) -> float:
        """A worker's factor, given its number of samples if they are elsewhere."""
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

    def _chosen(self, shard: Shard, worker: int, samples: Samples) -> Shard:
        """Those of a worker's samples that were asked for; so many of them are always the same."""
        if samples is None or (isinstance(samples, int) and samples >= shard.size):
            return shard
        if isinstance(samples, tuple):
            return shard.some(torch.arange(samples[0], min(samples[1], shard.size)))
        chosen = Draws(0, "evaluation").permutation(shard.size, worker)[:samples]
        return shard.some(torch.from_numpy(chosen).sort().values)

    def _over(self, shard: Shard, worker: int, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """The mean loss over a shard's samples, and its gradient if wanted, in float64 and still on the device."""
        loss = torch.zeros((), dtype=torch.float64, device=self._given.device)
        total = torch.zeros_like(self._given, dtype=torch.float64) if gradient else None
        for count, batch in shard.pieces(self._evaluation_batch):
            share = count / shard.size
            with torch.set_grad_enabled(gradient):
                part = self.loss_on(self.net.module, self._here(batch))
            if total is not None:
                total += share * self._scaled(self.net.gradient(part).to(total.device), worker)
            loss += share * part.detach().double().reshape(())
        return loss, total

    def _measured(self, worker: int, samples: Samples, found: tuple[Any, Any] | None = None) -> dict[str, Any]:
        """What a worker finds with the weights that the module has; metrics come with its last samples."""
        shard = self._shard(worker)
        chosen = self._chosen(shard, worker, samples)
        with self._seeded(0):  # random augmentation is the same each time
            loss, gradient = found or self._over(chosen, worker, self.full_gradient and not isinstance(samples, int))
        part = {"loss": float(loss), "samples": chosen.size, "size": shard.size, "gradient": gradient}
        if isinstance(samples, tuple) and samples[1] < shard.size:
            return part
        return part | self._tested(worker, samples if isinstance(samples, int) else None)

    def _tested(self, worker: int, samples: int | None) -> dict[str, Any]:
        """A worker's metrics; those that raise are nan from now on, and their errors are told once."""
        if not self._metrics and self._held_out is None:
            return {}
        shard = self._shard(worker) if self._held_out is None else self._held_out.get(worker)
        if shard is None:
            return {"metrics": dict.fromkeys((*self.metric_names, *self._metrics), math.nan), "tested": 0}
        shard = self._chosen(shard, worker, samples)
        metrics, errors = dict.fromkeys(self._metrics, 0.0), dict[str, str]()
        with self._seeded(0):
            for count, batch in shard.pieces(self._evaluation_batch) if self._metrics else ():
                batch = self._here(batch)
                for name, metric in self._metrics.items():
                    try:
                        with torch.no_grad():
                            value = (
                                math.nan
                                if (worker, name) in self._failed
                                else _number(name, metric(self.net.module, batch))
                            )
                    except Exception as error:  # whatever a user's function raises
                        self._failed.add((worker, name))
                        value, errors[name] = math.nan, f"{type(error).__name__}: {error}"
                    metrics[name] += count / shard.size * value
            if self._held_out is not None:
                metrics["held_out_loss"] = float(self._over(shard, worker, False)[0])
        return {"metrics": metrics, "tested": shard.size} | ({"errors": errors} if errors else {})

    def measure(self, x: Tensor, worker: int, samples: Samples = None) -> dict[str, Any]:
        """A worker's loss, its number of samples, that loss's gradient if wanted, in float64, and the metrics."""
        self._shard(worker)  # before the weights are in place: at its first use it is tried with others
        if self._held_out is not None:
            self._held_out.get(worker)
        with self.net.evaluating(x):
            return self._measured(worker, samples)

    def assess(self, x: Tensor, samples: Samples = None) -> tuple[dict[str, float], Mapping[int, Mapping[str, Any]]]:
        if type(self).evaluate is not Network.evaluate:  # a user's own
            return self.evaluate(x), {}
        parts = self._parts(x, samples)
        return self.combine(x, parts), parts

    def _parts(self, x: Tensor, samples: Samples) -> dict[int, dict[str, Any]]:
        shards = self.shards()
        if self._held_out is not None:
            for worker in range(self.workers):
                self._held_out.get(worker)
        with self.net.evaluating(x):
            found: dict[int, tuple[Any, Any]] = {}
            if samples is None and self._samplewise and not self._stochastic and self._evaluation_batch is None:
                found = self._over_several(shards)
            return {worker: self._measured(worker, samples, found.get(worker)) for worker in range(self.workers)}

    def _over_several(self, shards: Sequence[Shard]) -> dict[int, tuple[Any, Any]]:
        """The losses of workers with few samples, several workers in one call, with the sum of their gradients at one."""
        assert self.loss is not None
        found: dict[int, tuple[Any, Any]] = {}
        for workers, inputs, targets in self._shards.merged(shards, _TOGETHER):
            sizes = [shards[worker].size for worker in workers]
            with torch.set_grad_enabled(self.full_gradient):
                outputs = torch.split(self.net.module(inputs), sizes)
                losses = [self.loss(*part) for part in zip(outputs, torch.split(targets, sizes), strict=True)]
                if any(loss.numel() != 1 for loss in losses):
                    return {}  # which is refused when it is looked at alone
            gradient: Tensor | None = None
            if self.full_gradient:
                total = torch.stack([loss.reshape(()) * self._scale(w) for loss, w in zip(losses, workers, strict=True)])
                gradient = self.net.gradient(total.sum()).double()
            values = torch.stack([loss.detach().reshape(()) for loss in losses]).tolist()
            for k, worker in enumerate(workers):
                found[worker] = (values[k], gradient if k == 0 else None)
        return found

    def combine(self, x: Tensor, parts: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
        """The metrics, with F over the workers that answered; accuracy on test data is measured here."""
        workers = sorted(parts)  # whoever answered first
        sizes = [parts[worker].get("size", parts[worker]["samples"]) for worker in workers]
        raw = [self._scale(worker, size) for worker, size in zip(workers, sizes, strict=True)]
        whole = len(workers) == self.workers and self.unit is None  # then they have mean 1; those that join later may not
        factor = 1.0 if whole or not workers else len(workers) / math.fsum(raw)
        scales = [factor * scale for scale in raw]
        losses = [parts[worker]["loss"] for worker in workers]
        share = sum(parts[worker]["samples"] for worker in workers) / (sum(sizes) or math.nan)
        numbers = {**objectives(losses, sizes, scales), "accuracy": self._accuracy(x, share), "gradient_norm": math.nan}
        gradients = [parts[worker]["gradient"] for worker in workers if parts[worker]["gradient"] is not None]
        if gradients:
            numbers["gradient_norm"] = factor * float(torch.stack(gradients).sum(0).norm()) / len(workers)
        tested = [k for k, worker in enumerate(workers) if parts[worker].get("tested")]
        for name in (*self.metric_names, *(["accuracy"] if self.accuracy_at_workers else [])):
            values = [scales[k] * parts[workers[k]]["metrics"][name] for k in tested]
            numbers[name] = math.fsum(values) / math.fsum(scales[k] for k in tested) if tested else math.nan
        return {**numbers, "answered": float(len(workers)), "share": share}

    def _accuracy(self, x: Tensor, share: float) -> float:
        if self._test_data.absent:
            return math.nan
        with self.net.evaluating(x), seeded(0) if self._test_data.runs_user_code else nullcontext():
            return self._test_data.accuracy(self.net.module, share)

    def evaluate(self, x: Tensor) -> dict[str, float]:
        return self.combine(x, self._parts(x, None))

    def few_samples(self) -> int | None:
        # a gradient is a pass forward and twice as much backward; of a small network most of it is the call itself
        return 3 * max(self.minibatches.sizes) + min(512, int(_CALL * _FLOPS / 4) // len(self._given))

    def costs(self) -> tuple[float, float] | None:
        if self._costs is None:
            shards, rows = self.shards(), self.indices(0, 0)
            self.net.weights.copy_(self._given)
            with self._seeded(0):
                once = flops_of(lambda: self.loss_on(self.net.module, self._batch(shards[0], rows))) / len(rows)
            samples = sum(shard.size for shard in shards)
            grouped = -(-samples // _TOGETHER) if self._samplewise and not self._stochastic else 0
            calls = max(grouped, sum(-(-shard.size // 1024) for shard in shards if not grouped or shard.size > _TOGETHER))
            passes = 3.0 if self.full_gradient else 1.0
            tested = (1.0 if self._metrics else 0.0) * samples
            total = (passes * samples + tested + self._test_data.size) * once
            self._costs = (_CALL + 3.0 * len(rows) * once / _FLOPS, calls * passes * _CALL / 2 + total / _FLOPS)
        return self._costs

    def model(self, x: Tensor) -> nn.Module:
        """The module with these weights, in evaluation mode."""
        return self.net.model(x)

    def state_dict(self, x: Tensor) -> dict[str, Tensor]:
        return self.net.state_dict(x)

    def layout(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return self.net.layout()

    def fixed(self) -> dict[str, Tensor]:
        moving = {name for name, _, _ in self.net.layout()}
        return {name: tensor for name, tensor in self.net.state_dict(self._given).items() if name not in moving}

    def flat(self, state_dict: Mapping[str, Tensor]) -> Tensor:
        return self.net.flat(state_dict)

    def fingerprint(self) -> str:
        hashed = digest(
            repr(self.net.module), name_of(self.loss), self._options, self.seed, self._stochastic, self.full_gradient
        )
        if self._step is not None:
            hashed.update(name_of(self._step).encode())
        with self._seeded(0):  # augmented samples are drawn anew each time
            self._shards.digest(hashed)
            self._test_data.digest(hashed)
            if self._held_out is not None:
                self._held_out.digest(hashed)
        for tensor in self.net.fixed():
            hashed.update(bits(tensor))
        return str(hashed.hexdigest())

    def reseeded(self, seed: int) -> Network:
        """The same data and model with other minibatches."""
        other = copy.copy(self)  # one module and one store of data for both
        other.seed, other.own_seed, other._draws = seed, True, Draws(seed, "stochastic")
        other.minibatches = self.minibatches.named(seed)
        return other

    @property
    def unseeded(self) -> str:
        start = "" if self._make is None else " and initial weights"
        return f"its data are given, so a seed names its minibatches{start} alone"

    @property
    def parallel(self) -> bool:
        return not self._stochastic and not any(shard.runs_user_code for shard in self.shards())

    @property
    def workplace(self) -> object:
        return self.net

    def twin(self) -> Network:
        other = copy.copy(self)
        other.net = self.net.on(self._given.device)
        other.minibatches = self.minibatches.named(self.seed)  # what one thread has ahead is not another's
        return other

    def on(self, device: str, precision: str = "float32") -> Network:
        if (torch.device(device), precision) == (self._given.device, self.precision):
            return self
        other = copy.copy(self)
        other.net, other._given, other.precision = self.net.on(device), self._given.to(device), precision
        other._shards, other._test_data = self._shards.on(device), self._test_data.on(device)
        other._held_out = None if self._held_out is None else self._held_out.on(device)
        return other

    @property
    def batch_key(self) -> Hashable:
        kinds = {shard.kind for shard in self.shards()}
        if not self.parallel or self.minibatches.size is None or len(kinds) > 1 or None in kinds or self.loss is None:
            return OneAtATime
        place = (str(self._given.device), self.precision)
        return self.net.signature(), self.loss, self.minibatches.size, place, kinds.pop()

    def batched(self, problems: Sequence[Problem]) -> BatchedGradients:
        if self.batch_key is OneAtATime:
            return OneAtATime(problems)
        return Stacked([problem for problem in problems if isinstance(problem, Network)])


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


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError("a text is none")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        said = shortened(str(error))
        raise BadInput(
            f"metric {name!r} gave {shown(value)}; expected one number, the mean over the batch ({said})."
        ) from None
