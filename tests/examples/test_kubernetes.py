"""The Kubernetes manifests: valid by Kubernetes' own schemas, and consistent with what the daemon does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
from support.manifests import MANIFESTS, documents, pod

from tierd.core.config import Config, from_toml
from tierd.core.diagnosis import machine_findings
from tierd.core.retention.policy import parse_duration
from tierd.daemon.http import http_server

NAMES = ("annotate", "daemonset", "sidecar", "trainer")  # test_queues.py has those of other projects' kinds
WITH_DAEMON = ("daemonset", "sidecar")
SINCE = {"sidecar": "1.29"}  # the first version whose schema has what the manifest uses, and enables it
OLDEST, NEWEST = "1.25", "1.37"
END_S = 10  # for the end of the process, after `drain`


def valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_every_manifest_is_tested() -> None:
    assert {*NAMES, "jobset", "kueue"} == {path.stem for path in MANIFESTS.glob("*.yaml")}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("newest", [False, True], ids=["oldest", "newest"])
def test_kubernetes_schemas_accept_it(name: str, newest: bool) -> None:
    for document in documents(name):
        valid(document, NEWEST if newest else SINCE.get(name, OLDEST))


def _misspelled(spec: dict[str, Any]) -> None:
    container = spec["initContainers"][1] if len(spec["initContainers"]) > 1 else spec["containers"][0]
    container["livenessprobe"] = container.pop("livenessProbe")


def _of_another_type(spec: dict[str, Any]) -> None:
    spec["terminationGracePeriodSeconds"] = "180s"


def _misplaced(spec: dict[str, Any]) -> None:
    spec["preStop"] = {"exec": {"command": ["true"]}}


@pytest.mark.parametrize("damage", [_misspelled, _of_another_type, _misplaced])
@pytest.mark.parametrize("name", WITH_DAEMON)
def test_schemas_refuse_fields_that_kubernetes_would_drop(name: str, damage: Callable[[dict[str, Any]], None]) -> None:
    document = copy.deepcopy(documents(name)[1])
    damage(document["spec"]["template"]["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        valid(document, NEWEST)


@pytest.fixture(params=WITH_DAEMON)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def config(name: str) -> Config:
    """The file in the ConfigMap, as the daemon reads it."""
    return from_toml(pod(name).files["tierd.toml"], "tierd.toml")


def test_probes_ask_paths_that_the_daemon_serves_without_a_token(name: str, config: Config) -> None:
    daemon = pod(name).daemon
    assert config.http is not None and not config.http.is_loopback  # the kubelet asks from outside of the pod
    (port,) = daemon["ports"]
    assert config.http.listen.endswith(f":{port['containerPort']}")
    probes = {kind: daemon[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert {probe["path"] for probe in probes.values()} == set(http_server._OPEN)
    assert probes["liveness"]["path"] == "/healthz"  # /readyz fails while the daemon drains


def test_the_grace_period_covers_the_drain(name: str, config: Config) -> None:
    spec, daemon, words = pod(name).spec, pod(name).daemon, pod(name).last_words
    grace = spec["terminationGracePeriodSeconds"]
    before = parse_duration(words[words.index("--deadline") + 1])
    assert before + parse_duration(config.drain) + END_S <= grace
    reported = {it["name"]: it["value"] for it in daemon["env"]}["TIERD_GRACE_PERIOD"]
    assert parse_duration(reported) == grace
    assert machine_findings.pod_end(parse_duration(reported), parse_duration(config.drain)).severity == "ok"


def test_every_path_that_the_daemon_uses_is_mounted(name: str, config: Config) -> None:
    found, mounts = pod(name), pod(name).mounts("tierd")
    assert config.http is not None and config.http.token_file is not None
    used = [config.spool, config.http.token_file, found.daemon["args"][-1], *found.last_words[3:4]]
    assert [path for path in used if not any(path.startswith(mount) for mount in mounts)] == []
    assert found.last_words[:4] == ["/opt/tierd/bin/tierd", "drain", "--spool", config.spool]
    assert found.daemon["args"] == ["run", "--config", "/etc/tierd/tierd.toml"] and "tierd.toml" in found.files
    volumes = {it["name"] for it in found.spec["volumes"]}
    for container in found.containers:
        assert set(found.mounts(container).values()) <= volumes
    assert mounts["/run/tierd"] == found.mounts("token")["/run/tierd"]


def test_trainer_and_daemon_are_one_user_over_one_spool(config: Config, name: str) -> None:
    """The spool is private to its owner, and its path is the same for both."""
    if name == "daemonset":
        (job,) = documents("trainer")
        trainer, daemon = job["spec"]["template"]["spec"], pod(name).spec
        users = [{key: it["securityContext"][key] for key in ("runAsUser", "runAsGroup")} for it in (trainer, daemon)]
        assert users[0] == users[1]
        path = next(it["hostPath"]["path"] for it in trainer["volumes"] if it["name"] == "spool")
        assert path == next(it["hostPath"]["path"] for it in daemon["volumes"] if it["name"] == "spool")
        assert trainer["nodeSelector"] == daemon["nodeSelector"]
    text = (MANIFESTS / ("trainer.yaml" if name == "daemonset" else "sidecar.yaml")).read_text()
    assert re.findall(r'Checkpointer\("([^"]+)"', text) == [config.spool]


def test_the_daemon_has_no_more_than_it_needs(name: str) -> None:
    found = pod(name)
    assert found.spec["securityContext"]["runAsNonRoot"] and found.spec["automountServiceAccountToken"] is False
    for container in (found.daemon, found.containers["token"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
