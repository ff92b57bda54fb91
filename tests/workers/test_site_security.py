"""Nobody else gets in: keys, sessions, sizes, rates and certificates, over real connections on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import random
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

import dualdelay as dd
from dualdelay.core.version import __version__
from dualdelay.workers.sites import hub as hubs
from dualdelay.workers.sites import keys, serving, wire
from dualdelay.workers.sites.books import Turns
from dualdelay.workers.sites.hub import Hub
from dualdelay.workers.sites.serving import Served
from dualdelay.workers.sites.site import Line, Site

WELCOME = {
    "workers": 2, "room": 0, "algorithm": {"name": "dude", "lr": 0.1}, "uplink": None, "seed": 0, "threads": 1,
}  # fmt: skip
HELLO = {"protocol": wire.PROTOCOL, "version": __version__, "life": "one", "fingerprint": "a problem", "data": "data"}


class Place:
    """A hub that is served, with two sites enrolled."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.roster = folder, folder / "sites.txt"
        for name in ("a", "b"):
            keys.enroll(name, self.roster, folder / f"{name}.key")
        self.hub = Hub(keys.Roster(self.roster), ["a", "b"], 100_000, WELCOME)
        self.served = Served(self.hub, "127.0.0.1:0", None, None)
        self.pool = urllib3.PoolManager(retries=False, timeout=10)
        self.keys: dict[str, bytes] = {}  # by session

    def post(self, target: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        response = self.pool.request("POST", f"{self.served.url}{target}", body=body, headers=fields)
        return response.status, response.data.decode(errors="replace")

    def challenge(self) -> str:
        return self.post("/v1/challenge")[1]

    def signed(self, name: str, target: str, challenge: str, count: int, key: str = "") -> str:
        text = keys.signed_text(target, name, challenge, count)
        return f"Dualdelay {name} {challenge} {count} {keys.sign(keys.load_key(self.folder / f'{key or name}.key'), text)}"

    def hello(self, name: str, key: str = "", challenge: str = "", **changes: Any) -> tuple[int, Any]:
        """Say hello; gives the status, and the session or the line that was told."""
        private, exchange = keys.new_exchange()
        body = b"".join(wire.encode("hello", {**HELLO, "exchange": exchange, **changes}))
        target, challenge = f"/v1/hello?digest={hashlib.sha256(body).hexdigest()}", challenge or self.challenge()
        url, headers = f"{self.served.url}{target}", {"authorization": self.signed(name, target, challenge, 0, key)}
        response = self.pool.request("POST", url, body=body, headers=headers)
        if response.status != 200:
            return response.status, response.data.decode()
        welcome = wire.decode(response.data)[1]
        if welcome["session"]:
            self.keys[welcome["session"]] = keys.session_key(private, welcome["exchange"], name, challenge)
        return 200, welcome["session"]

    def marked(self, name: str, target: str, session: str, count: int, key: str = "") -> str:
        """A request's header, by the key of its session or that of another one."""
        mark = keys.mark(self.keys.get(key or session, b"none"), keys.signed_text(target, name, session, count))
        return f"Dualdelay {name} {session} {count} {mark}"

    def ask(self, name: str, target: str, session: str, count: int, body: bytes = b"", **rest: str) -> tuple[int, str]:
        return self.post(target, body, **rest, authorization=self.marked(name, target, session, count))

    def send(
        self,
        session: str,
        count: int,
        body: bytes,
        *,
        number: int = 1,
        part: slice | None = None,
        seal: bytes = b"",
        **fields: Any,
    ) -> Any:
        """Send a message of site a, or a part of it."""
        made = keys.new_seal(self.keys[session], number)
        made.update(body)
        body += seal or made.finalize()
        cut = part or slice(0, len(body))
        query = {"number": number, "size": len(body), "offset": cut.start or 0}
        target = "/v1/send?" + "&".join(f"{name}={value}" for name, value in {**query, **fields}.items())
        return self.ask("a", target, session, count, body[cut])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    there = Place(tmp_path)
    yield there
    there.pool.clear()
    there.served.close()


def test_who_is_enrolled_gets_a_session_and_others_one_clear_line(place: Place, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "dualdelay")
    assert place.hello("a")[0] == 200
    assert place.hello("b", key="a") == (403, "b has another key here; ask the server's operator: dualdelay enroll b")
    keys.enroll("c", place.folder / "elsewhere.txt", place.folder / "c.key")
    assert place.hello("c") == (403, "c is not enrolled; ask the server's operator: dualdelay enroll c")
    keys.enroll("d", place.roster, place.folder / "d.key")
    assert place.hello("d") == (403, "d is enrolled, but no site of this run.")
    keys.revoke("b", place.roster)
    assert place.hello("b") == (403, "the key of b was revoked; ask the server's operator for another.")
    text = place.roster.read_text().replace("b ed25519", "gone ed25519").splitlines()
    place.roster.write_text("\n".join(f"{line} until=2020-01-01" if line.startswith("a ") else line for line in text))
    assert place.hello("a") == (403, "the key of a was valid until 2020-01-01; ask the server's operator for another.")
    refused = [record.getMessage() for record in caplog.records]
    assert len(refused) == 5 and all("refused at 127.0.0.1: " in text for text in refused), "one line each in the log"


def test_a_session_ends_when_its_key_is_revoked(place: Place) -> None:
    _, session = place.hello("a")
    place.hub.push(0, "stop", {})
    assert place.ask("a", "/v1/next?ack=0&busy=0", session, 1)[0] == 200
    keys.revoke("a", place.roster)
    status, text = place.ask("a", "/v1/next?ack=0&busy=0", session, 2)
    assert (status, text) == (403, "the key of a was revoked; ask the server's operator for another.")
    last = [place.hub.inbox.get() for _ in range(3)][-1]
    assert last.bye and place.hub.sites[0].refused == text, "the run goes on without it"


def test_nothing_that_was_signed_before_is_taken_again(place: Place) -> None:
    challenge = place.challenge()
    status, session = place.hello("a", challenge=challenge)
    assert status == 200
    assert place.hello("a", challenge=challenge) == (401, "the challenge was answered before; ask for another.")
    head, _, mark = challenge.rpartition(".")
    forged = f"{head[:-1]}{(int(head[-1]) + 1) % 10}.{mark}"
    assert place.hello("a", challenge=forged)[1].startswith("the challenge is not one of this server's")
    assert place.hello("a", challenge="nonsense")[0] == 401
    place.hub.push(0, "stop", {})
    first = place.ask("a", "/v1/next?ack=0&busy=0", session, 300)
    assert first[0] == 200
    assert place.ask("a", "/v1/next?ack=0&busy=0", session, 300) == (401, "a request came a second time; say hello again.")
    assert place.ask("a", "/v1/next?ack=0&busy=0", session, 44)[0] == 401, "too old"
    assert place.ask("a", "/v1/next?ack=0&busy=0", session, 299)[0] == 200, "overtaken on its way"


def test_a_site_acts_for_itself_alone(place: Place) -> None:
    _, session = place.hello("a")
    target = "/v1/next?ack=0&busy=0"
    assert place.ask("b", target, session, 1)[0] == 401, "b in the session of a"
    _, other = place.hello("b")
    foreign = place.marked("a", target, session, 1, key=other)
    assert place.post(target, authorization=foreign)[0] == 401, "marked with the key of another session"
    moved = place.marked("a", target, session, 2)
    assert place.post("/v1/next?ack=5&busy=0", authorization=moved)[0] == 401, "another request than was marked"
    assert [place.hub.inbox.get().hello for _ in range(2)] == [True, True] and place.hub.inbox.empty()


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer x", "Dualdelay a s 1", "Dualdelay a s one x", "Dualdelay a s 99999999999999999 x", "Dualdelay ../a s 1 x"],
)
def test_what_is_not_signed_is_not_read(place: Place, authorization: str) -> None:
    assert place.post("/v1/next?ack=0&busy=0", authorization=authorization)[0] == 401


def test_other_versions_and_a_process_that_was_replaced_are_refused(place: Place) -> None:
    assert place.hello("a", exchange="none")[0] == place.hello("a", exchange="00" * 31)[0] == 400
    assert place.hello("a", exchange="00" * 32)[0] == 400, "with that everybody would know the key"
    status, text = place.hello("a", version="9.9")
    assert (
        status == 409 and text == f"the site has dualdelay 9.9, the server {__version__}; install the same version at both."
    )
    assert place.hello("a", protocol=2)[0] == 409
    assert place.hello("a")[0] == 200 and place.hello("a", life="two")[0] == 200
    assert place.hello("a") == (409, "another process has dialled in as a since; this one is not needed any more.")
    place.hub.ended = "the run has ended."
    assert place.hello("b") == (410, "the run has ended.")


def test_who_is_none_of_this_run_takes_nobodys_place(place: Place, caplog: Any) -> None:
    """A typing error at a site ends its second process, and not the first one, which is at work."""
    place.hub.admit = lambda worker, fingerprint, data: "" if data == "data" else "its data are others"
    _, session = place.hello("a")
    assert place.hello("a", life="two", fingerprint="", data="") == (200, ""), "who asks what there is to do"
    for _ in range(2):
        assert place.hello("a", life="three", data="others") == (409, "its data are others.")
    assert place.ask("a", "/v1/bye?ack=0", session, 1)[0] == 200, "the first one is in its session still"
    said = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert said == ["a was refused at 127.0.0.1: its data are others"] and place.hub.sites[0].refused == ""
    place.hello("a", life="three", data="others")
    assert place.hub.sites[0].refused == "its data are others", "and now nobody is there"


def test_messages_come_in_parts_and_what_was_cut_is_not_sent_again(place: Place) -> None:
    _, session = place.hello("a")
    place.hub.inbox.get()
    body = bytes(range(256)) * 200
    assert place.send(session, 1, body, part=slice(0, 20_000)) == (200, json.dumps({"have": 20_000, "size": 51_216}))
    assert place.send(session, 2, body, part=slice(0, 20_000))[0] == 409, "that part is there"
    assert json.loads(place.send(session, 3, body, part=slice(30_000, 51_216))[1]) == {"have": 20_000, "size": 51_216}
    assert place.send(session, 4, body, part=slice(20_000, 51_216))[0] == 200
    assert place.hub.inbox.get(timeout=5).data == body
    assert json.loads(place.send(session, 5, body)[1])["have"] == 51_216, "a message that was taken is not taken twice"
    assert place.hub.inbox.empty() and place.hub.sites[0].bytes_up == 51_216


def test_what_is_too_large_mistyped_or_compressed_is_refused(place: Place) -> None:
    _, session = place.hello("a")
    place.hub.inbox.get()
    assert place.send(session, 1, b"x" * 10, size=200_000)[0] == 413
    assert place.send(session, 2, b"x" * 10, size=20)[0] == 400, "longer than was said"
    assert place.send(session, 3, b"x" * 10, seal=b"0" * 16)[0] == 400, "another than was sent"
    assert place.send(session, 4, b"x" * 10, number="one")[0] == 400
    assert place.send(session, 5, b"x" * 10, number="9" * 30)[0] == 400
    target = "/v1/next?ack=0&busy=0"
    assert place.ask("a", target, session, 6, content_encoding="gzip") == (
        415,
        "a body that is compressed is not read; send it as it is.",
    )
    assert place.post("/v1/elsewhere")[0] == 404
    assert place.pool.request("GET", f"{place.served.url}/etc/passwd").status == 404
    assert place.pool.request("PUT", f"{place.served.url}/v1/next").status == 404
    body = b"x" * 100_000
    fields = {"authorization": place.signed("a", "/v1/hello?digest=0", place.challenge(), 0)}
    assert place.post("/v1/hello?digest=0", body, **fields)[0] == 413
    assert place.hub.inbox.empty()


def test_a_few_messages_may_be_on_their_way_at_once(place: Place) -> None:
    _, session = place.hello("a")
    statuses = [place.send(session, k, b"x" * 10, number=k, part=slice(0, 5))[0] for k in range(1, 12)]
    assert statuses == [200] * 8 + [429] * 3


def test_an_address_that_asks_too_often_has_to_wait(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "_STRANGERS", (0.001, 20.0))  # requests a second, and at once
    statuses = [place.post("/v1/challenge")[0] for _ in range(30)]
    assert statuses == [200] * 20 + [429] * 10


def test_a_malformed_request_gets_no_traceback_and_the_server_goes_on(place: Place) -> None:
    for data in (
        b"\0" * 100,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/send?%zz HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02",
    ):
        host, port = place.served.address.split(":")
        with socket.create_connection((host, int(port)), timeout=5) as line:
            line.sendall(data)
            line.shutdown(socket.SHUT_WR)
            answer = line.recv(10_000)
        assert b"Traceback" not in answer and b".py" not in answer
    assert place.hello("a")[0] == 200


def raw(place: Place) -> socket.socket:
    host, port = place.served.address.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_a_head_that_is_long_or_slow_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with raw(place) as line:  # one field without an end
        with suppress(OSError):
            line.sendall(b"POST / HTTP/1.1\r\nx: " + b"y" * 1_000_000)
        received(line)
    with raw(place) as line:  # many fields
        with suppress(OSError):
            line.sendall(b"POST / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000)
        received(line)
    with raw(place) as line:  # fields behind the body
        with suppress(OSError):
            line.sendall(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 100_000)
        received(line)
    monkeypatch.setattr(serving, "_SLOWEST_HEAD", 0.2)
    for beginning in (b"", b"POST / HTTP/1.1\r\nx: "):
        with raw(place) as line:
            line.sendall(beginning)
            assert b" 400 " in received(line), "it is told, and the connection is closed"
    assert place.hello("a")[0] == 200


def received(line: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    with suppress(ConnectionError):
        while piece := line.recv(65536):
            data += piece
    return data


def test_a_stalled_connection_is_given_up_and_what_came_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "_STALLED", 0.2)
    _, session = place.hello("a")
    body = bytes(50_000)
    target = f"/v1/send?number=1&size={len(body) + keys.SEAL}&offset=0"
    head = f"POST {target} HTTP/1.1\r\ncontent-length: {len(body) + keys.SEAL}\r\n"
    with raw(place) as line:
        line.sendall(f"{head}authorization: {place.marked('a', target, session, 1)}\r\n\r\n".encode() + body[:30_000])
        assert b" 408 " in received(line), "nothing more came, and the server has closed it"
    assert json.loads(place.send(session, 2, body)[1])["have"] == 30_000
    assert place.send(session, 3, body, part=slice(30_000, None))[0] == 200
    hello, message = place.hub.inbox.get(), place.hub.inbox.get()
    assert hello.hello and message.data == body
    place.hub.push(0, "job", {"request": [0] * 6 + [0.0, 1, False, False, 0, 0], "model": np.zeros(10**7), "held": None})
    target = "/v1/next?ack=0&busy=0"
    with raw(place) as line:  # who asks, and does not read
        line.sendall(f"POST {target} HTTP/1.1\r\nauthorization: {place.marked('a', target, session, 4)}\r\n\r\n".encode())
        place.pool.clear()
        while place.served.connections:  # a test that ends is one in which the server has let go
            time.sleep(0.05)
    assert place.hub.sites[0].outbox, "it is kept for the next try"


def test_bytes_that_are_no_requests_leave_nothing_behind(place: Place) -> None:
    """Requests with bytes changed, cut and put in, some hundreds: no traceback to the client, and no growth."""
    draw = random.Random(0)
    _, session = place.hello("a")
    target = "/v1/send?number=1&size=100&offset=0"
    good = f"POST {target} HTTP/1.1\r\nhost: x\r\nauthorization: {place.marked('a', target, session, 1)}\r\n".encode()
    good += b"content-length: 100\r\n\r\n" + bytes(100)
    words = [
        b"\r\n",
        b"\0",
        b"transfer-encoding: chunked\r\n",
        b"content-length: -1\r\n",
        b"ffffffffffffffff\r\n",
        b"%",
        b":",
    ]
    tracemalloc.start()
    before = 0
    for trial in range(400):
        data = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 20))] = draw.choice((draw.choice(words), draw.randbytes(draw.randrange(8))))
        with raw(place) as line:
            line.sendall(data[: draw.choice((len(data), draw.randrange(len(data))))])
            line.shutdown(socket.SHUT_WR)
            answer = received(line)
        assert b"Traceback" not in answer and b".py" not in answer
        if trial == 100:
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert place.hello("a")[0] == 200 and len(place.hub.sites[0].uploads) == 0
    assert grown < 300_000, "of 300 requests"
    place.pool.clear()
    while place.served.connections:
        time.sleep(0.05)


def test_a_file_of_sites_that_cannot_be_read_keeps_everybody_out_until_it_can(place: Place, caplog: Any) -> None:
    _, session = place.hello("a")
    good, target = place.roster.read_text(), "/v1/bye?ack=0"
    place.roster.write_text(f"{good}a line that is none\n")
    for count in (1, 2):
        status, text = place.ask("a", target, session, count)
        assert (status, text) == (503, "the server cannot read its file of sites; its log says why.")
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 1 and said[0].startswith("sites are not let in: line 4 of"), "one line, and no traceback"
    place.roster.write_text(good)
    assert place.ask("a", target, session, 3)[0] == 200


def test_no_clock_takes_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day jumps by hours whenever somebody looks at it."""
    now, jumps = time.time(), itertools.cycle((-86_400.0, 0.0, 50_000.0))
    monkeypatch.setattr(time, "time", lambda: now + next(jumps))
    _, session = place.hello("a")
    place.hub.push(0, "stop", {})
    assert place.ask("a", "/v1/next?ack=0&busy=0", session, 1)[0] == 200
    assert place.send(session, 2, b"message")[0] == 200
    assert [place.hub.inbox.get(timeout=5).data for _ in range(3)] == [None, None, b"message"]


BODY = bytes(range(256)) * 40


def sealed(place: Place, session: str, number: int) -> bytes:
    made = keys.new_seal(place.keys[session], number)
    made.update(BODY)
    return BODY + bytes(made.finalize())


def begun(place: Place, session: str, count: int, message: bytes, upto: int, number: int, offset: int = 0) -> socket.socket:
    """A request of site a whose body stops in the middle: the rest is in a proxy somewhere."""
    line, target = raw(place), f"/v1/send?number={number}&size={len(message)}&offset={offset}"
    head = f"POST {target} HTTP/1.1\r\nauthorization: {place.marked('a', target, session, count)}\r\n"
    line.sendall(f"{head}content-length: {len(message) - offset}\r\n\r\n".encode() + message[offset:upto])
    while place.hub.sites[0].uploads.get(number) is None or place.hub.sites[0].uploads[number].have < upto:
        time.sleep(0.01)
    return line


def test_what_comes_late_from_an_earlier_session_takes_no_number_of_this_one(place: Place) -> None:
    _, first = place.hello("a", life="one")
    message = sealed(place, first, 57)
    with begun(place, first, 1, message, 5000, number=57) as line:
        _, second = place.hello("a", life="two")
        line.sendall(message[5000:])
        assert line.recv(1000).startswith(b"HTTP/1.1 401")
    assert [place.hub.inbox.get().hello for _ in range(2)] == [True, True]
    assert place.send(second, 1, b"joined", number=1)[0] == 200
    assert place.hub.inbox.get(timeout=5).data == b"joined"


def test_a_question_of_an_earlier_session_takes_no_message_of_this_one_as_received(place: Place) -> None:
    site = place.hub.sites[0]

    async def unheard(message: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is answered")

    async def scenario() -> None:
        site.session = "one"
        question = place.hub._next(site, "one", {"ack": "5", "busy": "1"}, {"extensions": {}}, unheard)
        asked = asyncio.create_task(question)
        await asyncio.sleep(0)
        assert site.waiting is not None
        site.session = "two"
        place.hub.push(0, "stop", {})
        site.waiting.set()
        with pytest.raises(hubs.Refusal, match="no such session any more"):
            await asked

    asyncio.run(scenario())
    assert [one.number for one in site.outbox] == [1]


def test_two_requests_with_the_same_message_do_not_mix(place: Place) -> None:
    """A site gave the first one up, but its bytes were only slow."""
    _, session = place.hello("a")
    message = sealed(place, session, 1)
    with begun(place, session, 1, message, 5000, number=1) as slow:
        assert json.loads(place.send(session, 2, BODY, part=slice(0, 0))[1])["have"] == 5000, "nothing is sent to ask that"
        with begun(place, session, 3, message, 7000, number=1, offset=5000) as second:
            slow.sendall(message[5000:])
            assert slow.recv(1000).startswith(b"HTTP/1.1 409")
            second.sendall(message[7000:])
            assert second.recv(1000).startswith(b"HTTP/1.1 200")
    assert place.hub.inbox.get().hello and place.hub.inbox.get().data == BODY


def test_a_late_hello_of_a_process_that_is_gone_does_not_end_the_living_one(place: Place) -> None:
    old = place.challenge()
    assert place.hello("a", life="two")[0] == 200
    assert place.hello("a", challenge=old, life="one")[0] == 401
    assert place.hello("a", life="two")[0] == 200


def test_large_messages_are_sent_to_one_after_the_other_if_that_is_wanted() -> None:
    turns = Turns(1)
    assert turns.take(2) and turns.take(2), "who has the turn has it until the end"
    assert not turns.take(0) and not turns.take(1) and not turns.take(0)
    assert turns.end(2) == [0, 1] and not turns.take(1), "who asked first is first"
    assert turns.take(0) and turns.end(0) == [1] and turns.take(1)
    assert turns.end(5) == [] and not turns.take(3)
    assert turns.end(3) == [] and turns.end(1) == [] and turns.take(4)


def test_who_dies_in_a_turn_keeps_the_others_waiting_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    turns = Turns(1)
    assert turns.take(0) and not turns.take(1)
    now += 100
    assert not turns.take(2)
    now += 30
    assert turns.take(2), "worker 1 has not asked again"


def test_a_site_that_was_cut_off_finds_its_messages(place: Place) -> None:
    _, session = place.hello("a")
    place.hub.push(
        0, "job", {"request": [0] * 6 + [0.0, 1, False, False, 0, 0], "model": None, "held": None}, name=("job", 1)
    )
    place.hub.push(
        0, "job", {"request": [0] * 6 + [0.0, 1, False, False, 0, 0], "model": None, "held": None}, name=("job", 1)
    )
    first, again = (place.ask("a", "/v1/next?ack=0&busy=0", session, k) for k in (1, 2))
    assert first == again and first[0] == 200
    rest = place.ask("a", "/v1/fetch?number=1&offset=100", session, 3)
    assert rest[1] == first[1][100:]
    assert place.ask("a", "/v1/fetch?number=7&offset=0", session, 4)[0] == 410
    assert place.ask("a", "/v1/bye?ack=1", session, 5)[0] == 200 and not place.hub.sites[0].outbox


# --- the line ---


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate of its own for a server of that name."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, private = folder / f"{name}.pem", folder / f"{name}-key.pem"
    pem.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return pem, private


def nothing(run: Mapping[str, Any]) -> Any:
    raise AssertionError("nothing is prepared")


def test_a_server_that_others_could_reach_needs_a_certificate_and_a_site_https(place: Place) -> None:
    for listen in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(dd.BadInput, match="without a certificate, where others could read and change"):
            Served(place.hub, listen, None, None)
    with pytest.raises(dd.BadInput, match="belong together"):
        Served(place.hub, "127.0.0.1:0", Path("server.pem"), None)
    with pytest.raises(dd.BadInput, match="expected host:port"):
        Served(place.hub, "8443", None, None)
    with pytest.raises(dd.BadInput, match=r"cannot listen on 127\.0\.0\.1:\d+ \(Address already in use\)"):
        Served(place.hub, place.served.address, None, None)
    with pytest.raises(dd.BadInput, match=r"is no https: others could read and change what is sent"):
        Line("http://server.example:8443", "a", None)
    with pytest.raises(dd.BadInput, match="expected an address such as https://"):
        Line("server:8443", "a", None)
    with pytest.raises(dd.BadInput, match=r"cannot be used"):
        Served(place.hub, "127.0.0.1:0", place.roster, place.roster)


def test_tls_is_1_2_or_later_and_the_certificate_has_to_be_the_servers(place: Place) -> None:
    pem, private = certificate(place.folder)
    other, _ = certificate(place.folder, "elsewhere.example")
    served = Served(place.hub, "127.0.0.1:0", pem, private)
    try:
        url, port = f"https://localhost:{served.address.rpartition(':')[2]}", int(served.address.rpartition(":")[2])
        pool = urllib3.PoolManager(retries=False, ca_certs=str(pem))
        assert pool.request("POST", f"{url}/v1/challenge").status == 200
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection(("127.0.0.1", port)) as line, pytest.raises(ssl.SSLError):
            old.wrap_socket(line)
        pool.clear()
        for trusted in (None, other):
            site = Site(url, "a", place.folder / "a.key", nothing, trusted)
            with pytest.raises(dd.BadInput, match="has a certificate that this site does not trust"):
                site.run()
        with pytest.raises(dd.BadInput, match="has a certificate that this site does not trust"):  # of another name
            Site(f"https://127.0.0.1:{port}", "a", place.folder / "a.key", nothing, pem).run()
    finally:
        served.close()


def test_a_site_that_is_refused_ends_with_the_servers_line(place: Place) -> None:
    keys.revoke("a", place.roster)
    with pytest.raises(
        dd.BadInput, match=r"the server at http://127\.0\.0\.1:\d+ refused this site: the key of a was revoked"
    ):
        Site(place.served.url, "a", place.folder / "a.key", nothing).run()


def test_a_site_whose_own_code_fails_says_so_in_one_line_and_takes_nobodys_place(place: Place) -> None:
    def missing(run: Mapping[str, Any]) -> Any:
        raise FileNotFoundError("there is no patients.csv")

    _, session = place.hello("a")
    line = (
        r"this site cannot take part: FileNotFoundError: there is no patients\.csv \(\S+test_site_security\.py, line \d+\)"
    )
    with pytest.raises(dd.BadInput, match=line):
        Site(place.served.url, "a", place.folder / "a.key", missing).run()
    assert place.ask("a", "/v1/bye?ack=0", session, 1)[0] == 200, "who is at work stays"


def test_a_site_goes_through_a_proxy(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's setting is taken, and the server's name is resolved at the proxy."""
    pem, private = certificate(place.folder)
    served = Served(place.hub, "127.0.0.1:0", pem, private)
    port, asked = int(served.address.rpartition(":")[2]), list[bytes]()

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def forward(proxy: socket.socket) -> None:
        near, _ = proxy.accept()
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            asked.append(near.recv(10_000))
            near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=copy, args=(far, near))
            back.start()
            copy(near, far)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as proxy:
        thread = threading.Thread(target=forward, args=(proxy,))
        thread.start()
        for name in ("https_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        line = Line(f"https://localhost:{port}", "a", keys.load_key(place.folder / "a.key"), pem)
        assert line.read(line.post("/v1/challenge")).count(b".") == 3
        assert asked[0].startswith(b"CONNECT localhost:")
        line.close()
        thread.join(10)
    served.close()


def test_a_site_waits_longer_than_the_server_lets_it_wait(place: Place) -> None:
    line = Line(place.served.url, "a", keys.load_key(place.folder / "a.key"))
    assert line.timeout.total is None and line.timeout.connect_timeout < hubs.POLL < line.timeout.read_timeout
    line.close()


def test_waiting_ends_after_a_while_and_a_newer_request_takes_over(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "POLL", 0.3)
    _, session = place.hello("a")
    begin = time.monotonic()
    assert place.ask("a", "/v1/next?ack=0&busy=1", session, 1)[0] == 204
    assert time.monotonic() - begin >= 0.29
