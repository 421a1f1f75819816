"""Receivers of events: a webhook gets a POST request, a command is run. Both block, each in a thread of its own.

Invariant: a try ends within its time limit regardless of the other side, and nothing that it started is still running.
An error's text contains no address, no header and no part of the answer, because each may contain a secret.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from tierd.core.config import NotifyConfig
from tierd.core.errors import ConfigError
from tierd.core.event_kinds import is_loopback, is_reference, redacted_url
from tierd.stores.encryption_keys import read_private_file

_TICK = 0.02  # seconds between checks of a command
_REAP_S = 2.0  # seconds to wait for a killed process to end
_LONGEST = 8192  # characters of an address or of a header's value
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_RETRY_STATUSES = (408, 425, 429)  # HTTP statuses below 500 that ask for a later try


class DeliveryFailed(Exception):
    """A try failed.

    Attributes:
        is_retryable: whether another try may work.
    """

    def __init__(self, why: str, *, is_retryable: bool) -> None:
        super().__init__(why)
        self.is_retryable = is_retryable


class Receiver(Protocol):
    """A webhook or a command. `name` may be shown; one event is tried at most `tries` times."""

    name: str
    tries: int

    def deliver(self, body: bytes, timeout_s: float) -> None:
        """Deliver one event; raises `DeliveryFailed`."""

    def connect(self, timeout_s: float) -> bool:
        """Find out whether an event could be delivered, without one; False: that cannot be known, because a proxy
        connects. Raises `DeliveryFailed`."""

    def stop(self) -> None:
        """Cancel the try in progress, from another thread, and refuse every later one."""


def open_receiver(config: NotifyConfig, where: str) -> Receiver:
    """Open the receiver that a `[[notify]]` names; raises `ConfigError` with `where` if a reference cannot be read."""
    if config.command is not None:
        return Command(config.command)
    assert config.url is not None
    url = _resolve_reference(config.url, f"{where}.url")
    try:
        name = redacted_url(url)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
    headers = {key: _resolve_reference(value, f"{where}.headers.{key}") for key, value in config.headers.items()}
    return Webhook(url, name, headers)


def _resolve_reference(text: str, where: str) -> str:
    if not is_reference(text):
        return text
    kind, _, name = text.partition(":")
    if kind == "env":
        secret = os.environ.get(name, "")
    else:
        try:
            secret = read_private_file(Path(name), 4 * _LONGEST).decode().rstrip("\r\n")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except UnicodeDecodeError:
            secret = ""
    if not secret or len(secret) > _LONGEST or not all(" " <= character <= "~" for character in secret):
        raise ConfigError(f"{where}: {text} holds nothing, or no plain line of at most {_LONGEST} characters")
    return secret


class Webhook:
    """Posts JSON and follows no redirect. The proxy is taken from the environment, except for loopback addresses."""

    tries = 3

    def __init__(self, url: str, name: str, headers: Mapping[str, str]) -> None:
        self.name = name
        self._url = url
        agent = {"Content-Type": "application/json", "User-Agent": "tierd"}
        self._headers = {**headers, **agent}
        self._connection: http.client.HTTPConnection | None = None
        self._over = threading.Event()  # set when the try in progress has timed out or is cancelled
        self._stopped = False
        proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url)) else None
        self._opener = urllib.request.build_opener(
            _Plain(self._watched), _Tls(self._watched), _NoRedirect(), urllib.request.ProxyHandler(proxies)
        )

    def deliver(self, body: bytes, timeout_s: float) -> None:
        self._over.clear()
        # `redacted_url` has checked the scheme.
        request = urllib.request.Request(self._url, body, self._headers, method="POST")  # noqa: S310
        watch = threading.Timer(timeout_s, self._end)  # needed, because a socket's own timeout restarts with every byte
        watch.daemon = True
        watch.start()
        try:
            if self._stopped:
                raise DeliveryFailed("the daemon ends", is_retryable=False)
            self._opener.open(request, timeout=timeout_s).close()
            if self._over.is_set():  # an answer that was cut off looks complete
                raise DeliveryFailed(f"no answer within {timeout_s:g} s", is_retryable=True)
        except urllib.error.HTTPError as error:
            error.close()
            raise DeliveryFailed(
                f"it answered {error.code}", is_retryable=error.code >= 500 or error.code in _RETRY_STATUSES
            ) from None
        except DeliveryFailed:
            raise
        except Exception as error:  # a server's answer may cause any exception
            why = f"no answer within {timeout_s:g} s" if self._over.is_set() else _describe_error(error, timeout_s)
            raise DeliveryFailed(why, is_retryable=True) from None
        finally:
            watch.cancel()
            self._connection = None

    def connect(self, timeout_s: float) -> bool:
        url = urlsplit(self._url)
        host, is_encrypted = url.hostname or "", url.scheme == "https"
        if not is_loopback(url) and url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
            return False
        try:
            with socket.create_connection((host, url.port or (443 if is_encrypted else 80)), timeout_s) as line:
                if is_encrypted:
                    ssl.create_default_context().wrap_socket(line, server_hostname=host).close()
        except (OSError, UnicodeError) as error:
            raise DeliveryFailed(_describe_error(error, timeout_s), is_retryable=True) from None
        return True

    def stop(self) -> None:
        self._stopped = True
        self._end()

    def _end(self) -> None:
        self._over.set()
        line = self._connection.sock if self._connection else None
        if line is not None:
            try:
                # Not the TLS shutdown, because the other thread uses the TLS object.
                socket.socket.shutdown(line, socket.SHUT_RDWR)
            except OSError:
                pass

    def _watched(self, kind: Callable[..., http.client.HTTPConnection]) -> Callable[..., http.client.HTTPConnection]:
        def connect(*args: Any, **options: Any) -> http.client.HTTPConnection:
            self._connection = kind(*args, **options)
            return self._connection

        return connect


_Watched = Callable[[Callable[..., http.client.HTTPConnection]], Callable[..., http.client.HTTPConnection]]


class _Plain(urllib.request.HTTPHandler):
    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self._watched = watched

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._watched(http.client.HTTPConnection), req)


class _Tls(urllib.request.HTTPSHandler):
    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self._watched, self._ssl = watched, ssl.create_default_context()

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._watched(http.client.HTTPSConnection), req, context=self._ssl)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        return None


def _describe_error(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    if isinstance(error, OSError) and error.errno and error.strerror:
        return error.strerror
    return f"no answer: {type(error).__name__}"


class Command:
    """Runs a program with JSON on its standard input, in a process group of its own, which is killed afterwards."""

    tries = 1

    def __init__(self, words: Sequence[str]) -> None:
        self.name = words[0]
        self._words = tuple(words)
        self._stopped = False

    def deliver(self, body: bytes, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        if self._stopped:
            raise DeliveryFailed("the daemon ends", is_retryable=False)
        fd = os.memfd_create("event")  # not a pipe, because the program need not read it
        try:
            os.write(fd, body)
            os.lseek(fd, 0, os.SEEK_SET)
            process = subprocess.Popen(
                self._words,
                stdin=fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise DeliveryFailed(f"it cannot be run: {error.strerror}", is_retryable=False) from None
        finally:
            os.close(fd)
        has_exited = False
        try:
            while not has_exited and not self._stopped and time.monotonic() < end:
                # WNOWAIT leaves the process unreaped, so that the kernel does not reuse its group's number.
                has_exited = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
                time.sleep(0 if has_exited else _TICK)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:  # the whole group has ended, or belongs to another user
                pass
        if not has_exited:
            _reap(process)
            raise DeliveryFailed(
                "the daemon ends" if self._stopped else f"it ran longer than {timeout_s:g} s", is_retryable=False
            )
        if code := process.wait():
            raise DeliveryFailed(f"it ended with {code}", is_retryable=False)

    def connect(self, timeout_s: float) -> bool:
        if not os.access(self.name, os.X_OK):
            raise DeliveryFailed("this account cannot run it, or it is not there", is_retryable=False)
        return True

    def stop(self) -> None:
        self._stopped = True


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_REAP_S)
    except subprocess.TimeoutExpired:  # the process is stuck in the kernel; it is reaped at the next start of a process
        pass
