"""Mutants of what S3 may refuse: what its answers mean, whose credentials they are, and what nobody may delete. And of
names that are nobody's."""

from __future__ import annotations

from faults.rounds import Mutant

_ANSWERS = "pytest tests/stores/s3/test_answers.py"
_DISOWN = "pytest tests/cli/test_disown.py"
_REACH = "pytest tests/daemon/tiers/test_reach.py"
_APPEND = "pytest tests/daemon/tiers/test_append_only.py"

PERMISSIONS = (
    Mutant(
        "an archived object is a matter of credentials",
        "tierd/stores/s3/answers.py",
        'if code == "InvalidObjectState":',
        "if False:",
        f"{_ANSWERS} -k archived",
    ),
    Mutant(
        "a busy KMS is not tried again",
        "tierd/stores/s3/answers.py",
        "if bare in _NOT_NOW or",
        "if code in _NOT_NOW or",
        f"{_ANSWERS} -k busy",
    ),
    Mutant(
        "manifests go where they cannot be read",
        "tierd/core/urls.py",
        'if name == "storage_class" and value in _ARCHIVES:',
        "if False:",
        f"{_ANSWERS} -k read_at_once",
    ),
    Mutant(
        "TLS that is missing is a server that does not answer",
        "tierd/stores/s3/answers.py",
        "if isinstance(one, ssl.SSLError) and any(word in _reason(one) for word in _NO_TLS):",
        "if False:",
        f"{_ANSWERS} -k without_tls",
    ),
    Mutant(
        "a bundle that is missing is a server that does not answer",
        "tierd/stores/s3/s3_store.py",
        "await check_bundle(session)",
        "pass",
        f"{_ANSWERS} -k bundle",
    ),
    Mutant(
        "credentials are found once and for all",
        "tierd/stores/s3/credentials.py",
        "if known != self._known:",
        "if not self.generation:",
        f"{_ANSWERS} -k replaced",
    ),
    Mutant(
        "credentials that come late are not looked for",
        "tierd/stores/s3/credentials.py",
        "if self._found is None:\n            await self.renew()",
        "if self._found is None and not self._looked_at > 0:\n            await self.renew()",
        f"{_ANSWERS} -k come_after",
    ),
    Mutant(
        "the chain is looked at for every request",
        "tierd/stores/s3/credentials.py",
        "if time.monotonic() - self._looked_at < _PAUSE_S:",
        "if False:",
        f"{_ANSWERS} -k seldom",
    ),
    Mutant(
        "a flush whose intent cannot be deleted has failed",
        "tierd/stores/base.py",
        "    except DeleteRefused:\n        pass",
        "    except DeleteRefused:\n        raise",
        f"{_APPEND} -k reaches",
    ),
    Mutant(
        "what cannot be deleted is pruned again and again",
        "tierd/core/planning/pruning.py",
        "if tier is None or name in inventory.append_only or not is_janitor(inventory, tier, run):",
        "if tier is None or not is_janitor(inventory, tier, run):",
        f"{_APPEND} -k nobody_asks",
    ),
    Mutant(
        "a mark is put that nobody can delete",
        "tierd/daemon/tiers/tiers.py",
        'await self._guards[tier].check(f"{pruning_prefix(run)}none")',
        "pass",
        f"{_APPEND} -k nobody_asks",
    ),
    Mutant(
        "a policy that cannot be replaced stops all flushes",
        "tierd/daemon/tiers/tiers.py",
        "            if not self.refusal(tier):\n                raise",
        "            if True:\n                raise",
        f"{_APPEND} -k replaced",
    ),
    Mutant(
        "a person puts a mark that nobody can delete",
        "tierd/cli/acting/prune.py",
        'await guard.check(f"{pruning_prefix(one)}none")',
        "pass",
        f"{_APPEND} -k leaves_no_mark",
    ),
    Mutant(
        "a mark stays where checkpoints cannot be deleted",
        "tierd/daemon/tiers/prune.py",
        "marks.begun = False  #",
        "#",
        f"{_APPEND} -k nobody_asks",
    ),
    Mutant(
        "a refusal is believed for ever",
        "tierd/stores/deletions.py",
        "self._until |= dict.fromkeys(sorts, time.monotonic() + _AGAIN_S)",
        'self._until |= dict.fromkeys(sorts, float("inf"))',
        f"{_APPEND} -k again_later",
    ),
    Mutant(
        "what a refused deletion left is forgotten when another one succeeds",
        "tierd/daemon/tiers/tiers.py",
        "        if guard.has_left:  #",
        "        if guard.refused:  #",
        f"{_APPEND} -k a_refusal_left",
    ),
    Mutant(
        "a restore fails over what cannot be set aside",
        "tierd/daemon/scrub/repairer.py",
        "            with suppress(DeleteRefused):\n                await quarantine(stores[name], part)",
        "            await quarantine(stores[name], part)",
        f"{_APPEND} -k restore_goes_on",
    ),
    Mutant(
        "a head is written again and again because others' cannot go",
        "tierd/daemon/tiers/tiers.py",
        "if self.refusal(tier) and said == [head.launches]:",
        "if False:",
        f"{_APPEND} -k head",
    ),
    Mutant(
        "what was put to try a tier out is left there",
        "tierd/daemon/tiers/reach.py",
        "            await clear(store, [key])",
        "            pass",
        f"{_REACH} -k leaves_nothing",
    ),
    Mutant(
        "a tier that gives back something else is read-write",
        "tierd/daemon/tiers/reach.py",
        " and octets(found) == octets(data):",
        ":",
        f"{_REACH} -k comes_back",
    ),
    Mutant(
        "a lock on objects is not noticed",
        "tierd/daemon/tiers/reach.py",
        "        if not any([info.key == key async for info in store.scan(key)]):",
        "        if True:",
        f"{_REACH} -k lock",
    ),
    Mutant(
        "a tier that takes nothing passes the check",
        "tierd/cli/acting/act.py",
        'any(one.mode in (None, "read-only") for one in reached.values()):',
        "any(one.mode is None for one in reached.values()):",
        f"{_REACH} -k command",
    ),
    Mutant(
        "a hasty yes deletes what can be read",
        "tierd/cli/acting/disown.py",
        "    if readable:\n",
        "    if False:\n",
        f"{_DISOWN} -k might_read",
    ),
    Mutant(
        "what a newer tierd reads is garbage",
        "tierd/daemon/tiers/disown.py",
        "except (ObjectNotFound, ManifestError):",
        "except (ObjectNotFound, ManifestError, FormatTooNew):",
        f"{_DISOWN} -k might_read",
    ),
    Mutant(
        "another launch's names are disowned as well",
        "tierd/daemon/tiers/disown.py",
        "if owner is None or owner.attempt != attempt:",
        "if owner is None:",
        f"{_DISOWN} -k no_other",
    ),
    Mutant(
        "a launch of this node is disowned, and sent again",
        "tierd/cli/acting/disown.py",
        "if where.spool.saved_stamp(run, attempt) or any(_can_be_read(where.spool, part) for part in own):",
        "if False:",
        f"{_DISOWN} -k of_this_node",
    ),
    Mutant(
        "nobody says whose names end pruning",
        "tierd/events/notices.py",
        "for attempt in unvouched(inventory, tier, run):",
        "for attempt in ():",
        f"{_DISOWN} -k planted_name",
    ),
)
