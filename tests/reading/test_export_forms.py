"""What an export does with other programs' dtypes, metadata and forms of files."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.bundles import write_bundle
from support.watched_run import RUN, tier_of

from tierd.cli import run


def exported(tier: Path, format: str = "safetensors", *more: str) -> Path:
    target = tier.parent / format
    assert run(["export", str(tier), "--run", RUN, "--to", str(target), "--format", format, *more]) == 0
    return target


TENSORS = {
    "C64": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64),
    "F8_E8M0": torch.ones(6).to(torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": torch.arange(5.0).to(torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": torch.arange(5.0).to(torch.float8_e5m2fnuz),
    "F4": torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float4_e2m1fn_x2),
    "F32": torch.arange(7.0),
}


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, two)]
    return (one.dtype, one.shape) == (two.dtype, two.shape) and torch.equal(*as_bytes)


def header(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_tensors_of_newer_dtypes_are_exported_as_they_were(tmp_path: Path) -> None:
    tier = tier_of(lambda out: save_file(TENSORS, out / "model-10.safetensors"), tmp_path)
    for format in ("safetensors", "hf"):
        found = load_file(exported(tier, format) / "model.safetensors")
        assert found.keys() == TENSORS.keys() and all(same(found[name], one) for name, one in TENSORS.items())
    dtypes = {
        name: one["dtype"] for name, one in header(tmp_path / "hf" / "model.safetensors").items() if name in TENSORS
    }
    assert dtypes == {name: name for name in TENSORS}
    found = torch.load(exported(tier, "torch") / "state.pt", weights_only=True)["model"]
    assert all(same(found[name], one) for name, one in TENSORS.items())


def six_bits(out: Path) -> None:
    """A file with a dtype that torch lacks, as safetensors' description has it."""
    entries = {"a": {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]}}
    entries["b"] = {"dtype": "F4", "shape": [2, 1], "data_offsets": [6, 7]}
    text = json.dumps(entries).encode()
    (out / "model-10.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(7)))


def test_dtypes_that_torch_lacks_are_exported_to_safetensors_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = tier_of(six_bits, tmp_path)
    path = exported(tier) / "model.safetensors"
    found = header(path)
    for name, data in (("a", bytes(range(6))), ("b", bytes([6]))):
        begin, end = found[name]["data_offsets"]
        assert path.read_bytes()[path.stat().st_size - 7 :][begin:end] == data
    assert (found["a"]["dtype"], found["a"]["shape"]) == ("F6_E2M3", [2, 4])
    assert (found["b"]["dtype"], found["b"]["shape"]) == ("F4", [2, 1])
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"a", "b"}
    for format in ("torch", "dcp"):
        assert run(["export", str(tier), "--run", RUN, "--to", str(tmp_path / "new"), "--format", format]) != 0
        assert "the formats safetensors and hf hold it" in capsys.readouterr().err


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def test_metadata_of_safetensors_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {"format": "tf", "modelspec.title": 'é \n " title', "ss_steps": "10"}
    tier = tier_of(lambda out: save_file({"w": torch.ones(3)}, out / "lora-10.safetensors", texts), tmp_path)
    assert metadata(exported(tier) / "model.safetensors") == texts
    assert metadata(exported(tier, "hf", "--dtype", "fp16", "--only", "model") / "model.safetensors") == texts
    capsys.readouterr()
    exported(tier, "torch")
    assert "__metadata__" in capsys.readouterr().out
    assert run(["restore", str(tier), "--run", RUN, "--into", str(tmp_path / "back")]) == 0
    assert metadata(tmp_path / "back" / "lora-10.safetensors") == texts


def test_metadata_that_differs_between_files_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(out: Path) -> None:
        for number in (1, 2):
            texts = {"format": "pt", "part": str(number)}
            save_file({f"w{number}": torch.ones(3)}, out / f"net{number}-step10.safetensors", texts)

    capsys.readouterr()
    out = exported(tier_of(write, tmp_path))
    assert metadata(out / "model.safetensors") == {"format": "pt"}
    assert "__metadata__.part" in capsys.readouterr().out


def test_null_metadata_and_unaligned_tensors_are_exported(tmp_path: Path) -> None:
    """As other writers than the library leave them; the library reads both."""

    def write(out: Path) -> None:
        entries = {"__metadata__": None, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        text = json.dumps(entries | {"b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}).encode()
        data = len(text).to_bytes(8, "little") + text + b"\x07" + torch.tensor([2.5]).numpy().tobytes()
        (out / "model-10.safetensors").write_bytes(data)

    found = load_file(exported(tier_of(write, tmp_path), "safetensors", "--dtype", "fp16") / "model.safetensors")
    assert found["a"].item() == 7 and same(found["b"], torch.tensor([2.5], dtype=torch.float16))


def script(out: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(out / "model_10.pt"))


def keras_weights(out: Path) -> None:
    block = b"\x89HDF\r\n\x1a\n"
    (out / "step_10").mkdir()
    (out / "step_10" / "model.weights.h5").write_bytes(hdf5_file(block))


def hdf5_file(magic: bytes) -> bytes:
    """A superblock of version 0 and an empty root group, as h5py 3 writes a new file."""
    nowhere, header, tree, heap = b"\xff" * 8, 96, 136, 680
    end = 800
    number = lambda value: value.to_bytes(8, "little")  # noqa: E731
    block = magic + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + b"\x04\0\x10\0" + bytes(4)
    block += number(0) + nowhere + number(end) + nowhere
    block += number(0) + number(header) + b"\x01\0\0\0" + bytes(4) + number(tree) + number(heap)
    group = bytes([1, 0, 1, 0]) + b"\x01\0\0\0" + b"\x18\0\0\0" + bytes(4)
    data = bytearray(block.ljust(header, b"\0") + group).ljust(end, b"\0")
    data[tree : tree + 4], data[heap : heap + 4] = b"TREE", b"HEAP"
    return bytes(data)


def keras_archive(out: Path) -> None:
    with zipfile.ZipFile(out / "model_10.keras", "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")


def saved_model(out: Path) -> None:
    (out / "step_10" / "variables").mkdir(parents=True)
    write_bundle(out / "step_10" / "variables" / "variables", {"kernel": bytes(1200)}, shards=1)
    (out / "step_10" / "saved_model.pb").write_bytes(b"\x08\x01\x12\x00")


def legacy(out: Path) -> None:
    torch.save({"w": torch.ones(3)}, out / "model_10.pt", _use_new_zipfile_serialization=False)


def oldest(out: Path) -> None:
    with tarfile.open(out / "model_10.pt", mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            info = tarfile.TarInfo(name)
            info.size = 500
            archive.addfile(info, io.BytesIO(bytes(500)))


def arrays(out: Path) -> None:
    with zipfile.ZipFile(out / "model_10.npz", "w") as archive:
        archive.writestr("arr_0.npy", bytes(100))


FORMS = {
    script: ("a TorchScript archive", "torch.jit.load"),
    keras_weights: ("an HDF5 file", "h5py"),
    keras_archive: ("an archive of Keras", "keras.saving.load_model"),
    saved_model: ("a SavedModel of TensorFlow", "tf.saved_model.load"),
    legacy: ("a file of torch.save from before torch 1.6", "torch.load"),
    oldest: ("a tar archive of torch.save from before torch 0.2", "torch.load"),
    arrays: ("a zip archive, and none of torch.save", "`tierd restore` copies it"),
}


@pytest.mark.parametrize("write", FORMS, ids=lambda write: write.__name__)
def test_form_that_is_not_converted_is_named_with_the_program_that_reads_it(
    write: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = tier_of(write, tmp_path)
    capsys.readouterr()
    for format in ("safetensors", "torch"):
        assert run(["export", str(tier), "--run", RUN, "--to", str(tmp_path / "new"), "--format", format]) != 0
        err = capsys.readouterr().err
        assert all(text in err for text in (*FORMS[write], "tierd restore"))
        assert "corrupt" not in err and "miniz" not in err and "Traceback" not in err
