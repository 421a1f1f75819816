"""The places that a command means without naming them: of the environment, of configuration files, by a tier's name."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.world import commit, part

from tierd.cli import places, run
from tierd.core.config import from_urls
from tierd.core.units import format_size
from tierd.daemon.daemon_service import open_tiers
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

KEY = "00" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory without a configuration, and no variable of tierd's."""
    for name in (places.CONFIG, places.SPOOL, places.KEY_FILE):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration of a spool with one run and of an encrypted tier `prod`, which holds the same run."""
    spool, tier, key = Spool(tmp_path / "spool"), tmp_path / "tier", tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    tier.mkdir()
    commit(spool, part(10, run="bert"))

    async def work() -> None:
        async with AsyncExitStack() as stack:
            config = from_urls(str(spool.root), [str(tier)], key_file=str(key))
            stores = await open_tiers(config, stack)
            for spool_part in spool.parts():
                await flush(spool, spool_part, TierUploadContext(next(iter(stores.values()))))

    asyncio.run(work())
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{spool.root}"\n[[tier]]\nname = "prod"\nurl = "{tier}"\nkey_file = "{key}"\n')
    return file


def sources(capsys: pytest.CaptureFixture[str]) -> dict[str, bool]:
    assert run(["config", "show", "--json"]) == 0
    return {source["name"]: source["used"] for source in json.loads(capsys.readouterr().out)["sources"]}


def test_command_without_a_place_uses_the_first_source(
    home: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = home / ".config" / "tierd" / "tierd.toml"
    own.parent.mkdir(parents=True)
    own.write_text(config_file.read_text())
    assert sources(capsys)[str(own)]
    assert run(["ls", "--json"]) == 0
    copies = json.loads(capsys.readouterr().out)["checkpoints"][0]["copies"]
    assert [copy["place"] for copy in copies] == ["local", "prod"]

    monkeypatch.setenv(places.SPOOL, str(config_file.parent / "spool"))
    assert sources(capsys) == {**dict.fromkeys(sources(capsys), False), places.SPOOL: True}
    assert run(["ls", "--json"]) == 0
    copies = json.loads(capsys.readouterr().out)["checkpoints"][0]["copies"]
    assert [copy["place"] for copy in copies] == ["local"]

    monkeypatch.setenv(places.CONFIG, str(config_file))
    assert sources(capsys)[places.CONFIG] and not sources(capsys)[places.SPOOL]


def test_prune_does_not_take_a_spool_for_its_place(
    home: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(places.SPOOL, str(config_file.parent / "spool"))
    assert run(["prune", "--dry-run"]) == 3
    assert "nothing to look at" in capsys.readouterr().err


def test_name_of_a_tier_stands_for_its_url_and_key(
    home: Path, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ls", "prod"]) == 3  # no configuration has it
    monkeypatch.setenv(places.CONFIG, str(config_file))
    capsys.readouterr()
    assert run(["verify", "prod", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(check["place"], check["wrong"], check["unchecked"]) for check in checks] == [("prod", [], "")]
    assert run(["ls", "nas"]) == 3
    assert "it has prod" in capsys.readouterr().err
    assert run(["restore", "prod", "--to", str(tmp_path / "out")]) == 0  # the only run
    assert "restored bert step 10" in capsys.readouterr().out


def test_environment_names_the_key_of_urls(
    home: Path, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["ls", str(tmp_path / "tier")]) == 6
    assert "encrypted with key" in (said := capsys.readouterr().err) and "--key-file" in said
    monkeypatch.setenv(places.KEY_FILE, str(tmp_path / "key"))
    assert run(["verify", str(tmp_path / "tier")]) == 0
    assert run(["ls", str(tmp_path / "tier")]) == 0


def test_several_runs_need_a_name(
    home: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(Spool(tmp_path / "spool"), part(1, run="other"))
    assert run(["restore", "--config", str(config_file), "--to", str(tmp_path / "out")]) == 3
    assert "bert, other" in capsys.readouterr().err


def test_first_digits_name_an_attempt(
    home: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = Spool(tmp_path / "spool")
    commit(spool, part(20, launch=2, run="bert"))
    first = part(10, run="bert").checkpoint.attempt
    where = ["--spool", str(spool.root)]
    assert run(["show", "bert", "10", *where, "--attempt", first[-8:]]) == 0
    assert first in capsys.readouterr().out
    assert run(["show", "bert", "10", *where, "--attempt", "0000"]) == 3  # the beginning of two
    assert "several" in capsys.readouterr().err
    assert run(["show", "bert", "10", *where, "--attempt", "ffff"]) == 4


def test_ls_shows_the_newest_and_prune_its_total(
    home: Path, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = Spool(tmp_path / "spool")
    commit(spool, part(20, run="bert"))
    commit(spool, part(5, run="other"))

    def steps(*options: str) -> list[int]:
        assert run(["ls", "--spool", str(spool.root), "--json", *options]) == 0
        return [checkpoint["step"] for checkpoint in json.loads(capsys.readouterr().out)["checkpoints"]]

    assert sorted(steps()) == [5, 10, 20] and sorted(steps("--newest", "1")) == [5, 20]
    assert steps("--since", "1h") == [] and sorted(steps("--since", "30000d")) == [5, 10, 20]
    assert run(["ls", "--spool", str(spool.root), "--since", "soon"]) == 3
    assert run(["prune", str(tmp_path / "tier"), "--key-file", str(tmp_path / "key"), "--keep-last", "1"]) == 0
    assert "nothing to prune, 1 kept" in capsys.readouterr().out


def test_prune_names_bytes_that_it_freed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spool, tier = Spool(tmp_path / "spool"), tmp_path / "tier"
    tier.mkdir()

    async def save() -> None:
        store = FileStore(tier)
        for step in (1, 2, 3):
            commit(spool, part(step))
            await flush(spool, part(step), TierUploadContext(store))
        await store.aclose()

    def chunk_bytes() -> int:
        return sum(path.stat().st_size for path in (tier / "run" / "chunks").rglob("*") if path.is_file())

    asyncio.run(save())
    before = chunk_bytes()
    assert run(["prune", f"file://{tier}", "--keep-last", "1", "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert run(["prune", f"file://{tier}", "--keep-last", "1"]) == 0
    freed = format_size(before - chunk_bytes())
    assert f"file: pruned 2 of 3 checkpoints, which freed {freed}" in capsys.readouterr().out
    assert f"file: would prune 2 of 3 checkpoints, which would free at most {freed}" in dry
