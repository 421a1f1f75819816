"""Annotate this pod with the last verified checkpoint of a run, whenever the daemon's file names a newer one.

    python annotate.py SPOOL RUN

It needs Python alone, `POD_NAME` and `POD_NAMESPACE` of the downward API, and the rights of annotate.yaml.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
INTERVAL_S = 10.0


def annotations_of(spool: Path, run: str) -> dict[str, str]:
    """Return the annotations for the newest checkpoint of a run on any tier; none if no tier has one."""
    try:
        checkpoints = json.loads((spool / ".tierd" / "last-verified.json").read_bytes())["checkpoints"]
    except FileNotFoundError:
        return {}
    of_run = [checkpoint for checkpoint in checkpoints if checkpoint["run"] == run]
    if not of_run:
        return {}
    newest = max(of_run, key=lambda checkpoint: (checkpoint["attempt"], checkpoint["step"]))
    named = {"tierd.example.com/last-verified-step": str(newest["step"])}
    if newest["created"]:
        named["volcano.sh/last-checkpoint-time"] = newest["created"].replace("+00:00", "Z")
    return named


def patch(named: dict[str, str], server: str, token: str, context: ssl.SSLContext | None) -> None:
    """Merge annotations into those of this pod."""
    request = urllib.request.Request(
        f"{server}/api/v1/namespaces/{os.environ['POD_NAMESPACE']}/pods/{os.environ['POD_NAME']}",
        json.dumps({"metadata": {"annotations": named}}).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
        method="PATCH",
    )
    urllib.request.urlopen(request, timeout=30, context=context).close()


def main(spool: Path, run: str) -> None:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    written: dict[str, str] = {}
    while True:
        try:
            if (named := annotations_of(spool, run)) != written:
                context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
                patch(named, server, (ACCOUNT / "token").read_text(), context)  # the kubelet renews the token
                written = named
        except (OSError, ValueError) as error:  # the server does not answer, for example: it is asked again
            print(f"not annotated: {error}", file=sys.stderr, flush=True)
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
