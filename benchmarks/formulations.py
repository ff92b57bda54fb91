"""Ways to take many LeNet gradients at once on a GPU, each at its own weights: microseconds per gradient."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

BATCH = 64


def lenet() -> nn.Sequential:
    """The two-convolution network of 62,006 weights."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Unfolded(TorchFunctionMode):
    """Convolutions as matrix products: vmap makes one batched product of them instead of a grouped convolution."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.conv2d or func is torch.conv2d:
            return self.convolve(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def convolve(x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, *_: Any) -> Tensor:
        out, _, kh, kw = w.shape
        patches = F.pad(x, (0, 0, 0, 0)).unfold(2, kh, 1).unfold(3, kw, 1)  # (B, C, H, W, kh, kw)
        count, channels, high, wide = patches.shape[:4]
        columns = patches.permute(1, 4, 5, 0, 2, 3).reshape(channels * kh * kw, count * high * wide)
        y = (w.reshape(out, -1) @ columns).reshape(out, count, high, wide).permute(1, 0, 2, 3)
        return y if b is None else y + b[:, None, None]


class Plain(TorchFunctionMode):
    """Nothing changed."""


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
        return F.cross_entropy(outputs.float(), targets)

    def loop(x: Tensor, inputs: Tensor, targets: Tensor) -> Any:
        grads = []
        for k in range(len(x)):
            flat = x[k].detach().requires_grad_()
            grads.append(torch.autograd.grad(one(flat, inputs[k], targets[k]), flat)[0])
        return torch.stack(grads)

    def vmap_grad(x: Tensor, inputs: Tensor, targets: Tensor) -> Any:
        return vmap(grad_and_value(one))(x, inputs, targets)[0]

    def outside(mode: type[TorchFunctionMode]) -> Callable[..., Any]:
        def run(x: Tensor, inputs: Tensor, targets: Tensor) -> Any:
            x = x.detach().requires_grad_()
            with mode():
                losses = vmap(one)(x, inputs, targets)
            return torch.autograd.grad(losses.sum(), x)[0]

        return run

    return {"loop": loop, "vmap(grad)": vmap_grad, "grad(vmap)": outside(Plain), "unfold": outside(Unfolded)}


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


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    torch.manual_seed(0)
    module = lenet().cuda()
    data, labels = torch.randn(20_000, 3, 32, 32, device="cuda"), torch.randint(10, (20_000,), device="cuda")
    x0 = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    rows = []
    for kind, tf32, low in (("float32", False, None), ("tf32", True, None), ("bfloat16", True, torch.bfloat16)):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        for name, call in formulations(module, low).items():
            for g in (1, 10, 36, 120, 360):
                if name == "loop" and g > 10:
                    continue
                x = x0 + 0.01 * torch.randn(g, len(x0), device="cuda")
                pick = torch.randint(20_000, (g, BATCH), device="cuda")
                inputs, targets = data[pick], labels[pick]
                try:
                    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
                    exact = formulations(module, None)["loop"](x[:3], inputs[:3], targets[:3])
                    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
                    error = float((call(x, inputs, targets)[:3] - exact).norm() / exact.norm())
                    eager = timed(lambda: call(x, inputs, targets)) / g  # noqa: B023
                    replay = float("nan") if name == "loop" and g > 1 else timed(graphed(call, x, inputs, targets)) / g
                    rows.append((kind, name, g, eager * 1e6, replay * 1e6, error))
                    print(kind, name, g, f"{eager * 1e6:.1f} {replay * 1e6:.1f} {error:.1e}", flush=True)
                except Exception as e:  # noqa: BLE001
                    print(kind, name, g, "failed:", str(e)[:200], flush=True)


if __name__ == "__main__":
    main()
