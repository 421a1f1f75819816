"""Mutants of `tierd/stores/cloud/`."""

from __future__ import annotations

from faults.rounds import Mutant

_ANSWERS = "tierd/stores/cloud/answers.py"
_CLOUD_STORE = "tierd/stores/cloud/cloud_store.py"
_TEST_CLOUD = "pytest tests/stores/test_cloud.py"

MUTANTS = (
    Mutant(
        "a missing bucket is a missing object",
        _ANSWERS,
        'if code in _NO_BUCKET or (status == 404 and action in ("put", "scan")):',
        'if status == 404 and action in ("put", "scan"):',
        f"{_TEST_CLOUD} -k missing_bucket",
    ),
    Mutant(
        "a gateway's 404 is a missing object of Google's or Azure's",
        _ANSWERS,
        "else (UnnamedNotFound, UNNAMED)",
        'else (ObjectNotFound, "")',
        f"{_TEST_CLOUD} -k names_no_error",
    ),
    Mutant(
        "a bucket called after credentials has none",
        _ANSWERS,
        '_ADDRESS.sub("", _NAMES.sub("", head))',
        "head",
        "pytest tests/stores/test_cloud_answers.py -k a_name_is_no",
    ),
    Mutant(
        "a refused deletion is a refused tier",
        _ANSWERS,
        'if action == "delete" and status in',
        "if False and status in",
        "pytest tests/stores/test_cloud_answers.py -k refusal_to_delete",
    ),
    Mutant(
        "a server's words are shown",
        _ANSWERS,
        'return kind(f"{place}: {doing}: {shown or name}{advice}")',
        'return kind(f"{place}: {doing}: {shown or name}{advice} ({error})")',
        "pytest tests/stores/test_cloud_answers.py -k repeated",
    ),
    Mutant(
        "a request to Google or Azure reads the caller's buffer",
        _CLOUD_STORE,
        "name, copy = check_key(key), bytes(octets(data))",
        "name, copy = check_key(key), octets(data)",
        f"{_TEST_CLOUD} -k sends_a_copy",
    ),
    Mutant(
        "obstore tries again by itself",
        _CLOUD_STORE,
        '{"max_retries": 0,',
        '{"max_retries": 2,',
        f"{_TEST_CLOUD} -k what_a_status_means",
    ),
    Mutant(
        "a key that is gone cannot be deleted from Google's bucket",
        _CLOUD_STORE,
        "                except ObjectNotFound:\n                    pass\n",
        "                except ObjectNotFound:\n                    raise\n",
        f"{_TEST_CLOUD} -k counts_as_deleted",
    ),
    Mutant(
        "a listing out of order is taken for whole",
        _CLOUD_STORE,
        "                if key <= last:\n",
        "                if False:\n",
        f"{_TEST_CLOUD} -k out_of_order",
    ),
    Mutant(
        "every listing of a bucket begins at its beginning",
        _CLOUD_STORE,
        "    return found if found and",
        "    return None if found and",
        f"{_TEST_CLOUD} -k without_listing_its_chunks",
    ),
    Mutant(
        "credentials that were refused are kept",
        _CLOUD_STORE,
        "answer.status in (401, 403):\n                self._store = None",
        "answer.status in (401, 403):\n                pass",
        f"{_TEST_CLOUD} -k read_again",
    ),
    Mutant(
        "a process is aborted at its end by a thread of obstore's",
        _CLOUD_STORE,
        "@atexit.register\n",
        "",
        f"{_TEST_CLOUD} -k ends_as_it_should",
    ),
)
