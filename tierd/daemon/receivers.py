"""Who is told: a webhook, which is posted to, or a command, which is run. Both block, in a thread that is theirs alone.

Law: a try ends in time, whatever the other side does, and nothing that it began goes on. What is said of a failure
repeats neither an address nor a header nor what the other side answered, which might.
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

from tierd.core.config import TellConfig
from tierd.core.errors import ConfigError
from tierd.core.webhook import is_loopback, is_reference, shown
from tierd.stores.keys import read_private

_TICK = 0.02  # seconds between looks at a command
_LAST = 2.0  # seconds for a process that was killed to be gone
_LONGEST = 8192  # characters of an address or of what a header says
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_LATER = (408, 425, 429)  # HTTP statuses below 500 by which a server says: not now


class Untold(Exception):
    """A try failed; `again` says whether another one may not."""

    def __init__(self, why: str, *, again: bool) -> None:
        super().__init__(why)
        self.again = again


class Receiver(Protocol):
    """`name` is what may be shown of it, `tries` how often it is tried with one event."""

    name: str
    tries: int

    def give(self, body: bytes, timeout_s: float) -> None:
        """Hand one event over; raises `Untold`."""

    def stop(self) -> None:
        """End the try that is under way, from another thread, and begin none any more."""


def open_receiver(tell: TellConfig, where: str) -> Receiver:
    """The receiver that a `[[tell]]` names; raises `ConfigError` with `where` if a reference leads nowhere."""
    if tell.command is not None:
        return Command(tell.command)
    assert tell.url is not None
    url = _read(tell.url, f"{where}.url")
    try:
        name = shown(url)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None
    headers = {key: _read(value, f"{where}.headers.{key}") for key, value in tell.headers.items()}
    return Webhook(url, name, headers)


def _read(text: str, where: str) -> str:
    if not is_reference(text):
        return text
    kind, _, name = text.partition(":")
    if kind == "env":
        found = os.environ.get(name, "")
    else:
        try:
            found = read_private(Path(name), 4 * _LONGEST).decode().rstrip("\r\n")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        except UnicodeDecodeError:
            found = ""
    if not found or len(found) > _LONGEST or not all(" " <= one <= "~" for one in found):
        raise ConfigError(f"{where}: {text} holds nothing, or no plain line of at most {_LONGEST} characters")
    return found


class Webhook:
    """Posts JSON. Redirects are not followed; a proxy is what the environment says, but for this machine."""

    tries = 3

    def __init__(self, url: str, name: str, headers: Mapping[str, str]) -> None:
        self.name = name
        self._url = url
        agent = {"Content-Type": "application/json", "User-Agent": "tierd"}
        self._headers = {**headers, **agent}
        self._connection: http.client.HTTPConnection | None = None
        self._over = threading.Event()  # this try is
        self._stopped = False
        proxies: dict[str, str] | None = {} if is_loopback(urlsplit(url)) else None
        self._opener = urllib.request.build_opener(
            _Plain(self._watched), _Tls(self._watched), _NoRedirect(), urllib.request.ProxyHandler(proxies)
        )

    def give(self, body: bytes, timeout_s: float) -> None:
        self._over.clear()
        request = urllib.request.Request(self._url, body, self._headers, method="POST")  # noqa: S310  # `shown` saw it
        watch = threading.Timer(timeout_s, self._end)  # time-outs of a socket begin anew with every byte
        watch.daemon = True
        watch.start()
        try:
            if self._stopped:
                raise Untold("the daemon ends", again=False)
            self._opener.open(request, timeout=timeout_s).close()
            if self._over.is_set():  # an answer that was cut off looks like one
                raise Untold(f"no answer within {timeout_s:g} s", again=True)
        except urllib.error.HTTPError as error:
            error.close()
            raise Untold(f"it answered {error.code}", again=error.code >= 500 or error.code in _LATER) from None
        except Untold:
            raise
        except Exception as error:  # whatever a server's answer may be
            why = f"no answer within {timeout_s:g} s" if self._over.is_set() else _said(error, timeout_s)
            raise Untold(why, again=True) from None
        finally:
            watch.cancel()
            self._connection = None

    def stop(self) -> None:
        self._stopped = True
        self._end()

    def _end(self) -> None:
        self._over.set()
        line = self._connection.sock if self._connection else None
        if line is not None:
            try:
                socket.socket.shutdown(line, socket.SHUT_RDWR)  # not TLS's, which is the other thread's
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


def _said(error: BaseException, timeout_s: float) -> str:
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
    """Runs a program, with JSON on its standard input, in a process group of its own, of which nothing is left then."""

    tries = 1

    def __init__(self, words: Sequence[str]) -> None:
        self.name = words[0]
        self._words = tuple(words)
        self._stopped = False

    def give(self, body: bytes, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        if self._stopped:
            raise Untold("the daemon ends", again=False)
        fd = os.memfd_create("event")  # no pipe: whether the program reads it is its own affair
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
            raise Untold(f"it cannot be run: {error.strerror}", again=False) from None
        finally:
            os.close(fd)
        ended = False
        try:
            while not ended and not self._stopped and time.monotonic() < end:
                # Not reaped yet, so that its group's number is nobody else's.
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
                time.sleep(0 if ended else _TICK)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:  # all of it has ended, or is another user's
                pass
        if not ended:
            _reap(process)
            raise Untold("the daemon ends" if self._stopped else f"it ran longer than {timeout_s:g} s", again=False)
        if code := process.wait():
            raise Untold(f"it ended with {code}", again=False)

    def stop(self) -> None:
        self._stopped = True


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LAST)
    except subprocess.TimeoutExpired:  # in the kernel's hands; reaped at the next start of a process
        pass
