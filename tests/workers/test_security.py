"""Whom a cluster is open to, and what is on the wire."""

import ipaddress
import os
import pathlib
import re

import pytest

import dualdelay as dd
from dualdelay.workers.security import authenticates, is_loopback, own_token, require_here, require_secure

FAR = "192.0.2.1:6379"  # an address that is nobody's: nothing is sent there


@pytest.fixture
def nothing_set(monkeypatch, tmp_path):
    """No token, no TLS and an empty home folder; also what ``own_token`` sets is gone afterwards."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.setenv(name, "")  # so that it is restored, even where it was not set
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:6379", True),
        ("localhost:6379", True),
        ("ray://127.0.0.1:10001", True),
        ("[::1]:6379", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("192.0.2.1:6379", False),
        ("ray://head.example:10001", False),
        ("head", False),
    ],
)
def test_only_loopback_is_this_machine_alone(address, here):
    assert is_loopback(address) is here


def test_an_unauthenticated_cluster_elsewhere_is_refused(nothing_set):
    problem = dd.Quadratic([[0.0], [1.0]])
    with pytest.raises(dd.BadInput, match=r"will not use Ray at 192\.0\.2\.1:6379.*insecure=True"):
        dd.train(dd.DuDe(lr=0.1), problem, dd.RayFleet(address=FAR), updates=1)
    with pytest.raises(dd.BadInput, match=r"will not use Ray at 192\.0\.2\.1"):
        dd.train(dd.DuDe(lr=0.1), problem, dd.RayFleet(host="192.0.2.1"), updates=1)


def test_a_token_a_certificate_or_the_word_insecure_lets_it_pass(nothing_set, tmp_path):
    require_secure(FAR, insecure=True)
    require_secure("127.0.0.1:6379", insecure=False)
    assert not authenticates()
    for name, value in (("RAY_AUTH_MODE", "token"), ("RAY_USE_TLS", "1"), ("RAY_AUTH_TOKEN", "secret")):
        nothing_set.setenv(name, value)
        assert authenticates()
        require_secure(FAR, insecure=False)
        nothing_set.delenv(name)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert authenticates()
    nothing_set.setenv("RAY_AUTH_MODE", "disabled")
    assert not authenticates()


def test_the_token_for_a_ray_started_here_opens_nothing_else(nothing_set):
    own_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64 and not authenticates()
    with pytest.raises(dd.BadInput, match="will not use Ray"):
        require_secure(FAR, insecure=False)


def test_a_ray_that_did_not_stay_here_is_refused():
    require_here("127.0.0.1", "127.0.0.1:6379")
    require_here("192.0.2.1", "192.0.2.1:6379")
    with pytest.raises(dd.BadInput, match=r"was to stay on 127\.0\.0\.1 and is at 192\.0\.2\.1"):
        require_here("127.0.0.1", FAR)


def test_a_program_connected_elsewhere_says_so(ray_here):
    with pytest.raises(dd.BadInput, match=r"connected to Ray at 127\.0\.0\.1:\d+ already, and the fleet's address is 127"):
        dd.train(dd.DuDe(lr=0.1), dd.Quadratic([[0.0]]), dd.RayFleet(address="127.0.0.1:9"), updates=1)


def test_nothing_of_a_ray_started_here_listens_beyond_loopback(ray_here):
    """Also while a run's worker is up, whose two ranks have found one another."""
    found = []

    def look(state, a):
        if not found:
            found.extend(listening(family()))

    fleet = dd.RayFleet(ranks=2, cpus=0.5)
    dd.train(dd.VanillaASGD(lr=0.1), dd.problems.Logistic(workers=1), fleet, updates=20, watch=[look])
    assert len(found) >= 5
    assert [entry for entry in found if not entry[1].is_loopback] == []


def family():
    """This process and all its descendants."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids):
    """The kind, address and port of each socket on which one of these processes waits for others."""
    owned = set()
    for pid in pids:
        try:
            links = [link.readlink() for link in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        owned |= {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
    for kind in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in owned and fields[3] == "0A":
                raw, port = fields[1].split(":")
                data = bytes.fromhex(raw)
                address = ipaddress.ip_address(b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4)))
                yield kind, getattr(address, "ipv4_mapped", None) or address, int(port, 16)


def test_every_test_that_the_security_page_names_is_there():
    page = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "security.md"
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", page.read_text())
    assert len(named) > 25
    for file, name in named:
        assert f"\ndef {name}(" in (pathlib.Path(__file__).parents[1] / file).read_text(), (file, name)
