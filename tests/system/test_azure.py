"""CloudStore against Azurite, Microsoft's emulator of Azure Blob Storage: the contract, and what it refuses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

import obstore
import pytest
from obstore.store import AzureStore
from stores.conformance import Conformance, keys
from support import layouts
from support.waiting import wait_until
from support.watched_run import files

from tierd.cli import run
from tierd.core.errors import ObjectNotFound, StoreRefused
from tierd.core.urls import parse_url
from tierd.stores.base import Store
from tierd.stores.cloud.cloud_store import CloudStore

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ACCOUNT = "devaccount"
KEY = base64.b64encode(b"a key of nobody's").decode()


class Azurite:
    """A running emulator, on a port of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def url(self, container: str) -> str:
        return f"az://{container}/p?account={ACCOUNT}&endpoint=http://127.0.0.1:{self.port}/{ACCOUNT}"

    def container(self) -> str:
        """A fresh container, which obstore cannot make."""
        name = f"c{uuid.uuid4().hex[:12]}"
        headers = {"x-ms-date": format_datetime(datetime.now(UTC), usegmt=True), "x-ms-version": "2023-11-03"}
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
        lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        signature = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
        url = f"http://127.0.0.1:{self.port}/{ACCOUNT}/{name}?restype=container"
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=150) as answer:
            assert answer.status == 201
        return name

    def is_up(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=60).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """`TIERD_TEST_AZURITE` is the command azurite-blob (npm install azurite)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path_factory.mktemp("azurite"))]
    command = [os.environ["TIERD_TEST_AZURITE"], *where, "--silent", "--disableTelemetry"]
    process = subprocess.Popen(command, env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"})
    try:
        found = Azurite(port)
        wait_until(found.is_up)
        yield found
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)


class TestCloudStoreOnAzurite(Conformance):
    many, operations = 300, 100

    @pytest.fixture
    def make(self, azurite: Azurite) -> Callable[[], Store]:
        return lambda: CloudStore(parse_url(azurite.url(azurite.container())))


def attempt(call: Callable[[Store], object], url: str) -> None:
    async def work() -> None:
        await call(CloudStore(parse_url(url)))  # type: ignore[misc]

    asyncio.run(work())


def test_a_missing_container_is_refused_and_is_no_missing_object(azurite: Azurite) -> None:
    nowhere = azurite.url("nowhere")
    for call in (lambda s: s.put("k", b"1"), lambda s: s.get("k"), lambda s: keys(s)):
        with pytest.raises(StoreRefused, match="no such bucket or container"):
            attempt(call, nowhere)
    with pytest.raises(ObjectNotFound):
        attempt(lambda s: s.get("k"), azurite.url(azurite.container()))


def test_a_wrong_key_is_refused(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    url = azurite.url(azurite.container())
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"another").decode())
    for call in (lambda s: s.put("k", b"1"), lambda s: s.get("k"), lambda s: keys(s), lambda s: s.delete(["k"])):
        with pytest.raises(StoreRefused, match="credentials"):
            attempt(call, url)


def test_checkpoints_of_a_container_are_imported_and_a_container_can_be_the_tier(
    azurite: Azurite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Azure's listings, ETags and ranges are its own; `.metadata` and `=` are in other programs' names."""
    (tmp_path / "out").mkdir()
    layouts.trainer(tmp_path / "out")
    layouts.torchtitan(tmp_path / "out")
    source, target = azurite.container(), azurite.container()
    names = files(tmp_path / "out")
    assert any(name.endswith("/.metadata") for name in names)

    async def upload() -> None:
        endpoint = f"http://127.0.0.1:{azurite.port}/{ACCOUNT}"
        client = {"allow_http": True}
        store = AzureStore(source, account_name=ACCOUNT, account_key=KEY, endpoint=endpoint, client_options=client)
        for name, data in names.items():
            await obstore.put_async(store, f"p/out/{name}", data)

    asyncio.run(upload())
    url = azurite.url(source).replace("/p?", "/p/out?")
    for was_there in (False, True):
        assert run(["import", url, "--run", "run", "--to", azurite.url(target), "--json"]) == 0
        done = json.loads(capsys.readouterr().out)["imported"]
        assert {one["program"] for one in done["units"]} == {"HF Trainer", "torchtitan"} and not done["refused"]
        assert [one["was_there"] for one in done["units"]] == [was_there] * 2
    assert run(["verify", azurite.url(target)]) == 0
    for one in done["units"]:
        back = tmp_path / f"back-{one['step']}"
        command = ["restore", azurite.url(target), "--run", "run", "--step", str(one["step"]), "--into", str(back)]
        assert run(command) == 0
        wanted = {name: data for name, data in names.items() if name.startswith(f"{one['path']}/")}
        found = files(back)
        assert wanted and {name: found.get(name) for name in wanted} == wanted


def test_a_daemon_flushes_prunes_and_a_fresh_node_restores(azurite: Azurite, tmp_path: Path) -> None:
    code = """
import sys, torch, tierd
back = {"weights": torch.zeros(100_000)}
with tierd.Checkpointer(sys.argv[1], "run", to=[sys.argv[2]]) as ckpt:
    for step in range(1, 5):
        ckpt.save(step, {"weights": torch.full((100_000,), float(step))}).wait("az", timeout=100)
with tierd.Checkpointer(sys.argv[1] + "-fresh", "run", to=[sys.argv[2]]) as ckpt:
    found = ckpt.restore(back)
assert (found.step, found.tier, back["weights"][0]) == (4, "az", 4.0), found
"""
    url = azurite.url(azurite.container())
    command = [sys.executable, "-c", code, str(tmp_path / "spool"), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr

    async def manifests() -> list[str]:
        return [one for one in await keys(CloudStore(parse_url(url)), "run/manifests/") if one.endswith(".json")]

    wait_until(lambda: len(asyncio.run(manifests())) == 3)  # keep_last = 3 is the default
