"""`tierd://` in fsspec: others' loaders read verified files, or ranges of them, where they lie."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from support.chunk_keys import chunk_files
from support.doubles import contents
from support.pruned_meanwhile import moments
from support.saved import files_of
from support.world import commit, part

from tierd.core.errors import ConfigError, CorruptChunk
from tierd.core.installation import install_command
from tierd.daemon.tiers.tier_prune import prune
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore

fsspec = pytest.importorskip("fsspec")
ENTRY = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
# As fsspec does it with the entry point of an installed wheel; an editable install may be older than the entry.
fsspec.register_implementation("tierd", ENTRY["fsspec.specs"]["tierd"].replace(":", "."), clobber=True)
RUN = "run"


def state(step: int, rank: int) -> dict:
    return {"model": {"weight": torch.full((300, 7), float(step)), "rank": torch.tensor(rank)}}


def pickled(step: int) -> bytes:
    file = io.BytesIO()
    torch.save({"step": step, "w": torch.arange(5000.0) + step}, file)
    return file.getvalue()


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """Steps 1 and 2 of two ranks, each with a file of `torch.save` in a directory."""
    (tmp_path / "tier").mkdir()

    async def work() -> None:
        store, spool = FileStore(tmp_path / "tier"), Spool(tmp_path / "spool")
        for step in (1, 2):
            for rank in (0, 1):
                which = part(step, rank=rank, world=2)
                commit(spool, which, {**files_of(state(step, rank)), "deep/model.pt": pickled(step), "none": b""})
                await flush(spool, which, TierUploadContext(store))
        await store.aclose()

    asyncio.run(work())
    return tmp_path / "tier"


def opened(path: str, tier: Path):
    return fsspec.open(f"tierd://{path}", tiers=f"file://{tier}").open()


def test_loaders_of_others_read_a_file_where_it_lies(tier):
    with opened(f"{RUN}/latest/00001-of-00002/deep/model.pt", tier) as file:
        found = torch.load(file, weights_only=True)
    assert found["step"] == 2 and torch.equal(found["w"], torch.arange(5000.0) + 2)
    with opened(f"{RUN}/1/00001-of-00002/tensors.safetensors", tier) as file:
        tensors = load(file.read())
    assert sorted(one.sum().item() for one in tensors.values()) == [1.0, 2100.0]


def test_directories_and_ranges(tier):
    fs = fsspec.filesystem("tierd", tiers=f"file://{tier}")
    names = [f"{RUN}/{part(step).checkpoint.name}" for step in (1, 2)]
    assert fs.ls("", detail=False) == [RUN]
    assert fs.ls(f"tierd://{RUN}", detail=False) == names
    assert fs.ls(names[0], detail=False) == [f"{names[0]}/00000-of-00002", f"{names[0]}/00001-of-00002"]
    home = f"{RUN}/2/00000-of-00002"
    assert sorted(fs.ls(home, detail=False)) == [
        f"{home}/{name}" for name in ("deep", "none", "state.json", "tensors.safetensors")
    ]
    assert fs.find(f"{home}/deep") == [f"{home}/deep/model.pt"]
    file = f"{home}/deep/model.pt"
    assert fs.info(file)["size"] == len(pickled(2)) and fs.isdir(f"{home}/deep") and fs.isfile(file)
    assert fs.cat_file(file, 100, 200) == pickled(2)[100:200]
    assert fs.cat_file(file, -50) == pickled(2)[-50:]
    assert fs.cat(f"{home}/none") == b"" and fs.cat(file) == pickled(2)
    with fs.open(file) as one:
        one.seek(1000)
        assert one.read(10) == pickled(2)[1000:1010]
    assert fs.exists(file) and not fs.exists(f"{home}/deep/other")


@pytest.mark.parametrize("several", [False, True], ids=["a tier", "a list"])
def test_options_of_the_file_system_pass_through_every_entrance_of_fsspec(tier, several):
    """pandas, dask, zarr and others call these; `url_to_fs` and `get_mapper` have arguments of their own."""
    home, file = f"tierd://{RUN}/2/00000-of-00002", "deep/model.pt"
    options = {"tiers": [f"file://{tier}"] if several else f"file://{tier}", "key_file": None}
    fs, path = fsspec.url_to_fs(f"{home}/{file}", **options)
    assert fs.cat_file(path) == pickled(2)
    fs, _, paths = fsspec.core.get_fs_token_paths(f"{home}/deep/*", storage_options=options)
    assert [fs.cat_file(one) for one in paths] == [pickled(2)]
    mapper = fsspec.get_mapper(home, **options)
    assert mapper[file] == pickled(2) and file in set(mapper)
    (opened,) = fsspec.open_files(f"{home}/deep/*.pt", **options)
    with opened as stream:
        assert stream.read() == pickled(2)
    assert fsspec.filesystem("tierd", **options).cat_file(f"{home}/{file}") == pickled(2)


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
def test_caches_of_fsspec_read_through(tier, tmp_path, cache):
    options = {"tierd": {"tiers": f"file://{tier}"}, cache: {"cache_storage": str(tmp_path / "cache")}}
    home = f"{RUN}/{part(2).checkpoint.name}/00000-of-00002"
    fs, path = fsspec.url_to_fs(f"{cache}::tierd://{home}/deep/model.pt", **options)
    with fs.open(path) as file:
        assert file.read() == pickled(2)


def test_key_of_a_cached_file_names_the_checkpoint_of_latest(tier):
    fs = fsspec.filesystem("tierd", tiers=f"file://{tier}")
    path = "00000-of-00002/deep/model.pt"
    assert fs.ukey(f"{RUN}/latest/{path}") == fs.ukey(f"{RUN}/{part(2).checkpoint.name}/{path}")
    assert fs.ukey(f"{RUN}/latest/{path}") != fs.ukey(f"{RUN}/{part(1).checkpoint.name}/{path}")


def test_older_name_of_the_option_is_still_taken(tier):
    with fsspec.open(f"tierd://{RUN}/2/00000-of-00002/deep/model.pt", url=f"file://{tier}") as file:
        assert file.read() == pickled(2)


@pytest.mark.parametrize(
    "path",
    ["other", f"{RUN}/9", f"{RUN}/none", f"{RUN}/1/00000-of-00001", f"{RUN}/1/00000-of-00002/no", "../etc/passwd"],
)
def test_missing_path_is_a_missing_file(tier, path):
    fs = fsspec.filesystem("tierd", tiers=f"file://{tier}")
    with pytest.raises(FileNotFoundError):
        fs.ls(path)
    with pytest.raises(FileNotFoundError):
        fs.cat_file(path)


def test_no_byte_is_handed_out_that_was_not_verified(tier):
    for chunk in chunk_files(tier, RUN, step=2):
        data = chunk.read_bytes()
        chunk.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    fs = fsspec.filesystem("tierd", tiers=f"file://{tier}", skip_instance_cache=True)
    with pytest.raises(CorruptChunk):
        fs.cat_file(f"{RUN}/2/00000-of-00002/deep/model.pt", 0, 1)
    assert fs.cat_file(f"{RUN}/1/00000-of-00002/deep/model.pt", 0, 9) == pickled(1)[:9]


@pytest.mark.parametrize("way", ["cat", "get", "open"])
def test_latest_is_one_checkpoint_while_retention_deletes(tmp_path, monkeypatch, way):
    """Also if the newest is deleted, and a newer one arrives, between any two requests."""
    file, whole = f"{RUN}/latest/00000-of-00001/model.pt", {step: pickled(step) + bytes(step) for step in (1, 2, 3)}

    async def work() -> list[dict[str, bytes]]:
        store, spool = MemoryStore(), Spool(tmp_path / "spool")
        for step in (1, 2):
            commit(spool, part(step), {"model.pt": whole[step], "step": b"%d" % step})
            await flush(spool, part(step), TierUploadContext(store))
        before = await contents(store)
        commit(spool, part(3), {"model.pt": whole[3], "step": b"3"})
        await flush(spool, part(3), TierUploadContext(store))
        await prune(store, [part(2).checkpoint])
        return [before, await contents(store)]

    pruned = 0
    for home in moments(tmp_path / "moments", *asyncio.run(work()), monkeypatch):
        fs = fsspec.filesystem("tierd", tiers=f"file://{home / 'tier'}", skip_instance_cache=True)
        try:
            if way == "cat":
                assert fs.cat_file(file) in (whole[2], whole[3])
            elif way == "open":
                with fs.open(file) as opened:
                    assert opened.read() in (whole[2], whole[3])
            else:
                fs.get(f"{RUN}/latest", str(home / "out"), recursive=True)
                (model,), (step,) = (list((home / "out").rglob(name)) for name in ("model.pt", "step"))
                assert model.read_bytes() == whole[int(step.read_bytes())]
        except FileNotFoundError as error:
            assert way == "get" or (way == "open" and "was pruned" in str(error))
            pruned += 1
    assert pruned or way == "cat"


def test_it_is_read_only_and_wants_a_tier(tier):
    with pytest.raises(ConfigError, match="read-only"):
        fsspec.filesystem("tierd", tiers=f"file://{tier}").open(f"{RUN}/1/00000-of-00002/new", "wb")
    with pytest.raises(ConfigError, match="name the tier"):
        fsspec.filesystem("tierd")


def test_a_program_that_never_imports_tierd_opens_its_urls_by_the_installed_entry_point(tier):
    entries = {one.name: one.value for one in importlib.metadata.entry_points(group="fsspec.specs")}
    assert entries["tierd"] == ENTRY["fsspec.specs"]["tierd"], "the installation is older: `make` installs it again"
    script = """
import sys, fsspec
assert not [name for name in sys.modules if name.partition(".")[0] == "tierd"]
with fsspec.open(sys.argv[1], tiers=sys.argv[2]) as file:
    sys.stdout.buffer.write(file.read())
assert "tierd.filesystem" in sys.modules
"""
    command = [sys.executable, "-c", script, "tierd://run/2/00001-of-00002/deep/model.pt", f"file://{tier}"]
    done = subprocess.run(command, cwd=tier, capture_output=True, timeout=250)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert done.stdout == pickled(2)


def test_import_without_fsspec_names_the_package_to_install():
    script = """
import sys
sys.modules["fsspec"] = sys.modules["fsspec.spec"] = None
try:
    import tierd.filesystem
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.strip().endswith(install_command("torch,daemon,fsspec"))
