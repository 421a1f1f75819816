"""Checks of a webhook's address and headers.

Invariant: no message repeats more of an address than scheme, host and port, because anybody who knows the address may
post there. The address may come from a file or the environment. The values of headers must come from there.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import SplitResult, urlsplit

from tierd.core.errors import ConfigError

_HOST = re.compile(r"([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_TARGET = re.compile(r"[!-~]*")  # printable ASCII without spaces
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,127}|file:/[^\0]{0,4000}")
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_OWN_HEADERS = frozenset({"content-length", "content-type", "host", "connection", "transfer-encoding", "user-agent"})
_WAY_OUT = "write env:NAME or file:/path, which the daemon reads at its start"


def is_reference(text: str) -> bool:
    """Whether a value is ``env:NAME`` or ``file:/path``, which refer to a value stored elsewhere."""
    return _REFERENCE.fullmatch(text) is not None


def check_webhook(url: str, headers: Mapping[str, str]) -> None:
    """Check an address and its headers, as far as they are given directly and not by reference.

    Raises:
        ConfigError: one cannot be used; the message begins with the key.
    """
    if not is_reference(url):
        shown(url)
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
            raise ConfigError(f"headers: {name[:64]!r} is no header's name, or one that tierd sets")
        if not is_reference(value):
            raise ConfigError(f"headers.{name}: what it says does not belong in this file: {_WAY_OUT}")


def shown(url: str) -> str:
    """The part of a webhook's address that messages may show: ``https://host:port/…``.

    Raises:
        ConfigError: it is no address, contains a user name or password, or would cross a network unencrypted.
    """
    if url.startswith(("env:", "file:")):
        _refuse(_WAY_OUT)
    if not _TARGET.fullmatch(url) or "#" in url:
        _refuse("it holds a space, a control character, '#', or something that is not ASCII")
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        _refuse("its host or port is not well formed")
    if split.scheme not in ("https", "http"):
        _refuse(f"it begins with https://, or {_WAY_OUT}")
    if "@" in split.netloc:
        _refuse(f"credentials do not belong into it: use headers.Authorization; there, {_WAY_OUT}")
    if not _HOST.fullmatch(split.netloc) or port == 0:
        _refuse("a host's name or address, and perhaps a port, follow https://")
    if split.scheme == "http" and not is_loopback(split):
        _refuse("http:// goes to this machine alone (127.0.0.1, localhost); over a network it is https://")
    return f"{split.scheme}://{split.netloc.lower()}/…"


def is_loopback(split: SplitResult) -> bool:
    """Whether a URL's host is this machine."""
    host = split.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"url: {reason}") from None
