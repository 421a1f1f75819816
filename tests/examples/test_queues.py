"""The examples for JobSet and Kueue, and the annotation of a pod with its last verified checkpoint.

Their schemas are not installed. Their pods are Kubernetes' own, and the names by which objects refer to others agree.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from support.manifests import documents, pod

from examples.kubernetes import annotate

FILE = {
    "checkpoints": [
        {"run": "llama", "tier": "s3", "step": 90, "attempt": "1-a", "created": "2026-01-01T12:00:00+00:00"},
        {"run": "llama", "tier": "nfs", "step": 50, "attempt": "2-b", "created": "2026-01-01T12:30:00+00:00"},
        {"run": "bert", "tier": "s3", "step": 7, "attempt": "3-c", "created": None},
    ]
}


@pytest.fixture
def workers() -> dict[str, Any]:
    """The Job that JobSet makes of its template."""
    (jobset,) = documents("jobset")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    spec: dict[str, Any] = replicated["template"]["spec"]
    return spec


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_accepts_pods_of_the_jobset(workers: dict[str, Any], version: str) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": workers}
    kubernetes_validate.validate(job, version, strict=True)


def test_jobset_trains_as_the_user_and_on_the_nodes_of_the_daemon(workers: dict[str, Any]) -> None:
    spec, daemon = workers["template"]["spec"], pod("daemonset").spec
    for key in ("runAsUser", "runAsGroup", "runAsNonRoot"):
        assert spec["securityContext"][key] == daemon["securityContext"][key]
    assert spec["nodeSelector"] == daemon["nodeSelector"]
    paths = [{volume["name"]: volume for volume in pods["volumes"]}["spool"]["hostPath"] for pods in (spec, daemon)]
    assert paths[0] == paths[1]
    assert spec["initContainers"][0]["command"][2] == paths[0]["path"]


def test_queue_is_that_of_the_jobset_and_has_the_nodes_of_the_daemon() -> None:
    flavor, cluster_queue, local_queue = documents("kueue")
    (jobset,) = documents("jobset")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local_queue["metadata"]["name"]
    assert local_queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
    (group,) = cluster_queue["spec"]["resourceGroups"]
    assert [named["name"] for named in group["flavors"]] == [flavor["metadata"]["name"]]
    assert flavor["spec"]["nodeLabels"] == pod("daemonset").spec["nodeSelector"]
    requested = {name for it in pods_of(jobset) for name in it["resources"]["requests"]}
    assert requested == set(group["coveredResources"])


def pods_of(jobset: dict[str, Any]) -> list[dict[str, Any]]:
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return [*spec["initContainers"], *spec["containers"]]


def test_account_of_the_jobset_may_patch_pods_and_nothing_else(workers: dict[str, Any]) -> None:
    account, role, binding = documents("annotate")
    assert workers["template"]["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]


def test_annotations_name_the_newest_checkpoint_of_the_run(tmp_path: Path) -> None:
    assert annotate.annotations_of(tmp_path, "llama") == {}, "no daemon has run"
    (tmp_path / ".tierd").mkdir()
    (tmp_path / ".tierd" / "last-verified.json").write_text(json.dumps(FILE))
    assert annotate.annotations_of(tmp_path, "llama") == {
        "tierd.example.com/last-verified-step": "50",
        "volcano.sh/last-checkpoint-time": "2026-01-01T12:30:00Z",
    }
    assert annotate.annotations_of(tmp_path, "bert") == {"tierd.example.com/last-verified-step": "7"}
    assert annotate.annotations_of(tmp_path, "other") == {}


class _Api(http.server.BaseHTTPRequestHandler):
    """Takes one PATCH, as the API server does."""

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got = (self.path, self.headers["Authorization"], self.headers["Content-Type"], body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield server
        thread.join(60)


def test_pod_patches_its_own_annotations(api: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "train-0")
    monkeypatch.setenv("POD_NAMESPACE", "ml")
    annotate.patch({"key": "value"}, f"http://127.0.0.1:{api.server_port}", "secret", None)
    path, authorization, kind, body = api.got  # type: ignore[attr-defined]
    assert (path, authorization) == ("/api/v1/namespaces/ml/pods/train-0", "Bearer secret")
    assert (kind, body) == ("application/merge-patch+json", {"metadata": {"annotations": {"key": "value"}}})
