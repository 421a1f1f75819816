"""Credentials from the standard AWS chain, as they are now and not as they were when the daemon began.

Invariant: a client asks for credentials at each request and gets the most recently found ones. If there are none, or if
the server rejects them, the chain is searched again, at most once in `S3Limits.credentials_s`. Open connections and
calls in flight are not disturbed. This module logs nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from functools import cache
from pathlib import Path
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession, get_session
from botocore.loaders import Loader, create_loader

from tierd.core.errors import StoreRefused
from tierd.stores.s3.http1 import S3Limits


class RenewableCredentials(AioCredentials):  # type: ignore[misc]  # the library has no types
    """Credentials that search the AWS chain again when needed. `generation` rises when a search finds other ones."""

    def __init__(self, limits: S3Limits) -> None:
        super().__init__("", "", method="tierd")
        self.generation = 0
        self._resolved: Any = None
        self._frozen: object = None  # the keys themselves, to notice a change
        self._pause_s = limits.credentials_s
        self._checked_at = -self._pause_s
        self._checking = asyncio.Lock()

    def session(self) -> AioSession:
        """Create a session with the current AWS configuration, whose clients ask this object for credentials."""
        session = get_session()
        session.register_component("credential_provider", self)
        session.register_component("data_loader", _descriptions(session.get_config_variable("data_path")))
        return session

    async def load_credentials(self) -> RenewableCredentials:
        """Return this object; a session calls this method of its `credential_provider`."""
        return self

    async def get_frozen_credentials(self) -> Any:
        """Return the credentials that sign a request. If there are none, None makes botocore raise
        `NoCredentialsError`.
        """
        if self._resolved is None:
            await self.renew()
        return None if self._resolved is None else await self._resolved.get_frozen_credentials()

    async def renew(self) -> None:
        """Search the chain again. Raises botocore's errors if a link of the chain fails."""
        async with self._checking:
            if time.monotonic() - self._checked_at < self._pause_s:
                return
            self._checked_at = time.monotonic()
            credentials = await get_session().get_credentials()
            frozen = await credentials.get_frozen_credentials() if credentials else None
            if frozen != self._frozen:
                self._resolved, self._frozen, self.generation = credentials, frozen, self.generation + 1


@cache
def _descriptions(data_path: str | None) -> Loader:
    """Return the loader of the API's descriptions, one for all clients of this process, because it keeps what it has
    parsed: each client would take another 0.2 CPU seconds and several MB."""
    return create_loader(data_path)


async def check_ca_bundle(session: AioSession) -> None:
    """Check that the file of CA certificates can be read, if the environment or AWS's configuration names one.

    Raises `StoreRefused` if it does not exist, cannot be read, or holds no certificate.
    """
    path = session.get_config_variable("ca_bundle")
    if isinstance(path, str) and path.strip():
        await asyncio.to_thread(_check_bundle, path)


def _check_bundle(path: str) -> None:
    subject = f"AWS_CA_BUNDLE (or ca_bundle in AWS's configuration) names {path}"
    try:
        if Path(path).is_dir():
            raise StoreRefused(f"{subject}, which is a directory; name a file of certificates, in PEM")
        ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise StoreRefused(f"{subject}, which holds no certificate that can be used; it has to be PEM") from None
    except OSError as error:
        raise StoreRefused(f"{subject}: {error.strerror}; correct the path, or unset it") from None
