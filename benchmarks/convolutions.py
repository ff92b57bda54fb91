"""LeNet's two convolutions for many models at once, each with its own weights: our kernels against torch's ways.

    python benchmarks/convolutions.py [--variants fma,tf32x3] [--models 1,36] [--eager]

First the errors against float64, then a table of microseconds per model. Each pass is replayed as one captured graph, so
what it costs to launch is left out; with --eager it is left in. Needs a GPU; without one it says so and ends.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, fold
from torch.nn.functional import unfold as columns_of

BATCH = 64
CONVOLUTIONS = {"conv1": (3, 32, 6), "conv2": (6, 14, 16)}  # channels, height and width, outputs; kernels are 5 x 5
OURS = ("fma", "tf32x3", "tf32", "bf16")
VARIANTS = (*OURS, "grouped", "loop", "unfold")
PASSES = ("forward", "x", "weight")
ONE, NONE = (1, 1), (0, 0)
Works = dict[str, Callable[[], Any]]


def tensors(name: str, models: int, variant: str) -> list[Tensor]:
    """Inputs, weights, biases and slopes of the outputs."""
    channels, size, outputs = CONVOLUTIONS[name]
    torch.manual_seed(models)
    shapes = (
        (models, BATCH, channels, size, size),
        (models, outputs, channels, 5, 5),
        (models, outputs),
        (models, BATCH, outputs, size - 4, size - 4),
    )
    dtype = torch.bfloat16 if variant == "bf16" else torch.float32
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def dot_of(variant: str) -> str:
    return "tf32" if variant == "bf16" else variant


def ours(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, dot: str) -> Works:
    """The kernels themselves, as the gradient calls them."""
    from dualdelay.kernels import convolution as c

    slopes = c._Slopes(dy, dy.shape[3:])
    return {
        "forward": lambda: c._correlated(x, w, b, ONE, NONE, dot),
        "x": lambda: c._input_gradients(slopes, w, x.shape[3:], ONE, NONE, dot),
        "weight": lambda: c._weight_gradients(x, slopes, (5, 5), ONE, NONE, dot),
    }


def torchs(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, groups: int) -> Works:
    """One convolution of torch's, perhaps in groups."""

    def backward(of_x: bool) -> Any:
        mask = [of_x, not of_x, not of_x]
        return torch.ops.aten.convolution_backward(dy, x, w, [len(b)], ONE, NONE, ONE, False, NONE, groups, mask)

    return {
        "forward": lambda: conv2d(x, w, b, groups=groups),
        "x": lambda: backward(True),
        "weight": lambda: backward(False),
    }


def grouped(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> Works:
    """What vmap makes of it, without the cost of moving the models next to the channels."""
    x, dy = (t.transpose(0, 1).flatten(1, 2).contiguous() for t in (x, dy))
    return torchs(x, w.flatten(0, 1), b.flatten(), dy, len(w))


def loop(*inputs: Tensor) -> Works:
    """One model after the other."""
    each = [torchs(*model, 1) for model in zip(*inputs, strict=True)]
    return {name: lambda name=name: [works[name]() for works in each] for name in PASSES}


def unfold(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> Works:
    """Columns in memory and batched products; the weights' gradient reads the columns that the forward pass left."""
    models, count, channels, size, _ = x.shape
    flat, slopes = w.flatten(2), dy.flatten(3)

    def columns() -> Tensor:
        return columns_of(x.flatten(0, 1), (5, 5)).view(models, count, channels * 25, -1)

    def across(left: Tensor, right: Tensor) -> Tensor:  # every model's matrix with each of its images
        return torch.bmm(left[:, None].expand(-1, count, -1, -1).reshape(-1, *left.shape[1:]), right.flatten(0, 1))

    kept = columns()
    return {
        "forward": lambda: across(flat, columns()) + b[:, None].expand(-1, count, -1).reshape(-1, b.shape[1], 1),
        "x": lambda: fold(across(flat.transpose(1, 2), slopes), (size, size), (5, 5)),
        "weight": lambda: (
            torch.bmm(slopes.flatten(0, 1), kept.flatten(0, 1).transpose(1, 2)).unflatten(0, (models, count)).sum(1),
            dy.sum((1, 3, 4)),
        ),
    }


def works_of(variant: str, inputs: list[Tensor]) -> Works:
    if variant in OURS:
        return ours(*inputs, dot_of(variant))
    return {"grouped": grouped, "loop": loop, "unfold": unfold}[variant](*inputs)


def errors(name: str, models: int, variant: str) -> tuple[list[float], bool]:
    """Relative errors of a few models' outputs and three gradients, and whether a model alone gives the same bits."""
    from dualdelay.kernels import convolution

    def results(inputs: list[Tensor], slopes: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        y = convolution.conv2d(*leaves, ONE, NONE, dot_of(variant))
        return [y.detach(), *torch.autograd.grad(y, leaves, slopes)]

    *inputs, dy = tensors(name, models, variant)
    found = results(inputs, dy)
    worst, same = [0.0] * 4, True
    for g in sorted({0, models // 3, models // 2, models - 1}):
        exact = [t[g].double().requires_grad_() for t in inputs]
        y = conv2d(*exact)
        wanted = [y.detach(), *torch.autograd.grad(y, exact, dy[g].double())]
        off = [float((a[g] - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
        worst = [max(pair) for pair in zip(worst, off, strict=True)]
        alone = results([t[g : g + 1].clone() for t in inputs], dy[g : g + 1].clone())
        same &= all(torch.equal(a[g : g + 1], b) for a, b in zip(found, alone, strict=True))
    return worst, same


def timed(work: Callable[[], Any], eager: bool, seconds: float = 0.08) -> float:
    """The median time of one call on the GPU, in microseconds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    if not eager:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    work()
    torch.cuda.synchronize()
    marks, until = [], time.perf_counter() + seconds
    while len(marks) < 5 or (time.perf_counter() < until and len(marks) < 100):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        marks.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(marks)


def attempt(what: str, work: Callable[[], Any]) -> Any:
    """The result, or None and a line that says what went wrong."""
    try:
        return work()
    except Exception as error:  # a kernel that fails must not stop the others
        lines = str(error).strip().splitlines() or [""]
        print(f"{what}: {type(error).__name__}: {lines[0][:200]} ... {lines[-1][:300]}", flush=True)
        return None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--variants", default=",".join(VARIANTS))
    options.add_argument("--models", default="1,10,36,120,360")
    options.add_argument("--eager", action="store_true")
    options.add_argument("--no-check", action="store_true")
    asked = options.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU; there is none here")
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    variants, counts = asked.variants.split(","), [int(n) for n in asked.models.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, batch {BATCH}")
    for name in CONVOLUTIONS:
        for variant in () if asked.no_check else [v for v in variants if v in OURS]:
            for n in counts:
                what = f"{name} {variant:8s} {n:4d} models"
                result = attempt(what, lambda name=name, n=n, variant=variant: errors(name, n, variant))
                if result is None:
                    continue
                figures = " ".join(f"{error:8.1e}" for error in result[0])
                print(f"{what}: y, x, weight, bias off by {figures}; alone {'the same' if result[1] else 'DIFFERENT'}")
                torch.cuda.empty_cache()
    table: dict[tuple[str, str, str], dict[int, float]] = {}
    for name in CONVOLUTIONS:
        for variant in variants:
            for n in counts:
                if variant == "loop" and n != 36:
                    continue
                what = f"{name} {variant} {n} models"
                works = attempt(what, lambda name=name, n=n, variant=variant: works_of(variant, tensors(name, n, variant)))
                for part in PASSES if works else ():
                    cost = attempt(f"{what} {part}", lambda works=works, part=part: timed(works[part], asked.eager))
                    if cost is not None:
                        table.setdefault((name, part, variant), {})[n] = cost / n
                works = None
                attempt(what, torch.cuda.empty_cache)
    print(f"\nmicroseconds per model{', launches included' if asked.eager else ''}")
    print(f"{'':24s}" + "".join(f"{n:>10d}" for n in counts))
    for name in CONVOLUTIONS:
        for part in PASSES:
            for variant in variants:
                row = table.get((name, part, variant), {})
                print(
                    f"{name} {part:8s}{variant:10s}"
                    + "".join(f"{row[n]:10.2f}" if n in row else f"{'-':>10s}" for n in counts)
                )


if __name__ == "__main__":
    main()
