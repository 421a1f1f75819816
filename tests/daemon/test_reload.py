"""SIGHUP: a changed configuration is taken up without letting go of the spool, the sockets or what was handed over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.doubles import Double, is_chunk
from support.timed import timed
from support.training import tensors
from support.waiting import until
from support.world import commit, part, read, steps_in

import tierd
from tierd.cli.places import load_config
from tierd.core.errors import ConfigError, SpoolHeld, StoreUnavailable
from tierd.daemon import daemon_service
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import Attach, Fetch, StatusRequest, Wait
from tierd.spool.spool import Spool


class Node:
    """A daemon with a configuration file, in this process."""

    def __init__(self, tmp_path: Path, spool: Spool) -> None:
        self.spool, self.file, self._tmp = spool, tmp_path / "tierd.toml", tmp_path
        self.configure("a")

    def configure(self, *tiers: str, more: str = "", each: str = "") -> None:
        text = f'spool = "{self.spool.root}"\nrescan = "1h"\ndrain = "5s"\nscrub = "0s"\n{more}\n'
        for name in tiers:
            (self._tmp / name).mkdir(exist_ok=True)
            text += f'[[tier]]\nname = "{name}"\nurl = "file://{self._tmp / name}"\n{each}\n'
        self.file.write_text(text)

    def manifests(self, tier: str) -> int:
        return len(list((self._tmp / tier).glob("run/manifests/*/*")))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        reread = lambda: load_config(self.file)  # noqa: E731
        daemon = asyncio.ensure_future(daemon_service.serve(reread(), reread=reread))
        await until(self.spool.socket.exists)
        try:
            yield
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(60):
                await daemon


@pytest.fixture
def node(tmp_path, spool):
    return Node(tmp_path, spool)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "tierd.daemon")
    return lambda text: [one for one in caplog.records if text in one.getMessage()]


async def reload(said, text: str = "the configuration is reloaded") -> None:
    before = len(said(text))
    os.kill(os.getpid(), signal.SIGHUP)
    await until(lambda: len(said(text)) > before)


async def ask(link: DaemonConnection, request, timeout: float = 20.0):
    return await asyncio.to_thread(link.ask, request, timeout)


async def test_a_tier_that_was_added_is_flushed_to_and_nobody_is_dropped(node, spool, said):
    commit(spool, part(1))
    async with node.serving():
        attached = DaemonConnection(spool)
        await ask(attached, Attach())
        await until(lambda: node.manifests("a") == 1)
        node.configure("a", "b")
        await reload(said)
        await until(lambda: node.manifests("b") == 1)
        assert attached.is_alive()
        status = (await ask(attached, StatusRequest()))["status"]
        assert status["trainers"] == 1 and [one["name"] for one in status["tiers"]] == ["a", "b"]
        with pytest.raises(SpoolHeld), Spool(spool.root).lock():
            pass
        attached.close()


async def test_handed_over_snapshots_survive_a_reload(node, spool, said):
    """Its connection lives on: the next save is the daemon's, too, from the same memory."""
    async with node.serving():
        ckpt = await asyncio.to_thread(tierd.Checkpointer, spool.root, "run")
        for step in range(4):
            save = await asyncio.to_thread(ckpt.save, step, tensors(step))
            await reload(said)
            await asyncio.to_thread(save.wait, "a", 60)
        assert ckpt.stats.handed_over == 4
        await asyncio.to_thread(ckpt.close)


async def test_changed_retention_is_obeyed(node, spool, said):
    for step in range(3):
        commit(spool, part(step))
    async with node.serving():
        await until(lambda: node.manifests("a") == 3)
        node.configure("a", more="retention = { keep_last = 1 }", each="retention = { keep_last = 1 }")
        await reload(said)
        await until(lambda: node.manifests("a") == 1 and steps_in(spool) == [2])


BROKEN = {
    "not TOML": "spool = ",
    "an unknown key": 'spool = "/x"\ncolour = "red"\n',
    "another spool": 'spool = "/var/tmp/elsewhere"\n[[tier]]\nname = "a"\nurl = "file:///mnt/a"\n',
    "a key that is not there": 'spool = "SPOOL"\n[[tier]]\nname = "a"\nurl = "file:///mnt/a"\nkey_file = "/no/key"\n',
    "a receiver's file that is not there": 'spool = "SPOOL"\n[[tier]]\nname = "a"\nurl = "file:///mnt/a"\n'
    '[[notify]]\nurl = "file:/no/hook"\n',
    "a tier in another's directory": 'spool = "SPOOL"\n[[tier]]\nname = "a"\nurl = "file:///mnt/a"\n'
    '[[tier]]\nname = "b"\nurl = "file:///mnt/a/b"\n',
    "nothing": None,
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_configuration_that_cannot_be_used_changes_nothing_and_is_logged(node, spool, said, kind):
    async with node.serving():
        text = BROKEN[kind]
        node.file.write_text(text.replace("SPOOL", str(spool.root))) if text else node.file.unlink()
        await reload(said, "the configuration is not reloaded, nothing is changed: ")
        [error] = said("is not reloaded")
        assert error.levelno == logging.ERROR
        commit(spool, part(1))
        await until(lambda: node.manifests("a") == 1)
        node.configure("a", "b")
        await reload(said)  # and the next one that can be used is taken up
        await until(lambda: node.manifests("b") == 1)


async def test_removed_tier_is_left_alone_and_its_waiter_gets_an_error(node, spool, said, monkeypatch):
    stores = {"a": Double(), "b": Double()}
    stores["b"].error = StoreUnavailable("503")

    async def opened(config, stack, *, trial):
        return {tier.name: stores[tier.name] for tier in config.tier}

    monkeypatch.setattr(daemon_service, "open_tiers", opened)
    node.configure("a", "b")
    commit(spool, part(1))

    async with node.serving():
        waiting = asyncio.ensure_future(ask(DaemonConnection(spool), Wait(part=part(1), tier="b", timeout_s=60)))
        await until(lambda: said("b: failing"))
        node.configure("a")
        await reload(said)
        with pytest.raises(ConfigError, match="no tier of that name; it has local, a"):
            await waiting
        status = (await ask(DaemonConnection(spool), StatusRequest()))["status"]
        assert [one["name"] for one in status["tiers"]] == ["a"] and not status["alerts"]


async def test_a_changed_key_is_read_again(node, spool, said):
    key = node.file.parent / "key"
    key.touch(0o600)
    key.write_text(secrets.token_hex(32))
    node.configure("a")
    async with node.serving():
        node.configure("a", "b", each="")
        text = node.file.read_text() + f'key_file = "{key}"\n'
        node.file.write_text(text)
        key.chmod(0o644)
        await reload(said, "nothing is changed: ")
        key.chmod(0o600)
        await reload(said)
        commit(spool, part(1))
        assert (
            not node.manifests("b")
            or b'"run"' not in next((node.file.parent / "b").glob("run/manifests/*/*")).read_bytes()
        )


async def test_watch_still_shows_other_nodes_that_it_lives_after_a_reload(node, spool, said, tmp_path, monkeypatch):
    """With the stores of the new configuration, because those of the former one are closed."""
    timed(monkeypatch, watch_s=0.02, silent_s=0.2, idle_renew_s=0.1)
    (tmp_path / "out").mkdir()
    node.configure("a", each=f'[[watch]]\ndirectory = "{tmp_path}/out"\nrun = "run"')

    def records() -> list[str]:
        return [path.read_text() for path in (tmp_path / "a").glob("run/watching/*.json")]

    async with node.serving():
        await until(records)
        await reload(said)
        for _ in range(3):
            before = records()
            await until(lambda before=before: records() != before)
    [ended] = records()
    assert '"ended":true' in ended


async def test_receivers_are_those_of_the_new_configuration(node, spool, said):
    reported = node.file.parent / "told"
    script = f"import sys; open({str(reported)!r}, 'a').write(sys.stdin.read())"
    async with node.serving():
        command = f'[[notify]]\ncommand = ["{sys.executable}", "-c", "{script}"]\nevents = ["flushed"]\n'
        node.configure("a")
        node.file.write_text(node.file.read_text() + command)
        await reload(said)
        commit(spool, part(1))
        await until(lambda: reported.exists() and '"flushed"' in reported.read_text())
        assert [one["name"] for one in (await ask(DaemonConnection(spool), StatusRequest()))["status"]["notify"]] == [
            "notify[0]"
        ]


async def test_the_alert_of_a_receiver_that_was_taken_out_ends(node, spool, said, monkeypatch):
    timed(monkeypatch, notify_again_s=0.01)

    async def alerts() -> list[str]:
        return [one["place"] for one in (await ask(DaemonConnection(spool), StatusRequest()))["status"]["alerts"]]

    node.configure("a")
    without = node.file.read_text()
    failing = f'[[notify]]\ncommand = ["{sys.executable}", "-c", "exit(1)"]\nevents = ["flushed"]\n'
    node.file.write_text(without + failing)
    async with node.serving():
        for step in range(3):
            commit(spool, part(step))
        await until(lambda: said("notify[0]: failing"))
        assert await alerts() == ["notify[0]"]
        node.file.write_text(without)
        await reload(said)
        await until(lambda: said("notify[0]: works again"))
        assert not await alerts()


async def test_a_restore_that_is_under_way_ends_with_the_stores_that_it_began_with(node, spool, said, monkeypatch):
    stores: list[Double] = []
    inner = Double().inner
    go_on = asyncio.Event()

    class Slow(Double):
        closed = held = waits = False

        async def get(self, key, into=None):
            if self.held and is_chunk(key):
                self.waits = True
                await go_on.wait()
            assert not self.closed
            return await super().get(key, into)

        async def aclose(self):
            self.closed = True

    async def opened(config, stack, *, trial):
        stores.append(Slow(inner))
        stack.push_async_callback(stores[-1].aclose)
        return {"a": stores[-1]}

    monkeypatch.setattr(daemon_service, "open_tiers", opened)
    files = commit(spool, part(1))

    async with node.serving():
        await ask(DaemonConnection(spool), Wait(part=part(1), tier="a"))
        stores[0].held = True
        shutil.rmtree(spool.path(part(1)))
        link = DaemonConnection(spool)
        fetching = asyncio.ensure_future(ask(link, Fetch(part=part(1))))
        await until(lambda: stores[0].waits)
        await reload(said)
        assert len(stores) == 2 and not stores[0].closed and not fetching.done()
        go_on.set()
        assert (await fetching)["tiers"] == ["a"]
        assert read(spool, part(1)) == files
        await until(lambda: stores[0].closed)
        link.close()


async def test_a_flush_that_takes_long_is_cut_off_and_gone_on_with(node, spool, said, monkeypatch):
    timed(monkeypatch, in_hand_s=0.1)
    stores: list[Double] = []

    async def opened(config, stack, *, trial):
        stores.append(Double())
        stores[-1].delay = 0.0 if len(stores) > 1 else 30.0
        return {"a": stores[-1]}

    monkeypatch.setattr(daemon_service, "open_tiers", opened)
    commit(spool, part(1))

    async with node.serving():
        await until(lambda: stores[0].calls)
        await reload(said)
        await until(lambda: stores[1].puts(lambda key: "/manifests/" in key))


def test_sighup_during_the_start_reloads_when_the_daemon_is_up(tmp_path):
    (tmp_path / "tier").mkdir()
    file = tmp_path / "tierd.toml"
    file.write_text(f'spool = "{tmp_path / "spool"}"\n[[tier]]\nname = "nfs"\nurl = "{tmp_path / "tier"}"\n')
    # The signal comes with the first import of the command line, long before the event loop exists.
    early = (
        "import os, signal, sys\n"
        "class Early:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tierd.cli':\n"
        "            os.kill(os.getpid(), signal.SIGHUP)\n"
        "sys.meta_path.insert(0, Early())\n"
        "from tierd.__main__ import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", early, "run", "--config", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        lines = []
        for line in daemon.stderr:
            lines.append(line)
            if "the configuration is reloaded" in line:
                daemon.terminate()
    assert daemon.returncode == 0, lines
    assert any("the configuration is reloaded: nfs" in line for line in lines)
