"""What the how-to guides say to type works as they say it: Python that is there, and commands on a spool and a tier."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
from pathlib import Path

import pytest
from support.preemption_fixtures import usual  # noqa: F401
from support.s3stub import Bucket, serving
from support.waiting import wait_until
from support.world import Daemon, commit, part

import tierd
from tierd.cli import run
from tierd.cli.command_runtime import EXIT_WARNING
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

HOWTO = Path(__file__).parent.parent / "docs" / "howto"
PAGES = sorted((HOWTO.parent).rglob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_the_python_of_a_page_is_python(code: str) -> None:
    ast.parse(code)


def test_names_of_tierd_on_a_page_exist() -> None:
    for page in PAGES:
        for names in re.findall(r"(?<![\w./\"-])tierd((?:\.[A-Za-z]\w*)+)(?=[(`,\s:)])", page.read_text()):
            if names.split(".")[1] in ("adapters", "toml", "service"):  # adapters need their frameworks
                continue
            found: object = tierd
            for name in names.split(".")[1:]:
                found = getattr(found, name, None) or importlib.import_module(f"{found.__name__}.{name}")  # type: ignore
            assert found is not None, f"{page.name}: tierd{names}"


def test_the_adapters_that_a_page_names_are_files() -> None:
    for page in PAGES:
        for name in re.findall(r"import tierd\.adapters\.(\w+)", page.read_text()):
            assert (Path(tierd.__file__).parent / "adapters" / f"{name}.py").exists(), page.name


# -- commands ---------------------------------------------------------------------------------------------------------


def typed(page: str) -> list[str]:
    """The commands that a page shows with their arguments, in code spans and blocks."""
    spans = re.findall(r"(?:`|^    )(tierd [a-z]+ [^`\n#]+)", (HOWTO / f"{page}.md").read_text(), re.M)
    return [one.strip() for one in spans]


_PAGES = ("recovery", "operate", "tiers", "doctor", "follow", "export", "spot")
COMMANDS = [(page, one) for page in _PAGES for one in typed(page) if " run " not in one]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A spool with two checkpoints of run `r` and its daemon, which has sent them to a tier."""
    torch = pytest.importorskip("torch")
    home = tmp_path_factory.mktemp("node")
    (home / "tier").mkdir()
    (home / "tierd.toml").write_text(f'spool = "{home}/spool"\n[[tier]]\nname = "nas"\nurl = "file://{home}/tier"\n')
    with Daemon(home / "spool", lambda: {"file": FileStore(home / "tier")}) as daemon:
        with tierd.Checkpointer(home / "spool", run="r") as ckpt:
            for step in (10, 20):
                ckpt.save(step, {"weights": torch.full((1000,), float(step))}).wait("file", timeout=60)
            attempt = ckpt.restore().attempt  # type: ignore[union-attr]
        daemon.settle()
        yield home, attempt


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {one}" for page, one in COMMANDS])
def test_command_of_a_how_to_works_as_described(page: str, command: str, node, tmp_path: Path, capsys) -> None:
    home, attempt = node
    values = {
        "--spool DIR": f"--spool {home}/spool",
        "--to DIR": f"--to {tmp_path}/out",
        "URL…": "URL",
        "[STEP]": "STEP",
        "eval.sh {directory}": "test -d {directory}",
        "--only model": "--only weights",
        "FILE": f"{home}/tierd.toml",
    }
    values |= {"URL": f"file://{home}/tier", "RUN": "r", "STEP": "20", "ATTEMPT": attempt}
    for word, value in values.items():
        command = re.sub(rf"(?<![\w/]){re.escape(word)}(?![\w/])", value, command)
    code = run(shlex.split(command)[1:])
    # The launch is a real one, so its names are not deleted without a yes. Spool and tier share a disk here, and the
    # configuration has no receiver.
    allowed = {"disown": (3,), "notify": (3,), "doctor": (0, EXIT_WARNING)}.get(command.split()[1], (0,))
    assert code in allowed, capsys.readouterr().err
    if " export " in command:
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    if " follow " in command:
        assert len(json.loads((tmp_path / "out" / "delivered.json").read_text())["delivered"][attempt]) == 2
    if " restore " in command:
        assert next((tmp_path / "out").rglob("tensors.safetensors")).stat().st_size > 4000
    if " pause " in command:
        assert run(["resume", "--spool", f"{home}/spool"]) == 0


def test_commands_of_the_page_about_watching_work_as_described(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """A checkpoint of another program is taken, damaged, made right before a launch, and put back elsewhere."""
    layouts = pytest.importorskip("support.layouts")
    for name in ("out", "tier"):
        (tmp_path / name).mkdir()
    optimizer = layouts.trainer(tmp_path / "out") / "optimizer.pt"
    right = optimizer.read_bytes()
    watch, restore, prepare = (one for one in typed("watch") if " DIR " in f"{one} " and "EMPTY" not in one)
    words = {"DIR": f"{tmp_path}/out", "RUN": "r", "URL": f"{tmp_path}/tier"}

    def typed_in(command: str) -> int:
        for word, value in words.items():
            command = re.sub(rf"(?<![\w/]){word}(?![\w/])", value, command)
        return run(shlex.split(command)[1:])

    assert typed_in("tierd watch --explain DIR") == 0
    assert "checkpoint-500/trainer_state.json is there" in capsys.readouterr().out
    assert typed_in(f"{watch} --until-idle") == 0
    optimizer.write_bytes(right[:-20])
    assert typed_in(f"{prepare} --json") == 0
    (unit,) = json.loads(capsys.readouterr().out)["units"]
    assert (unit["verdict"], unit["replaced"]) == ("damaged", True) and optimizer.read_bytes() == right
    words["DIR"] = f"{tmp_path}/back"
    assert typed_in(restore) == 0
    assert (tmp_path / "back" / "checkpoint-500" / "optimizer.pt").read_bytes() == right


def test_commands_of_the_pages_about_copies_and_imports_work_as_described(  # type: ignore[no-untyped-def]
    tmp_path: Path, node, monkeypatch
) -> None:
    """A checkpoint of another program is imported, copied, and put back; a run is copied in each way."""
    layouts = pytest.importorskip("support.layouts")
    for name in ("out", "tier", "second"):
        (tmp_path / name).mkdir()
    right = (layouts.trainer(tmp_path / "out") / "optimizer.pt").read_bytes()
    words = {"PATH": f"{tmp_path}/out", "URL": f"{tmp_path}/tier", "RUN": "imported", "STEP": "500"}

    def typed_in(command: str) -> int:
        for word, value in words.items():
            command = re.sub(rf"(?<![\w/]){word}(?![\w/])", value, command)
        return run(shlex.split(command)[1:])

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with serving(Bucket()) as bucket:
        for path in (tmp_path / "out").rglob("*.*"):
            bucket.objects[f"training/{path.relative_to(tmp_path)}"] = path.read_bytes()
        words["s3://bucket/training/out"] = f"'{bucket.url('training/out')}'"
        for number, command in enumerate(one for one in typed("import") if " URL" in one):
            words |= {"DIR": f"{tmp_path}/{number}", "RUN": "fetched" if "s3:" in command else "imported"}
            assert typed_in(command) == 0, command
        assert bucket.asked["GetObject"], "the page shows how to import from a bucket"
    assert right in [path.read_bytes() for path in tmp_path.glob("[0-9]/checkpoint-500/optimizer.pt")]
    home, _ = node
    words |= {"FROM": f"{home}/tier", "TO": f"{tmp_path}/second", "RUN": "r", "STEP": "20", "NEWRUN": "new"}
    for command in typed("copy"):
        assert " rm " in command or typed_in(command) == 0, command
    assert {path.name for path in (tmp_path / "second").iterdir()} >= {"new", "r"}


def test_a_batch_script_passes_the_signal_on_as_the_page_about_spot_instances_says(tmp_path: Path) -> None:
    lines = (HOWTO / "spot.md").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("    trap "))
    script = tmp_path / "batch.sh"
    script.write_text("\n".join(lines[at : at + 3]))
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/bash\ntrap 'echo saved > {tmp_path}/saved; exit' USR1\necho $PPID > {tmp_path}/up\n")
    with srun.open("a") as file:
        file.write("for _ in $(seq 600); do sleep 0.1; done\n")
    srun.chmod(0o755)
    batch = subprocess.Popen(["bash", script], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    try:
        wait_until((tmp_path / "up").exists)
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(60) == 0
    finally:
        batch.kill()
        batch.wait()
    assert (tmp_path / "saved").exists(), "the script waited until the job had saved"


def test_the_loop_of_the_page_about_spot_instances_saves_and_ends(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    torch = pytest.importorskip("torch")
    (tmp_path / "tier").mkdir()
    code = re.findall(r"^```python\n(.*?)^```", (HOWTO / "spot.md").read_text(), re.M | re.S)[0]
    words = {"/nvme/tierd": f"{tmp_path}/spool", "s3://bucket/checkpoints": f"file://{tmp_path}/tier", '"s3"': '"file"'}
    for word, value in words.items():
        code = code.replace(word, value)
    code = code.replace("    ...\n", "    if step == 3: os.kill(os.getpid(), signal.SIGTERM)\n")
    state = {"step": 0, "weights": torch.zeros(10)}
    exec(code, {"tierd": tierd, "state": state, "STEPS": 50, "os": os, "signal": signal})
    assert state["step"] == 3
    with tierd.open(f"file://{tmp_path}/tier", "llama-7b") as reader:
        assert [one.step for one in reader.checkpoints()] == [3]


def test_the_key_that_the_how_to_makes_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (HOWTO / "encryption.md").read_text().splitlines()
    (make,) = [line.strip() for line in lines if "> /etc/tierd/key)" in line]
    key = tmp_path / "key"
    subprocess.run(["bash", "-c", make.replace("/etc/tierd/key", str(key))], check=True, timeout=150)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    (tmp_path / "tier").mkdir()
    tier = f'name = "disk"\nurl = "file://{tmp_path}/tier"\nkey_file = "{key}"\n'
    (tmp_path / "tierd.toml").write_text(f'spool = "{tmp_path}/spool"\n[[tier]]\n{tier}')
    assert run(["config", "check", str(tmp_path / "tierd.toml"), "--reach", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modes"]["disk"]["mode"] == "read-write"


def test_the_key_is_changed_as_the_how_to_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the new key reads the copy, the second copy sends nothing, and the old tier can be deleted."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    lines = [line.strip() for line in (HOWTO / "encryption.md").read_text().splitlines()]
    (make,) = [line for line in lines if "openssl rand" in line and "new-key" in line]
    for path in ("/etc/tierd/new-key", "/etc/tierd/key"):
        made = make.replace("/etc/tierd/new-key", f"{tmp_path}/{Path(path).name}")
        subprocess.run(["bash", "-c", made], check=True, timeout=150)
    spool = Spool(tmp_path / "spool")
    for step in (1, 2):
        commit(spool, part(step))
    places = ["--spool", str(spool.root), "--to", f"{tmp_path}/old", "--keep-last", "9"]
    assert run(["run", *places, "--key-file", f"{tmp_path}/key", "--until-idle"]) == 0
    words = {"OLDURL": f"{tmp_path}/old", "NEWURL": f"{tmp_path}/new", "RUN": "run", "/etc/tierd": str(tmp_path)}

    def typed_in(command: str) -> int:
        for word, value in words.items():
            command = command.replace(word, value)
        return run(shlex.split(command)[1:])

    runs, copy, verify = (one for one in typed("encryption") if "key" in one)
    for command in (runs, copy, verify, f"{copy} --json"):
        capsys.readouterr()
        assert typed_in(command) == 0, capsys.readouterr().err
    done = json.loads(capsys.readouterr().out)
    assert [one["was_there"] for one in done["copy"]["checkpoints"]] == [True, True] and not done["unkept"]
    assert run(["verify", f"{tmp_path}/new", "--key-file", f"{tmp_path}/key"]) == 6
    assert typed_in(f"tierd copy OLDURL NEWURL --run RUN --key-file {tmp_path}/key --to-key-file {tmp_path}/key") == 6
    assert "the target has what cannot be read here" in capsys.readouterr().err
    assert typed_in("tierd copy OLDURL NEWURL --run RUN") == 6
    assert "the source has what cannot be read here" in capsys.readouterr().err
    out = tmp_path / "out"
    assert (
        run(["restore", f"{tmp_path}/new", "--run", "run", "--to", str(out), "--key-file", f"{tmp_path}/new-key"]) == 0
    )
    assert [path.name for path in out.iterdir()] == ["00000-of-00001"]
    (rm,) = (one for one in typed("encryption") if one.startswith("tierd rm"))
    assert typed_in(rm) == 3 and "--yes" in capsys.readouterr().err, "it asks a person, and none is here"
    assert typed_in(f"{rm} --yes") == 0 and not (tmp_path / "old" / "run" / "manifests").exists()
    assert typed_in(verify) == 0
