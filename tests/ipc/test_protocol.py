"""Which protocols work together, and what both sides then say."""

from __future__ import annotations

import itertools

import pytest

from tierd.ipc.protocol import PROTOCOL, Peer, Protocol, explain_outdated, outdated_side


@pytest.mark.parametrize(
    ("client", "daemon", "upgrade"),
    [
        ("1.0", "1.0", None),
        ("1.0", "1.1", None),
        ("1.1", "1.0", None),
        ("1.7", "1.8", None),
        ("1.0", "1.2", "client"),
        ("1.2", "1.0", "daemon"),
        ("1.9", "1.10", None),
        ("1.2", "1.10", "client"),
        ("1.0", "2.0", "client"),
        ("2.0", "1.0", "daemon"),
        ("2.1", "1.1", "daemon"),
        ("1.9", "2.0", "client"),
        (None, "1.0", "client"),
        ("1.0", None, "daemon"),
        (None, "1.1", "client"),
    ],
)
def test_who_has_to_be_upgraded(client, daemon, upgrade):
    mine, other = (Protocol.parse(text) if text else None for text in (client, daemon))
    assert outdated_side(mine, other) == upgrade
    said = explain_outdated(Peer(mine, "0.1.0"), Peer(other, "0.2.0"))
    assert bool(said) == (upgrade is not None)
    if upgrade:
        assert f"upgrade the {upgrade}" in said
        assert (client or "before protocol 1.0") in said and (daemon or "before protocol 1.0") in said
        assert ("systemctl restart tierd" in said) == (upgrade == "daemon")


def test_both_sides_decide_alike():
    """With either one as the client: the later of the two is never the one to upgrade."""
    numbers = [Protocol(major, minor) for major in range(1, 4) for minor in range(4)]
    for one, other in itertools.product(numbers, repeat=2):
        found, mirrored = outdated_side(one, other), outdated_side(other, one)
        assert (found is None) == (mirrored is None)
        if found:
            assert found != mirrored
            assert found == ("client" if one < other else "daemon")


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.0\n", "-1.0", "1.0.0", "a.b", "12345.0", "\u0661.\u0660"])
def test_malformed_protocol_is_not_parsed(text):
    assert Protocol.parse(text) is None


def test_a_protocol_is_written_as_it_is_read():
    assert Protocol.parse(str(PROTOCOL)) == PROTOCOL
