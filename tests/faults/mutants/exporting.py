"""Mutants of `tierd/exporting/`."""

from __future__ import annotations

from faults.rounds import Mutant

_TEST_EXPORT_UNITS = "pytest tests/reading/test_export_units.py"
_TEST_EXPORT = "pytest tests/reading/test_export.py"

MUTANTS = (
    Mutant(
        "the bytes of a conjugated tensor are exported as its elements",
        "tierd/exporting/archive_reader.py",
        "        if tensor.is_conj() or tensor.is_neg():",
        "        if tensor.is_neg():",
        f"{_TEST_EXPORT_UNITS} -k lazily",
    ),
    Mutant(
        "the bytes of a negated tensor are exported as its elements",
        "tierd/exporting/archive_reader.py",
        "        if tensor.is_conj() or tensor.is_neg():",
        "        if tensor.is_conj():",
        f"{_TEST_EXPORT_UNITS} -k lazily",
    ),
    Mutant(
        "a view in an archive is exported from its storage's beginning",
        "tierd/exporting/archive_reader.py",
        "        return begin + int(tensor.storage_offset()) * tensor.dtype.itemsize\n",
        "        return begin\n",
        f"{_TEST_EXPORT_UNITS} -k archive_has",
    ),
    Mutant(
        "a tensor that is not row-major is exported as if it were",
        "tierd/exporting/archive_reader.py",
        "        if key is None or not tensor.is_contiguous():\n",
        "        if key is None:\n",
        f"{_TEST_EXPORT_UNITS} -k cannot_be_exported",
    ),
    Mutant(
        "an export fetches chunks again for each slab",
        "tierd/exporting/chunk_reader.py",
        "        if key in self._kept or len(chunk) > CACHED_BYTES:",
        "        if True:",
        f"{_TEST_EXPORT} -k memory",
    ),
    Mutant(
        "an export holds a tensor whole",
        "tierd/exporting/tensors.py",
        "SLAB_BYTES = 64 << 20",
        "SLAB_BYTES = 64 << 30",
        "pytest tests/reading/test_export_memory.py -k safetensors",
    ),
    Mutant(
        "an export that failed leaves its files",
        "tierd/exporting/export.py",
        "        if home.exists():",
        "        if not home.exists():",
        f"{_TEST_EXPORT} -k leaves_nothing",
    ),
    Mutant(
        "a shard is written at another shard's place",
        "tierd/exporting/tensors.py",
        "                into = into.narrow(below - dim, begin[below], size[below])",
        "                into = into.narrow(below - dim, 0, size[below])",
        f"{_TEST_EXPORT} -k whole_tensors",
    ),
    Mutant(
        "of two tensors of one name the last is exported",
        "tierd/exporting/units.py",
        "    if tensor.name in found:\n",
        "    if tensor.name in ():\n",
        f"{_TEST_EXPORT_UNITS} -k cannot_be_exported",
    ),
)
