"""The Kubernetes manifests of examples/, read as the kubelet and the daemon read them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of one file."""
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


@dataclass(frozen=True)
class Pod:
    """The pod template of a manifest that has the daemon in it."""

    spec: dict[str, Any]
    files: dict[str, str]  # of its ConfigMap

    @property
    def containers(self) -> dict[str, dict[str, Any]]:
        return {it["name"]: it for it in (*self.spec["initContainers"], *self.spec["containers"])}

    @property
    def daemon(self) -> dict[str, Any]:
        return self.containers["tierd"]

    @property
    def config(self) -> dict[str, Any]:
        """tierd.toml, as TOML."""
        return tomllib.loads(self.files["tierd.toml"])

    @property
    def last_words(self) -> list[str]:
        """The command of preStop."""
        return list(self.daemon["lifecycle"]["preStop"]["exec"]["command"])

    def mounts(self, container: str) -> dict[str, str]:
        """Volume by mount path."""
        return {it["mountPath"]: it["name"] for it in self.containers[container]["volumeMounts"]}


def pod(name: str) -> Pod:
    """The pod of one file."""
    files, workload = documents(name)
    return Pod(workload["spec"]["template"]["spec"], files["data"])
