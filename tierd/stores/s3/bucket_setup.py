"""How a bucket is set up, and what is known of the credentials: `tierd doctor` reads both.

Invariant: nothing here changes the bucket, and nothing returned holds a secret.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from aiobotocore.credentials import AioRefreshableCredentials
from aiobotocore.session import get_session
from botocore import exceptions as botocore
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from tierd.core.diagnosis.tier_findings import Credentials, LifecycleRule
from tierd.core.urls import StoreUrl
from tierd.stores.s3.credentials import check_ca_bundle
from tierd.stores.s3.s3_store import S3Store
from tierd.stores.s3.server_errors import no_response_error

_UNSET = {"NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError", "NotImplemented"}


class BucketSetup:
    """The bucket of a tier's URL, whose prefix with its '/' is `base`. Methods raise the errors of a `Store`."""

    def __init__(self, url: StoreUrl) -> None:
        self._url, self._store = url, S3Store(url)
        self.base = f"{url.prefix}/" if url.prefix else ""

    async def endpoint(self) -> str:
        """Return the URL to which requests go."""
        async with self._store.translating_errors("connect"):
            client = await self._store.get_client()
            return str(client.meta.endpoint_url)

    async def lifecycle_rules(self) -> list[LifecycleRule]:
        """Return the enabled rules of the bucket's lifecycle."""
        answer = await self._ask("lifecycle", "get_bucket_lifecycle_configuration")
        return [parse_lifecycle_rule(entry) for entry in answer.get("Rules", ()) if entry.get("Status") == "Enabled"]

    async def default_retention(self) -> tuple[str, str]:
        """Return the mode and the period of the bucket's default retention; both are empty if it has none."""
        answer = await self._ask("object lock", "get_object_lock_configuration")
        default = answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention", {})
        units = ("Days", "Years")
        return str(default.get("Mode", "")), " ".join(
            f"{default[unit]} {unit.lower()}" for unit in units if unit in default
        )

    async def versioning(self) -> str:
        """Return the bucket's versioning: `Enabled`, `Suspended`, or an empty string."""
        return str((await self._ask("versioning", "get_bucket_versioning")).get("Status", ""))

    async def unfinished_uploads(self) -> tuple[int, str]:
        """Return how many unfinished multipart uploads the first page below the prefix has, and when one began."""
        answer = await self._ask("multipart uploads", "list_multipart_uploads", Prefix=self.base)
        began = [str(upload.get("Initiated", ""))[:19] for upload in answer.get("Uploads", ())]
        return len(began), min(began, default="")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._store.aclose()

    async def _ask(self, doing: str, operation: str, **parameters: Any) -> Mapping[str, Any]:
        async with self._store.translating_errors(doing):
            client = await self._store.get_client()
            try:
                answer: Mapping[str, Any] = await getattr(client, operation)(Bucket=self._url.bucket, **parameters)
                return answer
            except botocore.ClientError as error:
                if error.response.get("Error", {}).get("Code") in _UNSET:
                    return {}
                raise


def parse_lifecycle_rule(members: Mapping[str, Any]) -> LifecycleRule:
    """Read one rule as the API reference of GetBucketLifecycleConfiguration describes it."""
    scope = members.get("Filter", {})
    conjunction = scope.get("And", {})
    expiration = members.get("Expiration", {})
    return LifecycleRule(
        name=str(members.get("ID", "")),
        prefix=str(members.get("Prefix") or scope.get("Prefix") or conjunction.get("Prefix") or ""),
        tagged=bool(scope.get("Tag") or conjunction.get("Tags")),
        expires="Days" in expiration or "Date" in expiration,
        moves_to=tuple(str(transition.get("StorageClass", "")) for transition in members.get("Transitions", ())),
        old_versions=bool(members.get("NoncurrentVersionExpiration")),
    )


async def describe_credentials(url: StoreUrl) -> Credentials | None:
    """Describe the credentials that the AWS chain gives now; None if it gives none.

    Raises StoreUnavailable or StoreRefused if a link of the chain failed.
    """
    try:
        resolved = await get_session().get_credentials()
        if resolved is None:
            return None
        frozen = await resolved.get_frozen_credentials()
    except (botocore.BotoCoreError, botocore.ClientError, OSError) as error:
        raise no_response_error(str(url), "credentials", error, heard=False) from None  # its text may quote a secret
    expiry = getattr(resolved, "_expiry_time", None)  # the library has no public name for it
    return Credentials(
        source=str(resolved.method),
        temporary=bool(frozen.token),
        renewed=isinstance(resolved, AioRefreshableCredentials),
        left_s=None if expiry is None else expiry.timestamp() - time.time(),
    )


async def ca_certificates_path() -> str:
    """Return the path of the CA certificates that verify the server. Raises `StoreRefused` if it cannot be used."""
    session = get_session()
    await check_ca_bundle(session)
    return str(session.get_config_variable("ca_bundle") or get_cert_path(True))


def is_proxied(endpoint: str) -> bool:
    """Return whether requests to `endpoint` go through a proxy of the environment."""
    return any(_proxies(endpoint))


def _proxies(endpoint: str) -> Iterator[str]:
    scheme = endpoint.partition(":")[0]
    yield from (proxy for name, proxy in get_environ_proxies(endpoint).items() if name in (scheme, "all"))
