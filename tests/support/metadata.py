"""Metadata servers of EC2, Compute Engine and Azure on loopback, which answer as their documentation says.

`tierd/client/preemption/cloud_notices.py` names the pages. Each refuses a request without the header that its cloud
demands.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from support.waiting import wait_until


class Metadata:
    """The state of one server; tests change it. `asked` counts requests by path."""

    def __init__(self) -> None:
        self.address = ""
        self.asked: Counter[str] = Counter()
        self.action: dict[str, str] | None = None  # EC2's spot/instance-action
        self.token = "token-1"  # EC2's; another one makes the first expire
        self.preempted, self.maintenance = "FALSE", "NONE"  # Compute Engine's
        self.events: list[dict[str, object]] = []  # Azure's
        self.name = "worker_3"
        self.broken: int | None = None  # a status with which every request is answered
        self.changed = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    metadata: Metadata

    def do_PUT(self) -> None:
        self._count()
        if self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600":
            return self._answer(200, self.metadata.token)
        return self._answer(400, "")

    def do_GET(self) -> None:
        metadata, url = self.metadata, urlsplit(self.path)
        self._count()
        if metadata.broken is not None:
            return self._answer(metadata.broken, "")
        if url.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != metadata.token:
                return self._answer(401, "")
            return self._answer(404, "") if metadata.action is None else self._answer(200, json.dumps(metadata.action))
        if url.path.startswith("/computeMetadata/v1/instance/"):
            return self._compute_engine(url.path.rpartition("/")[2], parse_qs(url.query))
        if self.headers["Metadata"] == "true" and url.path == "/metadata/instance/compute/name":
            return self._answer(200, metadata.name)
        if self.headers["Metadata"] == "true" and self.path == "/metadata/scheduledevents?api-version=2020-07-01":
            return self._answer(200, json.dumps({"DocumentIncarnation": 1, "Events": metadata.events}))
        return self._answer(400, "")

    def _compute_engine(self, key: str, query: dict[str, list[str]]) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            return self._answer(403, "")
        if query.get("wait_for_change") == ["true"] and query["last_etag"] == [self._etag()]:
            self.metadata.changed.wait(float(query["timeout_sec"][0]))
        value = {"preempted": self.metadata.preempted, "maintenance-event": self.metadata.maintenance}[key]
        return self._answer(200, value, {"ETag": self._etag()})

    def _etag(self) -> str:
        return "a1" if self.metadata.preempted == "FALSE" else "b2"

    def _count(self) -> None:
        self.metadata.asked[urlsplit(self.path).path] += 1

    def _answer(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def serving() -> Iterator[Metadata]:
    """A server of all three clouds until the block ends."""
    metadata = Metadata()
    handler = type("Handler", (_Handler,), {"metadata": metadata})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    metadata.address = f"127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield metadata
    finally:
        metadata.changed.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


def wait_for(metadata: Metadata, path: str) -> None:
    """Return when the server was asked for `path`."""
    wait_until(lambda: metadata.asked[path])
