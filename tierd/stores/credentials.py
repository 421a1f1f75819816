"""Who asks: the standard AWS chain, as it is now and not as it was when the daemon began.

Law: a client asks for credentials at each request, and gets those that were found last. Where there are none, or the
server takes them no longer, they are looked for again, at most once in `_PAUSE_S`; connections and calls in flight are
not disturbed by that. Nothing here is logged.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession, get_session

from tierd.core.errors import StoreRefused

_PAUSE_S = 3.0  # between two looks: a chain's link may be a program, or a request to the instance's metadata


class Chain(AioCredentials):  # type: ignore[misc]  # the library has no types
    """Credentials that look for themselves again. `generation` rises whenever others were found."""

    def __init__(self) -> None:
        super().__init__("", "", method="tierd")
        self.generation = 0
        self._found: Any = None
        self._known: object = None  # the keys themselves, to see whether others were found
        self._looked_at = -_PAUSE_S
        self._looking = asyncio.Lock()

    def session(self) -> AioSession:
        """A session of the chain as it is configured now, whose clients ask here for credentials."""
        session = get_session()
        session.register_component("credential_provider", self)
        return session

    async def load_credentials(self) -> Chain:
        """The part of a `credential_provider` that a session asks for."""
        return self

    async def get_frozen_credentials(self) -> Any:
        """What a request is signed with, or None: botocore then raises `NoCredentialsError`."""
        if self._found is None:
            await self.renew()
        return None if self._found is None else await self._found.get_frozen_credentials()

    async def renew(self) -> None:
        """Look whether there are other credentials by now. Raises botocore's errors where a link of the chain fails."""
        async with self._looking:
            if time.monotonic() - self._looked_at < _PAUSE_S:
                return
            self._looked_at = time.monotonic()
            found = await get_session().get_credentials()
            known = await found.get_frozen_credentials() if found else None
            if known != self._known:
                self._found, self._known, self.generation = found, known, self.generation + 1


async def check_bundle(session: AioSession) -> None:
    """That the file of certificates can be read which the environment or AWS's configuration names, if one does.

    Raises:
        StoreRefused: it is not there, cannot be read, or holds no certificate.
    """
    path = session.get_config_variable("ca_bundle")
    if isinstance(path, str) and path.strip():
        await asyncio.to_thread(_check_bundle, path)


def _check_bundle(path: str) -> None:
    named = f"AWS_CA_BUNDLE (or ca_bundle in AWS's configuration) names {path}"
    try:
        if Path(path).is_dir():
            raise StoreRefused(f"{named}, which is a directory; name a file of certificates, in PEM")
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise StoreRefused(f"{named}, which holds no certificate that can be used; it has to be PEM") from None
    except OSError as error:
        raise StoreRefused(f"{named}: {error.strerror}; correct the path, or unset it") from None
