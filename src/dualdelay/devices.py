"""Where arithmetic is done, and how precisely."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .errors import BadInput, require_one_of

PRECISIONS = ("float32", "tf32", "bfloat16")


def require_device(device: str, precision: str) -> None:
    """Refuse a device that is not there, or a precision that it does not have."""
    require_one_of("precision", precision, PRECISIONS)
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise BadInput(f"device is {device!r}; expected 'cpu' or 'cuda'.") from None
    if kind not in ("cpu", "cuda"):
        raise BadInput(f"device is {device!r}; expected 'cpu' or 'cuda'.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput("device is 'cuda', but torch sees no GPU here; leave it out, or install torch with CUDA.")
    if kind == "cpu" and precision == "tf32":
        raise BadInput("precision 'tf32' is a mode of GPUs; on the processor use 'float32' or 'bfloat16'.")


def batches(device: str, batch: bool | None) -> bool:
    """Whether many gradients are taken in one call: where it was not said, on a GPU."""
    return torch.device(device).type == "cuda" if batch is None else batch


@contextmanager
def using_precision(device: str, precision: str) -> Iterator[None]:
    """Torch computes on a GPU as precisely as said, and the same each time; on the processor it does anyway.

    By default torch takes convolutions in TF32, whose gradients are off by about 2%.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    before = (cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark)
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def lower(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """While this lasts, matrix products and convolutions are taken in bfloat16 if that is the precision."""
    if precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def placed(value: Any, device: torch.device) -> Any:
    """The same plain values with their tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(placed(item, device) for item in value)
    if isinstance(value, dict):
        return {key: placed(item, device) for key, item in value.items()}
    return value


def free_memory(device: torch.device) -> int:
    """The bytes that are free on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
