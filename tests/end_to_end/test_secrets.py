"""No secret gets anywhere: a daemon that has some works, fails and dies, and all that it leaves is searched."""

from __future__ import annotations

import base64
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from support.s3stub import Bucket, serving
from support.waiting import wait_until
from support.world import RUN, commit, part

import tierd
from tierd.core.errors import ConfigError, DaemonUnavailable
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest, Wait
from tierd.spool.spool import Spool

ID = "AKIDCANARYISNOSECRET"
SECRET, TOKEN, PASSWORD = "c4nary/S3cret+Key==one", "c4nary/T0ken+of/a/session==two", "c4nary-p4ssw0rd-three"
# Everything at DEBUG, as in the hunt for a bug; and asyncio's own debug mode.
LOUD = "import logging, sys; logging.basicConfig(level=1); from tierd.cli import run; sys.exit(run())"


def forms() -> Iterator[bytes]:
    for secret in (SECRET, TOKEN, PASSWORD):
        for form in (secret, quote(secret), quote(secret, safe=""), secret.encode().hex(), repr(secret)[1:-1]):
            yield form.encode()
        yield base64.b64encode(secret.encode())


def search(where: str, data: bytes) -> None:
    for form in forms():
        assert form not in data, f"{where} holds {form!r}: ...{data[max(0, data.index(form) - 300) :][:600]!r}"


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return own | {
        "AWS_ACCESS_KEY_ID": ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "PYTHONPATH": str(Path(tierd.__file__).parent.parent),
        "PYTHONASYNCIODEBUG": "1",
    }


def cores_allowed() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)


# Commands in one process, because each process takes a second to load what they need: a line of JSON for each; then all
# of their exit codes.
COMMANDS = """
import json, logging, sys
logging.basicConfig(level=1)
from tierd.cli import run
codes = [run(json.loads(line)) for line in sys.argv[1:]]
print(json.dumps(codes))
"""


def commands(env: dict[str, str], *lines: tuple[str | Path, ...]) -> list[int]:
    """Run commands at DEBUG; their exit codes. Nothing that they say holds a secret."""
    reported = [json.dumps(list(map(str, line))) for line in lines]
    done = subprocess.run([sys.executable, "-c", COMMANDS, *reported], env=env, capture_output=True, timeout=250)
    search(f"what {reported} say", done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nothing_that_a_daemon_says_or_leaves_holds_a_secret(tmp_path: Path, env: dict[str, str]) -> None:
    bucket, spool = Bucket(), Spool(tmp_path / "spool")
    config = tmp_path / "tierd.toml"
    with serving(bucket), (tmp_path / "log").open("wb") as log:
        url = bucket.url()
        config.write_text(f'spool = "{spool.root}"\nrescan = "1s"\n[[tier]]\nname = "s3"\nurl = "{url}"\n')
        line = [sys.executable, "-c", LOUD, "run", "--config", str(config), "--json"]
        daemon = subprocess.Popen(
            line, env=env, stdout=log, stderr=log, cwd=tmp_path, preexec_fn=cores_allowed, start_new_session=True
        )
        try:

            def answers() -> bool:
                assert daemon.poll() is None
                try:
                    DaemonConnection(spool).close()
                    return True
                except DaemonUnavailable:
                    return False

            wait_until(answers)
            search("argv", Path(f"/proc/{daemon.pid}/cmdline").read_bytes())
            commit(spool, part(1))
            with DaemonConnection(spool) as link:
                link.ask(Wait(part=part(1), tier="s3", timeout_s=60))
                # The canary sings: were it logged as it is sent, this would be seen.
                assert any(TOKEN in head for head in bucket.heads) and any(ID in head for head in bucket.heads)
                asked: list[tuple[str | Path, ...]] = [
                    ("status", "--json", "--spool", spool.root),
                    ("ls", "--json", "--config", config),
                    ("show", RUN, "1", url, "--json"),
                    ("verify", url, "--json"),
                    ("config", "check", config, "--reach", "--json"),
                    ("restore", url, "--run", RUN, "--to", tmp_path / "out", "--json"),
                ]
                assert commands(env, *asked) == [0] * len(asked)
                bucket.refuse = lambda headers: "no, " + headers.get("Authorization", "")  # a signature is no secret
                commit(spool, part(2))
                wait_until(lambda: link.ask(StatusRequest())["status"]["tiers"][0]["last_error"])
                with serving(Bucket()) as gone:
                    pass  # nobody listens there any more
                failing = [("ls", url, "--json"), ("status", "--json", "--spool", spool.root), ("ls", gone.url())]
                assert commands(env, *failing) == [6, 0, 6]
            proxy = {**env, "HTTP_PROXY": f"http://user:{PASSWORD}@127.0.0.1:{gone.port}"}
            assert commands(proxy, ("ls", url)) == [6]
        finally:
            daemon.send_signal(signal.SIGABRT)
            assert daemon.wait(60) == -signal.SIGABRT
    search("the log", (tmp_path / "log").read_bytes())
    assert "core" not in {path.name.split(".")[0] for path in tmp_path.iterdir()}  # where core_pattern writes it here
    for path in tmp_path.rglob("*"):
        if path.is_file():
            search(str(path), path.read_bytes())
    assert any("/manifests/" in key for key in bucket.objects) and "p/README.md" in bucket.objects
    for key, data in bucket.objects.items():
        search(key, key.encode() + data)


URLS = [
    f"s3://{ID}:{SECRET}@bucket/p",
    f"s3://{ID}:{PASSWORD}@bucket/p",
    f"s3://bucket/p?endpoint=http://user:{PASSWORD}@host:80",
    f"s3://bucket/p?aws_secret_access_key={quote(SECRET, safe='')}",
    f"s3://bucket/p?session_token={quote(TOKEN, safe='')}",
    f"s3://bucket/{PASSWORD}@p",
    f"https://user:{PASSWORD}@host/bucket",
    f"file://user:{PASSWORD}@host/path",
]


@pytest.mark.parametrize("url", URLS)
def test_a_secret_in_a_url_is_refused_and_not_repeated(tmp_path: Path, url: str, capsys, monkeypatch) -> None:
    from tierd.cli import run

    config = tmp_path / "tierd.toml"
    config.write_text(f'spool = "{tmp_path}/spool"\n[[tier]]\nname = "s3"\nurl = "{url}"\n')
    for arguments in (
        ["run", "--spool", str(tmp_path / "spool"), "--to", url],
        ["config", "check", str(config)],
        ["config", "check", str(config), "--json"],
        ["ls", url],
    ):
        assert run(arguments) == 3, arguments
    said = capsys.readouterr()
    search("what is said", (said.out + said.err).encode())
    # Nor does it get into the arguments of a daemon, which everybody on the node may read.
    monkeypatch.setattr("tierd.ipc.daemon_start.subprocess.Popen", lambda *_, **__: pytest.fail("a daemon was started"))
    with pytest.raises(ConfigError) as caught:
        tierd.Checkpointer(tmp_path / "spool", "run", to=[url])
    search("the error", str(caught.value).encode())
