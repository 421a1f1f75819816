"""A step that is asked for by number is the same checkpoint in every way to read it, also if its launch was abandoned.

Judged by docs/explanation/restore.md: the timeline's checkpoint of that step if there is one, otherwise that of the
newest launch that has the step; `attempt=` names another launch's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from support.saved import put
from support.world import RUN, attempt, part

import tierd
from tierd import dcp
from tierd.cli import run
from tierd.core.manifest import TENSORS
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore

# launch -> its steps, and what it resumed from: launch 5 goes on from step 20 of launch 1, and the others are abandoned
LAUNCHES = {1: ((10, 20, 30), None), 2: ((20, 30), 10), 3: ((25,), 10), 5: ((40,), 20)}
# (step, launch that is asked for) -> the launch whose checkpoint it is
EXPECTED = {(None, None): 5, (10, None): 1, (20, None): 1, (25, None): 3, (30, None): 2, (30, 1): 1, (20, 2): 2}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spool and a tier that hold every launch's checkpoints."""
    home = tmp_path_factory.mktemp("home")
    (home / "tier").mkdir()

    async def work() -> None:
        store, spool = FileStore(home / "tier"), Spool(home / "spool")
        for launch, (steps, origin) in LAUNCHES.items():
            for step in steps:
                resumed_from = part(origin, 1).checkpoint if origin else None
                await put(spool, part(step, launch), state_of(launch, step), store, origin=resumed_from)
        await store.aclose()

    asyncio.run(work())
    return home


def state_of(launch: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"mark": torch.tensor([float(launch), float(step)])}}


def loaded(home: Path, load: Callable[[tierd.Checkpointer, dict], object]) -> torch.Tensor:
    state = {"model": {"mark": torch.zeros(2)}}
    with tierd.Checkpointer(home / "spool", RUN, to=[]) as checkpointer:
        assert load(checkpointer, state) is not None
    return state["model"]["mark"]


def by_checkpointer(home: Path, out: Path, options: dict) -> torch.Tensor:
    return loaded(home, lambda checkpointer, state: checkpointer.restore(state, **options))


def by_dcp(home: Path, out: Path, options: dict) -> torch.Tensor:
    return loaded(home, lambda checkpointer, state: dcp.load(state, checkpointer, **options))


def by_reader(home: Path, out: Path, options: dict) -> torch.Tensor:
    state = {"model": {"mark": torch.zeros(2)}}
    with tierd.open(home / "tier", RUN) as reader:
        reader.restore(state, **options)
    return state["model"]["mark"]


def by_download(home: Path, out: Path, options: dict) -> torch.Tensor:
    with tierd.open(home / "tier", RUN) as reader:
        found = reader.download(out, **options)
    return mark(load_file(Path(found.directories[0]) / TENSORS))


def by_export(home: Path, out: Path, options: dict) -> torch.Tensor:
    with tierd.open(home / "tier", RUN) as reader:
        reader.export(out, "safetensors", **options)
    return mark(load_file(out / "model.safetensors"))


def by_command(command: str, home: Path, out: Path, options: dict) -> None:
    words = [command, str(home / "tier"), "--run", RUN, "--to", str(out)]
    words += ["--step", str(options["step"])] if options["step"] else []
    assert run([*words, *(("--attempt", options["attempt"]) if options["attempt"] else ())]) == 0


def by_restore_command(home: Path, out: Path, options: dict) -> torch.Tensor:
    by_command("restore", home, out, options)
    return mark(load_file(next(out.iterdir()) / TENSORS))


def by_export_command(home: Path, out: Path, options: dict) -> torch.Tensor:
    by_command("export", home, out, options)
    return mark(load_file(out / "model.safetensors"))


def by_file_system(home: Path, out: Path, options: dict) -> torch.Tensor:
    pytest.importorskip("fsspec")
    from tierd.filesystem import TierdFileSystem

    fs = TierdFileSystem(tiers=f"file://{home}/tier", skip_instance_cache=True)
    name = options["step"] or "latest"
    if options["attempt"]:
        name = f"{options['step']:012}.{options['attempt']}"
    return mark(load(fs.cat_file(f"{RUN}/{name}/00000-of-00001/{TENSORS}")))


def mark(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors.values()
    return tensor


WAYS = [by_checkpointer, by_dcp, by_reader, by_download, by_export, by_restore_command, by_export_command]


@pytest.mark.parametrize(("step", "launch"), EXPECTED)
@pytest.mark.parametrize("way", [*WAYS, by_file_system], ids=lambda way: way.__name__)
def test_a_step_is_the_same_checkpoint_everywhere(home, tmp_path, way, step, launch) -> None:
    options = {"step": step, "attempt": attempt(launch) if launch else None}
    found = way(home, tmp_path / "out", options)
    assert found.tolist() == [EXPECTED[step, launch], step or 40]


@pytest.mark.parametrize(("step", "launch"), [asked for asked in EXPECTED if asked[0]])
@pytest.mark.parametrize("place", ["tier", "spool"])
def test_show_shows_that_checkpoint(home, capsys, place, step, launch) -> None:
    where = [str(home / "tier")] if place == "tier" else ["--spool", str(home / "spool")]
    named = ["--attempt", attempt(launch)] if launch else []
    assert run(["show", RUN, str(step), *where, *named, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"]["attempt"] == attempt(EXPECTED[step, launch]) == found["manifests"][0]["attempt"]


def test_the_checkpointer_says_which_launch_it_was(home) -> None:
    with tierd.Checkpointer(home / "spool", RUN, to=[]) as checkpointer:
        found = checkpointer.restore({"model": {"mark": torch.zeros(2)}}, step=30)
    assert found is not None and (found.step, found.attempt) == (30, attempt(2))
