"""What a webhook's address may say.

Law: an address is a secret (who knows it may post there), so no message repeats more of it than scheme, host and port.
Its path and what headers say may come from a file or the environment, and headers may come from nowhere else.
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
_OURS = frozenset({"content-length", "content-type", "host", "connection", "transfer-encoding", "user-agent"})
_WAY_OUT = "write env:NAME or file:/path, which the daemon reads at its start"


def is_reference(text: str) -> bool:
    """Whether a value is ``env:NAME`` or ``file:/path``, and stands somewhere else."""
    return _REFERENCE.fullmatch(text) is not None


def check_webhook(url: str, headers: Mapping[str, str]) -> None:
    """Refuse what cannot be posted to, as far as it stands here; raises `ConfigError` that begins with the key."""
    if not is_reference(url):
        shown(url)
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or name.lower() in _OURS:
            raise ConfigError(f"headers: {name[:64]!r} is no header's name, or one that tierd sets")
        if not is_reference(value):
            raise ConfigError(f"headers.{name}: what it says does not belong in this file: {_WAY_OUT}")


def shown(url: str) -> str:
    """What may be shown of a webhook's address: ``https://host:port/…``.

    Raises:
        ConfigError: it is none, holds a user's name or password, or would cross a network unencrypted.
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
