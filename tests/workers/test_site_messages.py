"""What travels between a server and its sites, and the keys by which they know one another."""

from __future__ import annotations

import datetime
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualdelay as dd
from dualdelay.core.compression import Packed
from dualdelay.engine.half import Half
from dualdelay.workers.messages import Evaluated, EvaluationRequest, JobRequest, Reply
from dualdelay.workers.sites import keys, wire
from dualdelay.workers.sites import site as sites
from dualdelay.workers.worker import Worker

REQUEST = [0, 1, 2, 3, 4, -1, 0.0, 1, False, False, 0, 0]
REPLY = {
    "request": REQUEST, "value": np.arange(3.0), "keeps": True, "loss": 0.5, "seconds": 0.1, "error": "", "steps": 1,
    "refused": "",
}  # fmt: skip


def sent(kind: str, fields: dict[str, object]) -> bytearray:
    return bytearray(b"".join(wire.encode(kind, fields)))


leaves = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20)
kinds = st.sampled_from(["f8", "f4", "f2", "i8", "i4", "i1", "u1"])
arrays = st.builds(lambda kind, n: np.arange(n).astype(kind), kinds, st.integers(0, 40))
trees = st.recursive(leaves | arrays, lambda inner: st.dictionaries(st.text(max_size=5), inner, max_size=4), max_leaves=8)


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@settings(max_examples=100, deadline=None)
@given(trees)
def test_a_message_comes_out_as_it_went_in(held: object) -> None:
    kind, fields = wire.decode(sent("kept", {"question": 3, "held": held}))
    assert kind == "kept" and fields["question"] == 3 and same(fields["held"], held)


def test_messages_are_safetensors_files_and_small_vectors_stay_small() -> None:
    from safetensors.numpy import load

    packed = Packed(1000, (np.zeros(1000, np.int8), np.ones(1, np.float32)))
    data = sent("reply", {**REPLY, "value": {"a": packed}})
    assert len(data) < 1000 + 1000 and set(load(bytes(data))) == {"content", "t0", "t1"}
    assert wire.decode(data)[1]["value"]["a"].unpack().shape == (1000,)


WRONG = {
    "another kind": ("nonsense", {}),
    "a field too many": ("kept", {"question": 1, "held": None, "more": 1}),
    "a field too few": ("kept", {"question": 1}),
    "a text for a number": ("kept", {"question": "1", "held": None}),
    "a truth for a number": ("kept", {"question": True, "held": None}),
    "an enormous number": ("kept", {"question": 2**80, "held": None}),
    "a short request": ("reply", {**REPLY, "request": REQUEST[:5]}),
    "a request of texts": ("reply", {**REPLY, "request": ["0"] * 12}),
    "no arrays": ("reply", {**REPLY, "value": "gradient"}),
    "arrays in arrays": ("reply", {**REPLY, "value": {"a": {"b": np.ones(2)}}}),
    "an enormous text": ("reply", {**REPLY, "error": "x" * 300_000}),
    "a place outside": ("reply", {**REPLY, "value": Packed(5, (np.array([9], np.int32), np.ones(1)))}),
    "a place below zero": ("reply", {**REPLY, "value": Packed(5, (np.array([-1], np.int32), np.ones(1)))}),
    "more than there are": ("reply", {**REPLY, "value": Packed(1, (np.zeros(3, np.int32), np.ones(3)))}),
    "a vector of another length": ("reply", {**REPLY, "value": Packed(2**39, (np.zeros(3, np.int8), np.ones(1)))}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_message_that_is_none_is_refused(what: str) -> None:
    with pytest.raises(wire.BadMessage):
        wire.decode(sent(*WRONG[what]))


def test_bytes_that_are_no_message_are_refused_whatever_they_are() -> None:
    """Cut, longer, with some bytes changed, or random: always the one error, and nothing large is made of them."""
    draw, good = random.Random(0), sent("reply", REPLY)
    for k in range(3000):
        data = bytearray(good)
        if k % 3 == 0:
            data = data[: draw.randrange(len(data))]
        elif k % 3 == 1:
            for _ in range(draw.randrange(1, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
        else:
            data = bytearray(draw.randbytes(draw.randrange(200)))
        try:
            kind, fields = wire.decode(data)
        except wire.BadMessage:
            continue
        assert kind == "reply" and fields.keys() == REPLY.keys()  # what was changed was a number's value


def test_a_deep_structure_is_refused() -> None:
    held: object = 1
    for _ in range(50):
        held = {"a": held}
    with pytest.raises(wire.BadMessage, match="too deep"):
        wire.decode(sent("kept", {"question": 1, "held": held}))


def test_what_cannot_travel_is_refused_where_it_is_sent() -> None:
    with pytest.raises(TypeError, match="a set cannot travel"):
        wire.encode("kept", {"question": 1, "held": {"a": {1, 2}}})
    with pytest.raises(TypeError, match="complex128 cannot travel"):
        wire.encode("kept", {"question": 1, "held": np.ones(2, complex)})


@pytest.mark.parametrize("tells", [True, False])
def test_a_site_whose_answer_cannot_travel_says_that_instead_and_goes_on(tells: bool, tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)

    class Odd(Worker):
        def compute(self, request: JobRequest, x: Any, held: Any) -> Reply:
            return Reply(request, {"a": np.ones(2, complex)}, True, 0.5, 0.1)

        def evaluate(self, request: EvaluationRequest, x: Any) -> Evaluated:
            odd = {2: {1, 2}, 3: 10**5000, 4: endless}[request.evaluation]
            return Evaluated(0, 1, request.evaluation, {"loss": 0.5, "odd": odd})

    keys.enroll("a", tmp_path / "sites.txt", tmp_path / "a.key", days=1)
    site = sites.Site("http://127.0.0.1:1", "a", tmp_path / "a.key", lambda run: None, tell_errors=tells)
    site._worker, site._number, site._incarnation = Odd(0, dd.Quadratic([[1.0]]), Half(dd.DuDe(lr=0.1)), 1), 0, 1
    site._job({"request": REQUEST, "model": None, "held": None})
    for number in (2, 3, 4):
        site._evaluate(EvaluationRequest(0, 1, number, None), None)
    said = (wire.decode(bytearray(b"".join(site._outbox.get()._pieces))) for _ in range(4))
    (_, reply), (_, evaluated), *others = said
    why = ("complex128 cannot travel", "a set cannot travel") if tells else ("TypeError (its text stays",) * 2
    assert reply["request"] == REQUEST and why[0] in reply["error"] and not reply["keeps"] and reply["value"].shape == (0,)
    assert (evaluated["incarnation"], evaluated["evaluation"]) == (1, 2) and why[1] in evaluated["part"]
    for (_, fields), kind in zip(others, ("ValueError", "RecursionError"), strict=True):
        assert kind in fields["part"] and ("its text stays" in fields["part"]) is not tells


# --- keys ---


def test_a_key_is_made_for_a_site_alone_and_signs_for_it(tmp_path: Path) -> None:
    roster, key = tmp_path / "sites.txt", tmp_path / "a.key"
    site = keys.enroll("hospital-a", roster, key, days=30)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert keys.Roster(roster).sites == {"hospital-a": site}
    assert site.until == datetime.date.today() + datetime.timedelta(days=30)
    text = keys.signed_text("/v1/next?ack=0", "hospital-a", "session", 7)
    signature = keys.sign(keys.load_key(key), text)
    assert keys.is_signed(site.public, signature, text)
    for other in (("/v1/next?ack=1", "hospital-a", "session", 7), ("/v1/next?ack=0", "hospital-b", "session", 7)):
        assert not keys.is_signed(site.public, signature, keys.signed_text(*other))
    assert not keys.is_signed(site.public, "no base 64!", text)
    assert key.read_text().split()[1] not in roster.read_text()


def test_a_revoked_site_keeps_its_place_and_may_be_enrolled_again(tmp_path: Path) -> None:
    roster = tmp_path / "sites.txt"
    for name in "abc":
        keys.enroll(name, roster, tmp_path / f"{name}.key")
    known = keys.Roster(roster)
    today = datetime.date.today()
    assert [site.why_not(today) for site in known.sites.values()] == ["", "", ""]
    keys.revoke("b", roster)
    assert list(known.sites) == ["a", "b", "c"] and known.sites["b"].why_not(today) == "the key of b was revoked"
    again = keys.enroll("b", roster, tmp_path / "b2.key")
    assert list(known.sites) == ["a", "b", "c"] and known.sites["b"] == again and not again.revoked


def test_a_key_that_is_out_of_date_says_so() -> None:
    until = datetime.date(2020, 1, 31)
    site = keys.Enrolled("a", bytes(32), until)
    assert (
        site.why_not(until) == "" and site.why_not(datetime.date(2020, 2, 1)) == "the key of a was valid until 2020-01-31"
    )
    assert keys.parse_roster(site.line, "here") == {"a": site}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hospital-a", "line 1 of sites.txt is 'hospital-a'; expected 'NAME ed25519 KEY'"),
        ("hospital a ed25519 AAAA", "line 1 of sites.txt"),
        ("a rsa AAAA", "line 1 of sites.txt"),
        ("a ed25519 not!base64", "line 1 of sites.txt"),
        ("a ed25519 AAAA", "line 1 of sites.txt"),
        (f"a ed25519 {'A' * 43}= until=soon", "line 1 of sites.txt"),
        (f"a ed25519 {'A' * 43}= friendly", "line 1 of sites.txt"),
        (f"a ed25519 {'A' * 43}=\na ed25519 {'A' * 43}=", "line 2 of sites.txt names a a second time"),
    ],
)
def test_a_roster_with_a_wrong_line_is_refused(line: str, words: str) -> None:
    with pytest.raises(dd.BadInput) as refused:
        keys.parse_roster(line, "sites.txt")
    assert words in str(refused.value)


def test_keys_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    roster, key = tmp_path / "sites.txt", tmp_path / "a.key"
    with pytest.raises(dd.BadInput, match=r"there is no file .*; enroll a site first"):
        assert keys.Roster(roster).sites
    with pytest.raises(dd.BadInput, match="so no key to revoke"):
        keys.revoke("a", roster)
    with pytest.raises(dd.BadInput, match="a site is called 'two words'"):
        keys.enroll("two words", roster, key)
    keys.enroll("a", roster, key)
    with pytest.raises(dd.BadInput, match=r"a is enrolled in .* already; revoke its key first"):
        keys.enroll("a", roster, tmp_path / "other.key")
    with pytest.raises(dd.BadInput, match="a key is never written over"):
        keys.enroll("b", roster, key)
    assert list(keys.Roster(roster).sites) == ["a"]
    with pytest.raises(dd.BadInput, match=r"z is not enrolled in .*; there are: a"):
        keys.revoke("z", roster)
    with pytest.raises(dd.BadInput, match="there is no key"):
        keys.load_key(tmp_path / "nowhere.key")
    key.chmod(0o644)
    with pytest.raises(dd.BadInput, match="can be read by others on this machine; chmod 600"):
        keys.load_key(key)
    for text in ("", "ed25519", "ed25519 short", "rsa AAAA"):
        wrong = tmp_path / "wrong.key"
        wrong.write_text(text)
        wrong.chmod(0o600)
        with pytest.raises(dd.BadInput, match="is no site's key"):
            keys.load_key(wrong)


def place_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


HOLDERS = {
    "itself": lambda room: room,
    "a view": lambda room: room[5:10],
    "its bytes": lambda room: room.data,
    "a part of its bytes, as another array": lambda room: np.frombuffer(room.data[8:16], np.float32),
    "a tensor": lambda room: torch.from_numpy(room.view(np.float32)),
    "a part of a tensor": lambda room: torch.from_numpy(room)[3:4],
    "a message": lambda room: wire.encode("kept", {"question": 1, "held": room.view(np.float32)}),
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_memory_is_used_again_when_nothing_holds_it_and_not_before(holder: Any) -> None:
    rooms, size = wire.Rooms(), 400_000
    held = holder(rooms.take(size))
    first = place_of(rooms._kept[0])
    others = [rooms.take(size) for _ in range(2)]
    assert first not in map(place_of, others) and place_of(others[0]) != place_of(others[1])
    del held
    assert place_of(rooms.take(size)) == first, "nobody reads it any more"
    assert place_of(rooms.take(size + 4)) != first, "of another size"
    assert rooms.take(100).size == 100 and len(rooms._kept) == 4, "what is small is not kept"


def test_only_a_few_rooms_are_kept_and_those_in_use_stay_whole() -> None:
    rooms = wire.Rooms(most=2)
    used = [rooms.take(300_000) for _ in range(10)]
    for number, room in enumerate(used):
        room[:] = number
    assert len(rooms._kept) == 2 and [int(room[0]) for room in used] == list(range(10))
