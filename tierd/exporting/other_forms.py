"""Name the forms of other programs' files that an export does not convert, each with what reads it.

Only names, the first bytes and the directory of a zip archive are read, so that no form counts as a damaged archive of
`torch.save`.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import PurePosixPath

from tierd.core.ids import PartId
from tierd.exporting.chunk_reader import ChunkReader, RangeStream
from tierd.formats.hdf5 import MAGIC as HDF5
from tierd.formats.torch_legacy import is_legacy
from tierd.formats.zips import MAGIC as ZIP

_COPIES = "`tierd restore` copies it"
_SAVED_MODEL = (
    "a SavedModel of TensorFlow, which is a graph with its variables. Export does not convert it: `tierd restore` "
    "copies the directory, tf.saved_model.load reads it, and tf.train.load_checkpoint its variables/"
)
_KERAS = (
    "an archive of Keras, whose weights are an HDF5 file in it. Export does not convert it: "
    f"{_COPIES}, and keras.saving.load_model reads it"
)
_HDF5 = (
    "an HDF5 file, as Keras writes its weights. Export does not convert it: "
    f"{_COPIES}, and h5py, or load_weights of the Keras model, reads it"
)
_SCRIPT = (
    "a TorchScript archive of torch.jit.save, which is a program with its weights. Export does not convert it: "
    f"{_COPIES}, and torch.jit.load(FILE).state_dict() has its weights"
)
_EXPORTED = (
    "an archive of torch.export.save, which is a program with its weights. Export does not convert it: "
    f"{_COPIES}, and torch.export.load(FILE).state_dict has its weights"
)
_LEGACY = (
    "a file of torch.save from before torch 1.6, which cannot be streamed. Export does not convert it: "
    f"{_COPIES}, torch.load reads it, and torch.save of what it returns writes today's format"
)
_OLDEST = _LEGACY.replace(
    "a file of torch.save from before torch 1.6", "a tar archive of torch.save from before torch 0.2"
)
_ENDINGS = {".keras": _KERAS, ".h5": _HDF5, ".hdf5": _HDF5}
_ARCHIVES = (".pt", ".pth", ".ckpt", ".bin", ".pt2", ".ts")
_MAX_OPENED = 8  # files of one checkpoint that are opened


def other_form(reader: ChunkReader, part: PartId, paths: Sequence[str]) -> str | None:
    """Return which file of a checkpoint has a form that is not converted, and what reads it; None if none has.

    Raises: as `PartRanges.fill`.
    """
    for path in paths:
        if PurePosixPath(path).name == "saved_model.pb":
            return f"{PurePosixPath(path).parent!s}: {_SAVED_MODEL}"
    for path in paths:
        if form := _ENDINGS.get(PurePosixPath(path).suffix):
            return f"{path}: {form}"
    archives = [path for path in paths if len(paths) == 1 or path.endswith(_ARCHIVES)]
    for path in archives[:_MAX_OPENED]:
        if form := _form(reader, part, path):
            return f"{path}: {form}"
    return None


def _form(reader: ChunkReader, part: PartId, path: str) -> str | None:
    size = reader.size(part, path)
    head = bytes(reader.read(part, path, 0, min(40, size)))
    if head.startswith(HDF5):
        return _HDF5
    if is_legacy(head):
        return _LEGACY
    if size >= 512 and bytes(reader.read(part, path, 257, 5)) == b"ustar":
        return _OLDEST
    if not head.startswith(ZIP):
        return f"neither safetensors, nor DCP, nor an archive of torch.save, which export converts: {_COPIES}"
    try:
        with zipfile.ZipFile(io.BufferedReader(RangeStream(reader, part, path, 0, size))) as archive:
            return _form_of_zip(archive.namelist())
    except (zipfile.BadZipFile, NotImplementedError, ValueError):
        return None  # torch's own reader says why


def _form_of_zip(names: Sequence[str]) -> str | None:
    inner = {name.partition("/")[2] or name for name in names}
    if "model.weights.h5" in inner or "model.weights.h5" in names:
        return _KERAS
    if {"archive_format", "serialized_exported_program.json"} & inner:
        return _EXPORTED
    if "constants.pkl" in inner or "model.json" in inner:
        return _SCRIPT
    return None if "data.pkl" in inner else f"a zip archive, and none of torch.save, which export converts: {_COPIES}"
