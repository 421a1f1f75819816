"""What obstore's texts say of a failed request, in tierd's errors; and that no text of others is repeated."""

from __future__ import annotations

import pytest

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.stores.cloud.cloud_store import CREDENTIAL_SOURCES, ErrorText, error_from_obstore, parse_error_text
from tierd.stores.retry import StoreThrottled

SECRET = "sv=2023&sig=c2VjcmV0"
PUT = (
    "Generic GCS error: Error performing PUT http://127.0.0.1:1/bucket/k?{} in 1.5ms - Server returned non-2xx status "
    "code: {}: <?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message></Error>\n\n"
    "Debug source:\nstatus code: 418"
)
TOKEN = (
    "Generic GCS error: Error performing token request: Error performing GET http://169.254.169.254/computeMetadata/v1 "
    "in 3ms - {}\n\nDebug source:"
)


def test_a_text_is_read() -> None:
    assert parse_error_text(PUT.format("", "503 Service Unavailable", "SlowDown", "")) == ErrorText(
        503, "SlowDown", False
    )
    assert parse_error_text(TOKEN.format("Server returned non-2xx status code: 403 Forbidden: no")) == ErrorText(
        403, "", True
    )
    assert parse_error_text("error sending request") == ErrorText(0, "", False)
    said = PUT.format("", "403 Forbidden", "AccessDenied", "the credential was not good enough")
    assert parse_error_text(said) == ErrorText(403, "AccessDenied", False), (
        "the server's words are no trouble of the source's"
    )


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:1/bucket/credential%2Fk",
        "http://credentials.blob.core.windows.net/c/k",
        "https://h/metadata.google/k",
    ],
)
@pytest.mark.parametrize(
    ("begin", "status", "expected"),
    [
        ("Object at location {} not found", "404 Not Found", ObjectNotFound),
        ("Object at location {} already exists", "409 Conflict", DeleteRefused),
        ("Request precondition failure for path {}", "412 Precondition Failed", DeleteRefused),
        ("The operation lacked the necessary privileges to complete for path {}", "403 Forbidden", DeleteRefused),
        ("Generic GCS error", "429 Too Many Requests", StoreThrottled),
        ("Generic GCS error", "", StoreUnavailable),
    ],
)
def test_a_name_is_no_trouble_of_the_credentials(
    address: str, begin: str, status: str, expected: type[TierdError]
) -> None:
    """A bucket, an account, a prefix or a run may be called after credentials."""
    answered = f"Server returned non-2xx status code: {status}: <Error><Code>NoSuchKey</Code></Error>"
    text = f"{begin.format('credential/k')}: Error performing DELETE {address} in 1.5ms - "
    text += answered if status else "HTTP error: error sending request"
    error = error_from_obstore("gs://credential", "delete credential/k", OSError(text))
    assert type(error) is expected and CREDENTIAL_SOURCES["gs"] not in str(error), error


@pytest.mark.parametrize(
    ("text", "expected", "says"),
    [
        (
            TOKEN.format("Server returned non-2xx status code: 403 Forbidden: x"),
            StoreRefused,
            "GOOGLE_APPLICATION_CRED",
        ),
        (TOKEN.format("Server returned non-2xx status code: 503 Busy: x"), StoreUnavailable, "does not answer"),
        (TOKEN.format("error sending request"), StoreUnavailable, "does not answer"),
        ("error sending request: invalid peer certificate: UnknownIssuer", StoreRefused, "does not verify"),
        (PUT.format("", "409 Conflict", "ContainerBeingDeleted", ""), StoreUnavailable, "409"),
        (PUT.format("", "403 Forbidden", "AccessDenied", ""), StoreRefused, "storage.objects.create"),
    ],
)
def test_texts_of_a_cloud_are_translated_to_tierds_errors(text: str, expected: type[TierdError], says: str) -> None:
    error = error_from_obstore("gs://bucket/p", "put k", OSError(text))
    assert type(error) is expected and says in str(error)


@pytest.mark.parametrize(("status", "code"), [("403 Forbidden", ""), ("409 Conflict", "BlobImmutableDueToPolicy")])
def test_object_that_may_not_be_deleted_is_a_refusal_to_delete(status: str, code: str) -> None:
    error = error_from_obstore("az://container", "delete k", OSError(PUT.format("", status, code, "")))
    assert type(error) is DeleteRefused and "append-only" in str(error)


def test_no_text_of_others_is_repeated() -> None:
    for status in ("400 Bad Request", "403 Forbidden", "404 Not Found", "500 Oops", "503 Busy"):
        for operation in ("put", "get", "scan", "delete"):
            text = PUT.format(SECRET, status, "Custom", SECRET)
            assert SECRET not in str(error_from_obstore("az://container", f"{operation} k", OSError(text)))
    assert SECRET not in str(
        error_from_obstore("az://container", "put k", OSError(f"error sending to http://h/?{SECRET}"))
    )
