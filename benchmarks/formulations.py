"""Ways to take many LeNet gradients at once on a GPU, each at its own weights: microseconds per gradient."""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dualdelay.kernels.dispatch import Kernels
from dualdelay.problems.cifar10 import lenet

BATCH = 64


class Unfolded(TorchFunctionMode):
    """Convolutions as matrix products: vmap makes one batched product of them instead of a grouped convolution."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take over convolutions."""
        if func is functional.conv2d or func is torch.conv2d:
            return self.convolve(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def convolve(x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, *_: Any) -> Tensor:
        out, _, kh, kw = w.shape
        patches = x.unfold(2, kh, 1).unfold(3, kw, 1)  # (B, C, H, W, kh, kw)
        count, channels, high, wide = patches.shape[:4]
        columns = patches.permute(1, 4, 5, 0, 2, 3).reshape(channels * kh * kw, count * high * wide)
        y = (w.reshape(out, -1) @ columns).reshape(out, count, high, wide).permute(1, 0, 2, 3)
        return y if b is None else y + b[:, None, None]


def split(module: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """The flat weights as views by name."""
    parts, offset = {}, 0
    for name, p in module.named_parameters():
        parts[name] = flat[offset : offset + p.numel()].view_as(p)
        offset += p.numel()
    return parts


def formulations(module: nn.Module, low: torch.dtype | None) -> dict[str, Callable[..., Any]]:
    """Each takes weights (g, d), inputs and targets and gives gradients (g, d) and losses (g)."""

    def one(flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        weights = flat if low is None else flat.to(low)
        outputs = functional_call(module, split(module, weights), (inputs if low is None else inputs.to(low),))
        return functional.cross_entropy(outputs.float(), targets)

    def loop(x: Tensor, inputs: Tensor, targets: Tensor) -> Any:
        grads = []
        for k in range(len(x)):
            flat = x[k].detach().requires_grad_()
            grads.append(torch.autograd.grad(one(flat, inputs[k], targets[k]), flat)[0])
        return torch.stack(grads)

    def vmap_grad(x: Tensor, inputs: Tensor, targets: Tensor) -> Any:
        return vmap(grad_and_value(one))(x, inputs, targets)[0]

    def ours() -> TorchFunctionMode:
        return Kernels("float32" if low is None else "bfloat16")

    def outside(mode: Callable[[], TorchFunctionMode]) -> Callable[..., Any]:
        def run(x: Tensor, inputs: Tensor, targets: Tensor) -> Any:
            x = x.detach().requires_grad_()
            with mode():
                losses = vmap(one)(x, inputs, targets)
            return torch.autograd.grad(losses.sum(), x)[0]

        return run

    return {"loop": loop, "vmap(grad)": vmap_grad, "unfold": outside(Unfolded), "ours": outside(ours)}


def graphed(call: Callable[..., Any], *static: Tensor) -> Callable[[], Any]:
    """The call as a CUDA graph over these tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*static)

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def timed(call: Callable[[], Any], seconds: float = 0.4) -> float:
    """Median wall time of a call in seconds, the device being done at its end."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(times) < 200:
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def tf32(on: bool) -> None:
    """Switch the GPU's shorter float32 on or off."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = on


def main() -> None:
    """Print a line for each precision, formulation and number of models."""
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    torch.manual_seed(0)
    module = lenet().cuda()
    data, labels = torch.randn(20_000, 3, 32, 32, device="cuda"), torch.randint(10, (20_000,), device="cuda")
    x0 = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    print("precision, formulation, models: microseconds per gradient, the same in a graph, relative error")
    kinds = (("float32", False, None), ("tf32", True, None), ("bfloat16", True, torch.bfloat16))
    for (kind, short, low), count in itertools.product(kinds, (1, 10, 36, 120, 360)):
        x = x0 + 0.01 * torch.randn(count, len(x0), device="cuda")
        pick = torch.randint(20_000, (count, BATCH), device="cuda")
        inputs, targets = data[pick], labels[pick]
        tf32(False)
        exact = formulations(module, None)["loop"](x[:3], inputs[:3], targets[:3])
        tf32(short)
        for name, call in formulations(module, low).items():
            if name == "loop" and count > 1:
                continue
            error = float((call(x, inputs, targets)[:3] - exact).norm() / exact.norm())
            eager = timed(functools.partial(call, x, inputs, targets)) / count
            replay = timed(graphed(call, x, inputs, targets)) / count
            print(f"{kind:9s} {name:11s} {count:4d}: {eager * 1e6:8.1f} {replay * 1e6:8.1f} {error:.1e}", flush=True)


if __name__ == "__main__":
    main()
