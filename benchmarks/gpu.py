"""Simulation on a GPU: microseconds per gradient, everything but evaluation included, against a plain PyTorch loop.

python benchmarks/gpu.py [single | grid | workers | runs | figure1 | profile] [networks [NAME] ...] ...

``networks`` are five that no kernel was written for: a plain loop, one run and a grid of 36 runs of each, and the floors.
``profile`` is of LeNet, or of those of the five that are named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

import dualdelay as dd
from dualdelay.core.devices import using_precision
from dualdelay.problems.cifar10 import lenet
from dualdelay.problems.inspection import count_operations
from dualdelay.problems.splits import dirichlet
from models import UNTUNED, Unevaluated, Untuned

NEVER = 10**9  # evaluation is apart


def data(samples: int = 50_000) -> TensorDataset:
    """Random data of CIFAR-10's shape."""
    torch.manual_seed(0)
    return TensorDataset(torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,)))


def network(whole: TensorDataset, workers: int = 10, alpha: float = 0.1, seed: int = 0, kind: Any = Unevaluated) -> Any:
    """LeNet on a Dirichlet split."""
    rows = dirichlet(whole.tensors[1].numpy(), workers, alpha, seed, minimum=1)
    shards = [Subset(whole, part.tolist()) for part in rows]
    return kind(lenet, cross_entropy, shards, 64, seed=seed, full_gradient=False)


def plain_loop(whole: TensorDataset, count: int = 2000) -> float:
    """Seconds per gradient of a loop as one would write it: sample, forward, backward."""
    module = lenet().cuda()
    parameters = list(module.parameters())
    inputs, targets = (part.cuda() for part in whole.tensors)
    with using_precision("cuda", "float32"):
        for k in range(count + 100):
            if k == 100:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            rows = torch.randint(len(inputs), (64,), device="cuda")
            loss = cross_entropy(module(inputs[rows]), targets[rows])
            torch.autograd.grad(loss, parameters)
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def plain_loop_of(one: Untuned, samples: Sequence[torch.Tensor], count: int = 300) -> float:
    """Seconds per gradient of such a loop for another network."""
    module = one.model().cuda()
    parameters = list(module.parameters())
    inputs, targets = (part.cuda() for part in samples)
    with using_precision("cuda", "float32"):
        for k in range(count + 50):
            if k == 50:
                torch.cuda.synchronize()
                begin = time.perf_counter()
            rows = torch.randint(len(inputs), (one.batch,), device="cuda")
            torch.autograd.grad(one.loss(module(inputs[rows]), targets[rows]), parameters)
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def per_gradient(run: Callable[[int], Any], few: int, many: int) -> tuple[float, float]:
    """Seconds per gradient, from two runs of different length, and what a run costs before its first."""
    run(few)
    times, gradients = [], []
    for updates in (few, many):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        gradients.append(run(updates))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    each = (times[1] - times[0]) / (gradients[1] - gradients[0])
    return each, times[0] - each * gradients[0]


def sweeping(
    problems: Sequence[dd.Problem],
    rates: Sequence[float],
    workers: int = 10,
    precision: str = "float32",
    memory: float | None = None,
) -> Callable[[int], int]:
    """The gradients of a sweep of DuDe over step sizes and splits, as a function of the updates of each run."""

    def run(updates: int) -> int:
        made = dd.sweep(
            {"algorithm": [dd.DuDe(lr=0.01)], "lr": rates, "problem": problems},
            speeds=dd.TruncatedNormalSpeeds(n=workers, std=1.0),
            updates=updates,
            evaluation=dd.Evaluation(every=NEVER),
            compute=dd.Compute("cuda", precision=precision, memory_limit=memory),
        )
        return sum(len(r.trace) for r in made.runs if r is not None)

    return run


def rates(count: int) -> list[float]:
    """So many step sizes."""
    return [0.001 * 1.01**k for k in range(count)]


def main(parts: Sequence[str]) -> None:
    """Print what was asked for."""
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    chosen = [part for part in parts if part in UNTUNED]
    if "networks" in parts:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        floors(chosen or list(UNTUNED))
        networks(chosen or list(UNTUNED))
    if "profile" in parts and chosen:
        for one in (UNTUNED[name] for name in chosen):
            samples = one.data()
            profiled(sweeping([one.problem(samples, seed=seed) for seed in range(3)], rates(12)), 300)
        return
    if not {"single", "grid", "runs", "workers", "figure1", "profile"} & {*parts}:
        return
    whole = data()
    plain = plain_loop(whole)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; plain loop {plain * 1e6:.0f} us per gradient",
        flush=True,
    )

    def show(name: str, each: float, fixed: float) -> None:
        print(f"{name:44s} {each * 1e6:8.1f} us  {plain / each:6.1f} x  (before the first {fixed:.1f} s)", flush=True)

    if "single" in parts:
        problem = network(whole)
        for precision in ("float32", "tf32", "bfloat16"):

            def single(updates: int, precision: str = precision) -> int:
                speeds = dd.TruncatedNormalSpeeds(n=10, std=1.0)
                made = dd.simulate(
                    *(dd.DuDe(lr=0.01), problem, speeds),
                    updates=updates,
                    evaluation=dd.Evaluation(every=NEVER),
                    compute=dd.Compute(device="cuda", precision=precision),
                )
                return len(made.trace)

            show(f"one run, {precision}", *per_gradient(single, 1000, 4000))
    if "grid" in parts:
        problems = [network(whole, alpha=alpha) for alpha in (0.1, 0.5, 1.0)]
        for precision in ("float32", "tf32", "bfloat16"):
            show(
                f"36 runs (12 steps x 3 splits), {precision}",
                *per_gradient(sweeping(problems, rates(12), precision=precision), 200, 800),
            )
    if "runs" in parts:
        for count in (1, 10, 36, 100, 360):
            show(f"{count} runs that share a schedule", *per_gradient(sweeping([network(whole)], rates(count)), 100, 400))
    if "workers" in parts:
        for workers in (10, 100, 1000, 10_000):
            problem = network(whole, workers, alpha=100.0)
            show(
                f"10 runs, {workers} workers",
                *per_gradient(sweeping([problem], rates(10), workers, memory=1.2e11), 300, 900),
            )
    if "figure1" in parts:
        figure1(whole, int(next((part for part in parts if part.isdigit()), 20_000)))
    if "profile" in parts:
        profiled(sweeping([network(whole, alpha=alpha) for alpha in (0.1, 0.5, 1.0)], rates(12)))


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write, each tensor once in each of them; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and look at what it was given and made."""
        result = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(part) if isinstance(t, torch.Tensor)] for part in ((args, kwargs), result))
        places = {t.untyped_storage().data_ptr() for t in given}
        if any(t.untyped_storage().data_ptr() not in places for t in made) or func._schema.is_mutable:
            self.bytes += sum(t.nbytes for t in (*given, *made))
            self.kernels += 1
        return result


def rates_of_the_chip() -> tuple[float, float]:
    """Operations and bytes in a second: those of a large product in float32, and of a large copy."""

    def seconds(work: Callable[[], Any], count: int = 5) -> float:
        work()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    with using_precision("cuda", "float32"):
        matrix = torch.randn(8192, 8192, device="cuda")
        product = seconds(lambda: matrix @ matrix)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * 8192**3 / product, 2 * source.nbytes / seconds(lambda: target.copy_(source))


def floors(names: Sequence[str]) -> None:
    """What a gradient needs at least: operations at the rate of large products, bytes at the rate of a large copy."""
    operations, transfer = rates_of_the_chip()
    print(f"float32 products {operations / 1e12:.0f} TFLOP/s, copies {transfer / 1e12:.1f} TB/s")
    for name in names:
        one = UNTUNED[name]
        module, (inputs, targets) = one.model(), (part[: one.batch] for part in one.data(one.batch))
        flop = 3 * count_operations(lambda one=one, m=module, x=inputs, y=targets: one.loss(m(x), y))
        with Traffic() as traffic:
            torch.autograd.grad(one.loss(module(inputs), targets), list(module.parameters()))
        print(
            f"{name:12s} {flop / 1e9:5.2f} GFLOP: {flop / operations * 1e6:4.0f} us; {traffic.bytes / 1e6:5.0f} MB, each "
            f"of {traffic.kernels} operations by itself: {traffic.bytes / transfer * 1e6:4.0f} us",
            flush=True,
        )


def networks(names: Sequence[str], precision: str = "float32") -> None:
    """A plain loop, one run and a grid of 36 runs of each network, in microseconds per gradient."""
    print(f"{'':12s} {'plain':>8s} {'one run':>9s} {'times':>6s} {'36 runs':>9s} {'times':>6s}")
    for name in names:
        one = UNTUNED[name]
        samples = one.data()
        plain = plain_loop_of(one, samples)
        problems = [one.problem(samples, seed=seed) for seed in range(3)]
        single, _ = per_gradient(sweeping(problems[:1], rates(1), precision=precision), 1000, 4000)
        grid, _ = per_gradient(sweeping(problems, rates(12), precision=precision), 100, 500)
        one_run, many = f"{single * 1e6:9.0f} {plain / single:6.1f}", f"{grid * 1e6:9.0f} {plain / grid:6.1f}"
        print(f"{name:12s} {plain * 1e6:8.0f} {one_run} {many}", flush=True)


def figure1(whole: TensorDataset, updates: int) -> None:
    """The paper's first figure: 7 methods x 4 panels x 3 steps x 3 seeds, at equal simulated time, with 50 evaluations."""
    methods = [
        *(dd.DuDe(lr=0.01), dd.SyncSGD(lr=0.01), dd.VanillaASGD(lr=0.01), dd.UniformASGD(lr=0.01)),
        *(dd.ShuffledASGD(lr=0.01), dd.FedBuff(lr=0.01, buffer=3), dd.MIFA(lr=0.01)),
    ]
    test = (torch.randn(10_000, 3, 32, 32), torch.randint(10, (10_000,)))
    begin, runs, gradients = time.perf_counter(), 0, 0
    for seed in range(3 if updates > 1000 else 1):
        problems = []
        for alpha in (0.1, 0.5):
            rows = dirichlet(whole.tensors[1].numpy(), 10, alpha, seed)
            shards = [Subset(whole, part.tolist()) for part in rows]
            problems.append(dd.Network(lenet, cross_entropy, shards, 64, test=test, seed=seed, full_gradient=False))
        for std in (1.0, 5.0):
            speeds = dd.TruncatedNormalSpeeds(n=10, std=std, seed=seed)
            duration = updates / sum(1 / speeds.job(worker, 0, 0.0, 1) for worker in range(10))
            made = dd.sweep(
                {"algorithm": methods, "lr": [0.001, 0.005, 0.01], "problem": problems},
                speeds=speeds,
                seed=seed,
                time=duration,
                compute=dd.Compute(device="cuda"),
            )
            runs += len(made.runs)
            gradients += sum(len(run.trace) for run in made.runs if run is not None)
            seconds = time.perf_counter() - begin
            print(
                f"seed {seed} std {std:g}: {runs} runs, {gradients:,} gradients, {seconds:.0f} s, failed {made.failed}",
                flush=True,
            )
    each = seconds / gradients * 1e6
    print(f"figure 1 with U = {updates}: {seconds:.0f} s, {each:.1f} us per gradient, evaluation included")


def profiled(run: Callable[[int], int], updates: int = 1000) -> None:
    """Where the time of a sweep goes: kernels on the device, functions on the processor."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity, profile

    run(100)
    with profile(activities=[ProfilerActivity.CUDA]) as made:
        begin = time.perf_counter()
        count = run(updates)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - begin) / count
    kernels = [e for e in made.key_averages() if e.self_device_time_total > 0]
    busy = sum(e.self_device_time_total for e in kernels) / count
    print(f"{wall * 1e6:.1f} us per gradient under the profiler, start included; the device is busy for {busy:.1f}")
    for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:22]:
        print(f"  {e.key[:100]:100s} {e.count:6d} {e.self_device_time_total / count:7.2f} us per gradient")
    processor = cProfile.Profile()
    processor.runcall(run, updates)
    pstats.Stats(processor).sort_stats("tottime").print_stats(22)


if __name__ == "__main__":
    main(sys.argv[1:] or ["single", "grid", "runs", "workers"])
