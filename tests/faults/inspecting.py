"""Mutants of what checks other programs' checkpoints."""

from __future__ import annotations

from faults.rounds import Mutant

_FORMATS, _INSPECT = "pytest tests/formats/test_formats.py -k", "pytest tests/watching/test_inspect.py -k"
_ZIPS, _LAYOUTS, _FILES = "tierd/formats/zips.py", "tierd/watching/layouts.py", "tierd/watching/files.py"
_SETTLE, _SETTLING = "tierd/watching/settle.py", "pytest tests/watching/test_settle.py -k"

INSPECTING = (
    Mutant(
        "Accelerate's checkpoint is complete without its registered objects",
        "tierd/watching/layouts.py",
        " or _indexed(here) or _registered(here)\n",
        " or _indexed(here)\n",
        f"{_INSPECT} registered_objects",
    ),
    Mutant(
        "an index of shards may name the wrong one",
        "tierd/watching/inspect.py",
        "partial(check_safetensors, named=tensors, by=name)",
        "partial(check_safetensors, named=(), by=name)",
        f"{_INSPECT} wrong_shard",
    ),
    Mutant(
        "a safetensors header may have a name twice",
        "tierd/formats/safetensors.py",
        "        if name in seen:\n",
        "        if name in ():\n",
        f"{_FORMATS} name_twice",
    ),
    Mutant(
        "the content of a zip record is not compared",
        _ZIPS,
        "if size != record.size or found != record.crc:",
        "if size != record.size:",
        f"{_FORMATS} flipped_bit_of_content",
    ),
    Mutant(
        "a zip record's own header is not compared",
        _ZIPS,
        "if not (same and sizes and (crc == record.crc or (described and not crc))):",
        "if not sizes:",
        f"{_FORMATS} changes_no_content",
    ),
    Mutant(
        "records of a zip archive may overlap",
        _ZIPS,
        "        if begin < end:\n            raise Damaged(begin",
        "        if False:\n            raise Damaged(begin",
        f"{_FORMATS} overlapping",
    ),
    Mutant(
        "the end of a zip directory is not compared",
        _ZIPS,
        "    if offset + size != ends_at:",
        "    if offset + size > ends_at:",
        f"{_FORMATS} 'changes_no_content or every_cut'",
    ),
    Mutant(
        "a record without a CRC is damage",
        _ZIPS,
        "if record.crc or not record.size:",
        "if True:",
        f"{_FORMATS} without_a_crc",
    ),
    Mutant(
        "a hole between tensors is passed over",
        "tierd/formats/safetensors.py",
        "if first != at or last < first:",
        "if last < first:",
        f"{_FORMATS} safetensors",
    ),
    Mutant(
        "the end of a safetensors file is not compared",
        "tierd/formats/safetensors.py",
        "if begin + at != source.size:",
        "if begin + at > source.size + 8:",
        f"{_FORMATS} safetensors",
    ),
    Mutant(
        "HDF5 may end before its end address",
        "tierd/formats/hdf5.py",
        "if end > source.size:",
        "if end > source.size + 1:",
        f"{_FORMATS} superblock_by_hand",
    ),
    Mutant(
        "HDF5 that nobody closed is sound",
        "tierd/formats/hdf5.py",
        "    if flags:\n",
        "    if False:\n",
        f"{_FORMATS} superblock_by_hand",
    ),
    Mutant(
        "a block of a table is taken without its CRC",
        "tierd/formats/sstable.py",
        'if masked(crc(data[:-4], 0)) != int.from_bytes(data[-4:], "little"):',
        "if False:",
        f"{_FORMATS} flipped_bit_of_a_table",
    ),
    Mutant(
        "a TensorFlow tensor is taken without its CRC",
        "tierd/formats/tensorflow.py",
        "elif masked(_crc_of(source, entry, crc)) != entry.crc:",
        "elif False:",
        f"{_FORMATS} flipped_bit_of_a_shard",
    ),
    Mutant(
        "DCP's entries are only measured",
        "tierd/formats/dcp.py",
        "elif extent.tensor or _is_archive(part):",
        "elif False:",
        f"{_INSPECT} dcps_files",
    ),
    Mutant(
        "a file that an index names need not be there",
        "tierd/watching/inspect.py",
        "        if file not in self._there:\n",
        "        if False:\n",
        f"{_INSPECT} 'is_missing or leads_elsewhere'",
    ),
    Mutant(
        "damage in a file that changes is damage",
        _FILES,
        "                    _compare(listed, descriptor)\n                    self._compare_name(path, listed)\n",
        "                    pass\n",
        f"{_INSPECT} a_file_that_changes",
    ),
    Mutant(
        "a Trainer's checkpoint needs no trainer_state.json",
        _LAYOUTS,
        '    if not here.has("trainer_state.json"):',
        "    if False:",
        f"{_INSPECT} incomplete",
    ),
    Mutant(
        "an older step in the tracker will do",
        _LAYOUTS,
        "named is not None and named >= own",
        "named is not None and named >= 0",
        f"{_INSPECT} incomplete",
    ),
    Mutant(
        "NeMo's marker is passed over",
        _LAYOUTS,
        'return f"{marker} is there" if marker in siblings else None',
        "return None",
        f"{_INSPECT} incomplete",
    ),
    Mutant(
        "a unit counts as taken though it changed meanwhile",
        _SETTLE,
        "return found is not None and found.missing is None and shape_of(found, after.entries) == due.shape",
        "return found is not None",
        f"{_SETTLING} 'changes_while or never_due'",
    ),
    Mutant(
        "a unit is due as soon as it looks complete",
        _SETTLE,
        "now_s - seen.since_s < self._wait_s(seen)",
        "now_s < seen.since_s",
        f"{_SETTLING} long_enough",
    ),
    Mutant(
        "a part of a save over a unit is a save",
        _SETTLE,
        "return all(entries[path] != former.get(path) for path in unit.markers)",
        "return True",
        f"{_SETTLING} whole_save",
    ),
    Mutant(
        "an index may be older than what it names",
        _SETTLE,
        "    if any(_is_older(unit, entries, last, before) for last, before in _FOLLOWS):",
        "    if False:",
        f"{_SETTLING} older_than",
    ),
    Mutant(
        "what tierd moved away is inspected for ever",
        _FILES,
        "                if name.startswith(OWN):\n",
        "                if False:\n",
        f"{_INSPECT} tierd_made",
    ),
    Mutant(
        "a path that is not there hides what was found",
        "tierd/cli/reading/inspect.py",
        "            absent.append(error)\n",
        "            raise\n",
        f"{_INSPECT} hides_no_result",
    ),
)
