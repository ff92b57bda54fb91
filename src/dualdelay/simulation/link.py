"""How long messages travel, by their size."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import BadInput, shown
from ..core.settings import check_settings, positive, whole, zero_or_more


@dataclass(frozen=True)
class Link:
    """How long a message travels: ``latency + bytes / bandwidth``. The default takes no time, as in the paper."""

    latency: float = zero_or_more(0.0, "finite seconds")
    """Seconds for a message of no length."""
    bandwidth: float | None = None
    """Bytes per second; None: no limit."""

    def __post_init__(self) -> None:
        check_settings(self)
        number = isinstance(self.bandwidth, (int, float)) and not isinstance(self.bandwidth, bool)
        if self.bandwidth is not None and not (number and self.bandwidth > 0):
            raise BadInput(f"bandwidth is {shown(self.bandwidth)}; expected bytes per second, above zero.")

    def seconds(self, size: int) -> float:
        """The travel time of ``size`` bytes."""
        return self.latency if self.bandwidth is None else self.latency + size / self.bandwidth


@dataclass(frozen=True)
class SharedLink(Link):
    """Messages that all go through the server's own line, one after the other, and wait for a server that is busy.

    A worker's message queues at the server's line in the order in which messages reach it, and then for the server; models
    leave in the order in which they were sent. Either way has a line of its own. With k shards there are k lines, each of
    which carries a k-th of every message, and k processes, each of which does a k-th of the server's work. ``latency`` and
    ``bandwidth`` are those of a worker's own line, as in ``Link``: a message goes through both lines at once, so the slower
    of the two counts. What has no bytes, such as the order to go on at the same model, does not queue.
    """

    server_bandwidth: float | None = None
    """Bytes per second of the server's line, or that of one shard, each way; None: no limit."""
    shards: int = whole(1)
    """How many servers share every message."""
    service: float = zero_or_more(0.0, "finite seconds")
    """Seconds that one server is busy with an arrival; shards share it."""
    scale: float = positive(1.0)
    """How many bytes each byte of a message stands for: a short vector can stand for a long one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        number = isinstance(self.server_bandwidth, (int, float)) and not isinstance(self.server_bandwidth, bool)
        if self.server_bandwidth is not None and not (number and self.server_bandwidth > 0):
            raise BadInput(f"server_bandwidth is {shown(self.server_bandwidth)}; expected bytes per second, above zero.")

    def seconds(self, size: int) -> float:
        """The travel time of ``size`` bytes on a worker's own line."""
        return self.latency if self.bandwidth is None else self.latency + self.scale * size / self.bandwidth

    def server_seconds(self, size: int) -> float:
        """How long ``size`` bytes occupy the server's lines."""
        return 0.0 if self.server_bandwidth is None else self.scale * size / (self.shards * self.server_bandwidth)


@dataclass
class ServerLine:
    """Until when the server and its line are taken, each way."""

    link: SharedLink
    up: float = 0.0
    down: float = 0.0
    server: float = 0.0

    def send(self, now: float, size: int) -> float:
        """A model of so many bytes is sent; returns when its worker has it."""
        began = max(now, self.down) if size else now
        if size:
            self.down = began + self.link.server_seconds(size)
        return max((self.down if size else now) + self.link.latency, began + self.link.seconds(size))

    def receive(self, reached: float, size: int) -> float:
        """A message is all there as far as its worker's line is concerned; returns when the server is done with it.

        Its first byte has been there for as long as it takes on that line, and from then on it has queued.
        """
        began = reached - (self.link.seconds(size) - self.link.seconds(0))
        self.up = max(began, self.up) + self.link.server_seconds(size)
        self.server = max(reached, self.up, self.server) + self.link.service / self.link.shards
        return self.server
