"""Certificates made for a test, and a TLS server on loopback that misbehaves as it is told."""

from __future__ import annotations

import datetime
import ipaddress
import random
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NOW = datetime.datetime.now(datetime.UTC)
_DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority. `bundle` is its own certificate, as AWS_CA_BUNDLE takes one."""

    def __init__(self, room: Path) -> None:
        self._room, self._key = room, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority of the tests")])
        own = self._builder(self._name, self._key, -_DAY, _DAY).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.bundle = room / "bundle.pem"
        self.bundle.write_bytes(self._signed(own))

    def server(self, host: str, begins: datetime.timedelta = -_DAY, ends: datetime.timedelta = _DAY) -> ssl.SSLContext:
        """What a server at `host` needs, with a certificate that holds from `begins` to `ends`, counted from today."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.chain(host, begins, ends))
        return context

    def chain(self, host: str, begins: datetime.timedelta = -_DAY, ends: datetime.timedelta = _DAY) -> Path:
        """A file with such a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        try:
            alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        builder = self._builder(name, key, begins, ends).add_extension(
            x509.SubjectAlternativeName([alternative]), critical=False
        )
        path = self._room / f"{random.getrandbits(64):x}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(self._signed(builder) + secret)
        path.chmod(0o600)
        return path

    def _builder(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, begins: datetime.timedelta, ends: datetime.timedelta
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(_NOW + begins)
            .not_valid_after(_NOW + ends)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> bytes:
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def reset(sock: socket.socket) -> None:
    """Close with RST."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Front:
    """Stands before a plain server on loopback and speaks TLS, or plain TCP where `context` is None.

    Attributes:
        harm: asked for each new connection: "" (none), "reset before" (of the handshake), "reset within" it, "half"
            (closed for writing as soon as the client has sent something), "mute" (nothing is answered), "cut" (closed
            after the first bytes of an answer).
        connections: how many there were; `resumed`: on how many of them a TLS session was resumed.
    """

    def __init__(self, port: int, context: ssl.SSLContext | None, harm: Callable[[], str] = str) -> None:
        self.behind, self.context, self.harm = port, context, harm
        self.port = self.connections = self.resumed = 0
        self._open: set[socket.socket] = set()

    @contextmanager
    def running(self) -> Iterator[Front]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = listener.getsockname()[1]
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            self.hang_up()
            thread.join(60)

    def hang_up(self) -> None:
        """End every connection, so that the next call needs a handshake."""
        for one in list(self._open):
            with suppress(OSError):
                socket.socket.shutdown(one, socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(plain, self.harm()), daemon=True).start()

    def _serve(self, plain: socket.socket, harm: str) -> None:
        if harm == "reset within":
            with suppress(OSError):
                plain.recv(100)
        if harm.startswith("reset"):
            reset(plain)
            return
        client, server = plain, None
        try:
            if self.context:
                client = self.context.wrap_socket(plain, server_side=True)
                self.resumed += bool(client.session_reused)  # type: ignore[attr-defined]
            server = socket.create_connection(("127.0.0.1", self.behind))
            self._open |= {client, server}
            self._pass(client, server, harm)
        except OSError:
            pass
        finally:
            for one in (client, server):
                if one is not None:
                    self._open.discard(one)
                    one.close()

    def _pass(self, client: socket.socket, server: socket.socket, harm: str) -> None:
        """In one thread, because no two may use a TLS connection at once."""
        client.setblocking(False)
        while True:
            ready = [client] if getattr(client, "pending", int)() else select.select([client, server], [], [])[0]
            if client in ready:
                try:
                    data = client.recv(1 << 16)
                except (BlockingIOError, ssl.SSLWantReadError):
                    continue
                if not data:
                    return
                if harm == "half":
                    socket.socket.shutdown(client, socket.SHUT_WR)
                    harm = "mute"
                if harm != "mute":
                    server.sendall(data)
            elif not (data := server.recv(1 << 16)):
                return
            elif harm == "cut":
                _send(client, data[: len(data) // 2])
                return
            else:
                _send(client, data)


def _send(sock: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            select.select([], [sock], [])
