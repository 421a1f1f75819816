"""Daemons of other versions: sockets that answer as a test says."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from tierd.spool.spool import Spool

Message = dict[str, Any]


class OtherDaemon:
    """Listens on a spool's two sockets and answers with `answer(request)`; None closes the connection.

    Args:
        greeting: what the hand-off socket greets with; None where nobody listens there.

    Attributes:
        asked: every message of both sockets, in order.
    """

    def __init__(
        self, spool: Spool, answer: Callable[[Message], Message | None], greeting: Message | None = None
    ) -> None:
        self.asked: list[Message] = []
        self._answer, self._greeting = answer, greeting
        self._sockets: list[socket.socket] = []
        self._listen(spool.socket, socket.SOCK_STREAM, self._serve)
        if greeting is not None:
            self._listen(spool.handoff_socket, socket.SOCK_SEQPACKET, self._greet)

    def _listen(self, path: Any, kind: socket.SocketKind, serve: Callable[[socket.socket], None]) -> None:
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(str(path))
        listener.listen(16)
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._sockets.append(connection)
            threading.Thread(target=self._quietly, args=(serve, connection), daemon=True).start()

    def _quietly(self, serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
        with connection:
            try:
                serve(connection)
            except OSError:
                pass

    def _serve(self, connection: socket.socket) -> None:
        for line in connection.makefile("rb"):
            self.asked.append(json.loads(line))
            reply = self._answer(self.asked[-1])
            if reply is None:
                return
            connection.sendall(json.dumps(reply).encode() + b"\n")

    def _greet(self, connection: socket.socket) -> None:
        connection.send(json.dumps(self._greeting).encode())
        while packet := connection.recv(1 << 16):
            self.asked.append(json.loads(packet))

    def __enter__(self) -> OtherDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()
