"""Mutants that SECURITY.md's tables of who can write where find: one guard of each kind of writer."""

from __future__ import annotations

from faults.rounds import Mutant

_TIERS, _NODES = "pytest tests/test_writers_of_tiers.py", "pytest tests/test_writers_on_nodes.py"

WRITERS = (
    Mutant(
        "a head that anybody could have written stops the daemon's looks",
        "tierd/daemon/tiers/heads.py",
        "        except (CorruptChunk, ManifestError, FormatTooNew) as error:\n",
        "        except (CorruptChunk, ManifestError) as error:\n",
        f"{_TIERS} -k no_key_head",
    ),
    Mutant(
        "a prefix is also what begins as it does",
        "tierd/stores/s3/s3_store.py",
        'self._base = f"{url.prefix}/" if url.prefix else ""',
        "self._base = url.prefix",
        f"{_TIERS} -k tenant_prefix",
    ),
    Mutant(
        "another key's manifests hold nothing up",
        "tierd/daemon/tiers/tiers.py",
        "            if alien or (isinstance(why, FormatTooNew) and other == part):\n",
        "            if False:\n",
        f"{_TIERS} -k no_key_foreign",
    ),
    Mutant(
        "parts that do not belong together are restored together",
        "tierd/client/restoring/search.py",
        "        if others != manifest.origin:\n",
        "        if False:\n",
        f"{_NODES} -k rank_origin",
    ),
    Mutant(
        "every rank's metrics speak for a checkpoint",
        "tierd/core/timeline/run_view.py",
        "            if part.rank == 0 and facts:\n",
        "            if facts:\n",
        f"{_NODES} -k rank_metrics",
    ),
    Mutant(
        "a spool's copy goes for another content on the tier",
        "tierd/daemon/tiers/holders.py",
        "        if local is not None and not manifest.same_content(local):\n",
        "        if False:\n",
        f"{_NODES} -k another_node",
    ),
    Mutant(
        "a checkpoint of another number of ranks is tried",
        "tierd/client/restoring/restorer.py",
        "        if candidate.world != self._ranks.world:\n",
        "        if False:\n",
        f"{_NODES} -k rank_world",
    ),
)
