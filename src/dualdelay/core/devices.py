"""Where arithmetic is done, by how many threads, and how precisely."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .errors import BadInput, require_one_of

PRECISIONS = ("float32", "tf32", "bfloat16")


_counting = threading.Lock()


def in_new_thread(function: Callable[[], Any]) -> Any:
    """What a function gives in a thread that torch has not met."""
    given: list[Any] = []
    thread = threading.Thread(target=lambda: given.append(function()))
    thread.start()
    thread.join()
    return given[0]


_LARGEST_PIECE = 31 << 20  # bytes; of larger ones the C library never learns


def keep_freed_memory() -> None:
    """Have the C library keep the memory of vectors that are freed, for those that come next.

    The system would clear each page of it anew. glibc hands back what is free at the end of its memory beyond twice the
    largest piece that it has handed back, and an update of a model of a megabyte frees about that much: so whether it did
    was chance. Here it is shown a large piece, which is never written to.
    """
    torch.empty(_LARGEST_PIECE, dtype=torch.uint8)


def use_threads(count: int) -> None:
    """From now on torch uses so many threads for what this thread computes, and for no other thread's work.

    ``torch.set_num_threads`` alone would also change what threads begin with that torch has not met yet; and a thread that
    it has not met forgets its number at its first computation. So torch meets this thread first, and a new thread
    puts back afterwards what new threads begin with.
    """
    with _counting:
        if torch.get_num_threads() == count:
            return
        usual = in_new_thread(torch.get_num_threads)
        torch.set_num_threads(count)
        in_new_thread(lambda: torch.set_num_threads(usual))


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """While this lasts, torch uses so many threads in this thread, or as many as now; another number gives other bits."""
    with _counting:
        before = torch.get_num_threads()
    use_threads(before if count is None else count)
    try:
        yield
    finally:
        use_threads(before)


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

    By default torch takes convolutions in TF32, whose gradients are off by about 2%. The switches are those of the whole
    process, so runs in several threads must agree on them.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    with _switching:
        if _runs_on_gpu and precision != _runs_on_gpu[-1]:
            raise BadInput(
                f"precision is {precision!r}, but a run in another thread of this process computes in "
                f"{_runs_on_gpu[-1]!r}, and torch has one switch for both; wait for that run, or use another process."
            )
        if not _runs_on_gpu:
            _switches_before[:] = [getattr(place, name) for place, name in _SWITCHES]
            _set(precision == "tf32", precision == "tf32", True, False)
        _runs_on_gpu.append(precision)
    try:
        yield
    finally:
        with _switching:
            _runs_on_gpu.pop()
            if not _runs_on_gpu:
                _set(*_switches_before)


_SWITCHES: Any = (
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "benchmark"),
)
_switching = threading.Lock()
_runs_on_gpu: list[str] = []  # the precision of each run that is under way
_switches_before: list[bool] = []  # the first of them


def _set(*values: bool) -> None:
    for (place, name), value in zip(_SWITCHES, values, strict=True):
        setattr(place, name, value)


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
