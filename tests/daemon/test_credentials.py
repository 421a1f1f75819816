"""A daemon whose credentials come, or are replaced, while it runs: no restart is needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stores.s3.test_answers import file, written
from stores.s3.test_s3_store import credentials
from support.s3stub import Bucket, serving
from support.waiting import until
from support.world import commit, part, reconciler, running, settle, steps_on

from tierd.core.urls import parse_url
from tierd.spool.spool import Spool
from tierd.stores.retry import RetryingStore
from tierd.stores.s3.http1 import S3Limits
from tierd.stores.s3.s3_store import S3Store

__all__ = ["credentials", "file"]  # the fixtures


def test_daemon_uses_credentials_that_appear_or_are_replaced(spool: Spool, file: Path) -> None:
    async def work(bucket: Bucket) -> None:
        store = RetryingStore(S3Store(parse_url(bucket.url()), S3Limits(credentials_s=0.05)))
        commit(spool, part(1))
        async with running(reconciler(spool, {"s3": store})) as daemon:
            await until(lambda: "NoCredentialsError" in str(daemon.workers["s3"].last_error))
            written(file, "first")
            bucket.keys = {"first"}
            await settle(daemon)
            assert daemon.journal.counters["flushed"] == 1
            failed = daemon.journal.counters["errors"]
            await asyncio.sleep(0.1)
            written(file, "second")
            bucket.keys = {"second"}
            commit(spool, part(2))
            await settle(daemon)
            assert daemon.journal.counters["errors"] == failed  # the calls that were refused were made again
        await store.aclose()
        assert steps_on(key.removeprefix("p/") for key in bucket.objects) == [1, 2]

    with serving(Bucket()) as bucket:
        asyncio.run(work(bucket))
