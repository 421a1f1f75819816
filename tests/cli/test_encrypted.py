"""An encrypted tier from the command line: the key comes from a file, goes nowhere, and its lack is one clear line."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.chunk_keys import chunk_files
from support.doubles import damage
from support.world import RUN, commit, content, part

from tierd.cli import run
from tierd.core.config import from_urls
from tierd.core.errors import ConfigError
from tierd.core.ids import head_key
from tierd.core.manifest import MANIFEST_NAME
from tierd.core.urls import parse_url
from tierd.daemon.daemon_service import open_tiers
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.open import open_store

SECRET = bytes(range(100, 132))
ID, OTHER = EncryptionKey(SECRET).id, EncryptionKey(bytes(32)).id


@pytest.fixture
def key(tmp_path) -> str:
    return write_key(tmp_path / "key", SECRET)


def write_key(path: Path, secret: bytes) -> str:
    path.write_text(f"{secret.hex()}\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def tier(tmp_path, key) -> str:
    """An encrypted tier with two checkpoints."""
    (tmp_path / "tier").mkdir()
    home = Spool(tmp_path / "home")

    async def work() -> None:
        async with AsyncExitStack() as stack:
            (store,) = (await open_tiers(from_urls("/", [str(tmp_path / "tier")], key_file=key), stack)).values()
            for step in (1, 2):
                commit(home, part(step))
                await flush(home, part(step), TierUploadContext(store))

    asyncio.run(work())
    return str(tmp_path / "tier")


def wrote(path: Path) -> dict[str, bytes]:
    home = path / "00000-of-00001"
    found = {file.relative_to(home).as_posix(): file.read_bytes() for file in home.rglob("*") if file.is_file()}
    found.pop(MANIFEST_NAME)
    return found


def test_with_the_key_everything_works(tier, key, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert run(["verify", tier, "--key-file", key]) == 0
    assert run(["show", RUN, "2", tier, "--key-file", key]) == 0
    assert run(["ls", tier, "--key-file", key]) == 0
    assert "verified" in capsys.readouterr().out
    assert run(["restore", tier, "--run", RUN, "--to", str(out), "--key-file", key]) == 0
    assert wrote(out) == content(2)
    assert run(["pin", RUN, "2", tier]) == 0  # goes by names
    assert run(["prune", tier, "--keep-last", "1", "--key-file", key]) == 0
    assert run(["verify", tier, "--key-file", key, "--json"]) == 0
    assert run(["restore", tier, "--run", RUN, "--to", str(tmp_path / "again"), "--key-file", key]) == 0


def test_verify_detects_a_damaged_encrypted_checkpoint_and_restore_passes_over_it(tier, key, tmp_path, capsys) -> None:
    for path in chunk_files(Path(tier), RUN, 2):
        damage(path, "flip")
    assert run(["verify", tier, "--key-file", key]) == 5
    assert f"not what key {ID} encrypted" in capsys.readouterr().out
    assert run(["restore", tier, "--run", RUN, "--to", str(tmp_path / "out"), "--key-file", key]) == 0
    assert wrote(tmp_path / "out") == content(1)


@pytest.mark.parametrize("wrong", [False, True], ids=["none", "another"])
def test_without_the_key_one_line_names_it_and_nothing_is_called_corrupt(tier, tmp_path, capsys, wrong) -> None:
    options = ["--key-file", write_key(tmp_path / "wrong", bytes(32))] if wrong else []
    out = tmp_path / "out"
    for arguments, code in (
        (["restore", tier, "--run", RUN, "--to", str(out)], 6),
        (["restore", tier, "--run", RUN, "--step", "1", "--to", str(out)], 6),
    ):
        assert run([*arguments, *options]) == code
        text = capsys.readouterr().err
        (line,) = [line for line in text.splitlines() if line.startswith("tierd: ")]
        assert f"encrypted with key {ID}" in line
        assert "--key-file" in line and "be asked" not in line
        assert not wrong or f"the key in {tmp_path / 'wrong'} ({OTHER}) does not decrypt" in line
    assert not out.exists()
    assert run(["verify", tier, "--json", *options]) == 6
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(one["step"], one["wrong"], ID in one["unchecked"]) for one in checks] == [(2, [], True), (1, [], True)]
    assert run(["ls", tier, "--json", *options]) == 6
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [copy["state"] for one in found for copy in one["copies"]] == ["unreadable"] * 2
    assert run(["prune", tier, "--keep-last", "1", "--json", *options]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [one["pruned"] for one in verdicts] == [False, False]
    for one in verdicts:
        assert one["reasons"][0] == "incomplete: 1 of its 1 manifests cannot be used"
        assert "encrypted with key" in one["reasons"][1]


@pytest.mark.parametrize("wrong", [False, True], ids=["none", "another"])
def test_without_the_key_a_head_is_said_to_be_encrypted_not_newer(tier, key, tmp_path, caplog, wrong) -> None:
    async def put() -> None:
        async with AsyncExitStack() as stack:
            (store,) = (await open_tiers(from_urls("/", [tier], key_file=key), stack)).values()
            await store.put(head_key(RUN, "deadbeef"), b"{}")

    asyncio.run(put())
    assert run(["ls", tier, *(["--key-file", write_key(tmp_path / "wrong", bytes(32))] if wrong else [])]) == 6
    assert f"encrypted with key {ID}" in caplog.text and "--key-file" in caplog.text
    assert "newer" not in caplog.text


def test_a_configuration_is_checked_with_its_keys(tmp_path, key, capsys) -> None:
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path}"\n[[tier]]\nname = "t"\nurl = "file:///mnt/x"\nkey_file = "{key}"\n')
    for more in ([], ["--json"]):
        assert run(["config", "check", str(file), *more]) == 0
        reported = capsys.readouterr()
        assert SECRET.hex() not in reported.out + reported.err
    assert run(["config", "check", str(file)]) == 0
    assert f"encrypted with key {ID}" in capsys.readouterr().out
    Path(key).chmod(0o644)
    assert run(["config", "check", str(file)]) == 3
    assert "chmod 600" in capsys.readouterr().err
    file.write_text(file.read_text().replace(key, "key"))
    assert run(["config", "check", str(file)]) == 3
    assert "key_file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "--spool", "SPOOL", "--key-file", "KEY"],
        ["verify", "--config", "CONFIG", "--key-file", "KEY"],
        ["run", "--config", "CONFIG", "--key-file", "KEY"],
    ],
)
def test_a_key_belongs_to_a_url(arguments, tmp_path, key, capsys) -> None:
    Spool(tmp_path / "spool")
    (tmp_path / "tierd.toml").write_text(f'spool = "{tmp_path}/spool"\n[[tier]]\nname = "t"\nurl = "file:///mnt/x"\n')
    named = {"SPOOL": str(tmp_path / "spool"), "CONFIG": str(tmp_path / "tierd.toml"), "KEY": key}
    assert run([named.get(one, one) for one in arguments]) == 3
    assert "--key-file" in capsys.readouterr().err


def test_without_the_package_the_way_out_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "tierd.stores.encrypted_store", raising=False)
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"\[crypt\]"):
        open_store(parse_url("file:///mnt/x"), key=EncryptionKey(SECRET))


def test_the_key_is_nowhere_but_in_its_file(tmp_path, key) -> None:
    """A daemon flushes with it and ends: it is not in what it says, nor in what it leaves, nor in its arguments."""
    spool, tier = Spool(tmp_path / "spool"), tmp_path / "tier"
    tier.mkdir()
    for step in (1, 2):
        commit(spool, part(step))
    command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool.root), "--to", str(tier), "--key-file", key]
    daemon = subprocess.Popen(
        [*command, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"},
    )
    try:
        said = b""
        for line in daemon.stdout:
            said += line
            if said.count(b'"flushed"') == 2:
                break
        said += Path(f"/proc/{daemon.pid}/cmdline").read_bytes()
        status = subprocess.run(
            [sys.executable, "-m", "tierd", "status", "--spool", str(spool.root), "--json"],
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        said += status.stdout + status.stderr
    finally:
        daemon.terminate()
        said += daemon.communicate(timeout=60)[0]
    assert b'"flushed"' in said
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and str(path) != key]
    assert any(ID.encode() in data for data in left)
    forms = {
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().upper().encode(),
        base64.b64encode(SECRET),
        repr(SECRET).encode(),
    }
    assert not [form for form in forms for data in [said, *left] if form in data]
    assert b"weights.bin" not in b"".join(path.read_bytes() for path in tier.rglob("*") if path.is_file())
