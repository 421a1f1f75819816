"""An archive of `torch.save`, read without its tensors' bytes.

Invariant: values are read by torch's weights-only unpickler. From torch the module also uses `PyTorchFileReader`, with
which `torch.load` finds the records of an archive.
"""

from __future__ import annotations

import io
from typing import IO, Any

import torch

_untyped: Any = torch  # the calls below have no types
# What the reader and the unpickler raise for a file that is no such archive.
NO_ARCHIVE = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    _untyped._weights_only_unpickler.UnpicklingError,
)


class Archive:
    """An open archive.

    Attributes:
        value: what was saved, with tensors on the meta device.

    Raises:
        NO_ARCHIVE: the stream is no archive of `torch.save`, is big-endian, or holds what the reader refuses.
    """

    def __init__(self, stream: IO[bytes] | io.RawIOBase) -> None:
        self._records = _untyped._C.PyTorchFileReader(stream)
        if self._records.has_record("byteorder") and self._records.get_record("byteorder") != b"little":
            raise ValueError("its bytes are big-endian")
        self._storages: dict[str, Any] = {}  # also keeps them, so that no two have one address
        self._keys: dict[int, str] = {}  # by address
        unpickler = _untyped._weights_only_unpickler.Unpickler(io.BytesIO(self._records.get_record("data.pkl")))
        unpickler.persistent_load = self._storage
        self.value: Any = unpickler.load()

    def _storage(self, saved: tuple[Any, ...]) -> Any:
        _, kind, key, _, count = saved
        of = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if key not in self._storages:
            self._storages[key] = _untyped.UntypedStorage(count * of.itemsize, device="meta")
            self._keys[self._storages[key]._cdata] = str(key)
        return _untyped.storage.TypedStorage(wrap_storage=self._storages[key], dtype=of, _internal=True)

    def offset(self, tensor: torch.Tensor) -> int:
        """Return where the bytes of a tensor of `value` begin in the archive.

        Raises:
            ValueError: its elements do not lie row-major in one record, or are conjugates or negatives of its bytes.
        """
        if tensor.is_conj() or tensor.is_neg():  # torch stores the bytes as they were, and computes when it reads them
            raise ValueError(
                "the tensor was saved lazily conjugated or negated, so that it cannot be streamed; `tierd restore` "
                "copies it, or save x.resolve_conj().resolve_neg()"
            )
        key = self._keys.get(tensor.untyped_storage()._cdata)
        if key is None or not tensor.is_contiguous():
            raise ValueError("the tensor is not row-major, so that it cannot be streamed; `tierd restore` copies it")
        begin: int = self._records.get_record_offset(f"data/{key}")
        return begin + int(tensor.storage_offset()) * tensor.dtype.itemsize
