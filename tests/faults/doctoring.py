"""Mutants of `tierd doctor` and of what it tries, and of the log's formats."""

from __future__ import annotations

from faults.rounds import Mutant

_NODE, _TIER = "pytest tests/doctor/test_node.py", "pytest tests/doctor/test_tier.py"
_TABLE = "pytest tests/core/diagnosis/test_findings.py"

DOCTORING = (
    Mutant(
        "a trial makes the mark of a tier, where a mount is missing",
        "tierd/stores/file.py",
        "            if self._trial and not _exists(_TMP, root):\n",
        "            if False:\n",
        "pytest tests/stores/test_file.py -k does_not_make_it_the_tier",
    ),
    Mutant(
        "doctor opens a tier as a daemon does, and marks it",
        "tierd/cli/reading/doctor.py",
        "attempts=_ATTEMPTS, trial=True)",
        "attempts=_ATTEMPTS)",
        "pytest tests/cli/test_doctor.py -k left_as_it_was",
    ),
    Mutant(
        "doctor leaves its directory in the spool",
        "tierd/doctor/disk.py",
        "        shutil.rmtree(room)\n",
        "        pass\n",
        f"{_NODE} -k left_as_it_was",
    ),
    Mutant(
        "doctor leaves its timed object on the tier",
        "tierd/doctor/tier.py",
        "await clear(of.store, [CHECK_KEY])",
        "pass",
        f"{_TIER} -k timed_object",
    ),
    Mutant(
        "doctor overlooks a rule of the whole bucket",
        "tierd/core/diagnosis/tier.py",
        "(base.startswith(rule.prefix) or rule.prefix.startswith(base))",
        "rule.prefix.startswith(base)",
        f"{_TABLE} -k rules_of",
    ),
    Mutant(
        "doctor shows what a credential helper prints",
        "tierd/stores/s3/bucket.py",
        'raise unanswered(str(url), "credentials", error, heard=False) from None  # its text may quote a secret',
        'raise type(unanswered(str(url), "credentials", error, heard=False))(str(error)) from None',
        f"{_TIER} -k nobody_renews",
    ),
    Mutant(
        "two nodes that try a tier at once call it broken",
        "tierd/daemon/tiers/reach.py",
        "_TRIES, _APART_S = 5, 0.2",
        "_TRIES, _APART_S = 1, 0.2",
        "pytest tests/daemon/tiers/test_reach.py -k same_moment",
    ),
    Mutant(
        "a line of a message gives itself a priority",
        "tierd/logs.py",
        'return "\\n".join(f"<{priority(level)}>{line}" for line in text.split("\\n"))',
        'return f"<{priority(level)}>{text}"',
        "pytest tests/test_logs.py -k nothing_else",
    ),
    Mutant(
        "runs reads the manifests of every checkpoint",
        "tierd/daemon/tiers/overview.py",
        "            if manifests:\n                return",
        "            if manifests and number == len(newest) - 1:\n                return",
        "pytest tests/daemon/tiers/test_overview.py -k newest_verified",
    ),
    Mutant(
        "runs calls a damaged checkpoint verified",
        "tierd/daemon/tiers/overview.py",
        "    except (ObjectNotFound, ManifestError, FormatTooNew):\n        return ()",
        "    except (ObjectNotFound, ManifestError, FormatTooNew):\n"
        "        return (await read_manifest(store, PartId(checkpoint, 0, world)),)",
        "pytest tests/daemon/tiers/test_overview.py -k damaged",
    ),
    Mutant(
        "doctor: a full disk proves something of direct I/O",
        "tierd/core/diagnosis/node.py",
        "    if number in (errno.ENOSPC, errno.EDQUOT):\n",
        "    if False:\n",
        f"{_NODE} -k nearly_full",
    ),
    Mutant(
        "doctor: a tier may lie in its spool",
        "tierd/doctor/tier.py",
        "    return one.is_relative_to(other) or other.is_relative_to(one)\n",
        "    return False\n",
        f"{_TIER} -k in_its_spool",
    ),
)
