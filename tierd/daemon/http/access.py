"""Who may read the daemon's state over HTTP.

Invariants:

- On loopback only requests whose `Host` names loopback are answered. Otherwise a page of a stranger, in a browser on
  this machine, could read answers by DNS rebinding.
- A token is compared in constant time, and shown by no message, page or log.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
import ssl
from pathlib import Path

from tierd.core.config import HttpConfig
from tierd.core.errors import ConfigError
from tierd.stores.keys import read_private

_LONGEST = 1024  # bytes of a token
_TOKEN = re.compile(rb"[\x21-\x7e]{16,1024}")
_MAKE = "; openssl rand -hex 32 > FILE makes one"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::[0-9]{1,5})?", re.ASCII)


class Access:
    """Decides which requests are answered.

    Args:
        token: the token that a request must show; None: none.
        loopback: whether the server listens on loopback.
    """

    def __init__(self, token: bytes | None, *, loopback: bool) -> None:
        self._token, self._loopback = token, loopback

    def is_for_us(self, host: str | None) -> bool:
        """Whether a request with this `Host` header may be meant for this server."""
        if not self._loopback:
            return True  # TLS or the token keeps strangers' pages out
        match = _HOST.fullmatch(host or "")
        if match is None:
            return False
        name = match[1].strip("[]")
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return name.lower() == "localhost"

    def is_permitted(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header has the token, as `Bearer` or as the password of `Basic`."""
        if self._token is None:
            return True
        return hmac.compare_digest(_presented_token(authorization or ""), self._token)


def _presented_token(authorization: str) -> bytes:
    """The token in an `Authorization` header; empty if there is none."""
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip().encode("utf-8", "replace")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def access_of(http: HttpConfig) -> Access:
    """Read the token.

    Raises:
        ConfigError: the file cannot be read, is open to other users, or holds no token.
    """
    if http.token_file is None:
        return Access(None, loopback=http.is_loopback)
    path = Path(http.token_file)
    token = read_private(path, _LONGEST + 2, _MAKE).strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{path}: a token is 16 to {_LONGEST} visible ASCII characters on one line{_MAKE}")
    return Access(token, loopback=http.is_loopback)


def tls_of(http: HttpConfig) -> ssl.SSLContext | None:
    """Make the context for TLS; None without a certificate.

    Raises:
        ConfigError: the certificate or its key cannot be used, or the key is open to other users.
    """
    if http.cert_file is None or http.key_file is None:
        return None
    read_private(Path(http.key_file), 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(http.cert_file, http.key_file, password="")  # an encrypted key must not ask a terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{http.cert_file} with {http.key_file}: {error}") from error
    return context
