"""Mutants of what S3 may refuse: what its answers mean, whose credentials they are, and what nobody may delete."""

from __future__ import annotations

from faults.rounds import Mutant

_ANSWERS = "pytest tests/stores/test_answers.py"

PERMISSIONS = (
    Mutant(
        "an archived object is a matter of credentials",
        "tierd/stores/answers.py",
        'if code == "InvalidObjectState":',
        "if False:",
        f"{_ANSWERS} -k archived",
    ),
    Mutant(
        "a busy KMS is not tried again",
        "tierd/stores/answers.py",
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
        "tierd/stores/answers.py",
        "if isinstance(one, ssl.SSLError) and any(word in _reason(one) for word in _NO_TLS):",
        "if False:",
        f"{_ANSWERS} -k without_tls",
    ),
    Mutant(
        "a bundle that is missing is a server that does not answer",
        "tierd/stores/s3.py",
        "await check_bundle(session)",
        "pass",
        f"{_ANSWERS} -k bundle",
    ),
    Mutant(
        "credentials are found once and for all",
        "tierd/stores/credentials.py",
        "if known != self._known:",
        "if not self.generation:",
        f"{_ANSWERS} -k replaced",
    ),
    Mutant(
        "credentials that come late are not looked for",
        "tierd/stores/credentials.py",
        "if self._found is None:\n            await self.renew()",
        "if self._found is None and not self._looked_at > 0:\n            await self.renew()",
        f"{_ANSWERS} -k come_after",
    ),
    Mutant(
        "the chain is looked at for every request",
        "tierd/stores/credentials.py",
        "if time.monotonic() - self._looked_at < _PAUSE_S:",
        "if False:",
        f"{_ANSWERS} -k seldom",
    ),
)
