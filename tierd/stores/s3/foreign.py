"""Objects of other programs in an S3 bucket, read by range. Writes nothing."""

from __future__ import annotations

from botocore import exceptions as botocore

from tierd.core.errors import ObjectNotFound, StoreUnavailable
from tierd.stores.absence import confirmed
from tierd.stores.base import ObjectInfo
from tierd.stores.s3.s3_store import S3Store


class ForeignS3Store(S3Store):
    """An `S3Store` that also reads objects whose names are no keys; see `stores.foreign`."""

    async def get_range(self, info: ObjectInfo, offset: int, into: memoryview) -> None:
        """Fill `into` from a listed object."""
        doing = f"get {info.key!a}"
        ends = {"Range": f"bytes={offset}-{offset + into.nbytes - 1}", "IfMatch": f'"{info.token}"'}
        async with confirmed(self.names, info.key), self.translated(doing):
            try:
                answer = await self._get(info.key, doing, into, **ends)
            except botocore.ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                    raise ObjectNotFound(f"{self._url}: {doing}: another object has its name now") from None
                raise
        if memoryview(answer).nbytes != into.nbytes:
            raise StoreUnavailable(f"{self._url}: {doing}: the server sent another range than {ends['Range']}")
