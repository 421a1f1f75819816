"""Mutants of `tierd/daemon/intake/`."""

from __future__ import annotations

from faults.rounds import Mutant

_BUCKET = "tierd/daemon/intake/bucket.py"
_IMPORTING = "tierd/daemon/intake/importing.py"
_IN_PLACE = "tierd/daemon/intake/in_place.py"
_ORDERING = "tierd/daemon/intake/ordering.py"
_PREPARE = "tierd/daemon/intake/prepare.py"
_UNIT_WATCH = "tierd/daemon/intake/unit_watch.py"
_TEST_PREPARE_LEAVES = "pytest tests/watching/test_prepare_leaves.py"
_TEST_BUCKET = "pytest tests/watching/test_import_bucket.py"
_TEST_IMPORT = "pytest tests/watching/test_import.py"
_TEST_IN_PLACE = "pytest tests/watching/test_in_place.py"
_TEST_ORDER = "pytest tests/watching/test_order.py"
_TEST_UNIT_WATCH = "pytest tests/watching/test_unit_watch.py"

MUTANTS = (
    Mutant(
        "a name in a bucket is a path as it stands",
        _BUCKET,
        "safe = _safe(path)",
        "safe = path",
        f"{_TEST_BUCKET} -k cannot_be_a_files",
    ),
    Mutant(
        "a checkpoint is imported without a file whose name is none",
        _BUCKET,
        "if unit.strange:",
        "if False:",
        f"{_TEST_BUCKET} -k imported_without",
    ),
    Mutant(
        "an import lists the whole bucket again for each checkpoint",
        _BUCKET,
        "        if self._listing is None:\n            found",
        "        if True:\n            found",
        f"{_TEST_BUCKET} -k lists_the_place_once",
    ),
    Mutant(
        "an import from a bucket does not see what was put beside a checkpoint's files",
        _BUCKET,
        "        if now == {path: self._found[path] for path in before}:\n",
        "        if now.keys() >= set(before):\n",
        f"{_TEST_BUCKET} -k meanwhile",
    ),
    Mutant(
        "a checkpoint is brought where it has no room",
        _BUCKET,
        "if size > free:",
        "if size > free * 1_000_000:",
        f"{_TEST_BUCKET} -k without_room",
    ),
    Mutant(
        "prepare fetches what a person passed over",
        "tierd/daemon/intake/chosen.py",
        "or made > self.passed_over",
        "or made <= self.passed_over",
        f"{_TEST_PREPARE_LEAVES} -k not_overtaken",
    ),
    Mutant(
        "a choice outlives what the program saved since",
        "tierd/daemon/intake/chosen.py",
        "or made > self.passed_over",
        "",
        f"{_TEST_PREPARE_LEAVES} -k choice_ends",
    ),
    Mutant(
        "an edit is told as decay",
        "tierd/daemon/intake/comparing.py",
        "if at > manifest.created_at else",
        "if at < manifest.created_at else",
        f"{_TEST_PREPARE_LEAVES} -k an_edit",
    ),
    Mutant(
        "an import takes what is not sound",
        _IMPORTING,
        '    if found.status != "sound":\n',
        "    if False:\n",
        f"{_TEST_IMPORT} -k not_sound",
    ),
    Mutant(
        "an import does not look whether a checkpoint changed",
        _IMPORTING,
        '        raise Changed("it was written to, renamed or deleted")\n',
        "        pass\n",
        f"{_TEST_IMPORT} -k changes_while",
    ),
    Mutant(
        "an import goes by the order of names",
        _IMPORTING,
        "[chosen[one] for one in sorted(chosen)]",
        "[chosen[one] for one in chosen]",
        f"{_TEST_IMPORT} -k order_of_their_steps",
    ),
    Mutant(
        "other files of a step count as imported",
        _IMPORTING,
        "        return told == (len(wanted), digest(wanted)) and",
        "        return bool(told) or",
        f"{_TEST_IMPORT} -k not_sound",
    ),
    Mutant(
        "an import adds to a run of another origin",
        _IMPORTING,
        'if not one.endswith(f"-{token}")',
        'if one.endswith("-none")',
        f"{_TEST_IMPORT} -k another_origin",
    ),
    Mutant(
        "a link on the way is followed",
        _IN_PLACE,
        "        if here.is_symlink():\n",
        "        if False:\n",
        f"{_TEST_IN_PLACE} -k link_on_the_way",
    ),
    Mutant(
        "a made-up description is followed",
        _IN_PLACE,
        "    if own != set(about.modified_ns) or not (inside or all(",
        "    if False and not (inside or all(",
        f"{_TEST_IN_PLACE} -k 'made_up and global_step21'",
    ),
    Mutant(
        "what was in place is lost",
        _IN_PLACE,
        "        fresh.rename(aside)\n    else:",
        "        remove(fresh)\n    else:",
        f"{_TEST_IN_PLACE} -k a_step_can_be_chosen",
    ),
    Mutant(
        "times are not those of the program",
        _IN_PLACE,
        "        os.utime(home / path, ns=(modified_ns, modified_ns))",
        "        modified_ns += 1",
        f"{_TEST_IN_PLACE} -k 'byte_for_byte and torchtitan'",
    ),
    Mutant(
        "a trainer's run is watched",
        "tierd/daemon/intake/intake.py",
        "if manifest is not None and all(",
        "if False and all(",
        "pytest tests/watching/test_watch_ends.py -k trainers_run",
    ),
    Mutant(
        "a directory that vanished is waited for",
        "tierd/daemon/intake/intake.py",
        "            if one.error is not None and one.tries >= TRIES:\n",
        "            if False:\n",
        "pytest tests/watching/test_watch_ends.py -k vanished",
    ),
    Mutant(
        "a new node forgets what the tiers' times contradict",
        _ORDERING,
        "return newest is not None and checkpoint < newest and checkpoint.step > newest.step",
        "return False",
        f"{_TEST_ORDER} -k new_node",
    ),
    Mutant(
        "later units are named in the order of taking",
        _ORDERING,
        "for one in reversed(due) if",
        "for one in due if",
        f"{_TEST_ORDER} -k went_back_while",
    ),
    Mutant(
        "two units of one step and time count as one",
        _ORDERING,
        ">= self.beside.count(path, step, made)",
        ">= 1",
        f"{_TEST_ORDER} -k one_time",
    ),
    Mutant(
        "a unit is compared with another one of its step",
        _PREPARE,
        "if manifest is not None and _is_of(one.unit, manifest):",
        "if manifest is not None:",
        "pytest tests/watching/test_prepare_order.py -k apart",
    ),
    Mutant(
        "prepare fetches what only its time makes newer",
        _PREPARE,
        "        return checkpoint > one.checkpoint\n",
        "        pass\n",
        "pytest tests/watching/test_prepare_order.py -k time_alone",
    ),
    Mutant(
        "prepare believes the structure of what was taken",
        _PREPARE,
        "    if manifest is not None and recorded:\n",
        "    if manifest is not None and not recorded:\n",
        f"{_TEST_IN_PLACE} -k 'flipped_bit and safetensors-True'",
    ),
    Mutant(
        "prepare takes a file that was changed later for a new save",
        _PREPARE,
        "if oldest <= made < one.made)",
        "if made < oldest)",
        f"{_TEST_IN_PLACE} -k 'flipped_bit and safetensors-False'",
    ),
    Mutant(
        "prepare moves units while a tier does not answer",
        _PREPARE,
        "    if silent := [name for name, place in inventory.tiers.items() if place is None]:\n",
        "    if silent := []:\n",
        f"{_TEST_IN_PLACE} -k does_not_answer",
    ),
    Mutant(
        "a pointer keeps naming what was moved",
        _PREPARE,
        "    pointers = await to_the_end(_point, directory, judged)\n",
        "    pointers: list[str] = []\n",
        f"{_TEST_IN_PLACE} -k corrects_the_pointer",
    ),
    Mutant(
        "prepare undoes a return to an older checkpoint",
        _PREPARE,
        "            chosen.add(key)\n",
        "            pass\n",
        f"{_TEST_PREPARE_LEAVES} -k whole_older_unit",
    ),
    Mutant(
        "prepare moves what it cannot read",
        _PREPARE,
        "    if unread := [one for one in judged if one.unreadable]:\n",
        "    if unread := []:\n",
        f"{_TEST_PREPARE_LEAVES} -k 'cannot_be_read and newer'",
    ),
    Mutant(
        "a killed first watch makes the oldest the newest",
        "tierd/daemon/intake/taken.py",
        "was if was and was.sizes == sizes else _Waiting(sizes, after)",
        "_Waiting(sizes, after)",
        f"{_TEST_ORDER} -k killed",
    ),
    Mutant(
        "a unit that is open for writing is taken",
        "tierd/daemon/intake/taking.py",
        "            if is_open_for_writing(source.descriptor):\n                raise Busy(",
        "            if False:\n                raise Busy(",
        f"{_TEST_UNIT_WATCH} -k open_for_writing_waits",
    ),
    Mutant(
        "a name that is written again is linked",
        "tierd/daemon/intake/taking.py",
        "            link = unit.step is not None\n",
        "            link = True\n",
        f"{_TEST_UNIT_WATCH} -k never_linked",
    ),
    Mutant(
        "a unit that changed while it was taken is kept",
        _UNIT_WATCH,
        "            if not is_unchanged(due, after):\n",
        "            if False:\n",
        f"{_TEST_UNIT_WATCH} -k 'changes_while and rewrite-4'",
    ),
    Mutant(
        "a damaged unit is taken",
        _UNIT_WATCH,
        '        if found.status != "sound":\n',
        '        if found.status == "changing":\n',
        f"{_TEST_UNIT_WATCH} -k damaged",
    ),
    Mutant(
        "what retention deleted is taken again",
        _UNIT_WATCH,
        "        if self._taken.has(path, due.shape):\n",
        "        if False:\n",
        f"{_TEST_UNIT_WATCH} -k retention_deleted",
    ),
    Mutant(
        "a full disk loses a unit",
        _UNIT_WATCH,
        "            self._off[path] = self._now_s + _AGAIN_S\n            self._reports.taken(",
        "            self._settling.finish(due, False, tree.listing())\n            self._reports.taken(",
        f"{_TEST_UNIT_WATCH} -k full_disk",
    ),
    Mutant(
        "a second name of a step is a second attempt",
        _UNIT_WATCH,
        "        if self._is_repeated(tree, due, step):\n",
        "        if False:\n",
        f"{_TEST_ORDER} -k second_name_of_a_step",
    ),
    Mutant(
        "a second name is left where the first is damaged",
        _UNIT_WATCH,
        "if other is None or (self._settling.is_judged(other) and other in self.refused):",
        "if other is None:",
        f"{_TEST_ORDER} -k second_name_is_taken",
    ),
    Mutant(
        "a doubt about the order is not pinned",
        _UNIT_WATCH,
        "        self._spool.pin(checkpoint, pinned=True)\n",
        "",
        f"{_TEST_ORDER} -k copies_without_times",
    ),
    Mutant(
        "a unit is taken without the file whose name no manifest can have",
        "tierd/daemon/intake/unit_watch.py",
        '        if any(one.startswith(f"{path}/") for one in self._unnamed):\n',
        "        if False:\n",
        "pytest tests/watching/test_watch_ends.py -k taken_without_it",
    ),
    Mutant(
        "what nobody foresaw ends a watch",
        "tierd/daemon/intake/intake.py",
        "                except Exception as error:  # also",
        "                except (OSError, StoreRefused, ConfigError) as error:  # also",
        "pytest tests/watching/test_watch_ends.py -k nobody_foresaw",
    ),
    Mutant(
        "a unit that cannot be read keeps a watch from its end",
        "tierd/daemon/intake/unit_watch.py",
        "        return self._settling.is_waiting(self._unread)\n",
        "        return self._settling.is_waiting()\n",
        "pytest --timeout 20 tests/watching/test_watch_ends.py -k may_not_be_read_is_told",
    ),
)
