"""The Helm chart, rendered by Helm itself: with its own values it is examples/kubernetes/daemonset.yaml."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.manifests import MANIFESTS, documents

from tierd.core.config import from_toml

pytestmark = pytest.mark.loaders


def rendered(name: str = "tierd", **values: Any) -> list[dict[str, Any]]:
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(MANIFESTS / "chart")) as chart:
        (text,) = chart.render(values, name=name, namespace="default").values()
    return list(yaml.safe_load_all(text))


def test_chart_renders_objects_of_the_raw_manifest() -> None:
    assert rendered() == documents("daemonset")


def test_chart_renders_valid_objects_from_other_values() -> None:
    values = {
        "image": "registry/tierd@sha256:0",
        "imagePullSecrets": [{"name": "pull"}],
        "spool": "/data/spool",
        "config": '[[tier]]\nname = "nfs"\nurl = "file:///mnt/nfs"\n',
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": None,
        "port": 9999,
    }
    config_map, daemon_set = rendered("mine", **values)
    for document in (config_map, daemon_set):
        for version in ("1.25", "1.37"):
            kubernetes_validate.validate(document, version, strict=True)
        assert document["metadata"]["name"] == "mine"
    config = from_toml(config_map["data"]["tierd.toml"], "tierd.toml")
    assert config.spool == "/data/spool" and [tier.name for tier in config.tier] == ["nfs"]
    assert config.http is not None and config.http.listen == "0.0.0.0:9999"
    spec = daemon_set["spec"]["template"]["spec"]
    assert spec["tolerations"] == values["tolerations"] and "nodeSelector" not in spec
    assert spec["volumes"][0]["hostPath"]["path"] == "/data/spool"
    assert daemon_set["spec"]["selector"]["matchLabels"] == daemon_set["spec"]["template"]["metadata"]["labels"]


def test_chart_refuses_a_grace_period_that_does_not_cover_the_end() -> None:
    with pytest.raises(Exception, match="graceSeconds has to be"):
        rendered(graceSeconds=100)
