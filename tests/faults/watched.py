"""Mutants of what takes other programs' checkpoints, and puts them back."""

from __future__ import annotations

from faults.rounds import Mutant

_WATCH, _TAKEN = "pytest tests/watching/test_unit_watch.py -k", "pytest tests/watching/test_taken.py -k"
_NAMES, _PLACE = "pytest tests/watching/test_naming.py", "pytest tests/watching/test_in_place.py -k"
_LEAVES = "pytest tests/watching/test_prepare_leaves.py -k"
_UNIT_WATCH, _TAKING = "tierd/daemon/intake/unit_watch.py", "tierd/daemon/intake/taking.py"
_IN_PLACE, _PREPARE = "tierd/daemon/intake/in_place.py", "tierd/daemon/intake/prepare.py"
_NAMING, _ADOPT = "tierd/watching/naming.py", "tierd/spool/adopt.py"

WATCHED = (
    Mutant(
        "a unit that changed while it was taken is kept",
        _UNIT_WATCH,
        "            if not is_unchanged(due, after):\n",
        "            if False:\n",
        f"{_WATCH} 'changes_while and rewrite-4'",
    ),
    Mutant(
        "a damaged unit is taken",
        _UNIT_WATCH,
        '        if found.status != "sound":\n',
        '        if found.status == "changing":\n',
        f"{_WATCH} damaged",
    ),
    Mutant(
        "a unit that is open for writing is taken",
        _TAKING,
        "            if is_open_for_writing(source.descriptor):\n                raise Busy(",
        "            if False:\n                raise Busy(",
        f"{_WATCH} open_for_writing_waits",
    ),
    Mutant(
        "a name that is written again is linked",
        _TAKING,
        "            link = unit.step is not None\n",
        "            link = True\n",
        f"{_WATCH} never_linked",
    ),
    Mutant(
        "a repair writes to the program's file",
        "tierd/daemon/transfer/download.py",
        "            unshare(path)",
        "            pass",
        f"{_WATCH} repair_never_writes",
    ),
    Mutant(
        "a copy is not whole",
        _ADOPT,
        "            write_all(made, data, offset)\n",
        "            write_all(made, data, 0)\n",
        f"{_WATCH} 'every_way and copy'",
    ),
    Mutant(
        "what retention deleted is taken again",
        _UNIT_WATCH,
        "        if self._taken.has(path, due.shape):\n",
        "        if False:\n",
        f"{_WATCH} retention_deleted",
    ),
    Mutant(
        "a full disk loses a unit",
        _UNIT_WATCH,
        "            self._off[path] = self._now_s + _AGAIN_S\n            self._reports.taken(",
        "            self._settling.finish(due, False, tree.listing())\n            self._reports.taken(",
        f"{_WATCH} full_disk",
    ),
    Mutant(
        "nodes give one unit several names",
        _NAMING,
        '    token = xxhash.xxh3_64_hexdigest(f"{run}\\0{path}\\0{step}\\0{made.isoformat()}".encode())[:8]\n',
        '    token = f"{id(object()) % 10**8:08}"[:4] + f"{hash(datetime.now()) % 10**4:04}"\n',
        f"{_NAMES} -k two_nodes",
    ),
    Mutant(
        "a program that went back goes on in its attempt",
        _NAMING,
        "    return all((other < step and at <= made) or (other > step and at >= made) for other, at in own)\n",
        "    return all(other != step for other, _ in own)\n",
        f"{_NAMES} -k 'anew or older'",
    ),
    Mutant(
        "an attempt resumed from its own last checkpoint",
        _NAMING,
        "one.attempt == attempt and one.step < below]",
        "one.attempt == attempt]",
        f"{_NAMES} -k below",
    ),
    Mutant(
        "a link on the way is followed",
        _IN_PLACE,
        "        if here.is_symlink():\n",
        "        if False:\n",
        f"{_PLACE} link_on_the_way",
    ),
    Mutant(
        "a made-up description is followed",
        _IN_PLACE,
        "    if own != set(about.modified_ns) or not (inside or all(",
        "    if False and not (inside or all(",
        f"{_PLACE} 'made_up and global_step21'",
    ),
    Mutant(
        "what was in place is lost",
        _IN_PLACE,
        "        fresh.rename(aside)\n    else:",
        "        remove(fresh)\n    else:",
        f"{_PLACE} a_step_can_be_chosen",
    ),
    Mutant(
        "times are not those of the program",
        _IN_PLACE,
        "        os.utime(home / path, ns=(modified_ns, modified_ns))",
        "        modified_ns += 1",
        f"{_PLACE} 'byte_for_byte and torchtitan'",
    ),
    Mutant(
        "prepare believes the structure of what was taken",
        _PREPARE,
        "    if manifest is not None and recorded:\n",
        "    if manifest is not None and not recorded:\n",
        f"{_PLACE} 'flipped_bit and safetensors-True'",
    ),
    Mutant(
        "prepare takes a file that was changed later for a new save",
        _PREPARE,
        "if oldest <= made < one.made]",
        "if made < oldest]",
        f"{_PLACE} 'flipped_bit and safetensors-False'",
    ),
    Mutant(
        "prepare moves units while a tier does not answer",
        _PREPARE,
        "    if silent := [name for name, place in inventory.tiers.items() if place is None]:\n",
        "    if silent := []:\n",
        f"{_PLACE} does_not_answer",
    ),
    Mutant(
        "a pointer keeps naming what was moved",
        _PREPARE,
        "    pointers = await to_the_end(_point, directory, judged)\n",
        "    pointers: list[str] = []\n",
        f"{_PLACE} corrects_the_pointer",
    ),
    Mutant(
        "prepare undoes a return to an older checkpoint",
        _PREPARE,
        "            chosen.add(key)\n",
        "            pass\n",
        f"{_LEAVES} whole_older_unit",
    ),
    Mutant(
        "prepare fetches what a person passed over",
        "tierd/daemon/intake/chosen.py",
        "or made > self.passed_over",
        "or made <= self.passed_over",
        f"{_LEAVES} not_overtaken",
    ),
    Mutant(
        "a choice outlives what the program saved since",
        "tierd/daemon/intake/chosen.py",
        "or made > self.passed_over",
        "",
        f"{_LEAVES} choice_ends",
    ),
    Mutant(
        "prepare moves what it cannot read",
        _PREPARE,
        "    if unread := [one for one in judged if one.unreadable]:\n",
        "    if unread := []:\n",
        f"{_LEAVES} 'cannot_be_read and newer'",
    ),
    Mutant(
        "a fetch that was cut off looks like a checkpoint",
        "tierd/daemon/transfer/export.py",
        "f\".{self.target.name.removeprefix('.')}.partial\"",
        'f".{self.target.name}.partial"',
        f"{_LEAVES} cut_off",
    ),
    Mutant(
        "a run that was not watched is fetched for nothing",
        "tierd/daemon/transfer/export.py",
        "            self.accept(manifest)\n",
        "            pass\n",
        f"{_LEAVES} 'not_fetched and restore'",
    ),
    Mutant(
        "an edit is told as decay",
        "tierd/daemon/intake/comparing.py",
        "if at > manifest.created_at else",
        "if at < manifest.created_at else",
        f"{_LEAVES} an_edit",
    ),
)
