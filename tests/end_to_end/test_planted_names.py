"""Names that somebody else planted, and what a server answers: no command, log line, event or status lets a terminal
obey them.

What is planted verifies: anyone who may write to a tier that is not encrypted can write manifests that do.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import unicodedata
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from support.s3stub import Bucket, serving
from support.world import Daemon

import tierd
from tierd import logs
from tierd.cli import app, run
from tierd.core.config import from_urls
from tierd.core.errors import StoreUnavailable
from tierd.core.manifest_codec import decode, seal
from tierd.daemon.host_events import notify
from tierd.daemon.reconciler import Reconciler
from tierd.events.journal import Journal
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.open import open_tiers

EVIL = "\u202e\x9b31m\x9d0;x\x9c\u2028\u2066\u200b\U000e0041[red][link=x]:smile:"
ESCAPED = r"\u202e\x9b31m\x9d0;x\x9c\u2028\u2066\u200b\U000e0041[red][link=x]:smile:"
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
CODES = {"ls": 0, "show": 0, "verify": 5, "restore": 5}


def check(text: str, *, says: str = "") -> None:
    """Nothing unseen but line feeds is in `text`, nor was anything in it taken for markup."""
    assert text.strip()
    assert not [one for one in text if unicodedata.category(one) in UNSEEN and one != "\n"], ascii(text)
    assert says in "".join(text.split()).replace("\\\\", "\\")


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A spool and a tier with two checkpoints; the manifests of the newer have planted names, on both places."""
    spool, tier = tmp_path / "spool", tmp_path / "tier"
    tier.mkdir()
    with tierd.Checkpointer(spool, run="r") as ckpt:
        for step in (10, 20):
            ckpt.save(step, {"weights": torch.arange(1000.0) * step}, metrics={"loss": 1 / step}).wait()
    asyncio.run(_flush(spool, tier))
    for place in (spool / "r", tier / "r" / "manifests"):
        (path,) = (one for one in place.rglob("*.json") if f"{20:012}" in str(one) and one.name != "state.json")
        found = decode(path.read_bytes())
        extra = msgspec.structs.replace(found.files[0], path=f"w{EVIL}.bin")
        found = msgspec.structs.replace(found, metrics={f"m{EVIL}": 0.5}, files=(*found.files, extra))
        path.write_bytes(seal(found))
    return spool, tier


async def _flush(spool: Path, tier: Path) -> None:
    config = msgspec.structs.replace(from_urls(str(spool), [str(tier)]), min_free_percent=0.0)
    async with AsyncExitStack() as stack:
        reconciler = Reconciler(config, Spool(spool), await open_tiers(config, stack))
        work = asyncio.ensure_future(reconciler.run())
        async with asyncio.timeout(60):
            while reconciler.journal.counters["flushed"] < 2 or reconciler.backlog.parts():
                await asyncio.sleep(0.02)
        work.cancel()


def commands(spool: Path, tier: Path, home: Path) -> Iterator[tuple[list[str], str]]:
    """Every command that shows what lies in a place, and what it has to show of the planted names."""
    best = home / "tierd.toml"
    metric = json.dumps(f"m{EVIL}", ensure_ascii=False)
    rule = f'{{ keep_last = 1, keep_best = {{ metric = {metric}, mode = "min", count = 1 }} }}'
    best.write_text(
        f'spool = "{spool}"\nretention = {rule}\n[[tier]]\nname = "t"\nurl = "file://{tier}"\nretention = {rule}\n'
    )
    yield ["ls", str(tier)], ""
    yield ["runs", str(tier)], ""
    yield ["runs", str(home / f"none{EVIL}")], ""
    yield ["ls", "--config", str(best)], "\\u202e"
    yield ["show", "r", "20", str(tier)], f"metrics:m{ESCAPED}0.5"
    yield ["show", "r", "20", "--spool", str(spool)], "[red][link=x]:smile:"
    yield ["show", "r", "20", str(tier), "--json"], "\\u202e\\u009b31m"
    yield ["diff", "10", "20", str(tier)], ""
    yield ["diff", "10", "20", str(tier), "--json"], ""
    yield ["verify", str(tier)], ""
    yield ["verify", "--spool", str(spool)], "\\u202e"
    yield ["verify", "--spool", str(spool), "--json"], "\\u202e"
    yield ["prune", "--dry-run", "--config", str(best)], "\\u202e"
    yield ["prune", "--dry-run", "--config", str(best), "--json"], "\\u202e"
    yield ["restore", str(tier), "--run", "r", "--to", str(home / "back"), "--best", f"none{EVIL}"], "\\u202e"
    yield ["restore", str(tier), "--run", "r", "--to", str(home / f"back{EVIL}")], "\\u202e"
    yield ["restore", str(tier), "--run", f"r{EVIL}", "--to", str(home / "x")], "\\u202e"
    yield ["export", str(tier), "--run", "r", "--to", str(home / "e"), "--only", f"x{EVIL}"], "\\u202e"
    evil = ["--exec", f"false {{step}} {EVIL}", "--to", str(home / f"f{EVIL}")]
    yield ["follow", str(tier), "--run", "r", "--once", *evil], ""
    yield ["follow", str(tier), "--run", "r", "--once", *evil, "--json"], ""
    yield ["follow", str(tier), "--run", f"r{EVIL}", *evil], "\\u202e"
    (home / "copied").mkdir()
    yield ["copy", str(tier), str(home / "copied"), "--run", "r", "--step", "10"], ""
    yield ["copy", str(tier), str(home / "copied"), "--run", "r", "--json"], ""
    yield ["copy", str(tier), str(home / "copied"), "--run", "r", "--as", f"r{EVIL}"], "\\u202e"
    yield ["du", str(tier), "--spool", str(spool)], ""
    yield ["pin", "r", "20", str(tier)], ""
    yield ["unpin", "r", "20", str(tier)], ""
    yield ["pin", "r", "20", str(home / f"none{EVIL}")], ""
    yield ["config", "check", str(home / f"none{EVIL}")], "\\u202e"
    yield ["config", "check", str(best)], ""
    yield ["doctor", "--all", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["doctor", "--spool", str(home / f"none{EVIL}"), "--json"], "\\u202e"
    yield ["status", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["top", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["drain", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["wait", "r", "20", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["pause", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["resume", "--spool", str(home / f"none{EVIL}")], "\\u202e"
    yield ["rm", "r", str(tier), "--dry-run"], ""
    yield ["disown", "r", f"0{EVIL}", str(tier)], "\\u202e"
    yield ["run", "--spool", str(spool), "--to", f"file:///x{EVIL}"], ""
    yield ["inspect", str(home / f"none{EVIL}")], "\\u202e"
    yield ["import", str(home / f"none{EVIL}"), "--run", "r", "--to", str(tier)], "\\u202e"
    (home / f"evil{EVIL}.pt").write_bytes(b"no checkpoint")
    yield ["import", str(home / f"evil{EVIL}.pt"), "--run", "imported", "--to", str(tier), "--step", "1"], "\\u202e"
    (home / f"none{EVIL}").touch()  # a file, because a directory that is not there is waited for
    yield ["watch", str(home / f"none{EVIL}"), "--run", "r", "--to", str(tier)], "\\u202e"
    yield ["prepare", str(home / f"none{EVIL}"), "--run", f"r{EVIL}", "--to", str(tier)], "\\u202e"
    yield ["restore", str(tier), "--run", "r", "--into", str(home / f"back{EVIL}")], ""
    yield ["inspect", str(home / f"none{EVIL}"), "--json"], "\\u202e"
    yield ["advise", "--spool", str(spool), "--run", f"r{EVIL}", "--sync", "1s"], "\\u202e"
    yield ["check-resume", f"x{EVIL}:f", "--steps", "2", "--kill-at", "1"], "\\u202e"


def test_no_command_shows_planted_names_as_they_are(places, tmp_path, capsys):
    spool, tier = places
    driven = set()
    for command, says in commands(spool, tier, tmp_path):
        run(command)
        out, err = capsys.readouterr()
        check(out + err, says=says)
        driven.add(command[0])
    named = {one.name or one.callback.__name__.rstrip("_") for one in app.registered_commands}
    assert named | {"config"} == driven


class Refusing(FileStore):
    async def put(self, key, data):
        raise StoreUnavailable(f"503 {EVIL}\nSlow down")


def test_status_drain_and_the_log_escape_a_servers_text(tmp_path, capsys, caplog, monkeypatch):
    (tmp_path / "tier").mkdir()
    spool = Spool(tmp_path / "spool")
    with Daemon(spool.root, lambda: {"tier": Refusing(tmp_path / "tier")}) as daemon:
        with tierd.Checkpointer(spool.root, "r") as ckpt:
            ckpt.save(1, {"w": torch.ones(3)}).wait(timeout=60)
        for _ in range(600):
            if daemon.reconciler.journal.alerts():
                break
            daemon.call(asyncio.sleep(0.1))
        for command in (["status"], ["status", "--json"], ["top"], ["drain", "--deadline", "1s"], ["ls"]):
            run([*command, "--spool", str(spool.root)])
            out, err = capsys.readouterr()
            check(out + err, says="" if command == ["ls"] else "503")
        (alert,) = daemon.reconciler.journal.alerts()
        check(alert.why, says="503\\u202e")
        for event in daemon.reconciler.journal.events:
            check(event.what + event.why + event.subject + event.place)
    for record in caplog.records:
        assert record.name not in logs.LOGGERS or record.getMessage().isprintable(), record


def test_an_answer_of_s3_is_shown_escaped(capsys, caplog, tmp_path):
    bucket = Bucket()
    bucket.refuse = lambda headers: f"no{EVIL.replace(chr(0xE0041), '')}"
    with serving(bucket), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        (tmp_path / "tierd.toml").write_text(f'spool = "{tmp_path}"\n[[tier]]\nname = "t"\nurl = "{bucket.url()}"\n')
        for asked in ([], ["--json"]):
            assert run(["config", "check", "--reach", str(tmp_path / "tierd.toml"), *asked]) == 6
            out, err = capsys.readouterr()
            check(out + err, says="no\\u202e")
        assert run(["ls", bucket.url()]) == 6  # which logs it
    (said,) = [record.getMessage() for record in caplog.records if record.name == "tierd.daemon"]
    check(said, says="no\\u202e")


def test_events_and_systemd_status_are_escaped(monkeypatch, tmp_path):
    reported = []
    Journal(reported.append).record("corrupt", "tier", f"r{EVIL}", f"why{EVIL}\nMAINPID=1")
    check(reported[0].subject, says="r\\u202e")
    check(reported[0].why, says="why\\u202e")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify(f"STATUS=draining {EVIL}\nMAINPID=1")
        said = systemd.recv(1 << 16).decode()
        check(said, says="STATUS=draining\\u202e")
        assert "\n" not in said


def test_every_logger_of_tierd_escapes_and_so_does_the_command_lines_handler():
    source = Path(tierd.__file__).parent
    names = set()
    for path in source.rglob("*.py"):
        for line in path.read_text().splitlines():
            if "logging.getLogger(" in line and "= logging.getLogger" in line:
                name = line.split("getLogger(")[1].rstrip(")").strip('"')
                module = str(path.relative_to(source.parent).with_suffix("")).replace("/", ".")
                names.add(module if name == "__name__" else name)
    assert names == set(logs.LOGGERS)
    for name in logs.LOGGERS:
        assert logs.escape_record in logging.getLogger(name).filters
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.Formatter("%(levelname)s %(message)s"))
    logger = logging.Logger("another library")
    logger.addHandler(handler)
    try:
        raise OSError(f"x{EVIL}\nERROR not so")
    except OSError:
        logger.exception("a\n%s", EVIL)
    check(stream.getvalue(), says="\\u202e")
    assert not [line for line in stream.getvalue().splitlines()[1:] if not line.startswith("  ")]


def test_an_error_that_a_trainer_sees_is_escaped(tmp_path):
    with pytest.raises(tierd.core.errors.TierdError) as caught:
        tierd.Checkpointer(tmp_path / "spool", run=f"r{EVIL}", to=[])
    check(str(caught.value), says="\\u202e")
    assert os.linesep not in str(caught.value)
    check(str(StoreUnavailable(f"503 {EVIL}")), says="503\\u202e")
    check(f"{StoreUnavailable(EVIL)}", says="\\u202e")
