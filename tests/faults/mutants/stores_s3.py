"""Mutants of `tierd/stores/s3/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ANSWERS = "tierd/stores/s3/answers.py"
_CONNECTION = "tierd/stores/s3/connection.py"
_CREDENTIALS = "tierd/stores/s3/credentials.py"
_LINE = "tierd/stores/s3/line.py"
_S3_STORE = "tierd/stores/s3/s3_store.py"
_TRANSPORT = "tierd/stores/s3/transport.py"
_TEST_ANSWERS = "pytest tests/stores/s3/test_answers.py"
_TEST_BODIES = "pytest tests/stores/s3/test_bodies.py"
_TEST_LINE_MODEL = "pytest tests/stores/s3/test_line_model.py"

MUTANTS = (
    Mutant(
        "Retry-After as a date is passed over",
        _ANSWERS,
        "    except (ValueError, OverflowError):\n        return 0.0\n",
        "    except (ValueError, OverflowError):\n        return 0.0\n    return 0.0\n",
        "pytest tests/stores/test_window.py -k says_of_waiting",
    ),
    Mutant(
        "a gateway's 404 is a missing object",
        _ANSWERS,
        "return UnnamedNotFound, UNNAMED",
        'return ObjectNotFound, ""',
        "pytest tests/stores/s3/test_s3_store.py -k names_no_error",
    ),
    Mutant(
        "a gateway's 404 is a missing object also where the listing shows it",
        "tierd/stores/absence.py",
        "if first is not None and first.key == key:",
        "if False:",
        "pytest tests/stores/s3/test_s3_store.py -k what_the_listing_says",
    ),
    Mutant(
        "an archived object is a matter of credentials",
        _ANSWERS,
        'if code == "InvalidObjectState":',
        "if False:",
        f"{_TEST_ANSWERS} -k archived",
    ),
    Mutant(
        "a busy KMS is not tried again",
        _ANSWERS,
        "if bare in _NOT_NOW or",
        "if code in _NOT_NOW or",
        f"{_TEST_ANSWERS} -k busy",
    ),
    Mutant(
        "TLS that is missing is a server that does not answer",
        _ANSWERS,
        "if isinstance(one, ssl.SSLError) and any(word in _reason(one) for word in _NO_TLS):",
        "if False:",
        f"{_TEST_ANSWERS} -k without_tls",
    ),
    Mutant(
        "doctor shows what a credential helper prints",
        "tierd/stores/s3/bucket.py",
        'raise unanswered(str(url), "credentials", error, heard=False) from None  # its text may quote a secret',
        'raise type(unanswered(str(url), "credentials", error, heard=False))(str(error)) from None',
        "pytest tests/doctor/test_tier.py -k nobody_renews",
    ),
    Mutant(
        "the way out of a wrong certificate is not named",
        _CONNECTION,
        "        except ssl.SSLCertVerificationError as error:\n",
        "        except ssl.CertificateError as error:\n            raise error from None\n"
        "        except ssl.SSLSyscallError as error:\n",
        "pytest tests/stores/s3/test_tls.py -k way_out",
    ),
    Mutant(
        "a drip is waited for as long as it drips",
        _CONNECTION,
        "        if slow <= 0:\n",
        "        if False:\n",
        f"{_TEST_BODIES} -k drip",
    ),
    Mutant(
        "bytes that flow are cut off",
        _CONNECTION,
        "        if moved != self._moved:\n            self._last, self._moved = now, moved\n",
        "",
        f"{_TEST_BODIES} -k slow_link",
    ),
    Mutant(
        "what waits in a buffer has moved",
        _CONNECTION,
        "    return int(sent + received)\n",
        "    return int(received)\n",
        f"{_TEST_BODIES} -k slow_link",
    ),
    Mutant(
        "credentials are found once and for all",
        _CREDENTIALS,
        "if known != self._known:",
        "if not self.generation:",
        f"{_TEST_ANSWERS} -k replaced",
    ),
    Mutant(
        "credentials that come late are not looked for",
        _CREDENTIALS,
        "if self._found is None:\n            await self.renew()",
        "if self._found is None and not self._checked_at > 0:\n            await self.renew()",
        f"{_TEST_ANSWERS} -k come_after",
    ),
    Mutant(
        "the chain is looked at for every request",
        _CREDENTIALS,
        "if time.monotonic() - self._checked_at < _PAUSE_S:",
        "if False:",
        f"{_TEST_ANSWERS} -k seldom",
    ),
    Mutant(
        "the server's word that it will close is not heard",
        "tierd/stores/s3/http1.py",
        'keeps = "close" not in tokens if',
        "keeps = True if",
        f"{_TEST_BODIES} -k heads",
    ),
    Mutant(
        "a short read is an answer",
        _S3_STORE,
        "if size is not None and count != size:",
        "if size is None:",
        f"{_TEST_BODIES} -k fewer_bytes",
    ),
    Mutant(
        "a body that nobody can read is an object",
        "tierd/stores/s3/http1.py",
        "    if encoding not in _PLAIN:\n        raise Unanswered(",
        "    if False:\n        raise Unanswered(",
        f"{_TEST_BODIES} -k gzip",
    ),
    Mutant(
        "an error leaves a line as it was",
        _LINE,
        "        except botocore.BotoCoreError:\n            self.state = State.DEAD\n            raise",
        "        except botocore.BotoCoreError:\n            raise",
        f"{_TEST_LINE_MODEL} -k broke_off",
    ),
    Mutant(
        "what comes behind an answer is the next one's",
        _LINE,
        "self._head.keeps and not self._ahead",
        "self._head.keeps",
        _TEST_LINE_MODEL,
    ),
    Mutant(
        "a connection is closed under the call that was cancelled",
        _LINE,
        "        self._job = job\n",
        "        pass\n",
        f"{_TEST_BODIES} -k under_a_call",
    ),
    Mutant(
        "botocore logs at DEBUG",
        _S3_STORE,
        "logging.getLogger(_library).setLevel(logging.INFO)",
        "pass",
        "pytest tests/end_to_end/test_secrets.py -k nothing",
    ),
    Mutant(
        "an object has no end",
        _S3_STORE,
        "return await raw.read(most)",
        "return await raw.read(1 << 62)",
        f"{_TEST_BODIES} -k without_an_end",
    ),
    Mutant(
        "what the library stumbles over leaves a store as it is",
        _S3_STORE,
        "        except Exception as error:  # the library",
        "        except ZeroDivisionError as error:  # the library",
        f"{_TEST_BODIES} -k stumbles",
    ),
    Mutant(
        "a bundle that is missing is a server that does not answer",
        _S3_STORE,
        "await check_bundle(session)",
        "pass",
        f"{_TEST_ANSWERS} -k bundle",
    ),
    Mutant(
        "a prefix is also what begins as it does",
        _S3_STORE,
        'self._base = f"{url.prefix}/" if url.prefix else ""',
        "self._base = url.prefix",
        "pytest tests/test_writers_of_tiers.py -k tenant_prefix",
    ),
    Mutant(
        "a listing through a proxy is unbounded",
        _TRANSPORT,
        "        return ProxiedSession(**options)\n",
        "        from aiobotocore.httpsession import AIOHTTPSession\n\n        return AIOHTTPSession(**options)\n",
        "pytest tests/stores/s3/test_transport.py -k listing_is_bounded",
    ),
    Mutant(
        "a connection that failed is parked",
        _TRANSPORT,
        "if line.is_idle() and not self._closed:",
        "if not self._closed:",
        _TEST_LINE_MODEL,
    ),
    Mutant(
        "a slot is not given back where a connection could not be made",
        _TRANSPORT,
        "        self._slots.release()\n        self.in_use -= 1\n        if line is None:\n            return\n",
        '        if line is None or line.state.name == "NEW" or not line.connection.moved:\n            return\n'
        "        self._slots.release()\n        self.in_use -= 1\n",
        "pytest tests/stores/s3/test_tls.py -k cost_no_slot",
    ),
    Mutant(
        "what cannot be parsed keeps its slot",
        _TRANSPORT,
        "        for answer in opened:\n            answer.close()\n",
        "        pass\n",
        _TEST_LINE_MODEL,
    ),
    Mutant(
        "a reply has no end",
        _TRANSPORT,
        "limit = LONGEST_REPLY + 1 if most is None else most",
        "limit = 1 << 62 if most is None else most",
        f"{_TEST_BODIES} -k without_an_end",
    ),
    Mutant(
        "200 with what is no XML is the server's error 500",
        "tierd/stores/s3/http1.py",
        "    except expat.ExpatError as error:\n        raise Unanswered(",
        "    except expat.ExpatError as error:\n        return\n        raise Unanswered(",
        f"{_TEST_BODIES} -k no_xml",
    ),
)
