"""Vectors that processes of one machine exchange through memory that they share.

Ray's object store does this for a whole cluster, and takes some milliseconds of processor time for every object, whatever
its size. Here a process copies a vector into a segment of its own, an anonymous file, and tells another one the vector's
name, which is small; the other maps the file and reads it in place. The kernel frees a segment when the last process that
has it is gone, however that ended: nothing can be left behind. Linux alone has such files; elsewhere nothing is shared.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..core.state import BLOCK
from .messages import Array

PAGE = mmap.PAGESIZE
"""Bytes of which every vector begins at a multiple."""
_KEY, _STAMP, _RELEASED = 0, 1, 2  # words of a segment's head: which it is, what is in it, what each reader is done with
_MOST = 256  # segments that one process makes of a kind: each takes one of its file descriptors
_WRITING = 0  # the stamp of a vector that is not whole


class Name(NamedTuple):
    """Which vector it is, and where: in a segment of some process, since it was written there."""

    pid: int
    fd: int  # of the segment, in that process
    size: int  # of the segment, in bytes
    key: int  # of the segment: two that were ever made have different ones
    stamp: int  # of the vector: the segment has another one as soon as another vector is written there
    offset: int  # of its first byte
    dtype: str
    shape: tuple[int, ...]
    start: int = 0  # of its last axis, what is meant begins here
    stop: int | None = None  # and ends before this
    reader: int = 0  # which of those who read it this name is for


def name_of(values: Sequence[Any]) -> Name:
    """A name from its values, which may have travelled as a list."""
    name = Name(*values)
    return name._replace(shape=tuple(name.shape))


class Segment:
    """A piece of memory of this process that others can map."""

    def __init__(self, size: int, readers: int) -> None:
        self.offset = PAGE * math.ceil(8 * (_RELEASED + readers) / PAGE)
        self.size, self._fd = size, os.memfd_create("dualdelay")
        try:
            os.posix_fallocate(self._fd, 0, self.offset + size)  # memory that is not there shows here, and not as SIGBUS
            self._map = mmap.mmap(self._fd, self.offset + size)
        except OSError:
            os.close(self._fd)
            raise
        weakref.finalize(self, os.close, self._fd)
        self._words = np.frombuffer(self._map, np.int64, _RELEASED + readers)
        self._words[_KEY] = secrets.randbits(62)
        self.held = False  # whether somebody here needs what is in it

    @property
    def is_free(self) -> bool:
        """Whether nobody needs what is in it, here or elsewhere."""
        return not self.held and bool((self._words[_RELEASED:] >= self._words[_STAMP]).all())

    def begin(self, dtype: str, shape: tuple[int, ...], stamp: int) -> Name:
        """From now on what was in it is gone, and a vector is written that will have this name."""
        size, key = self.offset + self.size, int(self._words[_KEY])
        self._words[_STAMP] = _WRITING
        return Name(os.getpid(), self._fd, size, key, stamp, self.offset, dtype, shape)

    def end(self, name: Name) -> None:
        """The vector is whole."""
        self._words[_STAMP] = name.stamp

    def view(self, name: Name) -> Array:
        """What is in it."""
        return _vector(self._map, name)

    def take_back(self, name: Name) -> None:
        """Nobody is going to read the vector of that name, if that is what is in it."""
        if name.key == self._words[_KEY]:
            self._words[_RELEASED:] = np.maximum(self._words[_RELEASED:], name.stamp)

    def release(self) -> None:
        """Nobody here needs any more what is in it."""
        self.held = False


class Lent:
    """A vector in a segment of this process, which others may read for as long as this object is referred to."""

    def __init__(self, segment: Segment, name: Name) -> None:
        self._segment, self.name = segment, name
        segment.held = True
        weakref.finalize(self, segment.release).atexit = False

    @property
    def array(self) -> Array:
        """The vector, not to be written to; as long as that is referred to, so is this object."""
        array = self.blank()
        array.flags.writeable = False
        return array

    def blank(self) -> Array:
        """The memory that the vector is written to; as long as that is referred to, so is this object."""
        array = self._segment.view(self.name)
        weakref.finalize(array, _let_go, self).atexit = False
        return array

    def finish(self) -> None:
        """The vector is whole: others may read it."""
        self._segment.end(self.name)


def _let_go(what: object) -> None:
    """Refer to something until this is called."""


class Segments:
    """The segments of one process, each written to again when nobody needs any more what is in it."""

    def __init__(self, readers: int = 0) -> None:
        """Of what is put here so many other processes say when they are done with it."""
        self._readers, self._segments, self._stamp = readers, list[Segment](), _WRITING

    def put(self, array: Array, look: Callable[[Array], None] = lambda part: None) -> Name | None:
        """Copy a vector to where others can read it until all readers are done with it; None if nothing can be shared.

        Whoever has to ``look`` at its numbers is shown each part as it is copied: it is in the processor's cache then.
        """
        segment = self._free(array.nbytes)
        if segment is None:
            return None
        name = segment.begin(array.dtype.str, array.shape, self._next())
        source, target = array.reshape(-1), segment.view(name).reshape(-1)
        for start in range(0, len(source), BLOCK):
            part = source[start : start + BLOCK]
            np.copyto(target[start : start + BLOCK], part)
            look(part)
        segment.end(name)
        return name

    def take_back(self, name: Name) -> None:
        """Nobody is going to read a vector that was put."""
        for segment in self._segments:
            segment.take_back(name)

    def lend(self, array: Array) -> Lent | None:
        """The same until nobody here refers to it any more."""
        lent = self.blank(array.dtype, array.shape)
        if lent is not None:
            np.copyto(lent.blank(), array)
            lent.finish()
        return lent

    def blank(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Lent | None:
        """The same of a vector that is not written yet."""
        segment = self._free(dtype.itemsize * math.prod(shape))
        return None if segment is None else Lent(segment, segment.begin(dtype.str, shape, self._next()))

    def probe(self) -> Name | None:
        """What others can find out by whether they reach this process."""
        return self.put(np.zeros(1))

    def _next(self) -> int:
        self._stamp += 1
        return self._stamp

    def _free(self, size: int) -> Segment | None:
        """A segment of that size that nobody needs, an old one or a new one."""
        for segment in self._segments:
            if segment.size == size and segment.is_free:
                return segment
        if len(self._segments) >= _MOST:
            return None
        try:
            self._segments.append(Segment(size, self._readers))
        except (OSError, AttributeError):  # no memory or no descriptor is left, or this is not Linux
            return None
        return self._segments[-1]


class Reader:
    """The segments of another process, or of several, mapped here when something in them is read."""

    def __init__(self) -> None:
        self._maps: dict[int, tuple[mmap.mmap, Array]] = {}
        self._views: weakref.WeakValueDictionary[tuple[Any, ...], Array] = weakref.WeakValueDictionary()

    def reaches(self, name: Name) -> bool:
        """Whether that process is on this machine, and lets this one read what it shares."""
        return self._mapped(name) is not None

    def view(self, name: Name) -> Array | None:
        """A vector in place, not to be written to; None if it is not there any more.

        Its segment is written to again once nobody here refers to the vector. One that was let go of may be asked for again
        by whoever knows that its process has not gone on meanwhile.
        """
        asked = (name.key, name.stamp, name.start, name.stop)
        view, mapped = self._views.get(asked), self._mapped(name)
        if view is not None or mapped is None:
            return view
        segment, words = mapped
        if words[_STAMP] != name.stamp:
            return None
        words[_RELEASED + name.reader] = _WRITING
        if words[_STAMP] != name.stamp:  # it was written to just now
            return None
        view = _vector(segment, name)
        view.flags.writeable = False
        weakref.finalize(view, _release, words, name).atexit = False
        self._views[asked] = view
        return view

    def let_go(self) -> None:
        """Have nothing mapped any more but what somebody here refers to; what is read again is mapped again."""
        self._maps.clear()

    def has(self, name: Name) -> bool:
        """Whether a vector is there, whole and still the same."""
        mapped = self._mapped(name)
        return mapped is not None and bool(mapped[1][_STAMP] == name.stamp)

    def lay(self, name: Name, memory: Overlay, place: int) -> bool:
        """Put a whole vector to a place of an overlay, in bytes; False if it is not there any more, or cannot be put there.

        Nothing is copied: what was read there counts if this process still ``has`` the vector afterwards.
        """
        if not self.has(name):
            return False
        try:
            fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR)
            try:
                same = os.pread(fd, 8, 8 * _KEY) == name.key.to_bytes(8, sys.byteorder)
                return same and memory.lay(place, fd, name.offset, math.prod(name.shape) * np.dtype(name.dtype).itemsize)
            finally:
                os.close(fd)
        except OSError:
            return False

    def copy(self, name: Name, out: Array | None = None) -> Array | None:
        """A copy of a vector, in ``out`` if that is given; None if it is not there any more, or not all the time."""
        mapped = self._mapped(name)
        if mapped is None or mapped[1][_STAMP] != name.stamp:
            return None
        vector = _vector(mapped[0], name)
        out = np.empty_like(vector) if out is None or out.shape != vector.shape or out.dtype != vector.dtype else out
        np.copyto(out, vector)
        return out if mapped[1][_STAMP] == name.stamp else None

    def _mapped(self, name: Name) -> tuple[mmap.mmap, Array] | None:
        if name.key not in self._maps:
            try:
                fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR)
                try:
                    segment = mmap.mmap(fd, name.size)
                finally:
                    os.close(fd)
            except (OSError, ValueError):  # of another machine or another user, or its process is gone
                return None
            words = np.frombuffer(segment, np.int64, name.offset // 8)
            if words[_KEY] != name.key:
                return None
            self._maps[name.key] = (segment, words)
        return self._maps[name.key]


class Overlay:
    """Memory of this process in which segments of others lie side by side, as a vector of its own that may be written to.

    The kernel copies a page when somebody here writes into it: nobody else sees that, and nothing else is copied.
    """

    def __init__(self, dtype: np.dtype[Any], length: int) -> None:
        self._map = mmap.mmap(-1, max(1, dtype.itemsize * length))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.array: Array = np.ndarray((length,), dtype, self._map)
        """The vector; it refers to the memory, and another segment may be laid under it at any time."""

    def lay(self, place: int, fd: int, offset: int, size: int) -> bool:
        """Put so many bytes of a file there; whether that could be: pages must meet, and only the last may be a part."""
        if self in _BROKEN or place % PAGE or offset % PAGE or (size % PAGE and place + size < self.array.nbytes):
            return False
        flags = mmap.MAP_PRIVATE | _MAP_FIXED  # whatever was written there before is gone
        laid = _libc().mmap(self._address + place, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if laid != self._address + place:
            _BROKEN.append(self)
        return self not in _BROKEN


_MAP_FIXED = 0x10  # of Linux: at that address, in place of what is there
_BROKEN: list[
    Overlay
] = []  # in which there may be a hole, where somebody else's memory may be: nothing is ever done to them


@cache
def _libc() -> Any:
    """The C library, whose mmap takes an address, as Python's does not."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return libc


def _vector(segment: mmap.mmap, name: Name) -> Array:
    """What is meant by a name; made at once and not as a slice, for slices of it refer to it then and not to another."""
    size, kind = name.shape[-1], np.dtype(name.dtype)
    start, stop, _ = slice(name.start, name.stop).indices(size)
    rows, strides = name.shape[:-1], [kind.itemsize]
    for length in (size, *reversed(rows[1:])) if rows else ():
        strides.insert(0, strides[0] * length)
    return np.ndarray((*rows, stop - start), kind, segment, name.offset + start * kind.itemsize, strides)


def _release(words: Array, name: Name) -> None:
    """Say in a segment that this reader is done with a vector."""
    place = _RELEASED + name.reader
    words[place] = max(int(words[place]), name.stamp)
