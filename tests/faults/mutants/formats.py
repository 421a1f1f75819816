"""Mutants of `tierd/formats/`."""

from __future__ import annotations

from faults.rounds import Mutant

_SAFETENSORS = "tierd/formats/safetensors.py"
_ZIPS = "tierd/formats/zips.py"
_TEST_FORMATS = "pytest tests/formats/test_formats.py"

MUTANTS = (
    Mutant(
        "a number of more than 64 bits is read",
        "tierd/formats/sstable.py",
        " and value < 1 << 64:",
        ":",
        f"{_TEST_FORMATS} -k 64_bits",
    ),
    Mutant(
        "DCP's entries are only measured",
        "tierd/formats/dcp.py",
        "elif extent.tensor or _is_archive(part):",
        "elif False:",
        "pytest tests/watching/test_inspect.py -k dcps_files",
    ),
    Mutant(
        "HDF5 may end before its end address",
        "tierd/formats/hdf5.py",
        "if end > source.size:",
        "if end > source.size + 1:",
        f"{_TEST_FORMATS} -k superblock_by_hand",
    ),
    Mutant(
        "HDF5 that nobody closed is sound",
        "tierd/formats/hdf5.py",
        "    if flags:\n",
        "    if False:\n",
        f"{_TEST_FORMATS} -k superblock_by_hand",
    ),
    Mutant(
        "a safetensors header may have a name twice",
        _SAFETENSORS,
        "        if name in seen:\n",
        "        if name in ():\n",
        f"{_TEST_FORMATS} -k name_twice",
    ),
    Mutant(
        "a hole between tensors is passed over",
        _SAFETENSORS,
        "if first != at or last < first:",
        "if last < first:",
        f"{_TEST_FORMATS} -k safetensors",
    ),
    Mutant(
        "the end of a safetensors file is not compared",
        _SAFETENSORS,
        "if begin + at != source.size:",
        "if begin + at > source.size + 8:",
        f"{_TEST_FORMATS} -k safetensors",
    ),
    Mutant(
        "a block of a table is taken without its CRC",
        "tierd/formats/sstable.py",
        'if masked(crc(data[:-4], 0)) != int.from_bytes(data[-4:], "little"):',
        "if False:",
        f"{_TEST_FORMATS} -k flipped_bit_of_a_table",
    ),
    Mutant(
        "a TensorFlow tensor is taken without its CRC",
        "tierd/formats/tensorflow.py",
        "elif masked(_crc_of(source, entry, crc)) != entry.crc:",
        "elif False:",
        f"{_TEST_FORMATS} -k flipped_bit_of_a_shard",
    ),
    Mutant(
        "the content of a zip record is not compared",
        _ZIPS,
        "if size != record.size or found != record.crc:",
        "if size != record.size:",
        f"{_TEST_FORMATS} -k flipped_bit_of_content",
    ),
    Mutant(
        "a zip record's own header is not compared",
        _ZIPS,
        "if not (same and sizes and (crc == record.crc or (described and not crc))):",
        "if not sizes:",
        f"{_TEST_FORMATS} -k changes_no_content",
    ),
    Mutant(
        "records of a zip archive may overlap",
        _ZIPS,
        "        if begin < end:\n            raise Damaged(begin",
        "        if False:\n            raise Damaged(begin",
        f"{_TEST_FORMATS} -k overlapping",
    ),
    Mutant(
        "the end of a zip directory is not compared",
        _ZIPS,
        "    if offset + size != ends_at:",
        "    if offset + size > ends_at:",
        f"{_TEST_FORMATS} -k 'changes_no_content or every_cut'",
    ),
    Mutant(
        "a record without a CRC is damage",
        _ZIPS,
        "if record.crc or not record.size:",
        "if True:",
        f"{_TEST_FORMATS} -k without_a_crc",
    ),
)
