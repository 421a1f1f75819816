"""Choose a file's format by its name and its first bytes, and check it.

If the name indicates a format, the name decides, so that a file with a damaged first byte is still checked. Otherwise
the first bytes decide. If neither indicates a format, the result is `NoFormat`.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.formats.byte_source import ByteSource, DamagedFile, NoFormat, Sound, UncheckedFile
from tierd.formats.hdf5 import MAGIC as HDF5
from tierd.formats.hdf5 import check_hdf5
from tierd.formats.ocdbt import check_manifest
from tierd.formats.pickles import check_pickle, looks_like_pickle
from tierd.formats.safetensors import check_safetensors, looks_like_safetensors
from tierd.formats.sstable import MAGIC as TABLE_END
from tierd.formats.sstable import read_table
from tierd.formats.texts import check_json
from tierd.formats.torch_legacy import check_tar, is_legacy, is_tar
from tierd.formats.zips import MAGIC as ZIP
from tierd.formats.zips import check_zip

_HEAD = 40
_TAIL = 22  # bytes of a zip's end record
_ZIP_END = b"PK\x05\x06"


def _check_archive_or_pickle(source: ByteSource) -> Sound:
    """Check a file of torch.save: a zip archive or, before 1.6 or on request, pickles, or before 0.2 a tar archive.

    Either end of an archive identifies it.
    """
    if not source.size:
        raise DamagedFile(0, "the file is empty")
    head = source.read(0, min(_HEAD, source.size))
    tail = source.read(max(0, source.size - _TAIL), min(_TAIL, source.size))
    if head.startswith(ZIP) or tail.startswith(_ZIP_END):
        return check_zip(source)
    if looks_like_pickle(head) or is_legacy(head):
        return check_pickle(source)
    if is_tar(source):
        return check_tar(source)
    if not any(head) and not any(tail):
        raise DamagedFile(0, "zeros where an archive of torch.save begins and ends: it was never written")
    raise UncheckedFile("neither an archive of torch.save nor a pickle")


def _check_table(source: ByteSource) -> Sound:
    for _ in read_table(source):
        pass
    return Sound("table")


_BY_NAME: tuple[tuple[tuple[str, ...], Callable[[ByteSource], Sound]], ...] = (
    ((".safetensors",), check_safetensors),
    ((".keras", ".npz"), check_zip),
    ((".h5", ".hdf5"), check_hdf5),
    ((".pt", ".pth", ".ckpt", ".bin", ".pkl"), _check_archive_or_pickle),
    (("manifest.ocdbt",), check_manifest),
    ((".json", "_METADATA", "_sharding"), check_json),  # Orbax writes the last two names without a suffix
)


def check_file(name: str, source: ByteSource) -> Sound:
    """Check one file by itself.

    Raises:
        DamagedFile: its bytes are proven wrong.
        UnfinishedFile: it says that its writer has not finished.
        NoFormat: its format is not known.
        UncheckedFile: its format is known, but the check cannot decide.
    """
    if name.startswith("._"):
        raise NoFormat("attributes of a file that macOS wrote on another file system")
    for endings, check in _BY_NAME:
        if name.endswith(endings):
            return check(source)
    if name.endswith(".distcp"):  # a sequence of archives; only `.metadata` says where each one begins
        raise NoFormat("no .metadata names its entries")
    head = source.read(0, min(_HEAD, source.size))
    if head.startswith(ZIP):
        return check_zip(source)
    if head.startswith(HDF5):
        return check_hdf5(source)
    if looks_like_pickle(head) or is_legacy(head):
        return check_pickle(source)
    if is_tar(source):
        return check_tar(source)
    if looks_like_safetensors(head, source.size):
        return check_safetensors(source)
    if source.size >= _TAIL and source.read(source.size - _TAIL, _TAIL).endswith(TABLE_END):
        return _check_table(source)
    raise NoFormat("of no format whose structure can be checked")
