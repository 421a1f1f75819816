"""What the metadata servers of three clouds say is taken as it is documented, and no server is asked unasked."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from support.metadata import Metadata, serving

from tierd.client.preemption import cloud_notices
from tierd.client.preemption.cloud_notices import ADDRESS, Azure, Ec2, Gce, cloud
from tierd.core.errors import ConfigError


@pytest.fixture
def metadata():
    with serving() as server:
        yield server


def test_ec2_says_nothing_then_the_action_once_its_token_was_renewed(metadata: Metadata) -> None:
    server = Ec2(metadata.address)
    assert server.read() == [] == server.read()
    assert metadata.asked["/latest/api/token"] == 1, "a token is kept"
    metadata.token = "token-2"  # the first one has expired
    metadata.action = {"action": "terminate", "time": "2026-11-23T08:22:00Z"}
    (found,) = server.read()
    assert found == ("ec2 terminate", "EC2: terminate at 2026-11-23T08:22:00Z")
    assert metadata.asked["/latest/api/token"] == 2


def test_compute_engine_says_a_preemption_at_once_and_a_termination_for_maintenance(metadata: Metadata) -> None:
    server = Gce(metadata.address)
    assert server.read() == []

    def preempt() -> None:
        metadata.preempted = "TRUE"
        metadata.changed.set()

    threading.Timer(0.2, preempt).start()
    begun_s = time.monotonic()
    assert [one.key for one in server.read()] == ["gce preempted"], "of a request that waited for it"
    assert time.monotonic() - begun_s < cloud_notices._CHANGE_S + 60
    metadata.preempted, metadata.maintenance = "FALSE", "MIGRATE_ON_HOST_MAINTENANCE"
    assert server.read() == [], "a live migration ends nothing"
    metadata.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    assert [one.key for one in server.read()] == ["gce maintenance"]


def test_azure_reports_the_end_of_this_machine_and_not_of_others(metadata: Metadata) -> None:
    server = Azure(metadata.address)
    assert server.read() == []
    soon = "Mon, 19 Sep 2016 18:29:47 GMT"

    def event(number: int, kind: str, *resources: str, at: str = soon) -> dict[str, object]:
        more = {"ResourceType": "VirtualMachine", "EventStatus": "Scheduled", "DurationInSeconds": -1}
        return {"EventId": f"E{number}", "EventType": kind, "Resources": resources, "NotBefore": at, **more}

    mine = event(4, "Preempt", "worker_1", "worker_3", at="")
    metadata.events = [event(1, "Freeze", "worker_3"), event(2, "Preempt", "worker_33"), event(3, "Reboot"), mine]
    assert server.read() == [("azure E4", "Azure: Preempt, not before now")]


@pytest.mark.parametrize("kind", [Ec2, Gce, Azure])
def test_a_server_that_does_not_answer_as_documented_is_an_error_that_names_the_path(metadata: Metadata, kind) -> None:
    metadata.broken = 503
    with pytest.raises(OSError, match=r"/(latest|computeMetadata|metadata)/.*HTTP 503"):
        kind(metadata.address).read()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            kind(f"127.0.0.1:{nobody.getsockname()[1]}").read()


def test_an_answer_that_is_no_notice_is_an_error(metadata: Metadata) -> None:
    metadata.action = {"time": "soon"}
    with pytest.raises(OSError, match="not as documented"):
        Ec2(metadata.address).read()


@pytest.mark.parametrize(
    ("file", "says", "name"),
    [
        ("sys_vendor", "Amazon EC2", "EC2"),
        ("product_name", "Google Compute Engine", "Compute Engine"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "Azure"),
        ("sys_vendor", "QEMU", None),
    ],
)
def test_which_cloud_this_is_is_known_without_a_request(tmp_path, file: str, says: str, name: str | None) -> None:
    (tmp_path / file).write_text(f"{says}\n")
    found = cloud(True, dmi=tmp_path)
    assert (found.name if found else None) == name
    assert cloud(False, dmi=tmp_path) is None and cloud(True, dmi=tmp_path / "none") is None
    assert cloud("azure", dmi=tmp_path).name == "Azure"  # type: ignore[union-attr]


@pytest.mark.parametrize("address", ["metadata", "host:", ":80", "host:0", "host:99999", "host:a"])
def test_another_address_is_checked(monkeypatch, address: str) -> None:
    monkeypatch.setenv(ADDRESS, address)
    with pytest.raises(ConfigError, match=ADDRESS):
        cloud("ec2")


def test_default_metadata_address_is_link_local(monkeypatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    assert cloud("ec2")._address == "169.254.169.254:80"  # type: ignore[union-attr]
