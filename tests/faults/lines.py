"""Mutants that ordinary tests find of S3's transport (slots, connections, answers, waits) and of outages."""

from __future__ import annotations

from faults.rounds import Mutant

_TRANSPORT, _LINE, _CONNECTION = (
    "tierd/stores/s3/transport.py",
    "tierd/stores/s3/line.py",
    "tierd/stores/s3/connection.py",
)
_HTTP = "tierd/stores/s3/http1.py"
_MODEL, _TLS = "pytest tests/stores/s3/test_line_model.py", "pytest tests/stores/s3/test_tls.py"
_BODIES = "pytest tests/stores/s3/test_bodies.py"

LINES = (
    Mutant(
        "a connection that failed is parked",
        _TRANSPORT,
        "if line.is_idle() and not self._closed:",
        "if not self._closed:",
        _MODEL,
    ),
    Mutant(
        "a slot is not given back where a connection could not be made",
        _TRANSPORT,
        "        self._slots.release()\n        self.in_use -= 1\n        if line is None:\n            return\n",
        '        if line is None or line.state.name == "NEW" or not line.connection.moved:\n            return\n'
        "        self._slots.release()\n        self.in_use -= 1\n",
        f"{_TLS} -k cost_no_slot",
    ),
    Mutant(
        "what cannot be parsed keeps its slot",
        _TRANSPORT,
        "        for answer in opened:\n            answer.close()\n",
        "        pass\n",
        _MODEL,
    ),
    Mutant(
        "an error leaves a line as it was",
        _LINE,
        "        except botocore.BotoCoreError:\n            self.state = State.DEAD\n            raise",
        "        except botocore.BotoCoreError:\n            raise",
        f"{_MODEL} -k broke_off",
    ),
    Mutant(
        "what comes behind an answer is the next one's",
        _LINE,
        "self._head.keeps and not self._ahead",
        "self._head.keeps",
        _MODEL,
    ),
    Mutant(
        "the server's word that it will close is not heard",
        _HTTP,
        'keeps = "close" not in tokens if',
        "keeps = True if",
        _MODEL,
    ),
    Mutant(
        "a connection is closed under the call that was cancelled",
        _LINE,
        "        self._job = job\n",
        "        pass\n",
        f"{_BODIES} -k under_a_call",
    ),
    Mutant(
        "the way out of a wrong certificate is not named",
        _CONNECTION,
        "        except ssl.SSLCertVerificationError as error:\n",
        "        except ssl.CertificateError as error:\n            raise error from None\n"
        "        except ssl.SSLSyscallError as error:\n",
        f"{_TLS} -k way_out",
    ),
    Mutant(
        "a body that nobody can read is an object",
        _HTTP,
        "    if encoding not in _PLAIN:\n        raise Unanswered(",
        "    if False:\n        raise Unanswered(",
        f"{_BODIES} -k gzip",
    ),
    Mutant(
        "a reply has no end",
        _TRANSPORT,
        "limit = LONGEST_REPLY + 1 if most is None else most",
        "limit = 1 << 62 if most is None else most",
        f"{_BODIES} -k without_an_end",
    ),
    Mutant(
        "an object has no end",
        "tierd/stores/s3/s3_store.py",
        "return await raw.read(most)",
        "return await raw.read(1 << 62)",
        f"{_BODIES} -k without_an_end",
    ),
    Mutant(
        "a drip is waited for as long as it drips",
        _CONNECTION,
        "        if slow <= 0:\n",
        "        if False:\n",
        f"{_BODIES} -k drip",
    ),
    Mutant(
        "bytes that flow are cut off",
        _CONNECTION,
        "        if moved != self._moved:\n            self._last, self._moved = now, moved\n",
        "",
        f"{_BODIES} -k slow_link",
    ),
    Mutant(
        "what waits in a buffer has moved",
        _CONNECTION,
        "    return int(sent + received)\n",
        "    return int(received)\n",
        f"{_BODIES} -k slow_link",
    ),
    Mutant(
        "a deadline cuts off what the transport goes on with",
        "tierd/stores/retry.py",
        'self._slowest = getattr(inner, "slowest", _SLOWEST)',
        "self._slowest = _SLOWEST",
        "pytest tests/stores/test_retry.py -k names_its_rate",
    ),
    Mutant(
        "200 with what is no XML is the server's error 500",
        _TRANSPORT,
        "    except expat.ExpatError as error:\n        raise Unanswered(",
        "    except expat.ExpatError as error:\n        return\n        raise Unanswered(",
        f"{_BODIES} -k no_xml",
    ),
    Mutant(
        "what the library stumbles over leaves a store as it is",
        "tierd/stores/s3/s3_store.py",
        "        except Exception as error:  # the library",
        "        except ZeroDivisionError as error:  # the library",
        f"{_BODIES} -k stumbles",
    ),
    Mutant(
        "a short outage is waited out like a long one",
        "tierd/daemon/tier_worker.py",
        "longest = min(max(_SOON, (self.now() - self._since) / 4), _LONGEST)",
        "longest = _LONGEST",
        "pytest tests/daemon/test_tier_worker.py -k after_an_outage",
    ),
    Mutant(
        "what a refusal of the place met rests like what is refused for itself",
        "tierd/daemon/tier_worker.py",
        "_STUCK if what in self._off else min(_STUCK, _FIRST)",
        "_STUCK",
        "pytest tests/daemon/test_tier_worker.py -k failed_once",
    ),
    Mutant(
        "a flush waits for the marks of a prune that an outage has cut off",
        "tierd/daemon/tiers/intents.py",
        "older=_LEFT_OVER_S * 1000",
        "older=_DEADLINE * 1000",
        "pytest tests/daemon/tiers/test_intents.py -k cut_off_by_an_outage",
    ),
    Mutant(
        "no attempt has a deadline",
        "tierd/stores/retry.py",
        "async with asyncio.timeout(deadline_s):",
        "async with asyncio.timeout(None):",
        "pytest tests/stores/test_retry.py -k every_call_ends",
    ),
)
