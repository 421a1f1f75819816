"""The daemon's page in a headless Chromium, over a live daemon: what it shows, how wide, what it may do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import Browser, browsing, driver
from support.daemon_fixtures import quick  # noqa: F401
from support.waiting import wait_until
from support.web import serving
from support.world import attempt, commit, part

from tierd.daemon.http.http_server import HttpServer
from tierd.spool.spool import Spool

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>&amp;"
_CONTRAST = """
const light = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((it) => it / 255)
    .map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = getComputedStyle(at).backgroundColor;
    if (!found.startsWith("rgba(0, 0, 0, 0")) return found;
  }
  return "rgb(255, 255, 255)";
};
const texts = document.querySelectorAll("p, h1, h2, h3, dt, dd, li, td, th, .chip, time, button");
const least = [...texts].map((element) => {
  const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), element.className || element.tagName];
});
return least.sort((x, y) => x[0] - y[0])[0];
"""
_BADGES = """
const heads = [...document.querySelectorAll("#runs .head")];
return Object.fromEntries(heads.map((it) => [it.querySelector("h3").textContent, it.querySelector(".chip")])
  .map(([name, chip]) => [name, [chip.className.trim(), chip.textContent]]));
"""


class Live:
    """A daemon in a thread of this process; `http` is its server."""

    def __init__(self, spool: Spool, tier: Path) -> None:
        self.http: HttpServer | None = None
        self._spool, self._tier = spool, tier
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(self._spool, self._tier) as http:
            self.http = http
            await self._stop.wait()

    def call(self, what) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the daemon has ended
            self._loop.call_soon_threadsafe(what)

    def end(self) -> None:
        self.call(self._stop.set)

    @property
    def journal(self):
        assert self.http is not None and self.http._views is not None
        return self.http._views._reconciler.journal


@pytest.fixture
def address() -> Iterator[str]:
    with driver() as found:
        yield found


def fill(spool: Spool) -> None:
    for step in (10, 20, 30):
        commit(spool, part(step), metrics={"loss": 1 / step, "accuracy": 0.5})
    commit(spool, part(20, launch=2), origin=part(10).checkpoint)
    commit(spool, part(7, launch=3, run="half", world=2))


def observe(live: Live, spool: Spool, address: str, failures: list[BaseException]) -> None:
    """What a browser sees. The daemon handles signals, so its loop has the main thread, and this another one."""
    try:
        wait_until(lambda: live.http is not None and live.http.address)
        assert live.http is not None and live.http.address is not None
        url = f"http://127.0.0.1:{live.http.address[1]}/"
        live.call(lambda: live.journal.record("corrupt", "disk", part(10), MARKUP))
        for width in (1200, 390):
            with browsing(address, width) as browser:
                seen(browser, url, width)
                bins(browser)
                compares(browser, url, width)
                browser.open(url)
                if width == 390:
                    lives(browser, live, spool)
    except BaseException as error:
        failures.append(error)
    finally:
        live.end()


def seen(browser: Browser, url: str, width: int) -> None:
    browser.open(url)
    wait_until(lambda: "step 30 is on a tier" in browser.text() or "step 20 is on a tier" in browser.text())
    wait_until(lambda: "disk: verified, " in browser.text())
    text = browser.text()
    assert MARKUP in text and browser.run("return document.title") == "tierd"
    assert "[object" not in text and "undefined" not in text and "NaN" not in text
    for words in ("resumed from step 10", "rolled back by 20 steps", "kept: ", "incomplete: not all of 2 ranks",
                  "pending", "answers", "flushed", "durable", "accuracy 0.5", "loss 0.03333",
                  f"of launch {attempt(1)}", f"of launch {attempt(2)}"):  # fmt: skip
        assert words in text, words
    assert browser.run("return document.querySelectorAll('circle.dot').length") == 5
    badges = {"run": ["chip good", "step 20 is on a tier"], "half": ["chip warning", "on no tier"]}
    wait_until(lambda: browser.run(_BADGES) == badges)
    charts = browser.run(
        "return [...document.querySelectorAll('figure svg')].map((it) => it.getAttribute('aria-label'))"
    )
    assert {"from the spool to a tier, by step", "loss, by step", "accuracy, by step"} <= set(charts)
    assert browser.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
    hosts = browser.run("return [...new Set(performance.getEntriesByType('resource').map((one) => one.name))].sort()")
    assert hosts == [f"{url}runs", f"{url}status"]
    for dark in (False, True):
        browser.dark(dark)
        contrast, where = browser.run(_CONTRAST)
        assert contrast >= 4.5, (dark, contrast, where)
        if folder := os.environ.get("TIERD_SCREENSHOTS"):
            (Path(folder) / f"page-{width}-{'dark' if dark else 'light'}.png").write_bytes(browser.screenshot())
    assert browser.errors() == []


def bins(browser: Browser) -> None:
    """A bin keeps its steps and its value while newer saves come and older ones leave."""
    script = """
    const points = [];
    for (let step = %d; step <= %d; step += 50) points.push([step, step %% 700]);
    const axis = axisOf(points.map(([step]) => step));
    return [axis.size, Object.fromEntries(binned(points, axis, true))];
    """
    (size, before), (later_size, later) = browser.run(script % (50, 6000)), browser.run(script % (1050, 6950))
    assert size == later_size == 100 and before["10"] == 1050 % 700
    common = before.keys() & later.keys() - {"60"}  # to which further saves came
    assert len(common) == 50 and all(before[bin_number] == later[bin_number] for bin_number in common)


def compares(browser: Browser, url: str, width: int) -> None:
    """Two runs stand side by side with the same axis, by the address or by their boxes."""
    browser.open(f"{url}?runs=run,half")
    wait_until(lambda: browser.run("return document.getElementById('runs').className") == "pair")
    assert browser.run("return [...document.querySelectorAll('#runs h3')].map((it) => it.textContent)") == [
        "run",
        "half",
    ]
    tops = browser.run("return [...document.querySelectorAll('#runs > .card')].map((it) => it.offsetTop)")
    assert (len(set(tops)) == 1) == (width > 960), tops
    ends = "return [...document.querySelectorAll('figure text:last-child')].map((it) => it.textContent)"
    assert set(browser.run(ends)) == {"30"}
    assert browser.run("return document.documentElement.scrollWidth") == width
    browser.run("document.querySelector('#runs input').click()")
    assert browser.run("return [document.getElementById('runs').className, location.search]") == ["", ""]


def lives(browser: Browser, live: Live, spool: Spool) -> None:
    """What changes shows without a reload, and so does a daemon that ends."""
    commit(spool, part(40, launch=2), origin=part(10).checkpoint)
    wait_until(lambda: "step 40 is on a tier" in browser.text())
    for _ in range(3):  # of a thing that the daemon does not know, because its own worker works and ends the alert
        live.call(lambda: live.journal.record_failure(("test", "disk"), "prune", "disk", "backlog", "503 Slow Down"))
    wait_until(lambda: "failed 3 times in a row: 503 Slow Down" in browser.text())
    tier = spool.root.parent / "tier"
    tier.rename(tier.with_name("away"))
    commit(spool, part(50, launch=2), origin=part(10).checkpoint)
    wait_until(lambda: "step 40 is on a tier; step 50 waits for " in browser.text())
    assert browser.run(_BADGES)["run"][0] == "chip warning"
    command = f"tierd doctor --spool {spool.root} file://{tier}"
    assert command in browser.run("return [...document.querySelectorAll('#problems code')].map((it) => it.textContent)")
    browser.run("document.querySelector('#problems button').click()")
    wait_until(
        lambda: (
            browser.run("return String(getSelection()) + document.querySelector('#problems button').textContent")
            != "copy"
        )
    )
    browser.run("getSelection().removeAllRanges()")
    live.end()
    wait_until(lambda: "The daemon does not answer for" in browser.text())
    assert "step 40 is on a tier" in browser.text()


def test_the_page(tmp_path: Path, address: str) -> None:
    spool = Spool(tmp_path / "spool")
    fill(spool)
    live, failures = Live(spool, tmp_path / "tier"), []
    observing = threading.Thread(target=observe, args=(live, spool, address, failures))

    async def work() -> None:
        observing.start()
        await live.serve()

    try:
        asyncio.run(work())
    finally:
        observing.join(120)
    if failures:
        raise failures[0]
