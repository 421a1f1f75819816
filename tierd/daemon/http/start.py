"""The entry to the HTTP server, which loads the packages that it needs only if a `[http]` table asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierd.core.config import HttpConfig
from tierd.core.errors import ConfigError
from tierd.core.packages import needing

if TYPE_CHECKING:
    from tierd.daemon.http.server import HttpServer


def server_of(http: HttpConfig | None) -> HttpServer | None:
    """Make the server of a `[http]` table, not yet listening; None without a table.

    Raises:
        ConfigError: a package is not installed; or the token, the certificate or its key cannot be used.
    """
    if http is None:
        return None
    try:
        make = _loaded()
    except ImportError as error:
        raise ConfigError(f"http: {error}") from error
    return make(http)


def _loaded() -> type[HttpServer]:
    """Load the server. Raises `ImportError`, which says what to install."""
    with needing("the HTTP server", "metrics"):
        from tierd.daemon.http.server import HttpServer
    return HttpServer
