"""Mutants of what takes other programs' checkpoints, and puts them back."""

from __future__ import annotations

from faults.rounds import Mutant

_WATCH, _TAKEN = "pytest tests/watching/test_unit_watch.py -k", "pytest tests/watching/test_taken.py -k"
_NAMES, _PLACE = "pytest tests/watching/test_naming.py", "pytest tests/watching/test_in_place.py -k"
_UNIT_WATCH, _TAKING = "tierd/daemon/intake/unit_watch.py", "tierd/daemon/intake/taking.py"
_IN_PLACE, _PREPARE = "tierd/daemon/intake/in_place.py", "tierd/daemon/intake/prepare.py"
_NAMING, _ADOPT = "tierd/watching/naming.py", "tierd/spool/adopt.py"
_INTAKE, _ENDS = "tierd/daemon/intake/intake.py", "pytest tests/watching/test_watch_ends.py -k"
_ORDER = "pytest tests/watching/test_order.py -k"
_PREPARE_ORDER = "pytest tests/watching/test_prepare_order.py -k"

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
        "    return all((step < one.step and at <= made) or (step > one.step and at >= made) for step, at in times)\n",
        "    return all(step != one.step for step, _ in times)\n",
        f"{_NAMES} -k 'anew or older'",
    ),
    Mutant(
        "a time that names no later attempt names one",
        _NAMING,
        "_LATEST_NS = 3_155_760_000 * 10**9",
        "_LATEST_NS = 7_258_118_400 * 10**9",
        f"{_NAMES} -k range",
    ),
    Mutant(
        "a trainer's run is watched",
        _INTAKE,
        "if manifest is not None and all(",
        "if False and all(",
        f"{_ENDS} trainers_run",
    ),
    Mutant(
        "what is not taken does not show in the exit code",
        "tierd/daemon/service.py",
        "                failure, left = intake.failure, intake.refused\n",
        "                failure = intake.failure\n",
        f"{_ENDS} everything",
    ),
    Mutant(
        "what is not taken does not show in the status",
        "tierd/daemon/status.py",
        "problems=(*problems(found), *lasting)",
        "problems=problems(found)",
        f"{_ENDS} status",
    ),
    Mutant(
        "a unit with a directory that cannot be read is whole",
        "tierd/watching/files.py",
        '                entries[path] = ListedEntry("other")\n',
        "",
        f"{_ENDS} 'below_that and step-100'",
    ),
    Mutant(
        "a directory that vanished is waited for",
        _INTAKE,
        "            if one.error is not None and one.tries >= _TRIES:\n",
        "            if False:\n",
        f"{_ENDS} vanished",
    ),
    Mutant(
        "a date in a name is a step",
        "tierd/watching/layouts.py",
        '_DATE.sub("", name)',
        "name",
        "pytest tests/watching/test_describe.py -k date",
    ),
    Mutant(
        "an earlier time makes a later unit older",
        _NAMING,
        "if after is None or one > after}",
        "}",
        f"{_ORDER} clock_was_set_back",
    ),
    Mutant(
        "a doubt about the order is not pinned",
        _UNIT_WATCH,
        "        self._spool.pin(checkpoint, pinned=True)\n",
        "",
        f"{_ORDER} copies_without_times",
    ),
    Mutant(
        "a killed first watch makes the oldest the newest",
        "tierd/daemon/intake/taken.py",
        "was if was and was.sizes == sizes else _Waiting(sizes, after)",
        "_Waiting(sizes, after)",
        f"{_ORDER} killed",
    ),
    Mutant(
        "later units are named in the order of taking",
        "tierd/daemon/intake/ordering.py",
        "for one in reversed(due) if",
        "for one in due if",
        f"{_ORDER} went_back_while",
    ),
    Mutant(
        "two units of one step and time count as one",
        "tierd/daemon/intake/ordering.py",
        ">= self.beside.count(path, step, made)",
        ">= 1",
        f"{_ORDER} one_time",
    ),
    Mutant(
        "the files of one step are several checkpoints",
        "tierd/watching/layouts.py",
        "else first.setdefault(step, name)",
        "else name",
        f"{_ORDER} files_of_one_step",
    ),
    Mutant(
        "a unit is compared with another one of its step",
        _PREPARE,
        "if manifest is not None and _is_of(one.unit, manifest):",
        "if manifest is not None:",
        f"{_PREPARE_ORDER} apart",
    ),
    Mutant(
        "prepare fetches what only its time makes newer",
        _PREPARE,
        "        return checkpoint > one.checkpoint\n",
        "        pass\n",
        f"{_PREPARE_ORDER} time_alone",
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
        "if oldest <= made < one.made)",
        "if made < oldest)",
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
)
