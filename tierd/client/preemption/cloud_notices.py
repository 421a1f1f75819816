"""Read notices of preemption from the metadata server of a cloud's virtual machine.

Every answer is a bounded read over plain HTTP to the link-local address that all three clouds use; no proxy is asked.

Sources of the requests and answers:

- EC2: "Spot Instance interruption notices", docs.aws.amazon.com/AWSEC2/latest/UserGuide/
  spot-instance-termination-notices.html: `spot/instance-action` is 404 until the instance is marked, then JSON with
  `action` (hibernate, stop or terminate) and `time`; the notice comes 2 minutes before, and is to be read every 5 s.
  "Use IMDSv2", …/UserGuide/configuring-instance-metadata-service.html: the token of `PUT /latest/api/token`.
- Compute Engine: "Preemptible VM instances", cloud.google.com/compute/docs/instances/create-use-preemptible (detecting
  preemption): `instance/preempted` is TRUE or FALSE. "Get live migration notices", cloud.google.com/compute/docs/
  metadata/getting-live-migration-notice: `instance/maintenance-event` is NONE, MIGRATE_ON_HOST_MAINTENANCE or
  TERMINATE_ON_HOST_MAINTENANCE. "Wait for metadata updates", …/metadata/querying-metadata: `wait_for_change`,
  `last_etag`, `timeout_sec`.
- Azure: "Scheduled Events for Linux VMs", learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: events go
  to every machine of a group, and `Resources` names those that they concern; the first answer may take two minutes.
  "Azure Instance Metadata Service", …/instance-metadata-service: `instance/compute/name`.
- Which cloud this is, without a request: the DMI strings that cloud-init reads (`tools/ds-identify`).
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from tierd.core.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

ADDRESS = "TIERD_METADATA"  # the environment's variable for another address of the server, HOST:PORT
_LINK_LOCAL = "169.254.169.254:80"
_DMI = Path("/sys/class/dmi/id")
_ANSWER_S = 5.0
_FIRST_S = 130.0  # for Azure's first answer
_CHANGE_S = 5  # how long Compute Engine waits for a change before it answers
_LARGEST = 1 << 16  # bytes of an answer
_TOKEN_S = 21600  # how long EC2's token is valid
_ENDS = {"Preempt", "Terminate", "Reboot", "Redeploy"}  # Azure's events but Freeze, which pauses for seconds


class CloudNotice(NamedTuple):
    """A notice: its identity, and what it says, for people."""

    key: str
    why: str


class Cloud(Protocol):
    """A cloud's metadata server. `read` raises `OSError` if it does not answer as documented."""

    name: str

    def read(self) -> list[CloudNotice]:
        """Return the notices that hold now."""
        ...


class Ec2:
    """EC2, with IMDSv2 only."""

    name = "EC2"

    def __init__(self, address: str) -> None:
        self._address, self._token = address, ""

    def read(self) -> list[CloudNotice]:
        path = "/latest/meta-data/spot/instance-action"
        answer = self._get(path)
        if answer.status == 401:  # the token has expired
            self._token = ""
            answer = self._get(path)
        if answer.status == 404:
            return []
        action = _decode(answer.good(path).body, _Ec2Action)
        return [CloudNotice(f"ec2 {action.action}", f"EC2: {action.action} at {action.time}")]

    def _get(self, path: str) -> _Answer:
        if not self._token:
            token_path, headers = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = _ask(self._address, "PUT", token_path, headers).good(token_path).text
        return _ask(self._address, "GET", path, {"X-aws-ec2-metadata-token": self._token})


class Gce:
    """Compute Engine. A read waits up to `_CHANGE_S` for a preemption, so that it is known at once."""

    name = "Compute Engine"

    def __init__(self, address: str) -> None:
        self._address, self._etag = address, ""

    def read(self) -> list[CloudNotice]:
        wait = f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={_CHANGE_S}" if self._etag else ""
        preempted = self._get(f"preempted{wait}")
        etag = preempted.headers.get("ETag", "")
        self._etag = etag if etag.isalnum() else ""
        notices = [CloudNotice("gce preempted", "Compute Engine preempts this VM")] if preempted.text == "TRUE" else []
        if self._get("maintenance-event").text == "TERMINATE_ON_HOST_MAINTENANCE":
            notices.append(
                CloudNotice("gce maintenance", "Compute Engine terminates this VM for maintenance of its host")
            )
        return notices

    def _get(self, path: str) -> _Answer:
        path = f"/computeMetadata/v1/instance/{path}"
        return _ask(self._address, "GET", path, {"Metadata-Flavor": "Google"}, _ANSWER_S + _CHANGE_S).good(path)


class Azure:
    """Azure. Only events that name this machine count."""

    name = "Azure"

    def __init__(self, address: str) -> None:
        self._address, self._me, self._answer_s = address, "", _FIRST_S

    def read(self) -> list[CloudNotice]:
        headers = {"Metadata": "true"}
        if not self._me:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            self._me = _ask(self._address, "GET", path, headers).good(path).text
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = _ask(self._address, "GET", path, headers, self._answer_s).good(path)
        self._answer_s = _ANSWER_S
        return [
            CloudNotice(f"azure {event.id}", f"Azure: {event.type}, not before {event.not_before or 'now'}")
            for event in _decode(answer.body, _AzureEvents).events
            if event.type in _ENDS and self._me in event.resources
        ]


_CLOUDS: dict[str, Callable[[str], Cloud]] = {"ec2": Ec2, "gce": Gce, "azure": Azure}


def cloud(setting: bool | str, address: str | None = None, dmi: Path = _DMI) -> Cloud | None:
    """Return the server that `When(preemption=…)` reads; None if this machine is of none of the three clouds.

    Args:
        address: `HOST:PORT` of the server; by default the environment's `ADDRESS`, else the link-local one.
        dmi: the directory of the strings that say who made this machine.

    Raises:
        ConfigError: the environment's address cannot be used.
    """
    name = setting if isinstance(setting, str) else _detected(dmi) if setting else None
    address = address or os.environ.get(ADDRESS) or _LINK_LOCAL
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{ADDRESS}={address!r} in the environment: HOST:PORT of the metadata server")
    if name is None:
        return None
    server: Cloud = _CLOUDS[name](address)
    return server


def _detected(dmi: Path) -> str | None:
    def says(name: str) -> str:
        try:
            return (dmi / name).read_text().strip()
        except (OSError, ValueError):
            return ""

    if says("sys_vendor") == "Amazon EC2":
        return "ec2"
    if says("product_name") == "Google Compute Engine":
        return "gce"
    return "azure" if says("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77" else None


class _Ec2Action(msgspec.Struct, frozen=True):
    action: str
    time: str = "a time that it does not say"


class _AzureEvent(msgspec.Struct, frozen=True):
    id: str = msgspec.field(name="EventId")
    type: str = msgspec.field(name="EventType")
    resources: tuple[str, ...] = msgspec.field(name="Resources", default=())
    not_before: str = msgspec.field(name="NotBefore", default="")


class _AzureEvents(msgspec.Struct, frozen=True):
    events: tuple[_AzureEvent, ...] = msgspec.field(name="Events")


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()

    def good(self, path: str) -> _Answer:
        if self.status != 200:
            raise OSError(f"{path.partition('?')[0]}: HTTP {self.status}")
        return self


def _ask(address: str, method: str, path: str, headers: Mapping[str, str], timeout_s: float = _ANSWER_S) -> _Answer:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return _Answer(answer.status, answer.headers, answer.read(_LARGEST))  # type: ignore[arg-type]
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{path.partition('?')[0]}: {error!r}") from error
    finally:
        connection.close()


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OSError(f"an answer that is not as documented: {error}") from error
