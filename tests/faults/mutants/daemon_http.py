"""Mutants of `tierd/daemon/http/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ACCESS = "tierd/daemon/http/access.py"
_SERVER = "tierd/daemon/http/server.py"
_TEST_ACCESS = "pytest tests/daemon/http/test_access.py"
_TEST_METRICS = "pytest tests/daemon/http/test_metrics.py"

MUTANTS = (
    Mutant(
        "http: any Host is answered on loopback",
        _ACCESS,
        "if not self._loopback:",
        "if True:",
        f"{_TEST_ACCESS} -k any_other_host",
    ),
    Mutant(
        "http: a token is compared byte by byte",
        _ACCESS,
        'return hmac.compare_digest(_shown(authorization or ""), self._token)',
        'return _shown(authorization or "") == self._token',
        f"{_TEST_ACCESS} -k constant_time",
    ),
    Mutant(
        "http: an empty token opens",
        _ACCESS,
        r'_TOKEN = re.compile(rb"[\x21-\x7e]{16,1024}")',
        r'_TOKEN = re.compile(rb"[\x21-\x7e]{0,1024}")',
        f"{_TEST_ACCESS} -k private_and_holds_one",
    ),
    Mutant(
        "http: a key that others can read is used",
        _ACCESS,
        "    read_private(Path(http.key_file), 1)\n",
        "",
        f"{_TEST_ACCESS} -k certificate_that_cannot",
    ),
    Mutant(
        "http: series outlive their runs",
        "tierd/daemon/http/metrics.py",
        "        self._tally.keep(runs)\n",
        "",
        f"{_TEST_METRICS} -k only_runs_in_the_spool",
    ),
    Mutant(
        "http: a node exports any number of runs",
        "tierd/daemon/http/metrics.py",
        "reverse=True)[:_MOST_RUNS]",
        "reverse=True)",
        f"{_TEST_METRICS} -k only_runs_in_the_spool",
    ),
    Mutant(
        "http: a browser may run any script",
        "tierd/daemon/http/page.py",
        "script-src {_hash(_SCRIPT)};",
        "script-src 'unsafe-inline';",
        "pytest tests/daemon/http/test_answers.py -k only_its_own_script",
    ),
    Mutant(
        "http: the Host is not asked for",
        _SERVER,
        'if not self._access.is_for_us(request.headers.get("Host")):',
        "if False:",
        f"{_TEST_ACCESS} -k sent_by_another_name",
    ),
    Mutant(
        "http: every path is open",
        _SERVER,
        "if request.path not in _OPEN and not",
        "if request.path in _OPEN and not",
        f"{_TEST_ACCESS} -k only_probes",
    ),
    Mutant(
        "http: a client that reads nothing keeps its connection",
        _SERVER,
        "async with asyncio.timeout(_LIFETIME_S):",
        "async with asyncio.timeout(None):",
        f"{_TEST_ACCESS} -k reads_nothing",
    ),
    Mutant(
        "http: any number of connections is served",
        _SERVER,
        "while len(serving) >= _MOST:",
        "while len(serving) >= 10_000:",
        f"{_TEST_ACCESS} -k more_connections",
    ),
    Mutant(
        "http: what is no request is sent back",
        _SERVER,
        'return _plain(status, "not understood")',
        'return _plain(status, message or "not understood")',
        f"{_TEST_ACCESS} -k no_request",
    ),
    Mutant(
        "http: aiohttp logs what a client sent",
        _SERVER,
        "_silent.disabled = True",
        "_silent.disabled = False",
        f"{_TEST_ACCESS} -k logged",
    ),
    Mutant(
        "http: silent clients block a probe",
        _SERVER,
        "_GRACE_S = 0.5",
        "_GRACE_S = 500.0",
        f"{_TEST_ACCESS} -k give_way",
    ),
    Mutant(
        "http: a client that has asked gives way",
        _SERVER,
        "        request.protocol.asked = True\n",
        "        pass\n",
        f"{_TEST_ACCESS} -k slow_answer",
    ),
    Mutant(
        "http: a counter begins with its first event",
        "tierd/daemon/http/tally.py",
        "self.counts[name].setdefault(labels, 0.0)",
        "pass",
        f"{_TEST_METRICS} -k begin_at_zero",
    ),
    Mutant(
        "metrics: only counts of events begin at 0, so a rate misses the first repair",
        "tierd/daemon/http/tally.py",
        'if family.kind != "counter" or "run" not in family.labels:',
        "if name not in _COUNTED.values():",
        f"{_TEST_METRICS} -k every_counter_of_a_run",
    ),
    Mutant(
        "http: every request is computed anew",
        "tierd/daemon/http/views.py",
        "if time.monotonic() - self._made >= _FRESH:",
        "if True:",
        "pytest tests/daemon/http/test_answers.py -k shared",
    ),
)
