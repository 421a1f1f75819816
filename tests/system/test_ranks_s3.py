"""Ranks on two nodes, the tier on a real S3 server: they are killed, and all is as if they had not been."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest
from support import launchers

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SEED = int(os.environ.get("TIERD_TEST_SEED", "1"))
KILLS = int(os.environ.get("TIERD_KILLS", "16"))  # `make gate` has fifty
ON_NODES = [launcher for launcher in launchers.PLAIN if launcher.tier]


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a prefix in a fresh bucket."""
    from botocore.config import Config
    from botocore.session import get_session

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", os.environ["TIERD_TEST_S3_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", os.environ["TIERD_TEST_S3_SECRET_KEY"])
    endpoint, bucket = os.environ["TIERD_TEST_S3_ENDPOINT"], f"tierd-{uuid.uuid4().hex[:12]}"
    options = Config(s3={"addressing_style": "path"})
    client = get_session().create_client("s3", "us-east-1", endpoint_url=endpoint, config=options)
    client.create_bucket(Bucket=bucket)
    yield f"s3://{bucket}/some/prefix/{{}}?endpoint={endpoint}&addressing=path&region=us-east-1"
    client.close()


def test_killed_ranks_continue_exactly_over_s3(tier, tmp_path):
    for seed in range(SEED, SEED + KILLS):
        home = tmp_path / str(seed)
        home.mkdir()
        launchers.cycle(ON_NODES[seed % len(ON_NODES)], seed, home, tier.format(seed))
