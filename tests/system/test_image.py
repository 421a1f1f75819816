"""The image of examples/container, built and run without a container engine, as the pods of examples/ run it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.image import Image, build
from support.manifests import Pod, pod

import tierd
from tools import dist
from tools.locked import LOCK, TORCH, read

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parent.parent.parent
CACHE = Path(os.environ.get("TIERD_TEST_IMAGES", "/var/tmp/tierd-images"))
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".demo", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")
TOKEN = "0123456789abcdef" * 2
TRAINER = """
import sys, torch, tierd
with tierd.Checkpointer(sys.argv[1], "run") as ckpt:
    for step in (1, 2):
        ckpt.save(step, {"weights": torch.full((1000,), float(step))}).wait(timeout=60)
assert ckpt.stats.handed_over == 2, ckpt.stats
"""


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A directory that another user can get to."""
    with tempfile.TemporaryDirectory(prefix="tierd-image-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def image(room: Path) -> Image:
    """Built from what `make dist` would write."""
    shutil.copytree(ROOT, room / "checkout", ignore=LEFT_OUT)
    context = room / "dist"
    surroundings = {**os.environ, "TIERD_PURE": "1"}  # as of a release
    dist.run(sys.executable, "-c", dist._HOOK, "build_wheel", context, cwd=room / "checkout", env=surroundings)
    (wheel,) = context.glob("*.whl")
    metadata = dist.described(wheel)
    (context / f"{wheel.stem}-requirements.txt").write_text(dist.node_lock(metadata, read(LOCK, TORCH)))
    return build(ROOT / "examples" / "container" / "Containerfile", context, room, CACHE)


def test_the_image_holds_the_daemon_and_nothing_to_build_it_with(image: Image) -> None:
    done = subprocess.run(image.container(["--version"], {}), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and tierd.__version__ in done.stdout, done.stderr
    found = {path.name for path in (image.root / "opt/tierd/lib").glob("python*/site-packages/*")}
    assert {"aiobotocore", "cryptography", "prometheus_client", "obstore"} <= found
    assert not found & {"pip", "torch", "pytest"} and not list((image.root / "usr/bin").glob("*gcc*"))
    owned = {path.lstat().st_uid for path in (image.root / "opt/tierd").rglob("*")}
    assert owned == {0} and image.user == "1000:1000" and image.stop == "SIGTERM"


@dataclass
class Running:
    """A pod's volumes on this machine, and its daemon."""

    pod: Pod
    image: Image
    volumes: dict[str, Path]
    port: int

    def mounts(self, container: str) -> dict[Path, str]:
        return {self.volumes[name]: path for path, name in self.pod.mounts(container).items()}

    @property
    def spool(self) -> Path:
        """The spool's directory on this machine."""
        inside = str(self.pod.config["spool"])
        mount, name = next(it for it in self.pod.mounts("tierd").items() if inside.startswith(it[0]))
        return self.volumes[name] / inside[len(mount) :].lstrip("/")

    def answer(self, path: str, token: str = "") -> int:
        """The status of a request; 0 while nobody listens."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=150) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


def volumes(found: Pod, home: Path, port: int) -> dict[str, Path]:
    """As the kubelet makes them: an emptyDir is root's and open to all, a secret's file its group's."""
    made = {}
    for volume in found.spec["volumes"]:
        made[volume["name"]] = path = home / volume["name"]
        path.mkdir()
        if "hostPath" in volume:
            os.chown(path, 1000, 1000)
            path.chmod(0o700)
        if "emptyDir" in volume:
            path.chmod(0o777)
        if "configMap" in volume:
            text = found.files["tierd.toml"].replace("s3://my-bucket/checkpoints?region=eu-central-1", "file:///tier")
            (path / "tierd.toml").write_text(text.replace(":9464", f":{port}"))
        if "secret" in volume:
            (path / "token").write_text(TOKEN)
            os.chown(path / "token", 0, 1000)
            (path / "token").chmod(volume["secret"]["defaultMode"])
    made["tier"] = home / "tier"
    made["tier"].mkdir()
    os.chown(made["tier"], 1000, 1000)
    return made


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()  # --kill-child: and all that is in its namespaces
        process.wait(60)


def inside(process: subprocess.Popen[bytes]) -> int:
    """The daemon's process id: the one child of `unshare`."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize("name", ["daemonset", "sidecar"])
def test_a_pod_of_the_manifests_works_and_ends_with_all_flushed(image: Image, room: Path, name: str) -> None:
    """Its init container, its probes, a trainer in other namespaces, its preStop, its end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (room / name).mkdir()
    found = pod(name)
    running = Running(found, image, volumes(found, room / name, port), port)

    copy = image.process(found.containers["token"]["command"], running.mounts("token"), {})
    subprocess.run(copy, check=True, timeout=250)
    token = running.volumes["run"] / "token"
    assert (token.stat().st_mode & 0o777, token.stat().st_uid) == (0o600, 1000)

    reported = {it["name"]: it["value"] for it in found.daemon["env"]}
    mounts = {**running.mounts("tierd"), running.volumes["tier"]: "/tier"}
    with started(image.container(found.daemon["args"], mounts, reported)) as daemon:
        probes = {kind: found.daemon[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")}
        end = time.monotonic() + 200
        while running.answer(probes["startup"]) != 200:
            assert daemon.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        assert running.answer(probes["liveness"]) == 200
        assert (running.answer("/metrics"), running.answer("/metrics", token.read_text().strip())) == (401, 200)

        account = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"]
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
        trainer = [*account, sys.executable, "-c", TRAINER, str(running.spool)]
        done = subprocess.run(trainer, env=environment, cwd="/", capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

        pid = inside(daemon)
        enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--ipc", "--uts", "--root", "--wd"]
        drained = subprocess.run(
            [*enter, "env", "-i", "HOME=/", *account, *found.last_words], capture_output=True, text=True, timeout=300
        )
        assert drained.returncode == 0, drained.stdout + drained.stderr
        assert len(list(running.volumes["tier"].glob("run/manifests/*/*.json"))) == 2
        os.kill(pid, getattr(signal, image.stop))
        assert daemon.wait(200) == 0
