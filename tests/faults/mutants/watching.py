"""Mutants of `tierd/watching/`."""

from __future__ import annotations

from faults.rounds import Mutant

_FILES = "tierd/watching/files.py"
_LAYOUTS = "tierd/watching/layouts.py"
_NAMING = "tierd/watching/naming.py"
_SETTLE = "tierd/watching/settle.py"
_TEST_INSPECT = "pytest tests/watching/test_inspect.py"
_TEST_NAMING = "pytest tests/watching/test_naming.py"
_TEST_SETTLE = "pytest tests/watching/test_settle.py"

MUTANTS = (
    Mutant(
        "one wrong read makes a unit damaged",
        "tierd/watching/inspect.py",
        '    while found.status in ("damaged", "incomplete", "unknown") and not unit.missing:\n',
        "    while False:\n",
        "pytest tests/watching/test_bad_disk.py -k sound_unit",
    ),
    Mutant(
        "an integer that no float holds is an error",
        "tierd/watching/describe.py",
        "    except OverflowError:",
        "    except ZeroDivisionError:",
        "pytest tests/watching/test_describe.py -k counts_for_nothing",
    ),
    Mutant(
        "damage in a file that changes is damage",
        _FILES,
        "                    _compare(listed, descriptor)\n                    self._compare_name(path, listed)\n",
        "                    pass\n",
        f"{_TEST_INSPECT} -k a_file_that_changes",
    ),
    Mutant(
        "what tierd moved away is inspected for ever",
        _FILES,
        "                if name.startswith(OWN):\n",
        "                if False:\n",
        f"{_TEST_INSPECT} -k tierd_made",
    ),
    Mutant(
        "a unit with a directory that cannot be read is whole",
        _FILES,
        '        entries[path] = ListedEntry("other")\n',
        "",
        "pytest tests/watching/test_watch_ends.py -k 'below_that and step-100'",
    ),
    Mutant(
        "an index of shards may name the wrong one",
        "tierd/watching/inspect.py",
        "partial(check_safetensors, named=tensors, by=name)",
        "partial(check_safetensors, named=(), by=name)",
        f"{_TEST_INSPECT} -k wrong_shard",
    ),
    Mutant(
        "a file that an index names need not be there",
        "tierd/watching/inspect.py",
        "        if file not in self._there:\n",
        "        if False:\n",
        f"{_TEST_INSPECT} -k 'is_missing or leads_elsewhere'",
    ),
    Mutant(
        "Accelerate's checkpoint is complete without its registered objects",
        "tierd/watching/directory_layouts.py",
        " or absent_index(here) or _registered(here)\n",
        " or absent_index(here)\n",
        f"{_TEST_INSPECT} -k registered_objects",
    ),
    Mutant(
        "a lone directory that Trainer or Accelerate may have begun is whole",
        "tierd/watching/series.py",
        "        return replace(unit, missing=_ALONE) if unit.layout is DIRECTORY and _looks_begun(unit) else unit\n",
        "        return unit\n",
        f"{_TEST_INSPECT} -k incomplete",
    ),
    Mutant(
        "a directory without a whole file is nobody's, though its program resumes from its name",
        "tierd/watching/completeness.py",
        '    return all(entry.kind == "file" and name.startswith(".") for name, entry in here.names.items())\n',
        "    return False\n",
        "pytest tests/watching/test_in_place.py -k never_whole",
    ),
    Mutant(
        "an older step in the tracker will do",
        "tierd/watching/completeness.py",
        "named is not None and named >= own",
        "named is not None and named >= 0",
        f"{_TEST_INSPECT} -k incomplete",
    ),
    Mutant(
        "NeMo's marker is passed over",
        "tierd/watching/completeness.py",
        'return f"{marker} is there" if marker in siblings else None',
        "return None",
        f"{_TEST_INSPECT} -k incomplete",
    ),
    Mutant(
        "a date in a name is a step",
        "tierd/watching/step_in_name.py",
        '_DATE.sub("", name)',
        "name",
        "pytest tests/watching/test_describe.py -k date",
    ),
    Mutant(
        "the files of one step are several checkpoints",
        _LAYOUTS,
        "groups.setdefault(unit.path if alone else unit.step, [])",
        "groups.setdefault(unit.path, [])",
        "pytest tests/watching/test_order.py -k files_of_one_step",
    ),
    Mutant(
        "nodes give one unit several names",
        _NAMING,
        '    token = xxhash.xxh3_64_hexdigest(f"{run}\\0{path}\\0{step}\\0{made.isoformat()}".encode())[:8]\n',
        '    token = f"{id(object()) % 10**8:08}"[:4] + f"{hash(datetime.now()) % 10**4:04}"\n',
        f"{_TEST_NAMING} -k two_nodes",
    ),
    Mutant(
        "a program that went back goes on in its attempt",
        _NAMING,
        "    return all((step < one.step and at <= made) or (step > one.step and at >= made) for step, at in times)\n",
        "    return all(step != one.step for step, _ in times)\n",
        f"{_TEST_NAMING} -k 'anew or older'",
    ),
    Mutant(
        "a time that names no later attempt names one",
        _NAMING,
        "_LATEST_NS = 3_155_760_000 * 10**9",
        "_LATEST_NS = 7_258_118_400 * 10**9",
        f"{_TEST_NAMING} -k range",
    ),
    Mutant(
        "an earlier time makes a later unit older",
        _NAMING,
        "if after is None or one > after}",
        "}",
        "pytest tests/watching/test_order.py -k clock_was_set_back",
    ),
    Mutant(
        "an attempt resumed from its own last checkpoint",
        _NAMING,
        "one.attempt == attempt and one.step < below]",
        "one.attempt == attempt]",
        f"{_TEST_NAMING} -k below",
    ),
    Mutant(
        "a unit counts as taken though it changed meanwhile",
        _SETTLE,
        "        after.entries.get(path) == entry for path, entry in due.shape\n",
        "        path in after.entries for path, entry in due.shape\n",
        f"{_TEST_SETTLE} -k 'changes_while or never_due'",
    ),
    Mutant(
        "a unit is due as soon as it looks complete",
        _SETTLE,
        "now_s - seen.since_s < self._wait_s(seen)",
        "now_s < seen.since_s",
        f"{_TEST_SETTLE} -k long_enough",
    ),
    Mutant(
        "a part of a save over a unit is a save",
        _SETTLE,
        "return all(entries[path] != former.get(path) for path in unit.markers)",
        "return True",
        f"{_TEST_SETTLE} -k whole_save",
    ),
    Mutant(
        "an index may be older than what it names",
        _SETTLE,
        "    if any(_is_older(unit, entries, last, before) for last, before in _FOLLOWS):",
        "    if False:",
        f"{_TEST_SETTLE} -k older_than",
    ),
    Mutant(
        "what a dead program left is waited for without end",
        _SETTLE,
        "        return any(not (seen.judged or seen.left) for path, seen in self._seen.items() if path not in but)\n",
        "        return any(not seen.judged for path, seen in self._seen.items() if path not in but)\n",
        f"{_TEST_SETTLE} -k incomplete_unit_is_never_due",
    ),
    Mutant(
        "the usual rules apply beside a person's own",
        "tierd/watching/layouts.py",
        "    if listing.own is not None:\n        return own_units(listing, listing.own)\n",
        "",
        "pytest tests/watching/test_own_layout.py -k no_other_rule",
    ),
    Mutant(
        "a file that says that a checkpoint is complete is a checkpoint",
        "tierd/watching/own_layout.py",
        "for path in found if path not in markers)",
        "for path in found)",
        "pytest tests/watching/test_own_layout.py -k beside_it",
    ),
    Mutant(
        "a status names every file that is passed over",
        "tierd/watching/passed_over.py",
        "tuple(found[:_GROUPS])",
        "tuple(found)",
        "pytest tests/watching/test_silence.py -k bounded",
    ),
)
