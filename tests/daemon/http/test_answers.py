"""What a daemon answers over HTTP: probes, JSON, and the page's headers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import msgspec
from support.web import get, serving
from support.world import attempt, commit, part

from tierd.core.diagnosis.problems import Problem
from tierd.core.event_kinds import Event
from tierd.core.installation import install_command
from tierd.daemon.http.http_server import PAGE
from tierd.daemon.runs_report import SharedAnswer, sent_bytes

# -- JSON, probes, page -----------------------------------------------------------------------------------------------


async def test_status_and_runs(spool, tmp_path) -> None:
    commit(spool, part(1))
    commit(spool, part(2, launch=2), origin=part(1).checkpoint)
    async with serving(spool, tmp_path / "tier") as http:
        async with asyncio.timeout(60):
            while True:
                found = await get(http.address, "/runs")
                runs = json.loads(found.body)
                if [len(one["copies"]) for one in runs["checkpoints"]] == [2, 2]:
                    break
                await asyncio.sleep(0.2)
        assert found.headers["content-type"] == "application/json"
        newest, oldest = runs["checkpoints"]
        assert newest["resumed_from"] == f"000000000001.{attempt(1)}" and oldest["resumed_from"] is None
        assert [(one["place"], one["state"]) for one in newest["copies"]] == [
            ("local", "committed"),
            ("disk", "verified"),
        ]
        assert runs["held"] == runs["in_flight"] == runs["unreached"] == []
        (lag,) = runs["lags"]
        assert (lag["run"], lag["state"], lag["text"]) == ("run", "current", "step 2 is on a tier")
        assert [save["step"] for save in runs["saves"]] == [1, 2]
        assert all(save["tier_s"]["disk"] >= 0 for save in runs["saves"])
        status = json.loads((await get(http.address, "/status")).body)
        assert status["running"] and status["problems"] == [] and status["spool"] == str(spool.root)
        assert [one["name"] for one in status["tiers"]] == ["disk"]
        head = await get(http.address, "/status", method="HEAD")
        assert (head.status, head.body) == (200, b"") and int(head.headers["content-length"]) > 100


def test_minute_of_the_clock_keeps_its_bytes() -> None:
    """Bins that are counted back from now change with every answer."""
    times = ("2026-01-01T00:00:59.9+00:00", "2026-01-01T00:01:00+00:00", "2025-12-31T23:00:00+00:00")
    flushes = [Event(at=at, what="flushed", place="s3", subject="", why="", sent_bytes=5) for at in times]
    for second, expected in ((1, (0, 5, 5)), (59, (0, 5, 5)), (60, (5, 5, 0)), (61, (5, 5, 0))):
        at = f"2026-01-01T00:0{1 + second // 60}:{second % 60:02}+00:00"
        assert sent_bytes(flushes, ["s3"], at)["s3"][-3:] == expected


async def test_probes(spool, tmp_path, monkeypatch) -> None:
    async with serving(spool, tmp_path / "tier") as http:
        assert (await get(http.address, "/healthz")).body == b"ok\n"
        async with asyncio.timeout(60):
            while (await get(http.address, "/readyz")).status != 200:
                await asyncio.sleep(0.05)
        assert http._views is not None
        http._views._reconciler._phase.draining = True
        found = await get(http.address, "/readyz")
        assert (found.status, found.body) == (503, b"not ready\n")
        http._views._reconciler._phase.draining = False
        assert (await get(http.address, "/other")).status == 404


async def test_answers_are_shared() -> None:
    """However many ask, an answer is computed once a second."""
    calls = 0

    async def counted() -> bytes:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        return b"answer"

    shared = SharedAnswer(counted)
    assert set(await asyncio.gather(*(shared.get() for _ in range(50)))) == {b"answer"}
    assert calls == 1


async def test_the_page_runs_only_its_own_script(spool, tmp_path) -> None:
    async with serving(spool, tmp_path / "tier") as http:
        found = await get(http.address, "/")
    page, policy = found.body.decode(), found.headers["content-security-policy"]
    (script,), (style,) = (
        re.findall(r"<script>(.*?)</script>", page, re.S),
        re.findall(r"<style>(.*?)</style>", page, re.S),
    )
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert found.headers["x-frame-options"] == "DENY" and found.headers["cache-control"] == "no-store"
    assert not re.search(r"\bon[a-z]+=|style=|(src|href)=\"(https?:)?//", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)


class _Ids(HTMLParser):
    """The ids of a page's elements, and what labels another element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.labels: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        self.labels |= {value or "" for name, value in attrs if name == "aria-labelledby"}


def test_script_fills_elements_that_the_page_has() -> None:
    page = PAGE.decode()
    parsed = _Ids(page)
    filled = set(re.findall(r'(?:put|getElementById)\("([a-z-]+)"', page))
    assert {"problems", "tiers", "runs", "events"} <= filled <= parsed.ids and parsed.labels <= parsed.ids
    assert page.count('"use strict"') == 1 and '<script>\n"use strict";' in page


# -- what is loaded ---------------------------------------------------------------------------------------------------


def test_the_server_s_packages_are_loaded_only_if_it_is_configured() -> None:
    script = """
import sys
for name in ("prometheus_client", "aiohttp"):
    sys.modules[name] = None
import tierd.daemon.daemon_service
from tierd.daemon import daemon_service
from tierd.core.config import HttpConfig
from tierd.core.errors import ConfigError
assert daemon_service.make_http_server(None) is None
try:
    daemon_service.make_http_server(HttpConfig(listen="127.0.0.1:0"))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    line = f"the HTTP server needs the package aiohttp: {install_command('metrics')}"
    assert done.stdout.splitlines() == [f"http: {line}"]


def test_the_status_of_a_daemon_is_json() -> None:
    """`/status` has the form of `tierd status --json`: both are made of one class."""
    expected = {"severity": "alert", "place": "s3", "why": "why", "do": "", "command": ""}
    assert json.loads(msgspec.json.encode(Problem("alert", "s3", "why"))) == expected
