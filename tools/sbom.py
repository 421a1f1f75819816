"""The software bill of materials of a wheel, in CycloneDX: all that its extras need, as the lock has it.

Hashes are the lock's. Licences, and who needs whom, are from the metadata of what is installed here, from files with
these hashes. The same commit gives the same bytes.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from email.message import Message
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.utils import canonicalize_name

from tools.locked import ENVIRONMENTS, Pin, active, closure

Graph = dict[str, set[str]]


def needs(wheel: Message, extras: Iterable[str]) -> Graph:
    """Who needs whom, by canonical name, in any environment; the wheel itself is the empty name."""
    graph: Graph = defaultdict(set)
    itself = canonicalize_name(wheel["Name"])
    extras = list(extras)
    for environment in ENVIRONMENTS:
        wanted = active(wheel.get_all("Requires-Dist", []), extras, environment)
        for by, requirement in closure((it for it in wanted if canonicalize_name(it.name) != itself), environment):
            graph[by].add(canonicalize_name(requirement.name))
    return graph


def names(graph: Graph) -> set[str]:
    """All that is needed."""
    return {name for needed in graph.values() for name in needed}


def licences(metadata: Message) -> list[License]:
    """What a package says of its licence: an SPDX expression where it has one, else names. Texts are left out."""
    stated = metadata["License-Expression"] or metadata["License"] or ""
    brief: list[License] = []
    if stated and "\n" not in stated:
        brief = [LicenseFactory().make_from_string(stated)]
        if isinstance(brief[0], LicenseExpression) or brief[0].id:
            return brief
    classified = [it.split(" :: ") for it in metadata.get_all("Classifier", []) if it.startswith("License ::")]
    return [DisjunctiveLicense(name=parts[-1]) for parts in classified] or brief


def _component(pin: Pin, scope: ComponentScope) -> Component:
    purl = PackageURL("pypi", name=pin.key, version=pin.version)
    files = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/project/{pin.key}/{pin.version}/#files"),
        comment="one hash for each file that the lock allows",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=it) for it in pin.hashes],
    )
    try:
        licensed = licences(importlib.metadata.metadata(pin.name))  # type: ignore[arg-type]  # it is a Message
    except importlib.metadata.PackageNotFoundError:  # locked for another environment
        licensed = []
    return Component(
        name=pin.key,
        version=pin.version,
        purl=purl,
        bom_ref=purl.to_string(),
        scope=scope,
        licenses=licensed,
        external_references=[files] if pin.hashes else [],
    )


def made(wheel: Message, digest: str, pins: dict[str, Pin], epoch: int) -> str:
    """The bill as JSON, for a wheel's metadata, its SHA-256 in hex, and the time of its commit in Unix seconds."""
    graph = needs(wheel, wheel.get_all("Provides-Extra", []))
    base = names(needs(wheel, ()))
    purl = PackageURL("pypi", name=wheel["Name"], version=wheel["Version"])
    root = Component(
        name=wheel["Name"],
        version=wheel["Version"],
        type=ComponentType.APPLICATION,
        purl=purl,
        bom_ref=purl.to_string(),
        licenses=licences(wheel),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    parts = {
        name: _component(pins[name], ComponentScope.REQUIRED if name in base else ComponentScope.OPTIONAL)
        for name in sorted(names(graph))
    }
    bom = Bom(components=parts.values(), serial_number=uuid5(NAMESPACE_URL, f"{purl.to_string()}#{digest}"))
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(epoch, UTC)
    for name, component in {"": root, **parts}.items():
        bom.register_dependency(component, [parts[it] for it in sorted(graph.get(name, ()))])
    text: str = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return text + "\n"
