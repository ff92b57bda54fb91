"""The shards of a server as Ray actors, and how workers pull models from them and push messages to them.

On one machine the head and the workers reach a shard by a line of their own, and vectors are in memory that they share. To
other machines everything goes by Ray. The head then sends what happened to the first shard, every shard passes it on to two
others, and so the head's work is the same for any number of them. Vectors travel in pieces: what fits into one stays in
Ray's store as it came, what is larger is put together in the shard's own memory: the store holds a few pieces at a time.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..core import Memory
from ..core.compression import Packed, size_of, unpacked
from ..core.devices import keep_freed_memory, use_threads
from ..core.errors import DualDelayError, RunFailed
from ..core.state import is_finite
from ..core.tracebacks import cause_of, told
from ..core.work import Sent, expected_parts
from ..engine.half import METHOD
from ..engine.shard import Call, MessageName, Shard, ShardPlan, Store, cut_message, named, put_together, shard_like
from ..engine.sharded import ShardLost
from ..engine.slices import STAND_IN, Elsewhere, stand_ins, vectors_of
from .local_line import LineLost, LocalLine, ask_all, listen, tell_all
from .messages import INLINE, Array, Pushed, Reply, as_arrays, as_tensors, size_of_kept
from .shared_memory import PAGE, Lent, Name, Overlay, Reader, Segments, name_of

SHARD = "dualdelay shard "  # begins the names of our actors
UNTRACED = {"enable_task_events": False}
"""Of an actor: Ray keeps no record of its calls, which at the server would grow to 150 MB."""
NOT_FINITE = "values that are not finite"
_NOTICED = 10.0  # seconds in which Ray notices that a process is gone
_HEAD = -1  # in place of a worker's number
_CHILDREN = 2  # shards that each one passes on to what the head says
_IN_ANSWER = 4 << 20  # bytes of a slice up to which whoever pulls it gets it in the answer: no object to ask its owner for


class Files(Protocol):
    """How shards and workers write checkpoints: each its own file, whole or not at all."""

    def write(self, folder: Path, moment: int, who: str, content: Mapping[str, Any]) -> str:
        """Write what somebody has saved, ``who`` is a number and a kind; returns the file's name."""

    def read(self, path: Path) -> dict[str, Any]:
        """What was written; refuses what is damaged."""

    def again(self, path: Path, moment: int) -> Path:
        """The same for another moment."""


class AtWorker(NamedTuple):
    """Where a worker keeps something: in its process, as of the last reply that the server has accepted."""

    actor: Any
    accepted: int


class _Lent:
    """A vector that a shard lends: in memory that it shares, in Ray's store, or in its own memory alone."""

    def __init__(self, array: Array | None, shared: Lent | None, stored: Any) -> None:
        self._array, self._shared, self._stored = array, shared, stored

    @property
    def array(self) -> Array:
        """Its numbers."""
        import ray

        if self._array is not None:
            return self._array
        array: Array = self._shared.array if self._shared is not None else ray.get(self._stored)
        return array

    @property
    def name(self) -> Name | None:
        """By what name somebody on this machine finds it, if it is shared."""
        return None if self._shared is None else self._shared.name

    def answer(self, piece: int) -> Any:
        """For somebody who does not share it: its numbers, their place in Ray's store, or how many there are."""
        import ray

        if self._stored is not None:
            return self._stored
        if self.array.nbytes > piece:
            return len(self.array)
        if self.array.nbytes <= _IN_ANSWER:
            return self.array if self._shared is None else np.array(self.array)  # it may be dropped before it is sent
        self._stored = ray.put(self.array)
        return self._stored


class _SharedRoom:
    """Shared memory that weights are put to part by part."""

    def __init__(self, blank: Lent) -> None:
        self._blank, self._weights = blank, torch.from_numpy(blank.blank())

    def part(self, start: int, stop: int) -> Tensor:
        """The memory of some of them."""
        return self._weights[start:stop]

    def place(self) -> dict[str, _Lent]:
        """All are there."""
        self._blank.finish()
        return {"": _Lent(None, self._blank, None)}


class _Lending(Store):
    """Models where workers reach them: in shared memory if some worker is on this machine.

    Otherwise in Ray's store; small ones, and those that are larger than a piece, in the shard's own memory.
    """

    def __init__(self, length: int, piece: int, files: Files) -> None:
        self._length, self._piece, self._files = length, piece, files
        self.segments: Segments | None = None  # from when a worker has come that shares memory

    def copies(self, x: Tensor) -> bool:
        return self.segments is not None or self._is_stored(x.nbytes)

    def put(self, sent: Sent) -> dict[str, _Lent]:
        return {name: self._put(array) for name, array in _arrays(sent)}

    def _put(self, array: Array) -> _Lent:
        import ray

        if self.segments is not None:
            shared = self.segments.lend(array)
            return _Lent(np.array(array) if shared is None else None, shared, None)
        stored = self._is_stored(array.nbytes)
        return _Lent(None, None, ray.put(array)) if stored else _Lent(array, None, None)

    def _is_stored(self, size: int) -> bool:
        return _IN_ANSWER < size <= self._piece

    def room(self, x: Tensor) -> _SharedRoom | None:
        array: Array = as_arrays(x)
        blank = None if self.segments is None else self.segments.blank(array.dtype, array.shape)
        return None if blank is None else _SharedRoom(blank)

    def get(self, place: dict[str, _Lent]) -> Sent:
        parts = {name: as_tensors(lent.array) for name, lent in place.items()}
        return parts[""] if parts.keys() == {""} else parts

    def memory(self, place: AtWorker | Path, start: int, stop: int) -> dict[str, Any]:
        if isinstance(place, Path):
            vectors = vectors_of(self._files.read(place)[METHOD], self._length)
            return {name: vector[..., start:stop] for name, vector in vectors.items()}
        ask, step = place.actor.kept_slice.options(concurrency_group="ask"), max(1, self._piece // 8)
        pieces = [
            as_tensors(_got([ask.remote(place.accepted, first, min(first + step, stop))])[0])
            for first in range(start, stop, step)
        ]
        return {name: torch.cat([piece[name] for piece in pieces], -1) for name in pieces[0]}


def _arrays(sent: Sent) -> Iterator[tuple[str, Array]]:
    return iter(named(as_arrays(sent)).items())


def why_not_started(error: str) -> str:
    """Why an actor did not come to be, from Ray's explanation of its death; empty if it died later."""
    lines = re.sub(r"\x1b\[\d+m", "", error).strip().splitlines()
    if "creation task" not in lines[0]:
        return ""
    places = "it looks for modules in the folder of your program, and among the packages that are installed on its machine"
    return f"{lines[-1]}; {places}" if lines[-1].startswith("ModuleNotFoundError") else lines[-1]


class ShardActor:
    """A shard in a process of its own. It does one thing at a time, and what waits for something else lets others go on."""

    _number = -1  # until what it is to work with could be read: Ray asks for its name even then

    def __init__(self, plan: ShardPlan, number: int, threads: int, piece: int, files: Files) -> None:
        use_threads(threads)
        keep_freed_memory()
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is not written to
        self._plan, self._number, self._piece, self._files = plan, number, piece, files
        start, stop = plan.slices.places[number]
        self._start = torch.empty(stop - start, dtype=plan.dtype)
        self._shard: Shard | None = None
        self._children: list[Any] = []
        self._done = 0  # batches of what the head said
        self._turn = asyncio.Condition()
        self._aside = ThreadPoolExecutor(1, initializer=use_threads, initargs=(threads,))  # for what waits for workers
        self._failure = ""
        self._buffers: dict[tuple[int, MessageName], dict[str, Tensor]] = {}  # messages of which pieces have come
        self._lending = _Lending(plan.slices.length, piece, files)
        self._near: dict[int, Reader] = {}  # workers that share memory with this process, and how their messages are read
        self._listening: tuple[str, Any] | None = None  # by what address they ask, from when one has come

    def __repr__(self) -> str:
        return f"{SHARD}{self._number}"

    @property
    def shard(self) -> Shard:
        """The shard, once its weights have come."""
        assert self._shard is not None
        return self._shard

    async def begin(self, children: Sequence[Any]) -> tuple[str, int]:
        """All weights have come; what the head says is passed on to these. Returns its node and its process."""
        import ray

        self._children = list(children)
        self._shard = self._plan.shard(self._number, self._start, self._lending)
        self._start = torch.empty(0)
        return ray.get_runtime_context().get_node_id(), os.getpid()

    async def take_weights(self, start: int, piece: Array) -> None:
        """Some of the initial weights."""
        self._start[start : start + len(piece)] = torch.from_numpy(piece)

    async def stay(self) -> None:
        """Never return; raise if something fails here."""
        async with self._turn:
            await self._turn.wait_for(lambda: bool(self._failure))
        raise RunFailed(self._failure)

    async def tell(self, number: int, calls: Sequence[Call]) -> None:
        """Do what the head says, after as many batches as the number says, and pass it on."""
        for child in self._children:
            child.tell.remote(number, calls)
        await self._tell_here(number, calls)

    async def _tell_here(self, number: int, calls: Sequence[Call]) -> None:
        await self._after(number)
        if not self._failure:
            try:
                for name, args in calls:
                    if name == "step":
                        for _ in self.shard.step_in_turns(*args):
                            await asyncio.sleep(0)  # a worker that waits for an answer has it before the step is over
                    else:
                        getattr(self.shard, name)(*args)
                    if name == "leave" and args[0] in self._near:  # its process may be gone, or may have come meanwhile
                        self._near[args[0]].let_go()
            except Exception as error:  # a user's method may raise anything
                self._failure = told(error)
        async with self._turn:
            self._done += 1
            self._turn.notify_all()

    async def ask(self, number: int, name: str, args: Sequence[Any]) -> Any:
        """What the shard answers, after as many batches as the number says."""
        await self._after(number)
        self._require_whole()
        answer = asyncio.get_running_loop().run_in_executor(self._aside, partial(getattr(self.shard, name), *args))
        return as_arrays(await answer)

    async def lend_memory(self, number: int, key: int, name: str, args: Sequence[Any]) -> None:
        """Lend what the shard answers, which is what a worker keeps or is to keep."""
        self.shard.lend_memory(key, as_tensors(await self.ask(number, name, args)))

    async def _after(self, number: int) -> None:
        if self._done < number:
            async with self._turn:
                await self._turn.wait_for(lambda: self._done >= number)

    def _require_whole(self) -> None:
        """Refuse to say or save anything after a step that has failed half way."""
        if self._failure:
            raise RunFailed(f"shard {self._number} of the server failed: {cause_of(self._failure)}")

    # --- checkpoints ---

    async def save(self, number: int, folder: Path, moment: int) -> str:
        """Write a checkpoint; returns the file's name."""
        await self._after(number)
        self._require_whole()
        return self._files.write(folder, moment, f"{self._number}.shard", self.shard.save())

    async def load(self, content: Mapping[str, Any], pieces: Sequence[Any]) -> None:
        """Continue from a checkpoint: what its head saved, and what its shards did, or the files of that."""
        start, stop = self._plan.slices.places[self._number]
        read = []
        for first, end, saved in pieces:
            if first < stop and start < end:
                read.append((first, end, self._files.read(saved) if isinstance(saved, Path) else saved))
        like = shard_like(content, read[0][2]["models"], read[0][1] - read[0][0])
        self.shard.load(put_together(read, like, start, stop))

    # --- workers ---

    async def meet(self, worker: int, probe: Name) -> tuple[Name | None, str] | None:
        """A worker's process is new, or that of the head. If this one reaches what it shares, it is near.

        Then it is told by what name it finds out whether it reaches this one, and by what address it asks from now on.
        """
        self._near.pop(worker, None)
        if not (reader := Reader()).reaches(probe):
            return None
        self._near[worker] = reader
        self._lending.segments = self._lending.segments or Segments()
        self._listening = self._listening or await listen(
            {"pull": self._pull_near, "push": self._push_near, "tell": self._tell_here}
        )
        return self._lending.segments.probe(), self._listening[0]

    async def _pull_near(self, key: int) -> dict[str, Name | None] | None:
        """The names of what is lent, if it is shared."""
        place = await self._lent(key)
        return None if place is None else {name: lent.name for name, lent in place.items()}

    async def _push_near(self, worker: int, name: Sequence[int], parts: Mapping[str, Sequence[Any]]) -> None:
        await self.push(worker, (name[0], name[1]), {part: name_of(value) for part, value in parts.items()})

    async def pull(self, key: int) -> dict[str, Any] | None:
        """A model that is lent, as soon as it is, by name: its numbers, their place in Ray's store, or how many there are.

        None if it was dropped: whoever asks for it still was told to do something else.
        """
        place = await self._lent(key)
        return None if place is None else {name: lent.answer(self._piece) for name, lent in place.items()}

    async def _lent(self, key: int) -> dict[str, _Lent] | None:
        if not self.shard.is_known(key):
            async with self._turn:
                await self._turn.wait_for(lambda: self.shard.is_known(key))
        place: dict[str, _Lent] | None = self.shard.lent(key)
        return place

    async def piece(self, key: int, name: str, start: int, stop: int) -> Array | None:
        """Some numbers of a model that is lent; None if it was dropped."""
        place = self.shard.lent(key)
        return None if place is None else np.array(place[name].array[start:stop])

    async def weights(self, number: int, start: int, stop: int) -> Array:
        """Some of the current weights, after as many batches as the number says."""
        await self._after(number)
        self._require_whole()
        array: Array = as_arrays(self.shard.state.weights[start:stop])
        return array

    async def push(self, worker: int, name: MessageName, parts: Mapping[str, Any]) -> None:
        """A worker's message, or the last of it; all its numbers are finite."""
        tensors = {part: self._tensor(worker, value) for part, value in parts.items()}
        whole = {**self._buffers.get((worker, name), {}), **tensors}
        for key in [key for key in self._buffers if key[0] == worker and key[1] <= name]:  # also what a dead process began
            del self._buffers[key]
        self.shard.push(worker, name, whole)

    def _tensor(self, worker: int, value: Any) -> Tensor:
        """A part of a worker's message, however it came."""
        if isinstance(value, Packed):
            return unpacked(value)
        tensor: Tensor = as_tensors(self._near[worker].view(value) if isinstance(value, Name) else value)
        return tensor

    async def push_piece(self, worker: int, name: MessageName, part: str, length: int, start: int, piece: Array) -> None:
        """Some numbers of a worker's message."""
        buffers = self._buffers.setdefault((worker, name), {})
        if part not in buffers:
            buffers[part] = torch.empty(length, dtype=torch.from_numpy(piece).dtype)
        buffers[part][start : start + len(piece)] = torch.from_numpy(piece)


class NotThere(Exception):
    """A shard's process is gone, or a model that was dropped is asked for."""


def _got(calls: Sequence[Any]) -> list[Any]:
    """What calls of shards have come to."""
    import ray

    try:
        answers = list(ray.get(list(calls)))
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
        raise NotThere from error
    return answers


def _stored(places: Sequence[Any]) -> list[Array]:
    """Arrays, as they came or from Ray's store."""
    fetched = iter(_got([place for place in places if not isinstance(place, np.ndarray)]))
    return [place if isinstance(place, np.ndarray) else next(fetched) for place in places]


def _models(calls: Sequence[Any]) -> list[Any]:
    """What shards have of a model."""
    answers = _got(calls)
    if any(answer is None for answer in answers):
        raise NotThere
    return answers


class ShardLine:
    """What a worker has of the shards: it pulls models and pushes messages, slice by slice."""

    def __init__(self, plan: ShardPlan, shards: Sequence[Any], piece: int, files: Files) -> None:
        self._shards, self._slices, self._piece = list(shards), plan.slices, piece
        self._models, self._messages = plan.model_vectors(), plan.message_vectors()
        shapes = plan.algorithm.shapes(torch.zeros(STAND_IN, dtype=plan.dtype))
        length = plan.slices.length
        self._shapes = {n: (*shape[:-1], length) if self._messages[n] else tuple(shape) for n, shape in shapes.items()}
        self._kind = np.dtype(str(plan.dtype).removeprefix("torch."))
        self._buffers: dict[str, Array] = {}
        self._overlay: Overlay | None = None  # in which the slices of a model lie that is not copied
        self._laid: list[Name] = []  # those slices
        self._files = files
        self._near: dict[int, tuple[Reader, LocalLine]] = {}  # shards on this machine: how they are read and asked

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_near": {}}  # whoever gets this has to find out by itself who is near

    def meet(self, worker: int) -> None:
        """Find out which shards are on this machine, for a worker whose process is new, or for the head."""
        self._lock = threading.Lock()  # of the lines: a worker's threads ask in turns
        self._segments = Segments()  # what is shared with the shards
        probe = self._segments.probe()
        if probe is None:
            return
        for k, found in enumerate(_got([shard.meet.remote(worker, probe) for shard in self._shards])):
            if found is not None and found[0] is not None and (reader := Reader()).reaches(found[0]):
                with suppress(LineLost):
                    self._near[k] = (reader, LocalLine(found[1]))
        self._segments = Segments(readers=len(self._near))

    def pull(self, key: int, fresh: bool = False) -> Any:
        """A model in memory of this process, which the next one overwrites unless a ``fresh`` one is made.

        What is made of it counts if it ``is_there`` afterwards.
        """
        places = self._lent(key)
        if not fresh:  # others are asked for beside a job, whose model stays
            self._laid = []
            if (model := self._side_by_side(places)) is not None:
                return model
        whole = {}
        for name in places[0]:
            if not self._models.get(name, True):  # what is evaluated is the weights alone, without a name
                first = places[0][name]
                whole[name] = self._read(0, first) if isinstance(first, Name) else np.array(_stored([first])[0])
                continue
            whole[name] = self._fetched(key, name, [p[name] for p in places], None if fresh else self._buffers.get(name))
            if not fresh:
                self._buffers[name] = whole[name]
        return whole[""] if whole.keys() == {""} else whole

    @property
    def is_there(self) -> bool:
        """Whether the shards still lend the model that was pulled last, or a copy of it was made."""
        return all(self._near[k][0].has(name) for k, name in enumerate(self._laid))

    def _side_by_side(self, places: Sequence[Any]) -> Array | None:
        """A model whose slices all are in shared memory, without a copy; None if it has to be put together otherwise."""
        names = [place.get("") for place in places]
        if not all(isinstance(name, Name) and len(name.shape) == 1 for name in names):
            return None
        kind = np.dtype(names[0].dtype)
        if any(kind.itemsize * start % PAGE for start, _ in self._slices.places):
            return None
        if self._overlay is None or self._overlay.array.dtype != kind:
            self._overlay = Overlay(kind, self._slices.length)
        for k, (name, (start, _)) in enumerate(zip(names, self._slices.places, strict=True)):
            if not self._near[k][0].lay(name, self._overlay, kind.itemsize * start):
                return None
        self._laid = names
        return self._overlay.array

    def _lent(self, key: int) -> list[Any]:
        """What shards lend under that key, each its slice."""
        near = dict(zip(self._near, self._ask("pull", [[key]] * len(self._near)), strict=True))
        if None in near.values():
            raise NotThere
        named_parts = {k: parts for k, parts in near.items() if None not in parts.values()}  # others were lent before
        calls = [shard.pull.remote(key) for k, shard in enumerate(self._shards) if k not in named_parts]
        far = iter(_models(calls))
        return [
            {name: name_of(values) for name, values in named_parts[k].items()} if k in named_parts else next(far)
            for k in range(len(self._shards))
        ]

    def tell(self, *args: Any) -> bool:
        """Tell the shards something, if all are on this machine and it is plain; whether that was so."""
        lines = [line for _, line in self._near.values()]
        return len(lines) == len(self._shards) and tell_all(lines, "tell", *args)

    def close(self) -> None:
        """Ask nothing any more."""
        for _, line in self._near.values():
            line.close()
        self._near.clear()

    def _ask(self, name: str, args: Sequence[Sequence[Any]]) -> list[Any]:
        """What the shards on this machine answer, each to its own question."""
        if not self._near:
            return []
        try:
            with self._lock:
                return ask_all([line for _, line in self._near.values()], name, args)
        except LineLost as error:
            raise NotThere from error

    def _read(self, shard: int, name: Name, out: Array | None = None) -> Array:
        """A copy of what a shard shares, in ``out`` if that is given."""
        array = self._near[shard][0].copy(name, out)
        if array is None:
            raise NotThere
        return array

    def _fetched(self, key: int, name: str, places: Sequence[Any], out: Array | None) -> Array:
        """A vector that is lent, put together in ``out``, or in new memory."""
        bounds = self._slices.places
        shared = [(k, place) for k, place in enumerate(places) if isinstance(place, Name)]
        for k, place in shared:
            out = np.empty((*place.shape[:-1], self._slices.length), place.dtype) if out is None else out
            target = out[..., slice(*bounds[k])]
            read = self._read(k, place, target)
            if read is not target:  # it has another shape or type: numpy says so
                np.copyto(target, read, casting="no")
        for start, array in self._parts(key, name, places):
            out = np.empty((*array.shape[:-1], self._slices.length), array.dtype) if out is None else out
            np.copyto(out[..., start : start + array.shape[-1]], array)
        assert out is not None
        return out

    def _parts(self, key: int, name: str, places: Sequence[Any]) -> Iterator[tuple[int, Array]]:
        """The parts of a vector that come by Ray, and where they begin: slices, and pieces of those that are too large."""
        bounds, step = self._slices.places, max(1, self._piece // 8)
        whole = [k for k, place in enumerate(places) if not isinstance(place, (int, Name))]
        for k, array in zip(whole, _stored([places[k] for k in whole]), strict=True):
            yield bounds[k][0], array
        cut = [k for k, place in enumerate(places) if isinstance(place, int)]
        for first in range(0, max((places[k] for k in cut), default=0), step):
            asked = [k for k in cut if first < places[k]]
            calls = [self._shards[k].piece.remote(key, name, first, min(first + step, places[k])) for k in asked]
            for k, array in zip(asked, _models(calls), strict=True):
                yield bounds[k][0] + first, array

    def memory(self, held: Any) -> Any:
        """What this process is to keep, from where it is."""
        places = {part: few.place for part, few in (held or {}).items() if isinstance(few, Elsewhere)}
        if not places:
            return held
        (place,) = {id(place): place for place in places.values()}.values()  # all parts are in one
        if isinstance(place, Path):
            return self._files.read(place)
        lent = self._lent(place)
        vectors = {name: self._fetched(place, name, [part[name] for part in lent], None) for name in lent[0]}
        return {METHOD: {**held[METHOD], **vectors}}

    def few(self, kept: Any) -> tuple[dict[str, Any], int] | None:
        """What this process keeps, with stand-ins for the method's vectors and without the rest, and its bytes."""
        if kept is None:
            return None
        of = {part: stand_ins(memory, self._slices.length) if part == METHOD else {} for part, memory in kept.items()}
        return as_arrays(of), size_of_kept(kept)

    def cut(self, kept: Any, start: int, stop: int) -> dict[str, Array]:
        """Some numbers of the vectors that this process keeps for the method."""
        vectors = vectors_of(kept[METHOD], self._slices.length)
        return {name: as_arrays(vector[..., start:stop]) for name, vector in vectors.items()}

    def write(self, kept: Any, worker: int, folder: Path, moment: int) -> str | None:
        """Write what this process keeps for a checkpoint; returns the file's name."""
        return None if kept is None else self._files.write(folder, moment, f"{worker}.kept", kept)

    def push(self, worker: int, reply: Reply) -> Reply:
        """Send a message to the shards; the reply that goes to the head has stand-ins for its vectors."""
        message: Any = reply.value
        size, fault = size_of(as_tensors(message)), self._fault(message)
        alone = not isinstance(message, Mapping)
        few = {
            name: np.zeros(STAND_IN, self._kind) if alone or self._messages.get(name) else part
            for name, part in named(message).items()
        }
        if not fault:
            cut = [cut_message(message, self._messages, *place) for place in self._slices.places]
            fault = self._share(message, cut)
            if not fault:
                self._send(worker, reply, message, cut)
        return reply._replace(value=few[""] if alone else few, pushed=Pushed(size, fault))

    def _fault(self, message: Any) -> str:
        """What is wrong with the form of a message, in words, as the fold says it."""
        alone = not isinstance(message, Mapping)
        if alone and len(self._shapes) > 1:
            return f"one tensor without a name; expected {expected_parts(self._shapes)}"
        parts = {next(iter(self._shapes)): message} if alone else message
        if parts.keys() != self._shapes.keys():
            return f"the tensors {', '.join(parts) or 'none'}; expected {expected_parts(self._shapes)}"
        for name, part in parts.items():
            of = "" if alone else f" for {name!r}"
            shape = (part.length,) if isinstance(part, Packed) else part.shape
            kind = (part.parts[1] if isinstance(part, Packed) else part).dtype
            if tuple(shape) != self._shapes[name]:
                return f"shape {tuple(shape)}{of}, expected {self._shapes[name]}"
            if kind != self._kind:
                return f"numbers of type torch.{kind}{of}, expected torch.{self._kind}"
        return ""

    def _share(self, message: Any, cut: Sequence[dict[str, Any]]) -> str:
        """Put large vectors where the shards on this machine can read them, which are then sent the names alone.

        What is wrong with the numbers of the message, in words, comes back; then nobody is going to read it.
        """
        is_fine, names = True, list[Name]()

        def look(part: Array) -> None:
            nonlocal is_fine
            is_fine = is_fine and is_finite(torch.from_numpy(part))

        for part, vector in named(message).items():
            shared = None
            if self._near and isinstance(vector, np.ndarray) and vector.nbytes > INLINE:
                shared = self._segments.put(vector, look)
            if shared is None:
                look(as_arrays(unpacked(vector)) if isinstance(vector, Packed) else vector)
                continue
            names.append(shared)
            whole = (0, None) if isinstance(message, Mapping) and not self._messages[part] else None
            for reader, k in enumerate(self._near):
                start, stop = whole or self._slices.places[k]
                cut[k][part] = shared._replace(start=start, stop=stop, reader=reader)
        for shared in () if is_fine else names:
            self._segments.take_back(shared)
        return "" if is_fine else NOT_FINITE

    def _send(self, worker: int, reply: Reply, message: Any, cut: list[dict[str, Any]]) -> None:
        name = (reply.request.incarnation, reply.request.sequence)
        for part in named(message):
            vectors = {k: p[part] for k, p in enumerate(cut) if isinstance(p[part], np.ndarray)}
            if any(vector.nbytes > self._piece for vector in vectors.values()):
                self._send_pieces(worker, name, part, vectors)
                for k in vectors:
                    del cut[k][part]
        near = [k for k in self._near if all(isinstance(value, Name) for value in cut[k].values())]
        if len(near) < len(self._near):  # something small is among it, which travels in a call of Ray's
            near = []
        calls = [shard.push.remote(worker, name, cut[k]) for k, shard in enumerate(self._shards) if k not in near]
        if near:
            self._ask("push", [[worker, name, cut[k]] for k in near])
        _got(calls)

    def _send_pieces(self, worker: int, name: MessageName, part: str, vectors: Mapping[int, Array]) -> None:
        """Send slices of a vector that are too large to be sent at once."""
        step = max(1, self._piece // next(iter(vectors.values())).itemsize)
        for start in range(0, max(map(len, vectors.values())), step):
            calls = [
                self._shards[k].push_piece.remote(worker, name, part, len(vector), start, vector[start : start + step])
                for k, vector in vectors.items()
                if start < len(vector)
            ]
            _got(calls)


class LentModel:
    """A model that the shards have lent; it travels as its key, and is released when nobody here refers to it."""

    def __init__(self, key: int, release: Callable[[int], None]) -> None:
        self.key = key
        weakref.finalize(self, release, key)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (self.key,)


class RayShards:
    """All shards of a run, as its head reaches them."""

    def __init__(
        self, ray: Any, plan: ShardPlan, x: Tensor, threads: int, piece: int, files: Files, share: bool = True
    ) -> None:
        self._ray, self._plan, self._piece, self._files = ray, plan, piece, files
        self._keys = 0  # of models lent so far
        self._lent: weakref.WeakValueDictionary[int, LentModel] = weakref.WeakValueDictionary()
        claims = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        make = ray.remote(**claims, **UNTRACED)(ShardActor)
        shared = ray.put(plan)
        self.actors = [make.remote(shared, k, threads, piece, files) for k in range(plan.slices.count)]
        self._waiting: list[Call] = []  # what is to be told and is not on its way
        self._released: list[int] = []  # models that nobody needs any more
        self._sent = 0  # batches
        self.places: list[tuple[str, int]] = []
        """The node and the process of each shard."""
        self._lives: dict[Any, int] = {}  # calls that end with a shard
        self._hand_out(x)
        count = _CHILDREN
        children = [self.actors[count * k + 1 : count * k + 1 + count] for k in range(len(self.actors))]
        begun = [actor.begin.remote(those) for actor, those in zip(self.actors, children, strict=True)]
        self.places = self._answers(begun)
        self._lives = {actor.stay.remote(): k for k, actor in enumerate(self.actors)}
        self._line = self.line()
        if share:
            self._meet()

    def _meet(self) -> None:
        """Find out which shards are on this machine."""
        try:
            self._line.meet(_HEAD)
        except NotThere:
            raise self._lost() from None

    def _hand_out(self, x: Tensor) -> None:
        """Send the shards their initial weights."""
        for actor, start, first, last in self._pieces():
            self._answers([actor.take_weights.remote(first - start, x[first:last].numpy())])

    def _pieces(self) -> Iterator[tuple[Any, int, int, int]]:
        """Pieces of the weights: whose they are, where its slice begins, and where they begin and end."""
        step = max(1, self._piece // self._plan.dtype.itemsize)
        for actor, (start, stop) in zip(self.actors, self._plan.slices.places, strict=True):
            for first in range(start, stop, step):
                yield actor, start, first, min(first + step, stop)

    def line(self) -> ShardLine:
        """What workers need to reach the shards."""
        return ShardLine(self._plan, self.actors, self._piece, self._files)

    def weights(self) -> Tensor:
        """The current weights, whole, after all that was told before."""
        self.flush()
        x = torch.empty(self._plan.slices.length, dtype=self._plan.dtype)
        for actor, start, first, last in self._pieces():
            (part,) = self._answers([actor.weights.remote(self._sent, first - start, last - start)])
            x[first:last] = torch.from_numpy(part)
        return x

    def model(self, key: int) -> Sent:
        """A model that is lent, whole."""
        self.flush()
        try:
            sent: Sent = as_tensors(self._line.pull(key, fresh=True))
        except NotThere:
            raise self._lost() from None
        return sent

    def lent(self, key: int | None = None) -> LentModel:
        """A model that is to be lent, under a new key, or one that was lent before and saved."""
        key = self._keys if key is None else key
        self._keys = max(self._keys, key + 1)
        model = self._lent.get(key)
        if model is None:
            model = self._lent[key] = LentModel(key, self._released.append)  # they hear of it with what they are told next
        return model

    def recovered(self, worker: int, others: Mapping[int, Memory], few: Memory) -> Memory:
        """What a worker goes on with that has lost what it kept: its vectors stay with the shards, which lend them."""
        return self._lent_memory(few, "recover", worker, others)

    def borrowed(self, memory: Elsewhere) -> Memory:
        """What a worker keeps that is about to leave, lent by the shards from now on."""
        return self._lent_memory(memory, "sliced", memory)

    def _lent_memory(self, few: Memory, name: str, *args: Any) -> Memory:
        self.flush()
        lent, given = self.lent(), self._ray.put(args)
        self._answers([actor.lend_memory.remote(self._sent, lent.key, name, given) for actor in self.actors])
        return Elsewhere(few, lent, self._plan.slices.length * size_of_kept(vectors_of(few, STAND_IN)) // STAND_IN)

    def written_again(self, path: Path, moment: int) -> Path:
        """A file that a worker has written for one checkpoint, for another one as well."""
        return self._files.again(path, moment)

    def tell(self, name: str, *args: Any) -> None:
        """Have every shard do something, after all that it was told before."""
        self._waiting.append([name, list(args)])

    def flush(self) -> None:
        """What was told is on its way from now on."""
        if self._waiting:
            if self._released:
                self._waiting.append(["drop", [self._released[:]]])
                self._released.clear()
            calls, self._waiting = self._waiting, []
            try:
                if not self._line.tell(self._sent, calls):
                    self.actors[0].tell.remote(self._sent, calls)
            except LineLost:
                raise self._lost() from None
            self._sent += 1

    def ask(self, name: str, *args: Any) -> list[Any]:
        """What each shard answers, after all that it was told before."""
        self.flush()
        given = self._ray.put(args) if args else []
        return [as_tensors(a) for a in self._answers([actor.ask.remote(self._sent, name, given) for actor in self.actors])]

    def save(self, folder: Path | None, moment: int) -> Any:
        """Have every shard write a checkpoint; returns where each slice lies, and in which file."""
        assert folder is not None, "a sharded server is saved to a folder alone"
        self.flush()
        names = self._answers([actor.save.remote(self._sent, folder.resolve(), moment) for actor in self.actors])
        return [[start, stop, name] for (start, stop), name in zip(self._plan.slices.places, names, strict=True)]

    def load(self, saved: Mapping[str, Any]) -> None:
        """Have every shard continue from a checkpoint, however the server was cut that wrote it."""
        given = {name: saved[name] for name in ("state", "optimizer")}
        self._answers([actor.load.remote(given, saved["shards"]) for actor in self.actors])

    def _answers(self, calls: Sequence[Any]) -> list[Any]:
        """What calls have come to. All are looked at, also after one that failed: Ray would print what nobody looks at.

        After a death none is waited for: the others may wait for what the dead one was to pass on.
        """
        answers, failures, died = [], list[Exception](), False
        for call in calls:
            if died and not self._ray.wait([call], timeout=0)[0]:
                continue
            try:
                answers.append(self._ray.get(call))
            except self._ray.exceptions.RayError as error:
                failures.append(error)
                died = died or isinstance(error, self._ray.exceptions.RayActorError)
        if failures:
            raise self._failure(failures[0]) from None
        return answers

    def _failure(self, error: Exception) -> Exception:
        """What to say of a call that has failed."""
        if isinstance(error, self._ray.exceptions.RayActorError):
            why = why_not_started(str(error))
            return RunFailed(f"a shard of the server could not start: {why}.") if why else self._lost()
        cause = getattr(error, "cause", None)
        if isinstance(cause, DualDelayError):  # such as a disk that is full
            return cause
        if isinstance(cause, NotThere):
            return ShardLost("a worker has died while the shards of the server read what it keeps.")
        return error

    def _lost(self) -> ShardLost:
        """What to say of a shard that is gone; waits until Ray knows which it is."""
        if self._lives:  # otherwise they have just been started
            self._ray.wait(list(self._lives), num_returns=1, timeout=_NOTICED)
            self.check()
        return ShardLost("a shard of the server has died.")

    def check(self) -> None:
        """Raise if a shard has died or failed."""
        for call in self._ray.wait(list(self._lives), num_returns=len(self._lives), timeout=0)[0]:
            number = self._lives[call]
            node, pid = self.places[number]
            try:
                self._ray.get(call)
            except self._ray.exceptions.RayTaskError as error:
                raise RunFailed(f"shard {number} of the server failed: {str(error).strip().splitlines()[-1]}") from None
            except self._ray.exceptions.RayError:
                raise ShardLost(f"shard {number} of {len(self.actors)} has died (pid {pid} on node {node[:8]}).") from None

    def close(self) -> None:
        """End all shards."""
        self._line.close()
        for actor in self.actors:
            with suppress(Exception):
                self._ray.kill(actor)
