"""Mutants that ordinary tests find: what guards a spool, its sockets, a tier's secrets, an encrypted tier, the only
copy, and what was handed over before a death."""

from __future__ import annotations

from faults.rounds import Mutant

_TRUST, _SECRETS, _FILE = (
    "pytest tests/test_trust.py",
    "pytest tests/test_secrets.py",
    "pytest tests/stores/test_file.py",
)
_STORE, _DAEMON = "pytest tests/stores/test_encrypted.py::", "pytest tests/daemon/test_encrypted.py::"
_ENCRYPTED, _KEYS = "tierd/stores/encrypted.py", "tierd/stores/keys.py"
_HANDED, _PIPELINE = "pytest tests/client/test_handoff.py", "tierd/client/pipeline.py"
_LINKS = "os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW"

_GUARDS = (
    Mutant(
        "hand-off takes any user's memory",
        "tierd/daemon/handoff.py",
        "if (uid := stranger(connection)) is not None:",
        "if (uid := None) is not None:",
        f"{_TRUST} -k turns",
    ),
    Mutant(
        "control answers any user",
        "tierd/daemon/control.py",
        'if (uid := stranger(writer.get_extra_info("socket"))) is not None:',
        "if (uid := None) is not None:",
        f"{_TRUST} -k turns",
    ),
    Mutant(
        "a client trusts any daemon",
        "tierd/link.py",
        "if (uid := stranger(connection, os.fstat(directory).st_uid)) is not None:",
        "if (uid := None) is not None:",
        f"{_TRUST} -k client_trusts",
    ),
    Mutant(
        "sockets are open to all",
        "tierd/trust.py",
        "os.fchmod(listener.fileno(), 0o600)",
        "os.fchmod(listener.fileno(), 0o666)",
        f"{_TRUST} -k both_sockets",
    ),
    Mutant(
        "a wide spool stays wide",
        "tierd/trust.py",
        "os.fchmod(fd, mode & 0o700)",
        "pass",
        f"{_TRUST} -k closed_to_them",
    ),
    Mutant(
        "a spool that has vanished is an empty spool",
        "tierd/spool.py",
        "if self._made and not self.control.exists():",
        "if not self._made:",
        "pytest tests/test_spool.py -k vanished_is_not",
    ),
    Mutant(
        "what the dead sent behind an unread answer is dropped",
        "tierd/daemon/handoff.py",
        "for _ in range(2):",
        "for _ in range(1):",
        f"{_HANDED} -k left_an_answer",
    ),
    Mutant(
        "a spool that others filled is used",
        "tierd/trust.py",
        "if mode & stat.S_IWOTH and filled:",
        "if False:",
        f"{_TRUST} -k refused_unless",
    ),
    Mutant(
        "another user's spool is used",
        "tierd/trust.py",
        "if owner != os.geteuid():",
        "if False:",
        f"{_TRUST} -k another_user",
    ),
    Mutant("a link for a room is used", "tierd/spool.py", "check_room(directory)\n", "pass\n", f"{_TRUST} -k room"),
    Mutant(
        "a link among keys is followed",
        "tierd/stores/fds.py",
        _LINKS,
        _LINKS.removesuffix(" | os.O_NOFOLLOW"),
        f"{_FILE} -k planted",
    ),
    Mutant(
        "a link for an object is followed",
        "tierd/stores/file.py",
        "flags | os.O_NOFOLLOW | os.O_NONBLOCK",
        "flags | os.O_NONBLOCK",
        f"{_FILE} -k symlinks",
    ),
    Mutant(
        "an arena can be cut short",
        "tierd/arena.py",
        "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
        "_SEALS = fcntl.F_SEAL_GROW",
        f"{_TRUST} -k short",
    ),
    Mutant(
        "unsealed memory is taken",
        "tierd/arena.py",
        "sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS",
        "sealed = True",
        f"{_TRUST} -k short",
    ),
    Mutant(
        "a restore goes by name",
        "tierd/daemon/export.py",
        'home = Path(f"/proc/self/fd/{lock}")',
        "home = aside",
        "pytest tests/test_restore_cli.py -k another_put",
    ),
    Mutant(
        "nobody asks what was published",
        "tierd/daemon/export.py",
        "if not os.path.samestat(home.stat(), target.lstat()):",
        "if False:",
        "pytest tests/test_restore_cli.py -k another_put",
    ),
    Mutant(
        "chunks are named without end",
        "tierd/core/wire.py",
        "end > first >= before for",
        "end > first for",
        "pytest tests/core/test_wire.py -k run_of",
    ),
    Mutant(
        "botocore logs at DEBUG",
        "tierd/stores/s3.py",
        "logging.getLogger(_library).setLevel(logging.INFO)",
        "pass",
        f"{_SECRETS} -k nothing",
    ),
    Mutant(
        "a daemon leaves a core",
        "tierd/trust.py",
        "if _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0):",
        "if False:",
        f"{_TRUST} -k no_core",
    ),
    Mutant(
        "a URL's secret is told",
        "tierd/core/urls.py",
        'return "what stands there (not repeated here)" if',
        "return repr(piece) if",
        f"{_SECRETS} -k url",
    ),
)

_ENCRYPTION = (
    Mutant(
        "a chunk is any of its directory",
        _ENCRYPTED,
        "turn.authenticate_additional_data(key.encode())",
        'turn.authenticate_additional_data(b"")',
        f"{_STORE}test_what_was_put_in_anothers_place_is_not_believed",
    ),
    Mutant(
        "a tag is not checked",
        _ENCRYPTED,
        "            turn.finalize()\n        except InvalidTag:",
        "            pass\n        except InvalidTag:",
        f"{_STORE}test_every_flip_and_every_cut_is_noticed",
    ),
    Mutant(
        "bytes are handed on unverified",
        _ENCRYPTED,
        '            raise CorruptChunk(f"{key}: not what key {self._key.id} encrypted under this name") from None',
        "            return found",
        f"{_STORE}test_every_flip_and_every_cut_is_noticed",
    ),
    Mutant(
        "a manifest by anybody is believed",
        _ENCRYPTED,
        "            if wrapped is None:\n",
        "            if wrapped is None:\n                return memoryview(found)\n            if wrapped is None:\n",
        f"{_DAEMON}test_a_checkpoint_by_somebody_without_the_key_is_never_restored",
    ),
    Mutant(
        "a nonce is used twice",
        _ENCRYPTED,
        "nonce, end = os.urandom(_NONCE)",
        "nonce, end = bytes(_NONCE)",
        f"{_STORE}test_the_same_bytes_never_have_the_same_nonce",
    ),
    Mutant(
        "a missing key is corruption",
        "tierd/core/errors.py",
        "class WrongKey(FormatTooNew):",
        "class WrongKey(ManifestError):",
        f"{_DAEMON}test_without_the_key_nothing_is_restored_passed_over_quarantined_or_deleted",
    ),
    Mutant(
        "equal chunks have equal names",
        _KEYS,
        'f"tierd {purpose} {directory}"',
        'f"tierd {purpose} {directory and 0}"',
        f"{_STORE}test_the_place_sees_neither_bytes_nor_digests_nor_what_is_equal",
    ),
    Mutant(
        "a key may be open to its group",
        _KEYS,
        "& 0o077",
        "& 0o007",
        f"{_STORE}test_a_file_that_is_no_key_or_open_to_others_is_refused",
    ),
    Mutant(
        "a damaged manifest keeps another from its place",
        "tierd/daemon/mend.py",
        "            except (CorruptChunk, ManifestError):\n                pass  # there it is, damaged\n",
        "",
        f"{_DAEMON}test_a_damaged_manifest_is_rebuilt_after_another_tiers",
    ),
)

_DELETIONS = (
    Mutant(
        "a local copy goes without another look at the tiers",
        "tierd/daemon/reconcile.py",
        "        return parts if on_one or await self.tiers.are_past(checkpoint) else None\n",
        "        return parts\n",
        "pytest tests/daemon/test_reconcile.py -k whole_by_its_names_alone",
    ),
)

_DEATHS = (
    Mutant(
        "what was left in memory is believed",
        "tierd/client/source.py",
        "                check_bytes(found.files[file.path], file)\n",
        "                pass\n",
        f"{_HANDED} -k killed_in_a_copy",
    ),
    Mutant(
        "a slot is free again before its snapshot is durable",
        _PIPELINE,
        "        self._persister.give(lambda: self._persist(snapshot, slot, given, files))\n        return True",
        "        self._persister.give(lambda: self._persist(snapshot, slot, given, files))\n        return False",
        "pytest tests/client/test_slots.py -k waits_for_the_one_before",
    ),
    Mutant(
        "what a daemon did not answer before it died counts as durable",
        _PIPELINE,
        '            log.warning("%s: %s; it is persisted here", manifest.part, error)',
        "            return Written(size=given.size, direct=False, recycled=False)",
        f"{_HANDED} -k dies_over_it",
    ),
    Mutant(
        "the daemon drops the snapshot of a trainer that is gone",
        "tierd/daemon/handoff.py",
        "        part, arena = message.part, line.arenas.get(message.slot)",
        "        part, arena = message.part, None if line.hung_up else line.arenas.get(message.slot)",
        f"{_HANDED} -k every_slot",
    ),
    Mutant(
        "a living writer's stage counts as left over",
        "tierd/stage.py",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        fcntl.flock(fd, fcntl.LOCK_UN)",
        "pytest tests/test_spool.py -k living_writers_stage",
    ),
    Mutant(
        "a restore does not wait for what the dead had handed over",
        "tierd/daemon/control.py",
        "                await self._handoff.settled()  # what a trainer handed over before it died is seen, too",
        "                pass",
        f"{_HANDED} -k restart_waits",
    ),
)

PLAIN = _GUARDS + _ENCRYPTION + _DELETIONS + _DEATHS
