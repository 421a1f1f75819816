"""Mutants of how runs are copied and imported: what keeps the copies, and what may not become one of them."""

from __future__ import annotations

from faults.rounds import Mutant

_COPY, _COPIED = "tierd/daemon/transfer/copy.py", "pytest tests/daemon/transfer/test_copy.py"
_IMPORT, _IMPORTED = "tierd/daemon/intake/importing.py", "pytest tests/watching/test_import.py"
_JANITOR, _FILLED = "tierd/core/planning/janitor.py", "pytest tests/daemon/transfer/test_backfill.py"
_LINEAGE = "pytest tests/end_to_end/test_lineage.py"

MOVING = (
    Mutant(
        "a copied run leaves its policies behind",
        _COPY,
        "policies = 0 if step is not None else await work.put_policies()",
        "policies = 0",
        f"{_COPIED} -k 'policies_and_pins or obeys_the_policy'",
    ),
    Mutant(
        "a killed copy is left with some of the policies",
        _COPY,
        'if any(given != "default" and (by, given) not in own for by, given in known):',
        "if known:",
        f"{_COPIED} -k killed_between_two_policies",
    ),
    Mutant(
        "a single copied checkpoint is not pinned",
        _COPY,
        "pins = set(wanted) if step is not None else",
        "pins = set() if step is not None else",
        f"{_COPIED} -k single_checkpoint",
    ),
    Mutant(
        "a copy mixes two histories",
        _COPY,
        "            if self.run not in await self._copied_from(one):\n",
        "            if False:\n",
        f"{_COPIED} -k two_histories",
    ),
    Mutant(
        "other content of the same name counts as copied",
        _COPY,
        "        if not theirs.same_content(",
        "        if False and not theirs.same_content(",
        f"{_COPIED} -k two_histories",
    ),
    Mutant(
        "a copy forgets launches of which nothing is left",
        _COPY,
        "        await work.put_head()\n",
        "        pass\n",
        f"{_COPIED} -k nothing_is_left",
    ),
    Mutant(
        "an import takes what is not sound",
        _IMPORT,
        '        if found.status != "sound":\n',
        "        if False:\n",
        f"{_IMPORTED} -k not_sound",
    ),
    Mutant(
        "an import does not look whether a checkpoint changed",
        _IMPORT,
        '                raise Changed("it was written to, renamed or deleted")\n',
        "                pass\n",
        f"{_IMPORTED} -k changes_while",
    ),
    Mutant(
        "an import goes by the order of names",
        _IMPORT,
        "[chosen[one] for one in sorted(chosen)]",
        "[chosen[one] for one in chosen]",
        f"{_IMPORTED} -k order_of_their_steps",
    ),
    Mutant(
        "other files of a step count as imported",
        _IMPORT,
        "        return told == (len(wanted), digest(wanted)) and",
        "        return bool(told) or",
        f"{_IMPORTED} -k not_sound",
    ),
    Mutant(
        "an import adds to a run of another origin",
        _IMPORT,
        'if not one.endswith(f"-{token}")',
        'if one.endswith("-none")',
        f"{_IMPORTED} -k another_origin",
    ),
    Mutant(
        "a filled tier takes runs that others keep there",
        _JANITOR,
        "    return not by or inventory.who in by\n",
        "    return True\n",
        f"{_FILLED} -k left_to_that_node",
    ),
    Mutant(
        "a filled tier has no policy for what it got",
        "tierd/daemon/reconciling/records.py",
        "[*saved, *sorted(setup.backfill.runs)]",
        "saved",
        f"{_FILLED} -k 'outlive or nobody_saves_here'",
    ),
    Mutant(
        "a filled tier has no head of what it got",
        "tierd/daemon/tiers/tiers.py",
        "unwritten(inventory, place, run, fills=fills(inventory, self._config, run, tier))",
        "unwritten(inventory, place, run)",
        f"{_FILLED} -k nobody_saves_here",
    ),
    Mutant(
        "runs are observed for ever after they were copied",
        "tierd/daemon/reconciling/backfill.py",
        "            self.runs -= seen - set(flushes)\n",
        "            pass\n",
        f"{_FILLED} -k nobody_saves_here",
    ),
    Mutant(
        "a run is copied on after its tiers are no longer observed for it",
        _JANITOR,
        "    if run not in inventory.filling:\n        return False\n",
        "",
        f"{_FILLED} -k takes_long",
    ),
    Mutant(
        "a tier to be filled waits although another one has shown what it has",
        "tierd/daemon/reconcile.py",
        "                if backfill.runs:\n                    self.wake()",
        "                if False:\n                    self.wake()",
        f"{_FILLED} -k another_one_has_answered",
    ),
    Mutant(
        "a later launch forgets what its run started from",
        "tierd/client/checkpointer.py",
        "                self._launch.started_from = found.manifest.started_from\n",
        "",
        f"{_LINEAGE} -k over_its_launches",
    ),
    Mutant(
        "a launch that resumed claims another origin",
        "tierd/client/ranks/launch.py",
        '        if self._origin is not None:\n            raise ConfigError(f"start_from: this',
        '        if False:\n            raise ConfigError(f"start_from: this',
        f"{_LINEAGE} -k over_its_launches",
    ),
    Mutant(
        "other runs are sent before what this node saves",
        "tierd/core/planning/plan.py",
        "for candidates in (own, filled):",
        "for candidates in (filled, own):",
        f"{_FILLED} -k before_other_runs",
    ),
)
