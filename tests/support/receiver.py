"""A webhook's other end on loopback, which behaves as it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.waiting import wait_until


class Receiver:
    """What was posted. `answer`: a status, or ``hang`` (until `release` is set), ``drip``, ``garbage`` or ``close``."""

    def __init__(self) -> None:
        self.answer: int | str = 200
        self.reported: list[dict[str, Any]] = []  # what was answered with 200
        self.asked: list[tuple[str, dict[str, str]]] = []  # path and headers of every request
        self.gone: list[str] = []  # paths of requests whose sender hung up on a drip
        self.release = threading.Event()
        self.port = 0
        self.start: Callable[[], None] = lambda: None  # again, on the same port, after a `stop`
        self.stop: Callable[[], None] = lambda: None  # connections are refused from then on

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def what(self) -> list[str]:
        return [one["what"] for one in self.reported]


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Serve one while the context lasts."""
    receiver = Receiver()

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.asked.append((self.path, dict(self.headers)))
            answer = receiver.answer
            if answer == "hang":
                receiver.release.wait(100)
            elif answer == "drip":
                self._drip()
            elif answer == "garbage":
                self.wfile.write(b"\x00 no HTTP at all\r\n\r\n")
            elif answer != "close":
                if answer == 200:
                    receiver.reported.append(body)
                self.send_response(int(answer))
                self.send_header("Location", receiver.url("/elsewhere"))
                self.end_headers()

        do_GET = do_POST

        def _drip(self) -> None:
            try:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                while not receiver.release.wait(0.02):
                    self.wfile.write(b"x")
            except OSError:
                receiver.gone.append(self.path)

    running: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def start() -> None:
        server = ThreadingHTTPServer(("127.0.0.1", receiver.port), Answers)
        server.daemon_threads = True
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        running.append((server, thread))

    def stop() -> None:
        server, thread = running.pop()
        server.shutdown()
        server.server_close()
        thread.join(60)

    receiver.start, receiver.stop = start, stop
    start()
    try:
        yield receiver
    finally:
        receiver.release.set()
        stop()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: all(gone(pid) for pid in pids))
