"""Mutants of `tierd/doctor/`."""

from __future__ import annotations

from faults.rounds import Mutant

MUTANTS = (
    Mutant(
        "doctor does not compare a tier's room with a state",
        "tierd/doctor/examine.py",
        "tier.directory(of, state)",
        "tier.directory(of, None)",
        "pytest tests/cli/test_doctor.py -k without_room",
    ),
    Mutant(
        "doctor leaves its directory in the spool",
        "tierd/doctor/disk.py",
        "        shutil.rmtree(room)\n",
        "        pass\n",
        "pytest tests/doctor/test_node.py -k left_as_it_was",
    ),
    Mutant(
        "doctor leaves its timed object on the tier",
        "tierd/doctor/tier.py",
        "await clear(of.store, [CHECK_KEY])",
        "pass",
        "pytest tests/doctor/test_tier.py -k timed_object",
    ),
    Mutant(
        "doctor asks a server that does not answer for the bucket's rules, and blames permissions",
        "tierd/doctor/examine.py",
        "        if judge.is_reached(found):\n",
        "        if True:\n",
        "pytest tests/doctor/test_tier.py -k one_finding_and_nothing",
    ),
    Mutant(
        "doctor: a tier that hangs is a check that was not tried",
        "tierd/doctor/examine.py",
        "_GROUP_S, group.hung)",
        "_GROUP_S)",
        "pytest tests/cli/test_doctor.py -k what_hangs",
    ),
    Mutant(
        "doctor: another's spool was not tried, and nothing is wrong",
        "tierd/doctor/disk.py",
        "    except PermissionError:  # another account's\n",
        "    except FileNotFoundError:\n",
        "pytest tests/doctor/test_node.py -k another_accounts_spool",
    ),
    Mutant(
        "a read-only file system gives no answer",
        "tierd/daemon/tiers/reach.py",
        "    except StoreRefused as error:\n        return str(error)\n",
        "    except DeleteRefused as error:\n        return str(error)\n",
        "pytest tests/daemon/tiers/test_reach.py -k mounted_read_only",
    ),
    Mutant(
        "doctor: a tier may lie in its spool",
        "tierd/doctor/tier.py",
        "    return one.is_relative_to(other) or other.is_relative_to(one)\n",
        "    return False\n",
        "pytest tests/doctor/test_tier.py -k in_its_spool",
    ),
)
