"""Mutants of what leaves a spool: finished runs, verified copies on a full disk, and runs that a person deletes."""

from __future__ import annotations

from faults.rounds import Mutant

_EVICTION = "pytest tests/core/planning/test_eviction.py"

SPACE = (
    Mutant(
        "a full disk takes the newest copy of a run that trains as soon as any other",
        "tierd/core/planning/eviction.py",
        "spared = trained and (one == newest[one.run] or one in inventory.pins)",
        "spared = False",
        f"{_EVICTION} -k go_first",
    ),
    Mutant(
        "a full disk takes what no tier has",
        "tierd/core/planning/eviction.py",
        "verified = [seen.id for seen in inventory.spool.checkpoints.values() if inventory.on_a_tier(seen)]",
        "verified = list(inventory.spool.checkpoints)",
        f"{_EVICTION} -k never_taken",
    ),
    Mutant(
        "a finished run leaves although a tier does not answer",
        "tierd/core/planning/eviction.py",
        "all(place or name in inventory.silent for name, place in inventory.tiers.items())",
        "True",
        f"{_EVICTION} -k stays_while",
    ),
    Mutant(
        "a finished run leaves before a tier is sent it",
        "tierd/core/planning/plan.py",
        "leaving = leaving and not self._is_owed()",
        "leaving = leaving",
        f"{_EVICTION} -k stays_while",
    ),
    Mutant(
        "little space never takes the newest copy of a run without a trainer",
        "tierd/core/planning/spool_prunes.py",
        "trained = demand.run not in inventory.trainerless",
        "trained = True",
        f"{_EVICTION} -k little_free",
    ),
    Mutant(
        "a run counts as finished while a trainer may save it",
        "tierd/daemon/presence.py",
        "if self._attached[None]:",
        "if False:",
        "pytest tests/daemon/test_presence.py -k not_say",
    ),
    Mutant(
        "the wall clock alone says that a run is finished",
        "tierd/daemon/presence.py",
        "if min(quiet, math.inf if newest is None else today - newest) >= for_s:",
        "if (math.inf if newest is None else today - newest) >= for_s:",
        "pytest tests/daemon/test_presence.py -k both_its_trainer",
    ),
    Mutant(
        "a local copy goes on the word of an old look",
        "tierd/daemon/reconciling/pruner.py",
        "parts = await self._covered(checkpoint)\n        if parts is None or checkpoint",
        "parts = tuple(live.place.checkpoints[checkpoint].parts())\n        if parts is None or checkpoint",
        "pytest tests/daemon/test_finished.py -k lost_a_chunk",
    ),
    Mutant(
        "a save that met a full disk is tried again with no room made",
        "tierd/spool/commit.py",
        "if not is_full(error) or room is None or not room(part, size, error.errno == errno.EDQUOT):",
        "if not is_full(error) or room is None:",
        "pytest tests/client/saving/test_small_disk.py -k gives_up",
    ),
    Mutant(
        "rm deletes chunks before the manifests that name them",
        "tierd/daemon/remove.py",
        'for prefix in (*(name(run) for name in names), f"{run}/"):',
        'for prefix in (f"{run}/",):',
        "pytest tests/cli/test_space.py -k manifests_go",
    ),
    Mutant(
        "rm deletes a run that is being trained",
        "tierd/daemon/control.py",
        "if reconciler.requests.is_trained(run):",
        "if False:",
        "pytest tests/cli/test_space.py -k refuses",
    ),
)
