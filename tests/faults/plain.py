"""Mutants that ordinary tests find: what guards a spool, its sockets, a tier's secrets, an encrypted tier, the only
copy, what was handed over before a death, and how a daemon and a trainer end."""

from __future__ import annotations

from faults.adapting import ADAPTING
from faults.deploying import DEPLOYING
from faults.devices import DEVICES
from faults.doctoring import DOCTORING
from faults.elsewhere import ELSEWHERE
from faults.identity import IDENTITY
from faults.inspecting import INSPECTING
from faults.lines import LINES
from faults.meetings import MEETINGS
from faults.moving import MOVING
from faults.permissions import PERMISSIONS
from faults.preempting import PREEMPTING
from faults.rounds import Mutant
from faults.shards import SHARDS
from faults.space import SPACE
from faults.supply import SUPPLY
from faults.taking import TAKING
from faults.terminals import TERMINALS
from faults.transfer import TRANSFER
from faults.web import WEB
from faults.writers import WRITERS

_TRUST, _SECRETS, _FILE = (
    "pytest tests/spool/test_permissions.py",
    "pytest tests/end_to_end/test_secrets.py",
    "pytest tests/stores/test_file.py",
)
_STORE, _DAEMON = "pytest tests/stores/test_encrypted.py::", "pytest tests/daemon/test_encrypted.py::"
_ENCRYPTED, _KEYS = "tierd/stores/encrypted.py", "tierd/stores/keys.py"
_APART = "pytest tests/wire/test_apart.py"
_APART_DIRECTORIES = "pytest tests/cli/test_config_check.py"
_HANDED, _PIPELINE = "pytest tests/client/saving/test_handoff.py", "tierd/client/saving/pipeline.py"
_STOPPED = "pytest tests/client/saving/test_stopped_daemon.py"
_READER = "pytest tests/reading/test_reader.py"
_OWNED, _WHICH = "pytest tests/daemon/tiers/test_run_policies.py", "tierd/core/retention/policies.py"
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
        "tierd/ipc/client.py",
        "if (uid := stranger(connection, os.fstat(directory).st_uid)) is not None:",
        "if (uid := None) is not None:",
        f"{_TRUST} -k client_trusts",
    ),
    Mutant(
        "sockets are open to all",
        "tierd/spool/permissions.py",
        "os.fchmod(listener.fileno(), 0o600)",
        "os.fchmod(listener.fileno(), 0o666)",
        f"{_TRUST} -k both_sockets",
    ),
    Mutant(
        "a wide spool stays wide",
        "tierd/spool/permissions.py",
        "os.fchmod(fd, mode & 0o700)",
        "pass",
        f"{_TRUST} -k closed_to_them",
    ),
    Mutant(
        "a spool that has vanished is an empty spool",
        "tierd/spool/local_parts.py",
        "if self._made and not self.control.exists():",
        "if not self._made:",
        "pytest tests/spool/test_spool.py -k vanished_is_not",
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
        "tierd/spool/permissions.py",
        "if mode & stat.S_IWOTH and filled:",
        "if False:",
        f"{_TRUST} -k refused_unless",
    ),
    Mutant(
        "another user's spool is used",
        "tierd/spool/permissions.py",
        "if owner != os.geteuid():",
        "if False:",
        f"{_TRUST} -k another_user",
    ),
    Mutant(
        "a link for a room is used", "tierd/spool/spool.py", "check_room(directory)\n", "pass\n", f"{_TRUST} -k room"
    ),
    Mutant(
        "a link among keys is followed",
        "tierd/stores/descriptors.py",
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
        "tierd/spool/arena.py",
        "_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW",
        "_SEALS = fcntl.F_SEAL_GROW",
        f"{_TRUST} -k short",
    ),
    Mutant(
        "unsealed memory is taken",
        "tierd/spool/arena.py",
        "sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS",
        "sealed = True",
        f"{_TRUST} -k short",
    ),
    Mutant(
        "a restore goes by name",
        "tierd/daemon/transfer/export.py",
        'home = Path(f"/proc/self/fd/{lock}")',
        "home = aside",
        "pytest tests/cli/test_restore.py -k another_put",
    ),
    Mutant(
        "nobody asks what was published",
        "tierd/daemon/transfer/export.py",
        "if not os.path.samestat(home.stat(), target.lstat()):",
        "if False:",
        "pytest tests/cli/test_restore.py -k another_put",
    ),
    Mutant(
        "chunks are named without end",
        "tierd/ipc/messages.py",
        "end > first >= before for",
        "end > first for",
        "pytest tests/ipc/test_messages.py -k run_of",
    ),
    Mutant(
        "botocore logs at DEBUG",
        "tierd/stores/s3/s3_store.py",
        "logging.getLogger(_library).setLevel(logging.INFO)",
        "pass",
        f"{_SECRETS} -k nothing",
    ),
    Mutant(
        "a daemon leaves a core",
        "tierd/spool/permissions.py",
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

_SILENT = "pytest tests/client/restoring/test_silent_daemon.py"
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
        "an object cut to nothing is an empty one",
        _ENCRYPTED,
        "        if not found and _MARK.fullmatch(key):",
        "        if not found:",
        f"{_STORE}test_an_empty_or_cut_object_is_refused_by_the_store_itself",
        "DID NOT RAISE",
    ),
    Mutant(
        "an empty object has no tag",
        _ENCRYPTED,
        "        if check_key(key) in _PLAIN:\n            return await self._inner.put(",
        "        if check_key(key) in _PLAIN or not plain:\n            return await self._inner.put(",
        f"{_STORE}test_pins_and_marks_have_a_tag_and_those_of_older_tiers_have_none",
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
        "a policy is put beside manifests of another key",
        "tierd/daemon/tiers/run_policies.py",
        "isinstance(why, WrongKey) for other",
        "False for other",
        f"{_OWNED} -k cannot_be_read_here",
    ),
    Mutant(
        "a policy that is not encrypted is damage",
        _ENCRYPTED,
        "and is_plain(data):",
        "and False:",
        f"{_OWNED} -k another_key_left",
    ),
    Mutant(
        "an encrypted policy is damage where there is no key",
        "tierd/core/retention/stored.py",
        "if key_id := encrypted_with(data):",
        'if key_id := "":',
        f"{_OWNED} -k another_key_left",
    ),
    Mutant(
        "a tier may be a link to another",
        "tierd/stores/directory_overlap.py",
        "os.path.realpath(path)",
        "os.path.normpath(path)",
        f"{_APART_DIRECTORIES} -k not_apart",
    ),
    Mutant(
        "a tier may lie in the spool",
        "tierd/stores/directory_overlap.py",
        "if self._is_inside(other):",
        "if False:",
        f"{_APART_DIRECTORIES} -k not_apart",
    ),
    Mutant(
        "a reload may nest tiers",
        "tierd/daemon/service.py",
        "    await check_apart(config)\n    notifier",
        "    notifier",
        "pytest tests/daemon/test_reload.py -k cannot_be_used_changes",
    ),
    Mutant(
        "ls takes a silent daemon for none",
        "tierd/cli/reading/read.py",
        "            unanswered = True\n",
        "",
        "pytest tests/daemon/test_control.py -k ls_shows_the_spool",
    ),
    Mutant(
        "no daemon counts as one that does not answer",
        "tierd/ipc/client.py",
        "(DaemonAbsent if absent else DaemonUnavailable)",
        "DaemonUnavailable",
        "pytest tests/daemon/test_control.py -k ls_shows_the_spool",
    ),
    Mutant(
        "a daemon that does not greet is waited for as one that works",
        "tierd/ipc/client.py",
        "self._line(end, min(self._silence_s, _GREETING))",
        "self._line(end, self._silence_s)",
        f"{_SILENT} -k names_it_after_seconds",
    ),
    Mutant(
        "a stopped daemon whose queue is full counts as absent",
        "tierd/ipc/client.py",
        "            if isinstance(error, BlockingIOError):",
        "            if False:",
        f"{_SILENT} -k no_more_callers",
    ),
    Mutant(
        "a daemon that was stopped before it listened is waited for",
        "tierd/ipc/client.py",
        "                if _is_stopped(holder := _holder(spool)):",
        "                if False and (holder := 0):",
        f"{_SILENT} -k before_it_listened",
    ),
    Mutant(
        "no launch begins beside a stopped daemon",
        "tierd/client/attachment.py",
        "            except DaemonSilent as error:\n                self._warn(error)\n            self._watch",
        "            except ZeroDivisionError as error:\n                self._warn(error)\n            self._watch",
        f"{_SILENT} -k closing_waits",
    ),
    Mutant(
        "a daemon that woke is not attached to",
        "tierd/client/attachment.py",
        "return not link.heard() if link",
        "return True if link",
        f"{_SILENT} -k when_it_wakes",
    ),
    Mutant(
        "a daemon that falls silent in a look ends the restore",
        "tierd/client/restoring/source.py",
        "            except DaemonSilent as error:",
        "            except ZeroDivisionError as error:",
        f"{_SILENT} -k between_two_questions",
    ),
    Mutant(
        "a tier that does not answer is named and no more",
        "tierd/daemon/control.py",
        "silent=self._located(silent, sight.unreached)",
        "silent={}",
        "pytest tests/client/restoring/test_missing_tier.py -k missing_on_one_node",
    ),
    Mutant(
        "who hears no other rank is taken for rank 0",
        "tierd/core/timeline/candidates.py",
        "ranks = numbers if mute is None else (mute,)",
        "ranks = numbers",
        "pytest tests/client/restoring/test_missing_tier.py -k hears_no_other",
    ),
    Mutant(
        "a fetch that fails does not say on which node",
        "tierd/daemon/control.py",
        'raise type(error)(f"node {socket.gethostname()}: {error}") from error',
        "raise",
        "pytest tests/client/restoring/test_missing_tier.py -k only_that_tier_has",
    ),
    Mutant(
        "a wait tells what was left, not what was asked",
        "tierd/daemon/control.py",
        "is not verified there yet{why}",
        "is not verified there after {timeout:g} s{why}",
        "pytest tests/cli/test_ending.py -k time_is_over",
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
        "tierd/daemon/scrub/tier_repair.py",
        "            except (CorruptChunk, ManifestError):\n                pass  # the manifest exists, damaged\n",
        "",
        f"{_DAEMON}test_a_damaged_manifest_is_rebuilt_after_another_tiers",
    ),
)

_DELETIONS = (
    Mutant(
        "a planted name in the place of a checkpoint that went hides that it went",
        "tierd/core/timeline/candidates.py",
        "        doubtful &= hollow | set(timeline(",
        "        doubtful &= set(timeline(",
        "corruption --only 32247",
        "is newer than",
    ),
    Mutant(
        "a restore waits for a slow tier however long that takes",
        "tierd/daemon/control.py",
        "timeout=None if patient or not local else _PATIENCE)",
        "timeout=None)",
        "pytest tests/client/restoring/test_patience.py -k no_longer_than",
    ),
    Mutant(
        "a slow tier is not waited for though it may know of a newer checkpoint",
        "tierd/daemon/control.py",
        "timeout=None if patient or not local else _PATIENCE)",
        "timeout=None if patient else _PATIENCE)",
        "pytest tests/client/restoring/test_patience.py -k waited_for",
    ),
    Mutant(
        "a tier that is slower than the saves is never pruned",
        "tierd/daemon/reconciling/agenda.py",
        "if isinstance(action, Prune)] if worker.sent else []\n",
        "if isinstance(action, Prune)] if False else []\n",
        "pytest tests/daemon/transfer/test_slow_tier.py -k pruned_all_the_while",
    ),
    Mutant(
        "a tier that is slower than the saves fills the spool",
        "tierd/core/planning/eviction.py",
        "    return frozenset.intersection(*found) - inventory.needed\n",
        "    return frozenset()\n",
        "pytest tests/daemon/transfer/test_slow_tier.py -k does_not_fill",
    ),
    Mutant(
        "what is wanted for good and is sent one after the other passes for the newest",
        "tierd/core/planning/order.py",
        "    return checkpoint in tier.checkpoints or newest is None or newest <= checkpoint",
        "    return True",
        "pytest tests/daemon/transfer/test_slow_tier.py -k holds_up_no_newest",
    ),
    Mutant(
        "what was whole and is left in part may be begun anew",
        "tierd/core/timeline/run_view.py",
        "one not in some or (is_complete(ranks) and not inventory.has_whole(one))",
        "one not in some",
        "pytest tests/core/timeline/test_candidates.py -k left_in_part",
    ),
    Mutant(
        "a name of which nothing can be read hides what went",
        "tierd/core/planning/inventory.py",
        "if any(seen.sound.values())}",
        "}",
        "pytest tests/core/timeline/test_candidates.py -k does_not_hide_what_went",
    ),
    Mutant(
        "a place that refuses requests as too many is asked as many as before",
        "tierd/stores/window.py",
        "            self._most = max(1.0, min(self._most, self._under_way) / 2)\n",
        "            pass\n",
        "pytest tests/stores/test_window.py -k takes_few",
    ),
    Mutant(
        "Retry-After is passed over",
        "tierd/stores/window.py",
        "        self._closed_until = max(self._closed_until, now + wait_s)\n",
        "",
        "pytest tests/stores/test_window.py -k nothing_begins",
    ),
    Mutant(
        "nodes do not heed what others say that they send",
        "tierd/core/planning/flush_candidates.py",
        "    for one, nodes in tier.announced.items():\n",
        "    for one, nodes in {}.items():\n",
        "pytest tests/core/planning/test_several_links.py",
    ),
    Mutant(
        "a node does not say which checkpoint it sends",
        "tierd/daemon/reconciling/flusher.py",
        "tiers.flush_aloud if aloud else",
        "tiers.flush_aloud if False else",
        "pytest tests/daemon/test_nodes.py -k another_one_is_sending",
    ),
    Mutant(
        "a node does not ask what others send",
        "tierd/daemon/reconciling/agenda.py",
        "            await self._setup.tiers.hear(worker.name, action.part.checkpoint.run)\n",
        "",
        "pytest tests/daemon/test_nodes.py -k another_one_is_sending",
    ),
    Mutant(
        "what a long flush says that it sends is swept away",
        "tierd/daemon/tiers/intents.py",
        "            if info.key in _standing:\n",
        "            if False:\n",
        "pytest tests/daemon/tiers/test_intents.py -k said_that_it_sends",
    ),
    Mutant(
        "an intent that a listing does not show yet is left",
        "tierd/daemon/tiers/intents.py",
        "sorted({intent, *earlier})",
        "sorted(earlier)",
        "pytest tests/daemon/tiers/test_intents.py -k listing_does_not_show",
    ),
    Mutant(
        "a temp file that could not be removed is left for as long as the daemon lives",
        "tierd/stores/file.py",
        "            self._swept = False\n            raise\n",
        "            raise\n",
        "pytest tests/stores/test_file.py -k goes_with_a_later_put",
    ),
    Mutant(
        "a sweep that met an error is never done again",
        "tierd/stores/file.py",
        "self._swept = sweep(tmp, _TMP_NAME, _SWEEP)",
        "sweep(tmp, _TMP_NAME, _SWEEP)\n                self._swept = True",
        "pytest tests/stores/test_file.py -k goes_with_a_later_put",
    ),
    Mutant(
        "an entry that cannot be removed is no refusal to delete",
        "tierd/stores/file.py",
        "_KEPT = (errno.EPERM, errno.EACCES)",
        "_KEPT = (errno.EBADF,)",
        "pytest tests/daemon/tiers/test_append_only.py -k cannot_be_removed",
    ),
    Mutant(
        "a read-only file system is taken for an append-only tier",
        "tierd/stores/file.py",
        "        if error.errno not in _KEPT:\n",
        "        if error.errno not in (*_KEPT, errno.EROFS):\n",
        "pytest tests/stores/test_file.py -k read_only_is_not",
    ),
    Mutant(
        "marks are put where they cannot be deleted, each time that a refusal is forgotten",
        "tierd/stores/deletions.py",
        "        if refused:\n",
        "        if False:\n",
        "pytest tests/daemon/tiers/test_append_only.py -k cannot_be_removed",
    ),
    Mutant(
        "a tier is read-write where only some kinds of objects may be deleted",
        "tierd/daemon/tiers/reach.py",
        " or await _keeps_some(store)",
        "",
        "pytest tests/daemon/tiers/test_reach.py -k some_kinds",
    ),
    Mutant(
        "prune does not say what holds it back",
        "tierd/daemon/tiers/deletions.py",
        "                held |= found.grown\n",
        "",
        "pytest tests/cli/test_cli.py -k holds_it_back",
    ),
    Mutant(
        "disown takes a launch that lives on this node",
        "tierd/cli/acting/disown.py",
        "    if living := living_here(run, attempt):\n",
        "    if living := {}:\n",
        "pytest tests/cli/test_disown.py -k lives_here",
    ),
    Mutant(
        "disown takes the mark of a deletion that goes on",
        "tierd/daemon/tiers/intents.py",
        "    if match is None or 0 <= _age(match[2]) <= 1000 * _DEADLINE:\n",
        "    if match is None:\n",
        "pytest tests/cli/test_disown.py -k marks_of_the_launch",
    ),
    Mutant(
        "Retry-After as a date is passed over",
        "tierd/stores/s3/answers.py",
        "    except (ValueError, OverflowError):\n        return 0.0\n",
        "    except (ValueError, OverflowError):\n        return 0.0\n    return 0.0\n",
        "pytest tests/stores/test_window.py -k says_of_waiting",
    ),
    Mutant(
        "status is silent while a Retry-After is waited out",
        "tierd/daemon/tiers/tiers.py",
        "        return asked_s(self._stores[tier]) if tier in self._stores else 0.0\n",
        "        return 0.0\n",
        "pytest tests/stores/test_window.py -k until_when",
    ),
    Mutant(
        "a listing through a proxy is unbounded",
        "tierd/stores/s3/transport.py",
        "        return ProxiedSession(**options)\n",
        "        return AIOHTTPSession(**options)\n",
        "pytest tests/stores/s3/test_transport.py -k listing_is_bounded",
    ),
    Mutant(
        "intents that a place once refused to delete stand until a restart",
        "tierd/daemon/tiers/tiers.py",
        "        if guard.has_left:  # intents",
        "        if False:  # intents",
        "pytest tests/daemon/tiers/test_append_only.py -k intents_that_could_not",
    ),
    Mutant(
        "a copy goes because of a newer one that is rotten",
        "tierd/daemon/reconciling/pruner.py",
        " if await self._all_right(checkpoint, newer) else None\n",
        "\n",
        "pytest tests/daemon/transfer/test_slow_tier.py -k rotten",
    ),
    Mutant(
        "a copy that a scrub has just quarantined is suspected",
        "tierd/daemon/scrub/scrubber.py",
        "        if await to_the_end(self._spool.has, part):  #",
        "        if True:  #",
        "pytest tests/daemon/scrub/test_scrubber.py -k holds_up",
    ),
    Mutant(
        "what was found rotten is only read again in its own time",
        "tierd/daemon/scrub/scrubber.py",
        "        self._doubtful.add(ScrubbedCopy(place, part))\n",
        "",
        "pytest tests/daemon/scrub/test_scrubber.py -k in_doubt",
    ),
    Mutant(
        "a deletion that fails has its turn again before a flush",
        "tierd/daemon/reconcile.py",
        "                    worker.sent = isinstance(action, Flush)  # first, so a failing prune blocks no flush\n"
        "                    await self._act(action)\n",
        "                    await self._act(action)\n                    worker.sent = isinstance(action, Flush)\n",
        "pytest tests/daemon/transfer/test_slow_tier.py -k holds_up_no_flush",
    ),
    Mutant(
        "what only this node has complete counts where others have ranks",
        "tierd/core/planning/copies.py",
        "        return self.complete and not self.defects and all(",
        "        return not self.defects and all(",
        "pytest tests/core/planning/test_plan.py -k no_tier_wants_it_any_more",
    ),
    Mutant(
        "a local copy goes without another look at the tiers",
        "tierd/daemon/reconciling/pruner.py",
        "        return parts if await tiers.are_past(checkpoint, live.inventory()) else None\n",
        "        return parts\n",
        "pytest tests/daemon/test_reconcile.py -k whole_by_its_names_alone",
    ),
)

_BUFFERS = (
    Mutant(
        "a buffer is another's before its user is done with it",
        "tierd/daemon/transfer/buffers.py",
        "        memory = self._taken(size)\n",
        "        memory = self._taken(size)\n        self._idle.append(memory)\n",
        "pytest tests/daemon/transfer/test_buffers.py",
    ),
    Mutant(
        "all buffers of a download are kept",
        "tierd/daemon/transfer/buffers.py",
        "            while sum(map(len, self._idle)) > KEPT:\n                del self._idle[0]\n",
        "",
        "pytest tests/daemon/transfer/test_buffers.py -k no_more_is_kept",
    ),
)

_PLANNER = "pytest tests/core/planning/test_planner.py"
_DEATHS = (
    Mutant(
        "a directory that has just changed is not read again",
        "tierd/daemon/spool_observer.py",
        "settled = now_ns - stamp_ns > _NEAR_NS and not defects",
        "settled = True",
        "pytest tests/daemon/test_spool_observer.py -k same_tick",
    ),
    Mutant(
        "what changed in a checkpoint's directory is not seen",
        "tierd/daemon/spool_observer.py",
        "if known and stamp_ns and known.stamp_ns == stamp_ns and not full:\n            return known\n        parts",
        "if known and stamp_ns and known.stamp_ns and not full:\n            return known\n        parts",
        "pytest tests/daemon/test_spool_observer.py -k whatever",
    ),
    Mutant(
        "what waits for a copy that cannot be read is asked for again and again",
        "tierd/daemon/reconciling/pruner.py",
        "                self._rest_on[checkpoint] = part\n",
        "",
        "pytest tests/daemon/transfer/test_slow_tier.py -k each_second",
    ),
    Mutant(
        "a run's plan is kept whatever changes of it",
        "tierd/core/planning/plan.py",
        "known[1] is config and known[0] == own",
        "known[1] is config and known[0].tiers == own.tiers",
        f"{_PLANNER} -k planning_anew",
    ),
    Mutant(
        "what the timeline alone keeps is judged as what goes",
        "tierd/core/retention/policy.py",
        "(*self._counted[-count:], *self._on_path[-count:])}",
        "self._counted[-count:]}",
        f"{_PLANNER} -k each_verdict",
    ),
    Mutant(
        "a look at the newest few is taken for one at everything",
        "tierd/core/timeline/candidates.py",
        "        if self.down_to is None:\n            return True\n",
        "        if self.down_to is None or True:\n            return True\n",
        "pytest tests/client/restoring/test_lazy_restore.py -k finds_what",
    ),
    Mutant(
        "what is older than the newest few is called gone",
        "tierd/core/timeline/run_view.py",
        "named(run, sight.gone) if one >= oldest)",
        "named(run, sight.gone))",
        "pytest tests/client/restoring/test_lazy_restore.py -k is_not_gone",
    ),
    Mutant(
        "what was left in memory is believed",
        "tierd/client/restoring/source.py",
        "                check_bytes(found.files[file.path], file)\n",
        "                pass\n",
        f"{_HANDED} -k killed_in_a_copy",
    ),
    Mutant(
        "a slot is free again before its snapshot is durable",
        _PIPELINE,
        "        self._persister.give(lambda: self._persist(snapshot, slot, given, files))\n        return True",
        "        self._persister.give(lambda: self._persist(snapshot, slot, given, files))\n        return False",
        "pytest tests/client/saving/test_slots.py -k waits_for_the_one_before",
    ),
    Mutant(
        "what a daemon did not answer before it died counts as durable",
        _PIPELINE,
        '            log.warning("%s: %s; it is persisted here", manifest.part, error)',
        "            return CommittedPart(size=given.size, direct=False, recycled=False)",
        f"{_HANDED} -k dies_over_it",
    ),
    Mutant(
        "the daemon drops the snapshot of a trainer that is gone",
        "tierd/daemon/handoff.py",
        "message.part, line.arenas.get(message.slot)",
        "message.part, None if line.hung_up else line.arenas.get(message.slot)",
        f"{_HANDED} -k every_slot",
    ),
    Mutant(
        "a daemon at work on a snapshot counts as stopped",
        "tierd/daemon/handoff.py",
        "timeout=messages.BEAT).done:",
        "timeout=messages.HEARTBEAT).done:",
        f"{_STOPPED} -k works_for_long",
    ),
    Mutant(
        "a daemon at work on room counts as stopped",
        "tierd/daemon/control.py",
        "messages.BEAT if isinstance(request, messages.MakeRoom | messages.Candidates) else math.inf",
        "math.inf",
        f"{_STOPPED} -k makes_room",
    ),
    Mutant(
        "a daemon of before 1.1 is held to the beat of today",
        "tierd/client/saving/handoff.py",
        "_SILENCE if beats else _LONG_SILENCE",
        "_SILENCE",
        f"{_APART} -k has_its_time",
    ),
    Mutant(
        "a stopped daemon is waited for as long as ever",
        "tierd/client/saving/handoff.py",
        "_SILENCE if beats else _LONG_SILENCE",
        "_LONG_SILENCE",
        f"{_STOPPED} -k met_once_and_nothing",
    ),
    Mutant(
        "memory is lent to a daemon that has not greeted",
        "tierd/client/saving/handoff.py",
        "        except Silent:\n            return False\n",
        "        except Silent:\n            daemon = THIS\n",
        f"{_STOPPED} -k before_its_first",
    ),
    Mutant(
        "who falls silent again and again is tried again and again",
        "tierd/client/saving/handoff.py",
        " * 2 ** min(self._silences, _MOST_DOUBLED)",
        "",
        f"{_STOPPED} -k again_and_again",
    ),
    Mutant(
        "a daemon that wakes keeps what a living trainer lent it",
        "tierd/client/saving/handoff.py",
        "                self._let_go(given.connection)\n",
        "",
        f"{_STOPPED} -k commits_first",
    ),
    Mutant(
        "a daemon that wakes reports what its trainer wrote as failed",
        "tierd/daemon/handoff.py",
        "            if not isinstance(error, StepRefused) and not self._spool.has(part):\n",
        "            if True:\n",
        f"{_STOPPED} -k meanwhile",
    ),
    Mutant(
        "a living writer's stage counts as left over",
        "tierd/spool/stage.py",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "        fcntl.flock(fd, fcntl.LOCK_UN)",
        "pytest tests/spool/test_spool.py -k living_writers_stage",
    ),
    Mutant(
        "a restore does not wait for what the dead had handed over",
        "tierd/daemon/control.py",
        "                await self._handoff.settled()  # to include snapshots that a dead trainer handed over",
        "                pass",
        f"{_HANDED} -k restart_waits",
    ),
)

_VERSIONS = (
    Mutant(
        "two minor versions apart are taken to work together",
        "tierd/ipc/protocol.py",
        "abs(mine.minor - other.minor) <= 1:",
        "abs(mine.minor - other.minor) <= 2:",
        "pytest tests/ipc/test_protocol.py -k who_has_to_be_upgraded",
    ),
    Mutant(
        "a member that is not set is sent",
        "tierd/ipc/messages.py",
        'tag_field="op", omit_defaults=True)',
        'tag_field="op", omit_defaults=False)',
        "pytest tests/ipc/test_messages.py -k not_sent",
    ),
    Mutant(
        "a member that is not known is refused",
        "tierd/ipc/messages.py",
        'tag_field="op", omit_defaults=True)',
        'tag_field="op", omit_defaults=True, forbid_unknown_fields=True)',
        "pytest tests/ipc/test_messages.py -k is_ignored",
    ),
    Mutant(
        "a request of a later client ends its connection",
        "tierd/daemon/control.py",
        "                    request = unknown(error)",
        "                    raise",
        f"{_APART} -k one_minor_version_later_is_answered",
    ),
    Mutant(
        "a snapshot is handed to a daemon that is too far apart",
        "tierd/client/saving/handoff.py",
        "if why := explain(THIS, daemon):",
        'if why := "":',
        f"{_APART} -k saves_and_restores_beside",
    ),
    Mutant(
        "a member that an old daemon does not send ends `status`",
        "tierd/cli/reading/status.py",
        '        return "unknown"',
        "        raise",
        f"{_APART} -k status_of_an_old_daemon",
    ),
)

_READING = (
    Mutant(
        "a reader calls corrupt what was pruned",
        "tierd/reading/gone.py",
        "        there = tiers.has(candidate.checkpoint, candidate.world)",
        "        there = True",
        f"{_READER} -k pruned_while",
        "Skipped(step=4",
    ),
    Mutant(
        "a reader steps back where a tier did not answer",
        "tierd/reading/tiers.py",
        "copies.give_up(",
        "raise ObjectNotFound(",
        f"{_READER} -k never_a_reason",
        "vanished",
    ),
    Mutant(
        "entries that differ between ranks pass for the same",
        "tierd/reading/shared.py",
        "    if name not in one.entries or one.entries[name] != other.entries.get(name):",
        "    if name not in one.entries:",
        f"{_READER} -k every_bit",
        "DID NOT RAISE",
    ),
    Mutant(
        "tensors that differ between ranks pass for the same",
        "tierd/client/restoring/tensor_equality.py",
        "if a[2] != b[2]]",
        "if a[0] != b[0]]",
        f"{_READER} -k every_bit",
        "DID NOT RAISE",
    ),
    Mutant(
        "a reader does not verify",
        "tierd/daemon/transfer/replicas.py",
        "                raw = await to_the_end(decode, chunk, await get(memory), name, into)",
        "                raw = await get(memory)",
        f"{_READER} -k passed_over",
    ),
    Mutant(
        "an export calls corrupt what was pruned",
        "tierd/daemon/transfer/export.py",
        "                if not await is_there(self.stores, one, candidate.world):",
        "                if False:",
        f"{_READER} -k pruned_while",
        "step 4",
    ),
)

_POLICIES = (
    Mutant(
        "whoever restored a run prunes it",
        "tierd/core/planning/janitor.py",
        "max(known) in mine and run not in inventory.spool.restored",
        "max(known) in mine",
        f"{_OWNED} -k beside_a_reader",
    ),
    Mutant(
        "a restore counts as a save",
        "tierd/daemon/spool_observer.py",
        "if attempt not in marks.get(run, ()))",
        "if run in marks and attempt not in marks[run])",
        f"{_OWNED} -k beside_a_reader",
    ),
    Mutant(
        "a full disk that takes a run's last copy ends what its node had to do of it",
        "tierd/daemon/spool_observer.py",
        "            launches=own,\n",
        "",
        "pytest tests/daemon/test_spool_space.py -k last_copy_went",
    ),
    Mutant(
        "a tier that fails hides that another holds what a full disk asks for",
        "tierd/daemon/tiers/holders.py",
        "                    failure = error\n                    continue\n",
        "                    raise error\n",
        "pytest tests/daemon/test_spool_space.py -k 'first_of and fails'",
    ),
    Mutant(
        "a tier that stalls hides that another holds what a full disk asks for",
        "tierd/daemon/tiers/holders.py",
        "timeout=_NEXT if later else None",
        "timeout=None",
        "pytest tests/daemon/test_spool_space.py -k 'first_of and stalls'",
    ),
    Mutant(
        "who saved a run deletes nothing of it once its last copy went",
        "tierd/core/planning/janitor.py",
        "    if known and _saved_first(inventory, run) >= max(known):\n",
        "    if False:\n",
        "pytest tests/core/planning/test_eviction.py -k every_copy",
    ),
    Mutant(
        "a reader tidies up on a tier",
        "tierd/daemon/reconciling/records.py",
        "        saved = sorted((live.runs() - live.place.restored) | live.place.launches.keys())\n",
        "        saved = sorted(live.runs())\n",
        f"{_OWNED} -k not_a_readers_to_delete",
    ),
    Mutant(
        "a recorded default wins over what was given",
        _WHICH,
        'if one.given != "default" and one.retention)]',
        "if one.retention)]",
        f"{_OWNED} -k default_is_recorded",
    ),
    Mutant(
        "a policy that cannot be read is none",
        _WHICH,
        "if one.retention is None]\n    return lost",
        "if False]\n    return lost",
        f"{_OWNED} -k cannot_be_read",
    ),
    Mutant(
        "a damaged policy waits for the run's janitor, who is another node now",
        "tierd/daemon/tiers/run_policies.py",
        "(janitor or given in damaged)",
        "janitor",
        f"{_OWNED} -k repairs_its_own_damaged",
    ),
    Mutant(
        "a node that does not prune a run any more records its policy",
        "tierd/daemon/tiers/run_policies.py",
        "(janitor or given in damaged)",
        "True",
        f"{_OWNED} -k records_no_policy",
    ),
    Mutant(
        "a damaged default that nobody needs any more stays",
        "tierd/daemon/tiers/run_policies.py",
        'if "default" in damaged or (not wanted',
        "if (not wanted",
        f"{_OWNED} -k repairs_the_default",
    ),
    Mutant(
        "a daemon without a configuration goes by its default",
        _WHICH,
        "    return merged(given) or merged(",
        "    return merged(own) or DEFAULT or merged(",
        f"{_OWNED} -k obeys_what_lies_there",
    ),
    Mutant(
        "merged policies keep the least",
        "tierd/core/retention/policy.py",
        "keep_last=max(one.keep_last for one in found)",
        "keep_last=min(one.keep_last for one in found)",
        "pytest tests/core/retention/test_policy.py -k merg",
    ),
)

_PRUNES = (
    Mutant(
        "a chain of keep_every is cut while a tier does not answer where it may begin",
        "tierd/core/planning/verdicts.py",
        "    if demand.policy(name).every and (one in demand.whole or hoped):\n",
        "    if demand.policy(name).every and not (one in demand.whole or hoped):\n",
        "pytest tests/core/planning/test_demand.py -k may_begin",
    ),
    Mutant(
        "what was decided before the marks is deleted without asking again",
        "tierd/daemon/tiers/deletions.py",
        "            elif spared := await self._spared(found.shown):\n",
        "            elif spared := dict[CheckpointId, str]():\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py",
    ),
    Mutant(
        "a prune goes on although another node has begun a launch",
        "tierd/daemon/reconciling/pruner.py",
        "            if not {one.attempt for one in shown} <= known:\n",
        "            if {one.attempt for one in shown} < set():\n",
        "pytest tests/daemon/tiers/test_prune_confirmed.py -k another_node",
    ),
    Mutant(
        "small chunks are shared",
        "tierd/core/planning/sharing.py",
        "chunk.size >= SMALLEST_SHARED_BYTES",
        "chunk.size >= 1",
        "pytest tests/core/planning/test_sharing.py tests/daemon/transfer/test_sharing.py -k large_chunks",
        "1 MiB is the smallest",
    ),
    Mutant(
        "a chunk is shared without end",
        "tierd/core/planning/sharing.py",
        "if count >= MOST_SHARERS",
        "if count < 0",
        "pytest tests/daemon/transfer/test_sharing.py -k bound",
        "a chunk is named by",
    ),
    Mutant(
        "a pass of prunes looks before it marks",
        "tierd/daemon/tiers/deletions.py",
        "        await self.marks.put(self.to_delete | remembered)\n",
        "        await self.marks.put(set())\n",
        "pytest tests/daemon/tiers/test_pending_prunes.py -k marks_all",
    ),
    Mutant(
        "a pass of prunes reads its survivors again",
        "tierd/daemon/tiers/manifests.py",
        "        return read.borrowed.get(_mark(info)) if read else None",
        "        return None",
        "pytest tests/daemon/test_request_counts.py -k survivor_however",
        "a pass of prunes costs",
    ),
    Mutant(
        "a daemon at rest looks at every rescan",
        "tierd/core/planning/idle.py",
        "return max(rescan_s, requests * tiers * 3600 / REQUESTS_AN_HOUR)",
        "return rescan_s",
        "pytest tests/daemon/test_idle.py -k tiers0",
        "requests an hour",
    ),
    Mutant(
        "a daemon at rest forgets what is too young to be removed",
        "tierd/daemon/reconciling/agenda.py",
        "        if tiers.has_leftovers(worker.name):",
        "        if False:",
        "pytest tests/daemon/test_idle.py -k not_forgotten",
    ),
)

_ENDING = (
    Mutant(
        "a drain that left something counts as done",
        "tierd/cli/acting/act.py",
        "        raise typer.Exit(EXIT_UNFINISHED)  # the log says what is left",
        "        pass",
        "pytest tests/cli/test_ending.py -k sigterm_with_parts",
    ),
    Mutant(
        "what one tier has counts as on none",
        "tierd/core/planning/unflushed.py",
        "    nowhere = [one for one in left if not one.on]",
        "    nowhere = list(left)",
        "pytest tests/daemon/test_ending.py -k unfinished",
    ),
    Mutant(
        "a part lacks on no tier that does not answer",
        "tierd/core/planning/unflushed.py",
        "if (part, name) in wanted or (place is None and inventory.spool.lists(part))",
        "if (part, name) in wanted",
        "pytest tests/core/planning/test_unflushed.py -k did_not_answer",
    ),
    Mutant(
        "an idle daemon waits for a trainer that nobody announced",
        "tierd/daemon/service.py",
        "    while await_trainer and not control.seen",
        "    while not control.seen",
        "pytest tests/daemon/test_fs_events.py -k no_trainer_started",
    ),
    Mutant(
        "a daemon that ends with its container is trusted to flush",
        "tierd/client/outliving.py",
        "    return pid != 0 and namespace_ends_with_us()",
        "    return False",
        "pytest tests/client/test_closing.py -k other_end",
    ),
    Mutant(
        "nobody is told that no tier accepts checkpoints",
        "tierd/client/acceptance.py",
        "            looked = True\n",
        "            continue\n",
        "pytest tests/client/test_closing.py -k mistyped",
    ),
    Mutant(
        "a named tier is not waited for",
        "tierd/client/checkpointer.py",
        "                    closing.wait_for(wait, timeout)",
        "                    pass",
        "pytest tests/client/test_closing.py -k named_tier",
    ),
    Mutant(
        "a reload changes the spool",
        "tierd/daemon/reload.py",
        "        if config.spool != reconciler.config.spool:",
        "        if False:",
        "pytest tests/daemon/test_reload.py -k cannot_be_used",
    ),
    Mutant(
        "a restore is cut off from its stores by a reload",
        "tierd/daemon/reload.py",
        "        if working:\n",
        "        if False:\n",
        "pytest tests/daemon/test_reload.py -k under_way",
    ),
)

_DEMAND = "pytest tests/core/planning/test_demand.py"
_PLACES = (
    Mutant(
        "a tier deletes what another wants and lacks",
        "tierd/core/planning/verdicts.py",
        "    names = demand.waiting(name, one, seen, hoped=hoped) if seen else ()",
        "    names = ()",
        f"{_DEMAND} -k holds_what",
    ),
    Mutant(
        "what comes while a last copy is deleted hides that a tier wanted it",
        "tierd/core/planning/pruning.py",
        "    return replace(inventory, spool=rid(inventory.spool), tiers=tiers) if came else inventory\n",
        "    return inventory\n",
        f"{_DEMAND} -k what_came",
    ),
    Mutant(
        "what goes along with a last copy hides that a tier wanted it",
        "tierd/core/planning/pruning.py",
        "for one in (Demand(before, config, run), demand)]",
        "for one in (demand,)]",
        f"{_DEMAND} -k what_went",
    ),
    Mutant(
        "what was lost is asked by the world after the deletion alone",
        "tierd/daemon/reconciling/pruner.py",
        "        if names := lost_to(live.inventory(), before, self._setup.config, tier, seen):\n",
        "        if names := lost_to(live.inventory(), live.inventory(), self._setup.config, tier, seen):\n",
        "pytest tests/daemon/transfer/test_relay.py -k comes_while",
    ),
    Mutant(
        "rules that keep for good count from the oldest verified",
        "tierd/core/planning/verdicts.py",
        "        reasons = again.reasons if again.keep else demand.reasons(SPOOL, verdict.id)",
        "        reasons = ()",
        f"{_DEMAND} -k starts_at_the_oldest",
    ),
    Mutant(
        "a tier that does not answer lacks nothing",
        "tierd/core/planning/demand.py",
        "        if seen is None:\n            return True",
        "        if seen is None:\n            return place is not None",
        f"{_DEMAND} -k until_it_is_silent",
    ),
    Mutant(
        "time in which nobody asked a tier ends what is held for it",
        "tierd/daemon/tiers/tiers.py",
        "            self.mute.setdefault(tier, time.monotonic())",
        "            self.mute.setdefault(tier, self._since[tier])",
        "pytest tests/daemon/transfer/test_relay.py -k asked_in_vain",
    ),
    Mutant(
        "a slow tier is sent nothing but the newest",
        "tierd/core/planning/order.py",
        "    if sent is not None and sent.others**2 < len(good):",
        "    if False:",
        f"{_DEMAND} -k for_ever",
    ),
    Mutant(
        "a relay puts what it read without a look",
        "tierd/daemon/scrub/tier_repair.py",
        "    await to_the_end(check_stored, stored, data, run)",
        "    pass",
        "pytest tests/daemon/transfer/test_relay.py -k takes_what_is_wrong",
    ),
    Mutant(
        "a full tier is sent more before anything is deleted there",
        "tierd/core/planning/plan.py",
        "    return (*urgent, *actions)",
        "    return (*actions, *urgent)",
        f"{_DEMAND} -k full_tier",
    ),
)

_STATE, _ANY, _CAPTURE = (
    "pytest tests/state/test_flatten.py",
    "pytest tests/state/test_any_state.py -k near_misses",
    "pytest tests/state/test_capture.py",
)
_VALUES, _STRUCTURE = "tierd/state/values.py", "tierd/state/structure.py"
_CALL = "pytest tests/client/saving/test_call.py"
_STATES = (
    Mutant(
        "the tree is encoded by two threads",
        "tierd/client/saving/snapshot.py",
        "            if self._encoder.setdefault(None, me) is me:",
        "            if self._encoder.setdefault(None, me):",
        f"{_CALL} -k encoded_once",
    ),
    Mutant(
        "a step waits until a long list is encoded",
        "tierd/client/saving/snapshot.py",
        "        if not self.copies and self._is_soon:",
        "        if not self._events:",
        f"{_CALL} -k long_list",
    ),
    Mutant(
        "what changes is streamed behind training",
        "tierd/client/saving/pipeline.py",
        "            if snapshot.returned:  # the daemon",
        "            if False:  # the daemon",
        f"{_CALL} -k gone_meanwhile",
    ),
    Mutant(
        "buffers are copied late",
        "tierd/client/saving/snapshot.py",
        "            tensors[name] = tensors[name].clone()\n",
        "            pass\n",
        f"{_CALL} -k no_other_thread",
    ),
    Mutant(
        "a slice of anything is stored",
        _VALUES,
        "        if part is not None and type(part) is not int:\n",
        "        if type(part) not in SCALARS:\n",
        _ANY,
        "found out late",
    ),
    Mutant(
        "an expanded tensor is stored at any size",
        _VALUES,
        "return None if nbytes - span <= MOST_REPEATED else",
        "return None if True else",
        f"{_STATE} -k refused_by_path",
        "DID NOT RAISE",
    ),
    Mutant(
        "a broadcast array is stored at any size",
        _VALUES,
        "    if array.nbytes > MOST_REPEATED and not array.flags.forc:",
        "    if False:",
        f"{_STATE} -k refused_by_path",
    ),
    Mutant(
        "freed memory is read",
        _VALUES,
        "    if nbytes and tensor.storage_offset() * tensor.element_size() + span > there:",
        "    if False:",
        f"{_STATE} -k refused_by_path",
        "DID NOT RAISE",
    ),
    Mutant(
        "memory that was freed after the first save is read",
        "tierd/state/capture.py",
        "        if not self._extents.fit(tensors, others):",
        "        if False:",
        f"{_CAPTURE} -k freed_or_shrunk",
        "DID NOT RAISE",
    ),
    Mutant(
        "less memory at the same place is read",
        _STRUCTURE,
        "        pick = picker([*self._large, *moved])",
        "        pick = picker([*moved])",
        f"{_CAPTURE} -k less_memory",
        "DID NOT RAISE",
    ),
    Mutant(
        "every NaN is the same",
        "tierd/state/json_tree.py",
        '    return {"$float": str(value) if math.isinf(value) or bits == _NAN else bits}',
        '    return {"$float": str(value)}',
        f"{_STATE} -k plain_values",
        "nans",
    ),
    Mutant(
        "NumPy drops trailing NULs",
        _VALUES,
        "SCALARS[str](str.__str__(value))",
        "SCALARS[str](str(value))",
        f"{_STATE} -k numpy_scalars",
    ),
    Mutant(
        "targets that share memory are filled with whatever comes last",
        "tierd/state/load.py",
        "        found += shared.conflicts()\n",
        "",
        "pytest tests/state/test_aliasing.py -k tensors_that_share",
        "DID NOT RAISE",
    ),
    Mutant(
        "views of other strides are not looked at",
        "tierd/state/aliasing.py",
        "        yield from _painted(rest)\n",
        "        return\n",
        "pytest tests/state/test_aliasing.py -k tensors_that_share",
        "DID NOT RAISE",
    ),
    Mutant(
        "a view is compared only with the one before it",
        "tierd/state/aliasing.py",
        "            if write.end > farthest.end:\n",
        "            if True:\n",
        "pytest tests/state/test_aliasing.py -k tensors_that_share",
        "DID NOT RAISE",
    ),
    Mutant(
        "one list in two places takes what comes last",
        "tierd/state/aliasing.py",
        "if first is not saved and not alike(first, saved):",
        "if False:",
        "pytest tests/state/test_aliasing.py -k one_container",
        "DID NOT RAISE",
    ),
    Mutant(
        "an error is not imported from the package",
        "tierd/__init__.py",
        '    "TornSnapshot": "tierd.core.errors",\n',
        "",
        "pytest tests/test_imports.py -k users_catch",
    ),
    Mutant(
        "any object is a When",
        "tierd/client/schedule.py",
        "if when is not None and not isinstance(when, When):",
        "if False:",
        "pytest tests/end_to_end/test_run_policies.py -k each_argument",
    ),
    Mutant(
        "metrics are taken for a dict",
        "tierd/client/saving/save.py",
        "if not isinstance(metrics, Mapping):",
        "if False:",
        "pytest tests/client/test_checkpointer.py -k metrics_that_are_no_dict",
    ),
    Mutant(
        "rules are sorted before anybody looks what they are",
        "tierd/core/retention/policy.py",
        "        for best in map(_best, _several(self.keep_best)):\n",
        "        for best in _several(self.keep_best):\n",
        "pytest tests/end_to_end/test_run_policies.py -k each_argument",
    ),
    Mutant(
        "a generator is replaced, not set",
        "tierd/state/load.py",
        "        saved.set(target)\n        return target",
        "        return copy.deepcopy(saved, memo)",
        "pytest tests/state/test_load.py -k generator",
    ),
    Mutant(
        "a generator that nobody has is made",
        "tierd/state/load.py",
        "        if target is not None:\n            yield",
        "        if False:\n            yield",
        "pytest tests/state/test_load.py -k generator_that_does_not_fit",
        "DID NOT RAISE",
    ),
    Mutant(
        "True counts as 1 in a run",
        "tierd/state/kinds/packed_tensors.py",
        "        if set(map(type, window)) != {kind}:\n",
        "        if not set(map(type, window)) <= {kind, bool}:\n",
        "pytest tests/state/kinds/test_packed_tensors.py -k json",
    ),
    Mutant(
        "a string with a NUL in it is packed",
        "tierd/state/kinds/packed_tensors.py",
        "if text.count(_BETWEEN) >= len(parts):",
        "if text.count(_BETWEEN) > len(parts):",
        "pytest tests/state/kinds/test_packed_tensors.py -k json",
    ),
    Mutant(
        "a run says more than its tensor has",
        "tierd/state/kinds/packed_tensors.py",
        "not 0 <= size <= shape[0]",
        "not 0 <= size",
        "pytest tests/state/kinds/test_packed_tensors.py -k fit",
    ),
    Mutant(
        "a run has no room to grow",
        "tierd/state/kinds/packed_tensors.py",
        "step = max(_LINE, 1 << max(0, size.bit_length() - 6))",
        "step = _LINE",
        "pytest tests/state/kinds/test_packed_tensors.py -k grows",
    ),
    Mutant(
        "the state itself is packed",
        "tierd/state/encode.py",
        "return self.members(dict(state), ())",
        "return self.mapping(dict(state), ())",
        "pytest tests/state/kinds/test_packed_tensors.py -k itself",
    ),
    Mutant(
        "a dict that came to be a run stays JSON",
        "tierd/state/structure.py",
        "if any(pack(dicts[at]) for at in self._long_dicts):",
        "if False:",
        "pytest tests/state/kinds/test_packed_tensors.py -k comes_to_be",
    ),
    Mutant(
        "bytes that grew long stay JSON",
        "tierd/state/structure.py",
        "scalars = (*self._bytes_at, *others)",
        "scalars = others",
        "pytest tests/state/kinds/test_packed_tensors.py -k comes_to_be",
    ),
    Mutant(
        "a list that came to be a run stays JSON",
        "tierd/state/structure.py",
        "if pack_run(parts) or not is_run(parts)",
        "if not is_run(parts)",
        "pytest tests/state/kinds/test_packed_tensors.py -k comes_to_be",
    ),
    Mutant(
        "a deque that was packed forgets a new maxlen",
        "tierd/state/structure.py",
        "or _extra(value) != extra:\n            raise Doubt\n        if len(runs) > 1",
        "or False:\n            raise Doubt\n        if len(runs) > 1",
        "pytest tests/state/kinds/test_packed_tensors.py -k maxlen",
    ),
    Mutant(
        "long bytes in a list become base64",
        "tierd/state/values.py",
        "if bytes in kinds and any(",
        "if False and any(",
        "pytest tests/state/kinds/test_packed_tensors.py -k tensor",
    ),
    Mutant(
        "one tensor is named by many runs",
        "tierd/state/json_tree.py",
        "        self.claim(stored)\n        self._values += packed_tensors.count",
        "        self._values += packed_tensors.count",
        "pytest tests/state/kinds/test_packed_tensors.py -k one_tensor",
    ),
    Mutant(
        "values in runs are not counted by a reader",
        "tierd/state/json_tree.py",
        "if reason := tree_budget.excess_of_runs(self._values):",
        "if reason := tree_budget.excess_of_runs(0):",
        "pytest tests/state/kinds/test_packed_tensors.py -k more_values",
    ),
    Mutant(
        "values in runs are not counted by a save",
        "tierd/state/values.py",
        "if reason := tree_budget.excess_of_runs(sum(counts)):",
        "if reason := tree_budget.excess_of_runs(0):",
        "pytest tests/state/kinds/test_packed_tensors.py -k more_values",
    ),
    Mutant(
        "a packed dict of colliding keys is read",
        "tierd/state/json_tree.py",
        "    if kinds != {str}:\n",
        "    if False:\n",
        "pytest tests/state/kinds/test_packed_tensors.py -k one_hash",
    ),
    Mutant(
        "a packed dict of colliding keys is saved",
        "tierd/state/encode.py",
        'if keys.kind != "str":',
        'if keys.kind == "none":',
        "pytest tests/state/kinds/test_packed_tensors.py -k one_hash",
    ),
    Mutant(
        "a packed dict of colliding keys is saved by the structure",
        "tierd/state/structure.py",
        'if len(runs) > 1 and runs[0].kind != "str":',
        "if False:",
        "pytest tests/state/kinds/test_packed_tensors.py -k one_hash",
    ),
    Mutant(
        "few hashes are taken for many",
        "tierd/state/tree_budget.py",
        "len(set(map(hash, keys))) > len(keys) - MOST_ALIKE",
        "len(set(map(hash, keys))) > 1",
        "pytest tests/state/test_tree_budget.py -k among_others",
    ),
    Mutant(
        "a list that an object is given is the checkpoint's",
        "tierd/state/load.py",
        "memo[id(inner)] = inner if type(inner) is tuple else inner.copy()",
        "memo[id(inner)] = inner",
        "pytest tests/state/kinds/test_packed_tensors.py -k its_own",
    ),
    Mutant(
        "an added tensor takes the name of another",
        "tierd/state/capture.py",
        "if not stands_so or name_of(path) in names or tensor.data_ptr() in known:",
        "if not stands_so or tensor.data_ptr() in known:",
        "pytest tests/state/test_added.py -k special",
    ),
    Mutant(
        "an added tensor that is tied is stored twice",
        "tierd/state/capture.py",
        "name_of(path) in names or tensor.data_ptr() in known:",
        "name_of(path) in names:",
        "pytest tests/state/test_added.py -k tied",
    ),
    Mutant(
        "an added complex tensor is named as a plain one",
        "tierd/state/capture.py",
        "stands_so = tensor.dtype not in STORED_AS and",
        "stands_so =",
        "pytest tests/state/test_added.py -k special",
    ),
    Mutant(
        "an added key may be a tag",
        "tierd/state/capture.py",
        "simple = parent.end >= 0 and is_name(key) and",
        "simple = parent.end >= 0 and",
        "pytest tests/state/test_added.py -k special",
    ),
    Mutant(
        "names behind an added one keep their numbers",
        "tierd/state/capture.py",
        "                one.index += 1\n",
        "                one.index += 0\n",
        "pytest tests/state/test_added.py -k additions",
    ),
    Mutant(
        "the next added tensor stands before the last",
        "tierd/state/capture.py",
        "if one.end >= end:",
        "if one.end > end:",
        "pytest tests/state/test_added.py -k one_more",
    ),
    Mutant(
        "an added tensor never moves",
        "tierd/state/capture.py",
        "moved = moving(optimizers, added)",
        "moved = moving([], added)",
        "pytest tests/state/test_added.py -k optimizer",
    ),
    Mutant(
        "an added tensor lies last in its file",
        "tierd/state/tensor_file.py",
        "bisect.insort(self._described, _describe(name, tensor, moving), key=_place_of)",
        "self._described.append(_describe(name, tensor, moving))",
        "pytest tests/state/test_added.py -k grew",
    ),
    Mutant(
        "an added tensor may change its form",
        "tierd/state/structure.py",
        "if fits and all(_look(tensors[index]) == self._forms[index] for index in self._alone):",
        "if fits:",
        "pytest tests/state/test_added.py -k change_of",
    ),
    Mutant(
        "a state that grows gets new memory at each save",
        "tierd/client/saving/slots.py",
        "roomy = size + size // _GROWTH",
        "roomy = size",
        "pytest tests/state/test_added.py -k grows",
    ),
    Mutant(
        "a generator's state is not among an entry's tensors",
        "tierd/state/json_tree.py",
        'NAMING = ("$tensor", "$view", "$array", "$generator", "$values")',
        'NAMING = ("$tensor", "$view", "$array", "$values")',
        "pytest tests/client/restoring/test_only.py -k generators",
    ),
    Mutant(
        "a target of a few bits is copied by torch",
        _VALUES,
        "    if target.dtype in SHELLS:",
        "    if False:",
        "pytest tests/state/test_load.py -k few_bits",
        "not implemented",
    ),
    Mutant(
        "what is too large has no name",
        "tierd/state/paths.py",
        "        if not shares or (path and 2 * shares[part] <= whole):",
        "        if True:",
        f"{_STATE} -k too_large",
    ),
    Mutant(
        "nobody decodes what was encoded",
        "tierd/client/saving/pipeline.py",
        "        snapshot.capture.check(snapshot.tree)\n        given",
        "        given",
        "pytest tests/state/test_decodable.py -k would_not_come_back",
        "DID NOT RAISE",
    ),
    Mutant(
        "values are not decoded where the structure is known",
        "tierd/state/decodable.py",
        "        if self._known is None:\n            self._known = self._decode_structure()\n",
        "        if self._known is not None:\n            return\n        self._known = self._decode_structure()\n",
        "pytest tests/state/test_decodable.py -k by_its_path",
        "DID NOT RAISE",
    ),
)

_BUDGET = "pytest tests/state/test_tree_budget.py"
_BUDGETS = (
    Mutant(
        "a tree is built before anybody counts what it holds",
        "tierd/state/json_tree.py",
        "    if reason := tree_budget.excess(text):",
        "    if reason := '':",
        f"{_BUDGET} -k deques",
    ),
    Mutant(
        "some entries of a tree have no budget",
        "tierd/client/restoring/entries.py",
        "json.loads(tree_text(tree))",
        "json.loads(str(tree, 'utf-8'))",
        f"{_BUDGET} -k save_takes",
        "DID NOT RAISE",
    ),
    Mutant(
        "a save takes more than a restore",
        "tierd/state/values.py",
        "    if reason := tree_budget.excess(whole):",
        "    if reason := '':",
        f"{_BUDGET} -k too_many_values",
    ),
    Mutant(
        "an escaped quote ends a string",
        "tierd/state/tree_budget.py",
        """.replace('\\\\"', "")""",
        "",
        f"{_BUDGET} -k in_strings",
    ),
    Mutant(
        "keys that collide are compared with each other",
        "tierd/state/json_tree.py",
        "    if most := tree_budget.alike(keys):",
        "    if most := 0:",
        f"{_BUDGET} -k one_hash",
        "DID NOT RAISE",
    ),
    Mutant(
        "keys that no restore takes are saved",
        "tierd/state/encode.py",
        "            check_alike([key for key, _ in pairs], path)\n",
        "",
        f"{_BUDGET} -k one_hash",
    ),
    Mutant(
        "members that no restore takes are saved",
        _VALUES,
        "        check_alike(found := list(value), path)\n",
        "        found = list(value)\n",
        f"{_BUDGET} -k one_hash",
    ),
    Mutant(
        "one tensor becomes any number of arrays",
        "tierd/state/json_tree.py",
        "        if id(stored) in self._claimed:",
        "        if False:",
        f"{_BUDGET} -k of_its_own",
        "DID NOT RAISE",
    ),
)

_PLANTED, _TABLES = "pytest tests/end_to_end/test_planted_names.py", "tierd/cli/tables.py"
_SHOWN = (
    Mutant(
        "a terminal obeys C1 controls in names",
        "tierd/core/printable.py",
        '    return one.isprintable() or category(one) == "Zs"',
        '    return one.isprintable() or category(one) in ("Zs", "Cc")',
        "pytest tests/core/test_printable.py",
    ),
    Mutant(
        "tables show names as they are",
        _TABLES,
        "[[*map(printable, row)] for row in rows]",
        "[[*row] for row in rows]",
        f"{_PLANTED} -k no_command",
    ),
    Mutant(
        "lines show names as they are",
        _TABLES,
        "[printable(one) if isinstance(one, str) else one for one in objects]",
        "objects",
        f"{_PLANTED} -k no_command",
    ),
    Mutant(
        "names are markup",
        _TABLES,
        "markup=False, emoji=False",
        "emoji=False",
        f"{_PLANTED} -k no_command",
    ),
    Mutant(
        "JSON shows names as they are",
        _TABLES,
        "printable_json(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())",
        "msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()",
        f"{_PLANTED} -k no_command",
    ),
    Mutant(
        "errors show names as they are",
        "tierd/core/errors.py",
        "        return printable_lines(super().__str__())",
        "        return super().__str__()",
        f"{_PLANTED} -k trainer_sees",
    ),
    Mutant(
        "the log shows names as they are",
        "tierd/logs.py",
        "        logging.getLogger(name).addFilter(escape)",
        "        pass",
        f"{_PLANTED} -k every_logger",
    ),
    Mutant(
        "receivers are told names as they are",
        "tierd/events/journal.py",
        "        why = printable(why)  # here,",
        "        why = why  # here,",
        f"{_PLANTED} -k systemd",
    ),
    Mutant(
        "a line feed in a status is another message to systemd",
        "tierd/daemon/systemd.py",
        "printable(state).encode()",
        "state.encode()",
        f"{_PLANTED} -k systemd",
    ),
)

_MANY, _LINES = "pytest tests/client/saving/test_many_connections.py", "tierd/daemon/handoff_lines.py"
_CROWDS = (
    Mutant(
        "as many threads as anybody connects",
        _LINES,
        "    if len(counted) < MOST:",
        "    if True:",
        f"{_MANY} -k refused_by_name",
    ),
    Mutant(
        "idle connections keep their places",
        _LINES,
        "    if not idle:",
        "    if True:",
        f"{_MANY} -k beside_a_crowd",
    ),
    Mutant(
        "who lent something gives way as soon as who did not",
        _LINES,
        "(bool(line.arenas), line.heard)",
        "(not line.arenas, line.heard)",
        f"{_MANY} -k gives_way_last",
    ),
    Mutant(
        "who gives way counts as dead",
        _LINES,
        "        self.left = self.ending = True",
        "        self.ending = True",
        f"{_MANY} -k gives_way_last",
    ),
    Mutant(
        "a thread that cannot be had ends the hand-off",
        "tierd/daemon/handoff.py",
        "        except RuntimeError as error:  # no more threads",
        "        except FileNotFoundError as error:  # no more threads",
        f"{_MANY} -k cannot_be_had",
    ),
    Mutant(
        "the unit has fewer threads than a large node needs",
        "systemd/tierd.service",
        "TasksMax=2048",
        "TasksMax=512",
        "pytest tests/system/test_unit.py -k bounds_memory",
    ),
    Mutant(
        "a trainer says nothing of a refusal",
        "tierd/client/saving/handoff.py",
        "            if isinstance(error, TierdError) and str(error) != self._warned:",
        "            if isinstance(error, VersionMismatch) and str(error) != self._warned:",
        f"{_MANY} -k beside_a_crowd",
    ),
)

_BESIDE, _TWO = "pytest tests/core/timeline/test_launches.py", "pytest tests/end_to_end/test_two_launches.py"
_LEASE = "pytest tests/spool/test_leases.py"
_LAUNCHES = (
    Mutant(
        "a later launch retires what an earlier one that lives has saved",
        "tierd/core/retention/policy.py",
        "            if alone.keep:",
        "            if False:",
        f"{_BESIDE} -k says_why_it_stays",
    ),
    Mutant(
        "the quick answer forgets the launches that live beside a later one",
        "tierd/core/retention/policy.py",
        "return frozenset(found).union(*(alone.kept for alone in self._alone.values()))",
        "return frozenset(found)",
        "pytest tests/core/planning/test_planner.py -k what_each_verdict_keeps",
    ),
    Mutant(
        "a tier lacks what a launch that lives has saved beside a later one",
        "tierd/core/planning/demand.py",
        "self._living[place] = living(self.inventory, self.run, place)",
        "self._living[place] = living(self.inventory, self.run, place) if place == 'local' else frozenset()",
        f"{_BESIDE} -k sent_there",
    ),
    Mutant(
        "another node's launch that goes on counts as ended",
        "tierd/core/timeline/launches.py",
        "if newest.get(one, 0.0) > _launched(latest))",
        "if False)",
        f"{_BESIDE} -k spares_an_earlier_one",
    ),
    Mutant(
        "ranks of one launch that restored are taken for two launches",
        "tierd/core/timeline/launches.py",
        "return any(other.rank == one.rank and other.attempt",
        "return any(other.attempt",
        f"{_BESIDE} -k that_restored_are_not",
    ),
    Mutant(
        "a trainer does not show that it lives",
        "tierd/client/ranks/launch.py",
        "        self._saving(part)",
        "        pass",
        f"{_TWO} -k both_are_warned",
    ),
    Mutant(
        "nobody tells of two launches",
        "tierd/events/notices.py",
        "if not told[run] <= self._beside.get(run, frozenset()):",
        "if False:",
        f"{_TWO} -k both_are_warned",
    ),
    Mutant(
        "a Checkpointer that saves again takes the lease of the one that took its own",
        "tierd/client/ranks/other_launches.py",
        "among=former is not None and not shown)",
        "among=False)",
        f"{_LEASE} -k in_turns",
    ),
    Mutant(
        "a Checkpointer that nobody closed keeps its lease",
        "tierd/spool/leases.py",
        "if one == owner or not among]",
        "if one == owner]",
        f"{_LEASE} -k nobody_closed",
    ),
    Mutant(
        "a Checkpointer that lost its lease does not notice",
        "tierd/client/ranks/other_launches.py",
        "        if shown and former and former",
        "        if former and former",
        f"{_LEASE} -k in_turns",
    ),
    Mutant(
        "a second process that saves one attempt is only logged",
        "tierd/client/ranks/other_launches.py",
        "            if isinstance(error, ConfigError):",
        "            if False:",
        f"{_LEASE} -k refused_until",
    ),
    Mutant(
        "the lease of a launch on another node never ends",
        "tierd/core/timeline/launches.py",
        "return now_s - made[-1] > max(LEASE_S, _INTERVALS * between)",
        "return False",
        f"{_BESIDE} -k lease_of_a_launch",
    ),
    Mutant(
        "a launch that saves seldom counts as ended",
        "tierd/core/timeline/launches.py",
        "max(LEASE_S, _INTERVALS * between)",
        "LEASE_S",
        f"{_BESIDE} -k lease_of_a_launch",
    ),
    Mutant(
        "two nodes that save one attempt are not told",
        "tierd/core/timeline/launches.py",
        "if any(one.attempt == other and _is_foreign(inventory, one.rank, seen) for one in here):",
        "if False:",
        f"{_BESIDE} -k same_attempt_is_seen",
    ),
    Mutant(
        "what a node gave up is taken for another node's",
        "tierd/core/timeline/launches.py",
        "return newest is not None and newest.created < theirs.created",
        "return True",
        f"{_BESIDE} -k gave_up",
    ),
    Mutant(
        "a forked worker keeps its dead trainer alive",
        "tierd/spool/leases.py",
        "os.register_at_fork(after_in_child=_forget_in_child)",
        "pass",
        f"{_TWO} -k forked_child",
    ),
)

_MOVED = "pytest tests/spool/test_links.py"
_WAYS = (
    Mutant(
        "a run's linked directory is no directory",
        "tierd/spool/local_parts.py",
        "                found.append(name)\n",
        "                continue\n",
        f"{_MOVED} -k linked_is_followed",
    ),
    Mutant(
        "a link by way of what others may replace is followed",
        "tierd/spool/permissions.py",
        "why = _unsafe(link.parent.resolve() / link.name) or _unfit(link)",
        "why = _unfit(link)",
        f"{_MOVED} -k others_may_replace",
    ),
    Mutant(
        "a link to what others may write to is followed",
        "tierd/spool/permissions.py",
        "    if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP):\n",
        "    if False:\n",
        f"{_MOVED} -k others_may_write",
    ),
    Mutant(
        "a save goes through any link",
        "tierd/spool/spool.py",
        "        self.check_way(part.checkpoint.run)\n        if self.path(part)",
        "        if self.path(part)",
        f"{_MOVED} -k leads_nowhere",
    ),
    Mutant(
        "a link inside a run hides a checkpoint",
        "tierd/spool/local_parts.py",
        "        for link in inside:\n",
        "        for link in ():\n",
        f"{_MOVED} -k inside_a_run",
    ),
    Mutant(
        "a checkpoint that was removed was never there",
        "tierd/client/restoring/search.py",
        "        doubtful |= dict.fromkeys(resume.gone, GONE)\n",
        "",
        f"{_MOVED} -k removed_is_among",
    ),
    Mutant(
        "a commit is not remembered",
        "tierd/spool/stage.py",
        "        self._committed()\n",
        "",
        f"{_MOVED} -k removed_is_among",
    ),
)

_AROUND = "pytest tests/end_to_end/test_surroundings.py"
_SURROUNDINGS = (
    Mutant(
        "a spool's path that JSON cannot say is taken",
        "tierd/spool/spool.py",
        "        check_name(self.root)\n",
        "",
        f"{_AROUND} -k no_utf8",
    ),
    Mutant(
        "what the locale cannot write ends a command",
        "tierd/__main__.py",
        'errors="backslashreplace"',
        'errors="strict"',
        f"{_AROUND} -k plain_c_locale",
    ),
    Mutant(
        "a daemon's threads take all of a limited address space",
        "tierd/daemon/service.py",
        "    spare_address_space()\n",
        "",
        f"{_AROUND} -k 700_mb",
    ),
    Mutant(
        "that there are no more threads is a traceback",
        "tierd/cli/__init__.py",
        "if not errors.is_exhausted(error):",
        "if True:",
        f"{_AROUND} -k one_line",
    ),
    Mutant(
        "a spool's files are what the umask makes them",
        "tierd/spool/file_io.py",
        "self._fd = os.open(path, flags, 0o600) if over is None else over",
        "self._fd = os.open(path, flags, 0o666) if over is None else over",
        f"{_AROUND} -k nobody_else_gets_at",
    ),
    Mutant(
        "a stage's directory is what the umask makes it",
        "tierd/spool/stage.py",
        "        path.mkdir(mode=0o700, exist_ok=True)\n",
        "        path.mkdir(exist_ok=True)\n",
        f"{_AROUND} -k nobody_else_gets_at",
    ),
    Mutant(
        "a tier's files are whatever its root is",
        "tierd/stores/file.py",
        "(mode & 0o070 if mode & stat.S_ISGID else 0)",
        "(mode & 0o077)",
        f"{_AROUND} -k nobody_else_gets_at",
    ),
    Mutant(
        "a group that shares a tier cannot read it",
        "tierd/stores/file.py",
        "(mode & 0o070 if mode & stat.S_ISGID else 0)",
        "0",
        f"{_AROUND} -k group_shares",
    ),
)

_CHECKED = (
    Mutant(
        "a check does not read what a receiver refers to",
        "tierd/cli/acting/act.py",
        "        stores, _ = await open_all(config, stack, trial=True)",
        "        stores = await open_tiers(config, stack, trial=True)",
        "pytest tests/cli/test_config_check.py -k one_verdict",
    ),
)

_FIRST = (
    Mutant(
        "a tier deletes before the spool what another tier may still want",
        "tierd/core/planning/pruning.py",
        "    if None in inventory.tiers.values():\n",
        "    if False:\n",
        "pytest tests/core/planning/test_plan.py -k frees_a_copy_before",
    ),
)

_DCP, _PICKLED = "pytest tests/dcp/test_metadata.py", "tierd/core/pickled.py"
_METADATA = (
    Mutant(
        "metadata may name anything",
        _PICKLED,
        "        if found is None:\n",
        "        if False:\n",
        f"{_DCP} -k refused_by_name",
    ),
    Mutant(
        "metadata gives members to what it names",
        _PICKLED,
        "        if type(target) is not PickledInstance or target.state is not None:\n",
        "        if type(target) is Named:\n            return None\n        if False:\n",
        f"{_DCP} -k change_what_it_names",
    ),
    Mutant(
        "metadata gives members to an instance twice",
        _PICKLED,
        "if type(target) is not PickledInstance or target.state is not None:",
        "if type(target) is not PickledInstance:",
        f"{_DCP} -k members_once",
    ),
    Mutant(
        "tuples in metadata may be of any depth",
        _PICKLED,
        "            if level > _LEVELS:\n",
        "            if False:\n",
        f"{_DCP} -k hang_or_kill",
    ),
    Mutant(
        "metadata may make a container of every byte",
        _PICKLED,
        "        if self._left < 0:\n",
        "        if False:\n",
        f"{_DCP} -k hang_or_kill",
    ),
    Mutant(
        "metadata may name more bytes than it has",
        _PICKLED,
        "        if len(found) != size:\n",
        "        if False:\n",
        f"{_DCP} -k hang_or_kill",
    ),
    Mutant(
        "keys in metadata may share a hash",
        "tierd/dcp/metadata.py",
        "            if any(one == other for one, other in zip(hashes, hashes[_SAME:], strict=False)):\n",
        "            if False:\n",
        f"{_DCP} -k hang_or_kill",
    ),
    Mutant(
        "what only a newer torch knows of an entry is dropped",
        "tierd/dcp/metadata.py",
        '        if len(fitting) < len(members) and members["transform_descriptors"]:\n',
        "        if False:\n",
        f"{_DCP} -k each_torch",
        "DID NOT RAISE",
    ),
)

_WAKING = (
    Mutant(
        "what a rank commits while other parts are freed is out of sight",
        "tierd/daemon/reconciling/pruner.py",
        "live.place = live.place.without_parts(parts)",
        "live.place = live.place.without(checkpoint)",
        "pytest tests/daemon/test_reconcile.py -k stays_in_sight",
    ),
    Mutant(
        "the end of a daemon waits for the next trainer, or the next look",
        "tierd/daemon/handoff.py",
        "os.eventfd_write(wake, 1)",
        "pass",
        "pytest tests/daemon/test_control.py -k ends_at_once",
    ),
    Mutant(
        "what a tier is seen to hold frees the spool only at the next rescan",
        "tierd/daemon/reconcile.py",
        "self.workers[SPOOL].wake.set()",
        "pass",
        "pytest tests/daemon/test_pause.py -k paused_a_tier_is_not_pruned",
    ),
)

_HEADS = (
    Mutant(
        "where a launch came from is told by manifests alone",
        "tierd/core/planning/inventory.py",
        "        for attempt, known in self.remembered(run).items():\n",
        "        for attempt, known in ():\n",
        "pytest tests/end_to_end/test_heads.py -k not_all_that_tells",
    ),
    Mutant(
        "what vanished from every place is not missed",
        "tierd/core/timeline/run_view.py",
        "    if lost := inventory.gone(run):\n",
        "    if (lost := inventory.gone(run)) and False:\n",
        "pytest tests/end_to_end/test_heads.py -k lost_everything_but_its_head",
    ),
    Mutant(
        "a name of which nothing can be read decides what is newest",
        "tierd/core/timeline/chain.py",
        "    newest = max(origins or steps, default=None)\n",
        "    newest = max(steps, default=None)\n",
        "pytest tests/end_to_end/test_heads.py -k without_a_head",
    ),
    Mutant(
        "names that cannot be read decide how many ranks there were",
        "tierd/core/timeline/candidates.py",
        "        hollow = {one for one in hollow if complete[one] != world}\n",
        "        hollow = set()\n",
        "pytest tests/core/timeline/test_candidates.py -k stop_nobody",
    ),
    Mutant(
        "a name of another number of ranks hides the one that can be read",
        "tierd/core/timeline/run_view.py",
        "            size = min([size for size in sizes if size not in bare] or sizes)\n",
        "            size = min(sizes)\n",
        "pytest tests/core/timeline/test_candidates.py -k stop_nobody",
    ),
    Mutant(
        "one number of ranks that cannot be read hides another",
        "tierd/core/timeline/run_view.py",
        "_pairs(found) for size, found in sorted(ranks.items()) if size not in sizes}\n            parts",
        "_pairs(found) for size, found in sorted(ranks.items())}\n            parts",
        "pytest tests/core/timeline/test_candidates.py -k stop_nobody",
    ),
    Mutant(
        "a name uses up the numbers of launches",
        "tierd/core/ids.py",
        "    latest = max((at for attempt in seen if (at := int(attempt[:12], 16)) <= most), default=-1)\n",
        "    latest = max((at for attempt in seen if (at := int(attempt[:12], 16)) < most << 9), default=-1)\n",
        "pytest tests/core/test_ids.py -k uses_up",
    ),
    Mutant(
        "a name that lies a century ahead is a checkpoint",
        "tierd/core/ids.py",
        "        if match is None or int(match[2][:12], 16) >= LATEST_MS or not _RUN.fullmatch(run):\n",
        "        if match is None or not _RUN.fullmatch(run):\n",
        "pytest tests/core/test_ids.py -k a_century_ahead",
    ),
    Mutant(
        "a run that is remembered begins anew",
        "tierd/client/restoring/search.py",
        "any(one.reason != INCOMPLETE for one in skipped):\n",
        "any(one.reason not in (INCOMPLETE, GONE) for one in skipped):\n",
        "pytest tests/end_to_end/test_heads.py -k no_fresh_start",
    ),
    Mutant(
        "what the caller knows is not asked",
        "tierd/client/restoring/search.py",
        "                if at_least is not None and one.step < at_least:\n",
        "                if False:\n",
        "pytest tests/end_to_end/test_heads.py -k says_so",
    ),
    Mutant(
        "what is too old ends the search",
        "tierd/client/restoring/search.py",
        "                    old = old or one\n                    continue\n",
        "                    raise self._too_old(at_least, one)\n",
        "pytest tests/end_to_end/test_heads.py -k too_old_hides",
    ),
    Mutant(
        "a spool that nothing else is left in remembers nothing",
        "tierd/daemon/spool_observer.py",
        "            heads=heads(control),\n",
        "            heads={run: one for run, one in heads(control).items() if run in newest | own},\n",
        "pytest tests/end_to_end/test_heads.py -k whatever_else",
    ),
    Mutant(
        "without a daemon heads are not read",
        "tierd/client/restoring/source.py",
        "            remembered = heads(self._spool.control)\n",
        "            remembered = {}\n",
        "pytest tests/end_to_end/test_heads.py -k without_a_daemon",
    ),
    Mutant(
        "heads of nodes that write no more stay on a tier",
        "tierd/daemon/tiers/heads.py",
        "        await clear(store, stale)\n",
        "        pass\n",
        "pytest tests/end_to_end/test_heads.py -k goes_on_elsewhere",
    ),
    Mutant(
        "a head forgets what it said",
        "tierd/core/timeline/head.py",
        "    steps = {attempt: one.newest for attempt, one in remembered.items()}\n",
        "    steps: dict[str, int | None] = {}\n",
        "pytest tests/end_to_end/test_heads.py -k never_goes_back",
    ),
    Mutant(
        "a launch that cannot be shown leaves the one before alive",
        "tierd/spool/leases.py",
        "for former in [one for one in owners if one == owner or not among]:",
        "for former in []:",
        "pytest tests/end_to_end/test_two_launches.py -k cannot_be_shown_yet",
    ),
    Mutant(
        "a record's place may hold a pipe",
        "tierd/spool/records.py",
        "_MARK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC",
        "_MARK = os.O_NOFOLLOW | os.O_CLOEXEC",
        "pytest tests/spool/test_records.py -k neither_waited",
    ),
    Mutant(
        "a rollback is followed and not told of",
        "tierd/core/timeline/head.py",
        "    if seen is None or (there and there.counter >= seen.counter):\n",
        "    if seen is None or there:\n",
        "pytest tests/end_to_end/test_heads.py -k told_of_once",
    ),
    Mutant(
        "a head that is just being replaced is a rollback",
        "tierd/daemon/tiers/heads.py",
        "    return rollback(last_of(now), seen)\n",
        "    return rollback(last_of(heads), seen)\n",
        "pytest tests/end_to_end/test_heads.py -k replaced_while",
    ),
    Mutant(
        "a rollback is told of at every look",
        "tierd/events/notices.py",
        "        if why and self._rolled_back.get((tier, run)) != why:\n",
        "        if why:\n",
        "pytest tests/end_to_end/test_heads.py -k while_it_stays",
    ),
    Mutant(
        "a head tells of a launch that nobody can have made",
        "tierd/core/timeline/head.py",
        "    if any(int(one[:12], 16) >= LATEST_MS for one in head.launches):\n",
        "    if False:\n",
        "pytest tests/end_to_end/test_heads.py -k nobody_can_have_made",
    ),
)

_PROOF = (
    Mutant(
        "a launch is stopped before its last state is there",
        "tierd/check/launches.py",
        "        if not rank.seen.ended:",
        "        if (rank.seen.last or 0) < self.steps:",
        "pytest tests/check/test_check_resume.py -k however_long",
    ),
    Mutant(
        "an earlier moment stands in for the last",
        "tierd/check/final.py",
        ' if key[1] == "end"), default=None)',
        "), default=None)",
        "pytest tests/check/test_states.py -k stands_in",
    ),
    Mutant(
        "a state past the last step is taken for its own",
        "tierd/check/child.py",
        'take(number, "end")',
        'take(self._steps, "end")',
        "pytest tests/check/test_check_resume.py -k past_the_last",
    ),
    Mutant(
        "what was restored is taken for what is trained with",
        "tierd/check/states.py",
        'form if key in kept else f"other {form}"',
        "form",
        "pytest tests/check/test_check_resume.py -k restores_into",
    ),
    Mutant(
        "values of saves of other steps are compared",
        "tierd/check/final.py",
        " and step != other_step)",
        " and False)",
        "pytest tests/check/test_states.py -k same_form",
    ),
    Mutant(
        "an entry of the state that only one run has is no difference",
        "tierd/check/final.py",
        "sorted(ours.keys() ^ theirs.keys())",
        "()",
        "pytest tests/check/test_states.py -k only_one_run",
    ),
    Mutant(
        "what two launches from the start do not agree on is a finding",
        "tierd/check/final.py",
        "if path in shaky or any(",
        "if any(",
        "pytest tests/check/test_states.py -k do_not_agree",
    ),
    Mutant(
        "what an uninterrupted run does to its samples as well is a leak",
        "tierd/check/leakage.py",
        "count > max(expected[one], 1)",
        "count > 1",
        "pytest tests/check/test_leakage.py -k uninterrupted_run_does",
    ),
    Mutant(
        "a repetition across a resume is not noticed",
        "tierd/client/sample_watch.py",
        'self._seen = set(state["seen"].tolist())',
        "self._seen = set()",
        "pytest tests/check/test_leakage.py -k resume_that_repeats",
    ),
    Mutant(
        "a tier always has caught up when training goes on",
        "tierd/core/advice/save_interval.py",
        "goodput(interval, costs) - backlog(interval, period, costs)",
        "goodput(interval, costs)",
        "pytest tests/core/advice/test_save_interval.py -k 200_drawn",
    ),
    Mutant(
        "a library's own error is not caught as what its documents say",
        "tierd/state/load.py",
        'if kind.__module__ == "builtins" or issubclass(StateMismatch, kind):',
        "if True:",
        "pytest tests/state/test_load.py -k own_error",
    ),
    Mutant(
        "a seed that a dataset's state names and does not restore need not fit",
        "tierd/state/kinds/loader_fingerprint.py",
        "return found | {where: found.get(where, {}) | facts for where, facts in kept.items()}",
        "return found",
        "pytest tests/state/kinds/test_shard_datasets.py -k is_named_before",
    ),
    Mutant(
        "a model is loaded before a dataset refuses its state",
        "tierd/state/load.py",
        "0 if loader_fingerprint.gives_samples(target) else 1",
        "1",
        "pytest tests/state/kinds/test_shard_datasets.py -k refused_before_a_model",
    ),
)

PLAIN = (
    _FIRST
    + _PROOF
    + _METADATA
    + _HEADS
    + _LAUNCHES
    + _CHECKED
    + _WAYS
    + _SURROUNDINGS
    + _PRUNES
    + _GUARDS
    + _ENCRYPTION
    + _DELETIONS
    + _DEATHS
    + _BUFFERS
    + _VERSIONS
    + _READING
    + PERMISSIONS
    + PREEMPTING
    + SHARDS
    + SPACE
    + TRANSFER
    + LINES
    + MEETINGS
    + MOVING
    + DEVICES
    + DEPLOYING
    + DOCTORING
    + _POLICIES
    + _ENDING
    + _PLACES
    + _STATES
    + _BUDGETS
    + _SHOWN
    + _CROWDS
    + _WAKING
    + WRITERS
    + WEB
    + IDENTITY
    + SUPPLY
    + INSPECTING
    + ELSEWHERE
    + TERMINALS
    + TAKING
    + ADAPTING
)
