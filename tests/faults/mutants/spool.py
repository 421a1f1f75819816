"""Mutants of `tierd/spool/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ARENA = "tierd/spool/arena.py"
_CONTROL_GROUPS = "tierd/spool/control_groups.py"
_LEASES = "tierd/spool/leases.py"
_LOCAL_PARTS = "tierd/spool/local_parts.py"
_PERMISSIONS = "tierd/spool/permissions.py"
_SPOOL = "tierd/spool/spool.py"
_STAGE = "tierd/spool/stage.py"
_TEST_PERMISSIONS = "pytest tests/spool/test_permissions.py"
_TEST_SLOTS = "pytest tests/client/saving/test_slots.py"
_TEST_SURROUNDINGS = "pytest tests/end_to_end/test_surroundings.py"
_TEST_LINKS = "pytest tests/spool/test_links.py"

MUTANTS = (
    Mutant(
        "a run's directory with an empty one for pins is kept for ever",
        "tierd/spool/leftovers.py",
        "_VACANT_LINKS = 3",
        "_VACANT_LINKS = 2",
        "pytest tests/spool/test_spool.py -k empty_one_for_pins",
    ),
    Mutant(
        "a file in a run's directory is a checkpoint's directory",
        "tierd/spool/directories.py",
        "if name in known or _is_directory(path / name)",
        "if True",
        "pytest tests/spool/test_spool.py -k and_nothing_else",
    ),
    Mutant(
        "a copy is not whole",
        "tierd/spool/adopt.py",
        "            write_all(made, data, offset)\n",
        "            write_all(made, data, 0)\n",
        "pytest tests/watching/test_unit_watch.py -k 'every_way and copy'",
    ),
    Mutant(
        "a repaired file's copy is shown before it is durable",
        "tierd/spool/adopt.py",
        "            os.fsync(fd)  # before the rename, which",
        "            pass  # before the rename, which",
        "pytest tests/watching/test_unit_watch.py -k by_unshare",
    ),
    Mutant(
        "an arena can be cut short",
        _ARENA,
        "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
        "_SEALS = fcntl.F_SEAL_GROW",
        f"{_TEST_PERMISSIONS} -k short",
    ),
    Mutant(
        "the limit of a control group of version 1 is not read",
        _CONTROL_GROUPS,
        '"memory" in controllers.split(",")',
        "False",
        f"{_TEST_SLOTS} -k control_group",
    ),
    Mutant(
        "a group's limit leaves a share of the machine's memory to others",
        _ARENA,
        "_SPARE * group.limit",
        "_SPARE * total",
        f"{_TEST_SLOTS} -k tightest_control_group",
    ),
    Mutant(
        "the limit of the address space bounds no arena",
        _ARENA,
        "if space != resource.RLIM_INFINITY",
        "if False",
        f"{_TEST_SLOTS} -k address_space",
    ),
    Mutant(
        "unsealed memory is taken",
        _ARENA,
        "sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS",
        "sealed = True",
        f"{_TEST_PERMISSIONS} -k short",
    ),
    Mutant(
        "an arena says that it goes when it has gone",
        _ARENA,
        "            self._memory = _Mapping(self.fd, self.size)\n",
        "            self._memory = mmap.mmap(self.fd, self.size)\n",
        "pytest tests/client/saving/test_device_copies.py -k keeps_it_pinned",
    ),
    Mutant(
        "a save that met a full disk is tried again with no room made",
        "tierd/spool/commit.py",
        "if not is_full(error) or room is None or not room(part, size, error.errno == errno.EDQUOT):",
        "if not is_full(error) or room is None:",
        "pytest tests/client/saving/test_small_disk.py -k gives_up",
    ),
    Mutant(
        "what lies beyond a file's first whole page is written from that page's start",
        "tierd/spool/direct_io.py",
        "    body, offset = data[edge:], offset + edge\n",
        "    body, offset = data[edge:], offset\n",
        "pytest tests/reading/test_new_file.py -k in_order",
    ),
    Mutant(
        "a chunk of which the cache has a part is taken for whole",
        "tierd/spool/direct_io.py",
        "does not say so\n            return False\n",
        "does not say so\n            return True\n",
        "pytest tests/spool/test_file_io.py -k just_written",
    ),
    Mutant(
        "a chunk from the cache is not compared with its digest",
        "tierd/spool/verified_reads.py",
        "        if found == chunk.xxh3_128:\n            return memory",
        "        if found is not None:\n            return memory",
        "pytest tests/spool/test_file_io.py -k just_written",
    ),
    Mutant(
        "a spool's files are what the umask makes them",
        "tierd/spool/file_io.py",
        "self._fd = os.open(path, flags, 0o600) if over is None else over",
        "self._fd = os.open(path, flags, 0o666) if over is None else over",
        f"{_TEST_SURROUNDINGS} -k nobody_else_gets_at",
    ),
    Mutant(
        "a Checkpointer that nobody closed keeps its lease",
        _LEASES,
        "if one == owner or not among]",
        "if one == owner]",
        "pytest tests/spool/test_leases.py -k nobody_closed",
    ),
    Mutant(
        "a signal handler that saves waits for the lease that it has interrupted",
        _LEASES,
        "threading.RLock()  # reentrant",
        "threading.Lock()  # reentrant",
        "pytest tests/spool/test_leases.py -k at_any_line",
    ),
    Mutant(
        "a signal handler that saves is refused by the lease that it has interrupted",
        _LEASES,
        "            return False\n        try:\n",
        "            pass\n        try:\n",
        "pytest tests/spool/test_leases.py -k at_any_line",
    ),
    Mutant(
        "a first save that was interrupted refuses the next one",
        _LEASES,
        "except BaseException as error:",
        "except OSError as error:",
        "pytest tests/spool/test_leases.py -k interrupted_first_save",
    ),
    Mutant(
        "a forked worker keeps its dead trainer alive",
        _LEASES,
        "os.register_at_fork(after_in_child=_forget_in_child)",
        "pass",
        "pytest tests/end_to_end/test_two_launches.py -k forked_child",
    ),
    Mutant(
        "a launch that cannot be shown leaves the one before alive",
        _LEASES,
        "former = [owners.pop(one) for one in list(owners) if one == owner or not among]",
        "former = []",
        "pytest tests/end_to_end/test_two_launches.py -k cannot_be_shown_yet",
    ),
    Mutant(
        "a spool that has vanished is an empty spool",
        _LOCAL_PARTS,
        "if self._made and not self.control.exists():",
        "if not self._made:",
        "pytest tests/spool/test_spool.py -k vanished_is_not",
    ),
    Mutant(
        "a run's linked directory is no directory",
        _LOCAL_PARTS,
        "                found.append(name)\n",
        "                continue\n",
        f"{_TEST_LINKS} -k linked_is_followed",
    ),
    Mutant(
        "a link inside a run hides a checkpoint",
        _LOCAL_PARTS,
        "            for path in bad:\n",
        "            for path in ():\n",
        f"{_TEST_LINKS} -k no_other_place_has",
    ),
    Mutant(
        "sockets are open to all",
        _PERMISSIONS,
        "os.fchmod(listener.fileno(), 0o600)",
        "os.fchmod(listener.fileno(), 0o666)",
        f"{_TEST_PERMISSIONS} -k both_sockets",
    ),
    Mutant(
        "a wide spool stays wide",
        _PERMISSIONS,
        "os.fchmod(fd, mode & 0o700)",
        "pass",
        f"{_TEST_PERMISSIONS} -k closed_to_them",
    ),
    Mutant(
        "a spool that others filled is used",
        _PERMISSIONS,
        "if mode & stat.S_IWOTH and filled:",
        "if False:",
        f"{_TEST_PERMISSIONS} -k refused_unless",
    ),
    Mutant(
        "another user's spool is used",
        _PERMISSIONS,
        "if owner != os.geteuid():",
        "if False:",
        f"{_TEST_PERMISSIONS} -k another_user",
    ),
    Mutant(
        "a daemon leaves a core",
        _PERMISSIONS,
        "if _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0):",
        "if False:",
        f"{_TEST_PERMISSIONS} -k no_core",
    ),
    Mutant(
        "a link by way of what others may replace is followed",
        _PERMISSIONS,
        "why = _unsafe(link.parent.resolve() / link.name) or _unfit(link)",
        "why = _unfit(link)",
        f"{_TEST_LINKS} -k others_may_replace",
    ),
    Mutant(
        "a link to what others may write to is followed",
        _PERMISSIONS,
        "    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):\n",
        "    if False:\n",
        f"{_TEST_LINKS} -k others_may_write",
    ),
    Mutant(
        "pins that cannot be listed are none",
        "tierd/spool/leftovers.py",
        "for name in names_in(self.root / run / _PINS))",
        'for name in (path.name for path in (self.root / run).glob("pins/*")))',
        "pytest tests/spool/test_spool.py -k pins_that_cannot",
    ),
    Mutant(
        "a checkpoint of which the disk gives no kind is none",
        "tierd/spool/local_parts.py",
        "    return exists(path)  # False",
        "    return os.path.lexists(path)  # False",
        "pytest tests/spool/test_spool.py -k disk_does_not_say_what",
    ),
    Mutant(
        "a policy that the disk does not give is none",
        "tierd/spool/records.py",
        "        if not exists(path):\n",
        "        if not path.exists():\n",
        "pytest tests/spool/test_records.py -k disk_does_not_give",
    ),
    Mutant(
        "a record's place may hold a pipe",
        "tierd/spool/records.py",
        "_MARK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "_MARK = os.O_NOFOLLOW | os.O_CLOEXEC",
        "pytest tests/spool/test_records.py -k neither_waited",
    ),
    Mutant(
        "a link for a room is used",
        _SPOOL,
        "check_room(directory)\n",
        "pass\n",
        f"{_TEST_PERMISSIONS} -k room",
    ),
    Mutant(
        "a save goes through any link",
        _SPOOL,
        "        self.check_way(part.checkpoint.run)\n        if self.path(part)",
        "        if self.path(part)",
        f"{_TEST_LINKS} -k leads_nowhere",
    ),
    Mutant(
        "a spool's path that JSON cannot say is taken",
        _SPOOL,
        "        check_name(self.root)\n",
        "",
        f"{_TEST_SURROUNDINGS} -k no_utf8",
    ),
    Mutant(
        "a living writer's stage counts as left over",
        _STAGE,
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        fcntl.flock(fd, fcntl.LOCK_UN)",
        "pytest tests/spool/test_spool.py -k living_writers_stage",
    ),
    Mutant(
        "a visible part is hidden for lack of a descriptor",
        _STAGE,
        "            os.fsync(shelf)\n",
        "            sync_directory(self._target.parent)\n",
        "pytest tests/spool/test_commit.py -k no_more_descriptors",
    ),
    Mutant(
        "a commit is not remembered",
        _STAGE,
        "        self._committed()\n",
        "",
        f"{_TEST_LINKS} -k removed_is_among",
    ),
    Mutant(
        "a stage's directory is what the umask makes it",
        _STAGE,
        "        path.mkdir(mode=0o700, exist_ok=True)\n",
        "        path.mkdir(exist_ok=True)\n",
        f"{_TEST_SURROUNDINGS} -k nobody_else_gets_at",
    ),
)
