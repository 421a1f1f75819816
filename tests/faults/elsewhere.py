"""Mutants of what reads checkpoints elsewhere: followers and exports."""

from __future__ import annotations

from faults.rounds import Mutant

_FOLLOW = "pytest tests/reading/test_follow.py"
_KILLED = "pytest tests/reading/test_follow_killed.py"
_UNITS = "pytest tests/reading/test_export_units.py -k"
_EXPORT = "pytest tests/reading/test_export.py"

ELSEWHERE = (
    Mutant(
        "a view in an archive is exported from its storage's beginning",
        "tierd/exporting/archive_reader.py",
        "        return begin + int(tensor.storage_offset()) * tensor.dtype.itemsize\n",
        "        return begin\n",
        f"{_UNITS} archive_has",
    ),
    Mutant(
        "a tensor that is not row-major is exported as if it were",
        "tierd/exporting/archive_reader.py",
        "        if key is None or not tensor.is_contiguous():\n",
        "        if key is None:\n",
        f"{_UNITS} cannot_be_exported",
    ),
    Mutant(
        "of two tensors of one name the last is exported",
        "tierd/exporting/units.py",
        "    if tensor.name in found:\n",
        "    if tensor.name in ():\n",
        f"{_UNITS} cannot_be_exported",
    ),
    Mutant(
        "a watched directory of DCP is looked for at the root",
        "tierd/dcp/entries.py",
        "        part, rest = first, base + path\n",
        "        part, rest = first, path\n",
        f"{_UNITS} 'directories_of_dcp and torchtitan'",
    ),
    Mutant(
        "a delivery in a loop is not recorded",
        "tierd/reading/follow.py",
        "            delivered.add(name_of(tiers.run, listed))",
        "            pass",
        f"{_FOLLOW} -k over_restarts",
    ),
    Mutant(
        "a command's status is not recorded",
        "tierd/reading/commands.py",
        '        if status == "0":',
        "        if not status:",
        f"{_FOLLOW} -k gets_each",
    ),
    Mutant(
        "any status of a command counts as delivered",
        "tierd/reading/commands.py",
        '        if status == "0":',
        "        if status:",
        f"{_FOLLOW} -k that_fails",
    ),
    Mutant(
        "a command that outlives its follower does not hold the lock",
        "tierd/reading/commands.py",
        "            pass_fds=[delivered.lock],",
        "            pass_fds=[],",
        f"{_KILLED} -k outlived",
    ),
    Mutant(
        "a follower lists the tiers without a pause",
        "tierd/reading/follow.py",
        "        time.sleep(max(0.0, begun + period_s - time.monotonic()))",
        "        time.sleep(0)",
        f"{_FOLLOW} -k once_in_a_period",
    ),
    Mutant(
        "a late checkpoint passes for the latest",
        "tierd/reading/follow.py",
        "        whole = [one for one in whole[-1:] if newest is None or name_of(run, one) > newest]",
        "        whole = [one for one in whole if name_of(run, one) not in delivered][-1:]",
        f"{_FOLLOW} -k only_the_latest",
    ),
    Mutant(
        "a shard is written at another shard's place",
        "tierd/exporting/tensors.py",
        "                into = into.narrow(below - dim, begin[below], size[below])",
        "                into = into.narrow(below - dim, 0, size[below])",
        f"{_EXPORT} -k whole_tensors",
    ),
    Mutant(
        "an export fetches chunks again for each slab",
        "tierd/exporting/chunk_reader.py",
        "        if key in self._kept or len(chunk) > CACHED_BYTES:",
        "        if True:",
        f"{_EXPORT} -k memory",
    ),
    Mutant(
        "an export that failed leaves its files",
        "tierd/exporting/export.py",
        "        if home.exists():",
        "        if not home.exists():",
        f"{_EXPORT} -k leaves_nothing",
    ),
)
