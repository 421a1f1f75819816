"""Mutants of `tierd/core/`."""

from __future__ import annotations

from faults.rounds import Mutant

_PICKLED = "tierd/core/pickled.py"
_SHARD_PLACEMENT = "tierd/core/shard_placement.py"
_TEST_ENCRYPTED = "pytest tests/daemon/test_encrypted.py"
_TEST_METADATA = "pytest tests/dcp/test_metadata.py"
_TEST_DTENSORS = "pytest tests/state/kinds/test_dtensors.py"

MUTANTS = (
    Mutant(
        "configuration: a mistake is answered by a regular expression",
        "tierd/core/config.py",
        'f"write {form}")',
        "pattern)",
        "pytest tests/core/test_config.py -k answered_by_its_form",
    ),
    Mutant(
        "http: all the world may read without a token",
        "tierd/core/config.py",
        "if open_to_all and http.token_file is None and http.cert_file is None:",
        "if False:",
        "pytest tests/daemon/http/test_access.py -k cannot_be_used",
    ),
    Mutant(
        "a missing key is corruption",
        "tierd/core/errors.py",
        "class WrongKey(FormatTooNew):",
        "class WrongKey(ManifestError):",
        f"{_TEST_ENCRYPTED}::test_without_the_key_nothing_is_restored_passed_over_quarantined_or_deleted",
    ),
    Mutant(
        "errors show names as they are",
        "tierd/core/errors.py",
        "        return printable_lines(super().__str__())",
        "        return super().__str__()",
        "pytest tests/end_to_end/test_planted_names.py -k trainer_sees",
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
        "a device's own memory is taken for the host's",
        "tierd/core/numa.py",
        "_numbers(with_memory) & _numbers(with_cpu)",
        "_numbers(with_memory)",
        "pytest tests/core/test_numa.py",
    ),
    Mutant(
        "metadata may name anything",
        _PICKLED,
        "        if found is None:\n",
        "        if False:\n",
        f"{_TEST_METADATA} -k refused_by_name",
    ),
    Mutant(
        "metadata gives members to what it names",
        _PICKLED,
        "        if type(target) is not PickledInstance or target.state is not None:\n",
        "        if type(target) is Named:\n            return None\n        if False:\n",
        f"{_TEST_METADATA} -k change_what_it_names",
    ),
    Mutant(
        "metadata gives members to an instance twice",
        _PICKLED,
        "if type(target) is not PickledInstance or target.state is not None:",
        "if type(target) is not PickledInstance:",
        f"{_TEST_METADATA} -k members_once",
    ),
    Mutant(
        "tuples in metadata may be of any depth",
        _PICKLED,
        "            if level > _LEVELS:\n",
        "            if False:\n",
        f"{_TEST_METADATA} -k hang_or_kill",
    ),
    Mutant(
        "metadata may make a container of every byte",
        _PICKLED,
        "        if self._left < 0:\n",
        "        if False:\n",
        f"{_TEST_METADATA} -k hang_or_kill",
    ),
    Mutant(
        "metadata may name more bytes than it has",
        _PICKLED,
        "        if len(found) != size:\n",
        "        if False:\n",
        f"{_TEST_METADATA} -k hang_or_kill",
    ),
    Mutant(
        "a terminal obeys C1 controls in names",
        "tierd/core/printable.py",
        '    return one.isprintable() or category(one) == "Zs"',
        '    return one.isprintable() or category(one) in ("Zs", "Cc")',
        "pytest tests/core/test_printable.py",
    ),
    Mutant(
        "a strided shard is taken for a plain one",
        _SHARD_PLACEMENT,
        "_piece(found[dim], int(rule[2]) if rule[0] == STRIDED else 1, count, at)",
        "_piece(found[dim], 1, count, at)",
        f"{_TEST_DTENSORS} -k torch_gives",
    ),
    Mutant(
        "the last shard is as long as the others",
        _SHARD_PLACEMENT,
        "min(first + (at + 1) * inner, last)",
        "first + (at + 1) * inner",
        f"{_TEST_DTENSORS} -k torch_gives",
    ),
    Mutant(
        "the rest of what is cut twice is forgotten",
        _SHARD_PLACEMENT,
        "return whole * part(outer) + part(rest)",
        "return whole * part(outer)",
        f"{_TEST_DTENSORS} -k torch_gives",
    ),
    Mutant(
        "a shard may be of blocks without end",
        _SHARD_PLACEMENT,
        "    if split * len(runs) > MAX_BOXES:",
        "    if False:",
        f"{_TEST_DTENSORS} -k takes_forever",
    ),
    Mutant(
        "a coordinate outside of its mesh passes",
        _SHARD_PLACEMENT,
        "any(at >= n for at, n in zip(self.coordinate, self.mesh, strict=True))",
        "False",
        f"{_TEST_DTENSORS} -k is_none_is_refused",
    ),
    Mutant(
        "a URL's secret is told",
        "tierd/core/urls.py",
        'return "what stands there (not repeated here)" if',
        "return repr(piece) if",
        "pytest tests/end_to_end/test_secrets.py -k url",
    ),
    Mutant(
        "manifests go where they cannot be read",
        "tierd/core/urls.py",
        'if name == "storage_class" and value in _ARCHIVES:',
        "if False:",
        "pytest tests/stores/s3/test_answers.py -k read_at_once",
    ),
)
