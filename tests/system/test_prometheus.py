"""A real Prometheus and its promtool: metrics by its linter, the alert rules over made-up and over real failures."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from support.daemon_fixtures import quick, spool  # noqa: F401
from support.web import get, serving
from support.world import commit, part

from tierd.spool.spool import Spool

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

SYSTEMD = Path(__file__).parents[2] / "systemd"
RULES = SYSTEMD / "alerts.yml"
NAMES = re.findall(r"- alert: (\w+)", RULES.read_text())
NODE = {"instance": "n:9464", "job": "tierd"}


def promtool(*arguments: str | Path, text: bytes | None = None) -> str:
    """What promtool prints; the test fails if it finds fault."""
    done = subprocess.run(["promtool", *map(str, arguments)], input=text, capture_output=True)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


# -- rules over made-up series ----------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What makes an alert fire.

    Attributes:
        series: by name and labels, the values minute by minute, in promtool's notation.
        quiet_at, fires_at: when it does not fire yet, and when it does.
        labels: the alert's, beside the node's and its severity.
        summary: the text that it wakes somebody with.
        severity: of the alert.
    """

    series: dict[str, str]
    quiet_at: str
    fires_at: str
    labels: dict[str, str]
    summary: str
    severity: str = "ticket"


BOTH, RUN = {"run": "r", "tier": "s3"}, {"run": "r"}
CASES = {
    "TierdDown": Case({"up": "1x5 0x20"}, "10m", "12m", {}, "n:9464: the daemon does not answer", "page"),
    "TierdAlert": Case(
        {'tierd_active_alerts{tier="s3"}': "0x5 1x20"}, "6m", "8m", {"tier": "s3"},
        "n:9464: s3 fails again and again", "page",
    ),
    "TierdCheckpointTooOld": Case(
        {
            'tierd_last_durable_age_seconds{run="r",tier="s3"}': "3600x5 18000x30",
            'tierd_last_durable_age_seconds{run="r",tier="local"}': "60x40",
            'tierd_pending_parts{run="r",tier="s3"}': "2x40",
        },
        "14m", "17m", RUN, "run r: the newest checkpoint on any tier is 5h 0m 0s old", "page",
    ),
    "TierdRunBehind": Case(
        {'tierd_run_behind{run="r"}': "0x5 1x30"}, "14m", "17m", RUN,
        "run r: a checkpoint waits too long to be on a tier",
    ),
    "TierdBacklogGrows": Case(
        {
            'tierd_pending_bytes{run="r",tier="s3"}': "0+1000000x90",
            'tierd_pending_parts{run="r",tier="s3"}': "4x90",
        },
        "29m", "40m", BOTH, "n:9464: s3 falls behind run r",
    ),
    "TierdSaveFailed": Case(
        {'tierd_save_failures_total{run="r"}': "0x5 1x30"}, "5m", "7m", RUN, "n:9464: saves of run r failed"
    ),
    "TierdRestoreFellBack": Case(
        {'tierd_restore_fallbacks_total{run="r"}': "0x5 1x30"}, "5m", "7m", RUN,
        "run r resumed from an older checkpoint than its newest",
    ),
    "TierdCorruption": Case(
        {'tierd_quarantined_copies_total{run="r",tier="s3"}': "0x5 1x30"}, "5m", "7m", BOTH,
        "n:9464: a copy of run r on s3 is corrupt, and no place had the right bytes", "page",
    ),
    "TierdReplicasDiffer": Case(
        {'tierd_replicas_differ_total{run="r"}': "0x5 1x30"}, "5m", "7m", RUN,
        "run r: tensors that should be the same on all ranks differ", "page",
    ),
    "TierdSpoolFull": Case(
        {"tierd_spool_free_bytes": "60x5 40x20", "tierd_spool_size_bytes": "1000x30"}, "10m", "12m", {},
        "n:9464: 4% of the spool's disk is free", "page",
    ),
    "TierdPaused": Case({"tierd_paused": "1x1500"}, "23h", "24h1m", {}, "n:9464: paused for a day"),
    "TierdScrubOverdue": Case(
        {"tierd_scrub_overdue_copies": "3x10200"}, "167h", "168h1m", {},
        "n:9464: 3 copies were not verified again in time",
    ),
}  # fmt: skip
CALM = {
    "up": "1x200",
    'tierd_active_alerts{tier="s3"}': "0x200",
    'tierd_last_durable_age_seconds{run="done",tier="s3"}': "900000x200",  # a finished run: nothing is pending
    'tierd_pending_parts{run="done",tier="s3"}': "0x200",
    'tierd_last_durable_age_seconds{run="r",tier="s3"}': "600x200",
    'tierd_pending_parts{run="r",tier="s3"}': "1x200",
    'tierd_pending_bytes{run="r",tier="s3"}': "1000x200",
    'tierd_save_failures_total{run="r"}': "7x50 0x150",  # a restart begins at 0 again, and is no failure
    'tierd_restore_fallbacks_total{run="r"}': "7x50 0x150",
    'tierd_quarantined_copies_total{run="r",tier="s3"}': "7x50 0x150",
    'tierd_replicas_differ_total{run="r"}': "7x50 0x150",
    "tierd_spool_free_bytes": "400x200",
    "tierd_spool_size_bytes": "1000x200",
    "tierd_paused": "0x50 1x60 0x90",
    "tierd_scrub_overdue_copies": "0x50 3x100 0x50",
}


def series(values: dict[str, str]) -> list[dict[str, str]]:
    """promtool's series, each with the labels of a node."""
    node = ",".join(f'{name}="{value}"' for name, value in NODE.items())
    found = []
    for name, numbers in values.items():
        metric, _, labels = name.rstrip("}").partition("{")
        found.append({"series": f"{metric}{{{','.join(filter(None, [labels, node]))}}}", "values": numbers})
    return found


def described(name: str) -> str:
    rule = RULES.read_text().split(f"- alert: {name}\n")[1]
    found = re.search(r'description: "([^"]+)"', rule)
    assert found
    return found[1]


def tried(name: str, case: Case) -> dict[str, Any]:
    rule = RULES.read_text().split(name)[1].split("- alert")[0]
    labels = {**({} if re.search(r"expr: m(in|ax) by \(run\)", rule) else NODE), **case.labels}
    fires = {
        "exp_labels": {**labels, "severity": case.severity},
        "exp_annotations": {"summary": case.summary, "description": described(name)},
    }
    tests = [
        {"eval_time": case.quiet_at, "alertname": name, "exp_alerts": []},
        {"eval_time": case.fires_at, "alertname": name, "exp_alerts": [fires]},
    ]
    return {"name": name, "interval": "1m", "input_series": series(case.series), "alert_rule_test": tests}


def test_the_rules_load() -> None:
    assert f"SUCCESS: {len(NAMES)} rules found" in promtool("check", "rules", RULES)


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    assert sorted(CASES) == sorted(NAMES)
    quiet = [{"eval_time": at, "alertname": name, "exp_alerts": []} for name in NAMES for at in ("40m", "55m", "3h")]
    calm = {"name": "calm", "interval": "1m", "input_series": series(CALM), "alert_rule_test": quiet}
    tests = [calm, *(tried(name, case) for name, case in CASES.items())]
    file = tmp_path / "test.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)


# -- a live daemon ----------------------------------------------------------------------------------------------------


class _Classic(Collector):
    def __init__(self, text: str) -> None:
        self._text = text

    def collect(self) -> Iterator[Any]:
        yield from text_string_to_metric_families(self._text)


def test_the_metrics_pass_the_linter(spool: Spool, tmp_path: Path) -> None:  # noqa: F811
    """promtool reads the older text format only, in which the same families are written once more."""
    commit(spool, part(10))

    async def work() -> str:
        async with serving(spool, tmp_path / "tier") as http:
            assert http.address is not None
            return (await get(http.address, "/metrics")).body.decode()

    registry = CollectorRegistry()
    registry.register(_Classic(asyncio.run(work())))
    text = generate_latest(registry)
    assert text.count(b"# HELP tierd_") >= 30
    assert promtool("check", "metrics", text=text) == ""


@contextmanager
def prometheus(home: Path, target: tuple[str, int]) -> Iterator[str]:
    """The address of a Prometheus that scrapes a daemon every second, with the rules."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scrape = {"job_name": "tierd", "static_configs": [{"targets": ["{}:{}".format(*target)]}]}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    file = home / "prometheus.yml"
    file.write_text(json.dumps({"global": every, "scrape_configs": [scrape], "rule_files": [str(RULES)]}))
    promtool("check", "config", file)
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={home}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


class Asked:
    """A Prometheus, asked from beside a running loop."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def data(self, path: str) -> Any:
        """The data of an answer; None while it does not answer yet."""

        def ask() -> Any:
            try:
                with urllib.request.urlopen(self._address + path, timeout=60) as answer:
                    return json.load(answer)["data"]
            except ConnectionError:
                return None
            except urllib.error.HTTPError as error:
                if error.code == 503:  # it starts
                    return None
                raise AssertionError(f"{path}: {error.read().decode()}") from error
            except urllib.error.URLError:
                return None

        return await asyncio.to_thread(ask)

    async def result(self, expression: str) -> list[Any]:
        found = await self.data(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return found["result"] if found else []

    async def firing(self, name: str) -> list[str]:
        """The tiers for which an alert fires, or will when its `for` is over."""
        found = await self.data("/api/v1/alerts")
        return [one["labels"].get("tier", "") for one in found["alerts"] if one["labels"]["alertname"] == name]

    async def wait(self, condition: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with asyncio.timeout(60):
                while not await condition():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"it did not come to hold: {condition}") from None


async def test_a_broken_tier_raises_its_alert_and_the_dashboard_has_data(spool: Spool, tmp_path: Path) -> None:  # noqa: F811
    commit(spool, part(10))
    tier, away = tmp_path / "tier", tmp_path / "away"
    panels = json.loads((SYSTEMD / "grafana.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    async with serving(spool, tier) as http:
        assert http.address is not None
        with prometheus(tmp_path, http.address) as address:
            asked = Asked(address)
            await asked.wait(lambda: asked.result('up{job="tierd"} == 1'))
            await asked.wait(lambda: asked.result('tierd_last_durable_step{tier="disk"} == 10'))
            for expression in expressions:
                shown = expression.replace("$instance", ".*").replace("$run", ".*")
                if "tierd_save_blocked_seconds" in shown:  # no trainer has saved here
                    assert await asked.result(shown) == []
                else:
                    await asked.wait(partial(asked.result, shown))
            assert await asked.firing("TierdAlert") == []
            tier.rename(away)
            commit(spool, part(20))
            await asked.wait(lambda: asked.firing("TierdAlert"))
            assert await asked.firing("TierdAlert") == ["disk"]
            await asked.wait(partial(asked.result, 'tierd_tier_reachable{tier="disk"} == 0'))
            await asked.wait(partial(asked.result, 'tierd_pending_parts{tier="disk"} > 0'))
            away.rename(tier)
            await asked.wait(lambda: asked.result('tierd_last_durable_step{tier="disk"} == 20'))

            async def over() -> bool:
                return not await asked.firing("TierdAlert")

            await asked.wait(over)
