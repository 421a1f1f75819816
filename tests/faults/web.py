"""Mutants of the HTTP server: who is answered, what bounds a client, and what a browser may run."""

from __future__ import annotations

from faults.rounds import Mutant

_ACCESS, _ANSWERS = "pytest tests/daemon/http/test_access.py", "pytest tests/daemon/http/test_answers.py"
_METRICS = "pytest tests/daemon/http/test_metrics.py"
_RULES, _SERVER = "tierd/daemon/http/access.py", "tierd/daemon/http/server.py"

WEB = (
    Mutant(
        "http: all the world may read without a token",
        "tierd/core/config.py",
        "if open_to_all and http.token_file is None and http.cert_file is None:",
        "if False:",
        f"{_ACCESS} -k cannot_be_used",
    ),
    Mutant(
        "http: any Host is answered on loopback",
        _RULES,
        "if not self._loopback:",
        "if True:",
        f"{_ACCESS} -k any_other_host",
    ),
    Mutant(
        "http: the Host is not asked for",
        _SERVER,
        'if not self._access.is_for_us(request.headers.get("Host")):',
        "if False:",
        f"{_ACCESS} -k sent_by_another_name",
    ),
    Mutant(
        "http: a token is compared byte by byte",
        _RULES,
        'return hmac.compare_digest(_shown(authorization or ""), self._token)',
        'return _shown(authorization or "") == self._token',
        f"{_ACCESS} -k constant_time",
    ),
    Mutant(
        "http: every path is open",
        _SERVER,
        "if request.path not in _OPEN and not",
        "if request.path in _OPEN and not",
        f"{_ACCESS} -k only_probes",
    ),
    Mutant(
        "http: an empty token opens",
        _RULES,
        r'_TOKEN = re.compile(rb"[\x21-\x7e]{16,1024}")',
        r'_TOKEN = re.compile(rb"[\x21-\x7e]{0,1024}")',
        f"{_ACCESS} -k private_and_holds_one",
    ),
    Mutant(
        "http: a key that others can read is used",
        _RULES,
        "    read_private(Path(http.key_file), 1)\n",
        "",
        f"{_ACCESS} -k certificate_that_cannot",
    ),
    Mutant(
        "http: a client that reads nothing keeps its connection",
        _SERVER,
        "async with asyncio.timeout(_LIFETIME_S):",
        "async with asyncio.timeout(None):",
        f"{_ACCESS} -k reads_nothing",
    ),
    Mutant(
        "http: any number of connections is served",
        _SERVER,
        "while len(serving) >= _MOST:",
        "while len(serving) >= 10_000:",
        f"{_ACCESS} -k more_connections",
    ),
    Mutant(
        "http: what is no request is sent back",
        _SERVER,
        'return _plain(status, "not understood")',
        'return _plain(status, message or "not understood")',
        f"{_ACCESS} -k no_request",
    ),
    Mutant(
        "http: aiohttp logs what a client sent",
        _SERVER,
        "_silent.disabled = True",
        "_silent.disabled = False",
        f"{_ACCESS} -k logged",
    ),
    Mutant(
        "http: a browser may run any script",
        "tierd/daemon/http/page.py",
        "script-src {_hash(_SCRIPT)};",
        "script-src 'unsafe-inline';",
        f"{_ANSWERS} -k only_its_own_script",
    ),
    Mutant(
        "http: series outlive their runs",
        "tierd/daemon/http/metrics.py",
        "        self._tally.keep(runs)\n",
        "",
        f"{_METRICS} -k only_runs_in_the_spool",
    ),
    Mutant(
        "http: a node exports any number of runs",
        "tierd/daemon/http/metrics.py",
        "reverse=True)[:_MOST_RUNS]",
        "reverse=True)",
        f"{_METRICS} -k only_runs_in_the_spool",
    ),
    Mutant(
        "http: every request is computed anew",
        "tierd/daemon/http/views.py",
        "if time.monotonic() - self._made >= _FRESH:",
        "if True:",
        f"{_ANSWERS} -k shared",
    ),
    Mutant(
        "status --check exits with 0 during an alert",
        "tierd/cli/reading/status.py",
        'raise typer.Exit(EXIT_ALERT if "alert" in severities else EXIT_WARNING)',
        "raise typer.Exit(0)",
        "pytest tests/cli/test_status.py -k exits_by_severity",
    ),
    Mutant(
        "status --check takes a state of the past for an answer",
        "tierd/cli/reading/status.py",
        "_answer(found.spool, last=not check)",
        "_answer(found.spool, last=True)",
        "pytest tests/cli/test_status.py -k last_state_is_shown",
    ),
    Mutant(
        "http: silent clients block a probe",
        _SERVER,
        "_GRACE_S = 0.5",
        "_GRACE_S = 500.0",
        f"{_ACCESS} -k give_way",
    ),
    Mutant(
        "http: a client that has asked gives way",
        _SERVER,
        "        request.protocol.asked = True\n",
        "        pass\n",
        f"{_ACCESS} -k slow_answer",
    ),
    Mutant(
        "http: a counter begins with its first event",
        "tierd/daemon/http/tally.py",
        "self.counts[name].setdefault(labels, 0.0)",
        "pass",
        f"{_METRICS} -k begin_at_zero",
    ),
)
