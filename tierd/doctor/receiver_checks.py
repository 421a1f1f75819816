"""Try the receivers of events, without an event, and the port of the HTTP server."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import closing

from tierd.core.config import HttpConfig, NotifyConfig
from tierd.core.diagnosis.findings import Finding, finding
from tierd.core.errors import ConfigError
from tierd.events.receivers import DeliveryFailed, open_receiver

_PORT = "http"  # the place of findings about the port
_MAX_CONNECT_S = 5.0
_HEALTHY = b"ok"  # as the daemon's /healthz answers


def examine_receivers(receivers: Sequence[NotifyConfig]) -> Iterator[Finding]:
    """Yield a finding about each receiver."""
    for index, config in enumerate(receivers):
        place = f"notify[{index}]"
        try:
            receiver = open_receiver(config, place)
        except ConfigError as error:
            yield finding(place, "receiver unusable", str(error))
            continue
        try:
            is_tried = receiver.connect(min(config.timeout_s, _MAX_CONNECT_S))
        except DeliveryFailed as error:
            yield finding(place, "receiver silent", f"{receiver.name}: {error}")
            continue
        yield finding(place, "receiver connects" if is_tried else "receiver by proxy", receiver.name)


def examine_port(config: HttpConfig) -> Iterator[Finding]:
    """Yield the finding about the port on which a daemon serves, or shall serve, HTTP."""
    host, port = config.address
    try:
        with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            yield finding(_PORT, "port unusable", f"{config.listen}: {error.strerror}")
        elif _answers_as_daemon(config):
            yield finding(_PORT, "port answers", f"{config.listen}: a daemon answers")
        else:
            yield finding(_PORT, "port taken", f"{config.listen}: another program listens there")
        return
    yield finding(_PORT, "port free", config.listen)


def _answers_as_daemon(config: HttpConfig) -> bool:
    host, port = config.address
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    connection = http.client.HTTPConnection(host, port, timeout=_MAX_CONNECT_S)
    if config.cert_file is not None:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # no secret is sent
        connection = http.client.HTTPSConnection(host, port, timeout=_MAX_CONNECT_S, context=context)
    with closing(connection):
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().read(64).strip() == _HEALTHY
        except (OSError, http.client.HTTPException):
            return False
