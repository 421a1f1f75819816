"""Four ranks on two nodes, the tier on a real S3 server: kills, and all is as if there were none."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from support.ranked import cluster
from support.ranked_kills import Killer, a_launch_lives_on, a_node_is_replaced, finish

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SEED = int(os.environ.get("TIERD_TEST_SEED", "1"))
KILLS = int(os.environ.get("TIERD_KILLS", "16"))  # `make gate` has fifty


class Bucket:
    """A tier in a fresh bucket, listed by a client of its own."""

    name = "s3"

    def __init__(self) -> None:
        from botocore.config import Config
        from botocore.session import get_session

        endpoint = os.environ["TIERD_TEST_S3_ENDPOINT"]
        self._bucket, self._prefix = f"tierd-{uuid.uuid4().hex[:12]}", "some/prefix/"
        options = Config(s3={"addressing_style": "path"})
        self._client = get_session().create_client("s3", "us-east-1", endpoint_url=endpoint, config=options)
        self._client.create_bucket(Bucket=self._bucket)
        where = f"endpoint={endpoint}&addressing=path&region=us-east-1"
        self.url = f"s3://{self._bucket}/{self._prefix.rstrip('/')}?{where}"

    def listing(self) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        return [found["Key"].removeprefix(self._prefix) for page in pages for found in page.get("Contents", ())]

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", os.environ["TIERD_TEST_S3_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", os.environ["TIERD_TEST_S3_SECRET_KEY"])
    bucket = Bucket()
    yield bucket
    bucket.close()


@pytest.fixture
def made(tmp_path, tier):
    with cluster(tmp_path, tier) as made:
        yield made


def test_kills(made):
    with Killer(made, SEED) as killer:
        killer.run(KILLS)
        finish(made)


def test_an_empty_node_takes_over_and_another_world_size_is_refused(made):
    a_node_is_replaced(made)


def test_a_zombie_launch_harms_nobody_but_itself(made):
    a_launch_lives_on(made)
