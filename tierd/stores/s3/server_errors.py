"""Translate error responses and missing responses of an S3 server into tierd's errors.

Invariant: each error message names its condition and the remedy. No message repeats a library's text, because such text
may quote a secret. Of foreign errors it shows only class names and OpenSSL's constants.
"""

from __future__ import annotations

import http.client
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp
from botocore import exceptions as botocore
from botocore.parsers import ResponseParserError

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreFull, StoreRefused, StoreUnavailable, TierdError
from tierd.stores.base import BucketAbsent
from tierd.stores.retry import UNNAMED, StoreThrottled, UnnamedNotFound

# The errors of the libraries and of the operating system.
LIBRARY_ERRORS = (botocore.ClientError, botocore.BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError)
MISMATCH_CODES = {"BadDigest", "XAmzContentChecksumMismatch"}
# Error codes by which a server rejects the credentials. Newer credentials may be available by now.
CREDENTIAL_CODES = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
    "ExpiredTokenException",
}
CREDENTIAL_CODES |= {"TokenRefreshRequired", "InvalidClientTokenId", "UnrecognizedClientException", "RequestExpired"}

_NO_OBJECT = {"NoSuchKey", "NoSuchVersion"}
_UNNAMED = {"", "404", "NotFound"}  # botocore's codes for a body that is no error of S3's: empty, or a gateway's page
_TOO_MANY = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded"}
_NOT_NOW = {"InternalError", "ServiceUnavailable", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict"}
_NOT_NOW |= {"KMSInternalException", "InternalException", "DependencyTimeoutException", "KeyUnavailableException"}
_NOT_NOW |= {*MISMATCH_CODES, "IncompleteBody"}  # damaged or truncated in transit
_PLACE = {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "InvalidRegion"}
_LOCKED = {"MethodNotAllowed", "NotImplemented", "RetentionPolicyNotMet", "ObjectUnderActiveHold", "ObjectLocked"}
ACTIONS = {"put": "s3:PutObject", "get": "s3:GetObject", "scan": "s3:ListBucket", "delete": "s3:DeleteObject"}
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")
_SECONDS, _LONGEST_WAIT_S = re.compile("[0-9]+"), 60.0
_UNHEARD = "; nothing was heard from there yet: check host, port, and whether it is http:// or https://"
_TLS_ALERT = "\x15\x03"  # how a server that speaks TLS responds to plain HTTP


def response_error(
    place: str, doing: str, code: str, status: int, message: str, after: str = "", date: str = "", region: str = ""
) -> TierdError:
    """Return the error that corresponds to a server's error response.

    Args:
        doing: the operation and the key: ``put``, ``get``, ``scan`` or ``delete`` first.
        code: S3's error code, or the HTTP status if the response has none.
        status: the HTTP status; 0 if the error is one item in the response to a batch request.
        message: the server's own text.
        after, date, region: the headers Retry-After, Date and x-amz-bucket-region.
    """
    kind, advice = _condition(doing, code, status, message)
    if region and (code in _PLACE or 300 <= status < 400):
        advice += f"; the bucket is in {region[:40]}: add ?region={region[:40]} to the URL"
    answer = f"{code} {status or ''}".strip()
    text = f"{place}: {doing}: {answer}{advice}{f' ({message[:200]})' if message else ''}"
    if kind is StoreThrottled:
        return StoreThrottled(text, _wait_s(after, date))
    return kind(text)


def _wait_s(after: str, date: str) -> float:
    """Return the seconds that Retry-After asks for (RFC 9110, section 10.2.3), at most 60; 0 if it cannot be parsed.

    A date counts from the response's Date header, because the clocks may differ. Without that header it counts from
    this node's clock.
    """
    if _SECONDS.fullmatch(after):
        return min(float(after), _LONGEST_WAIT_S)
    try:
        until, now = parsedate_to_datetime(after), parsedate_to_datetime(date) if date else datetime.now(UTC)
    except (ValueError, OverflowError):
        return 0.0
    remaining = until.replace(tzinfo=UTC) - now.replace(tzinfo=UTC)  # HTTP dates are always in GMT
    return min(max(remaining.total_seconds(), 0.0), _LONGEST_WAIT_S)


def _condition(doing: str, code: str, status: int, message: str) -> tuple[type[TierdError], str]:
    if code in _NO_OBJECT:
        return ObjectNotFound, ""
    if status == 404 and code in _UNNAMED and doing.startswith("get "):
        return UnnamedNotFound, UNNAMED
    if code == "NoSuchBucket" or status == 404:
        return BucketAbsent, ": there is no such bucket; create it, or check its name, the endpoint and the region"
    if code == "RequestTimeTooSkewed":
        return StoreUnavailable, ": this node's clock and the server's differ too much; is NTP running?"
    if code == "QuotaExceeded" or status == 507:
        return StoreFull, ": the bucket is full"
    bare, is_kms = code.removeprefix("KMS."), code.startswith("KMS") or "kms:" in message.lower()
    advice = ": KMS takes no more requests for now; S3 Bucket Keys ask it seldom" if is_kms else ""
    if bare in _TOO_MANY or status in (429, 503):
        return StoreThrottled, advice
    if bare in _NOT_NOW or status == 408 or (status >= 500 and status != 501):
        return StoreUnavailable, advice
    if is_kms:
        return StoreRefused, (
            ": the KMS key cannot be used: check sse_kms_key_id in the URL, that the key is enabled, and that the "
            "credentials are allowed kms:GenerateDataKey and kms:Decrypt"
        )
    if code == "InvalidObjectState":
        return StoreRefused, (
            ": the object is archived and cannot be read until it is restored (aws s3api restore-object); take tierd's "
            "prefix out of lifecycle rules that move objects to GLACIER or DEEP_ARCHIVE"
        )
    if code == "InvalidStorageClass":
        return StoreRefused, ": the server does not know this storage_class; change it in the URL, or leave it out"
    if code in _PLACE or 300 <= status < 400:
        return StoreRefused, ": the bucket lives elsewhere; check region and endpoint in the URL"
    return _denial(doing, code, status)


def _denial(doing: str, code: str, status: int) -> tuple[type[TierdError], str]:
    if code in CREDENTIAL_CODES or status == 401:
        return StoreRefused, ": check the credentials: the server does not know them, or takes them no longer"
    action = doing.partition(" ")[0]
    denied = code == "AccessDenied" or status == 403
    if action == "delete" and (denied or code in _LOCKED or status in (405, 501)):
        return DeleteRefused, (
            ": the credentials, the bucket's policy or a lock on the object allow no s3:DeleteObject; without it this "
            "tier is append-only, and nothing is pruned there"
        )
    if denied:
        needs = f": this needs {ACTIONS[action]}" if action in ACTIONS else ""
        return StoreRefused, f": check the credentials, and what the bucket's policy allows them{needs}"
    if code == "400" and status == 400:
        return StoreRefused, ": this is no answer of an S3 server; if it speaks TLS there, write endpoint=https://…"
    return StoreRefused, ""


def no_response_error(place: str, doing: str, error: BaseException, *, heard: bool) -> TierdError:
    """Return the error that corresponds to a missing or incomplete response.

    `heard` says whether the server has responded to this store before; then host, port and scheme are right.
    """
    name = type(error).__name__
    if isinstance(error, (botocore.MetadataRetrievalError, botocore.CredentialRetrievalError)):
        return StoreUnavailable(f"{place}: {doing}: {name}: the source of the credentials does not answer")
    if isinstance(error, (botocore.NoCredentialsError, botocore.PartialCredentialsError, botocore.ProfileNotFound)):
        return StoreRefused(
            f"{place}: {doing}: {name}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
            "or give the node a role; a credentials file is found as soon as it is there"
        )
    if tls := _tls_trouble(error):
        return StoreRefused(f"{place}: {doing}: {tls}")
    unheard = (botocore.ConnectionError, botocore.HTTPClientError, botocore.IncompleteReadError)
    if isinstance(error, botocore.BotoCoreError) and not isinstance(error, unheard):
        return StoreRefused(f"{place}: {doing}: {name}: check the AWS configuration")
    reason = _reason(error)
    name = f"{name} ({reason})" if reason else name
    return StoreUnavailable(f"{place}: {doing}: {name}: no answer, or not all of it{'' if heard else _UNHEARD}")


def silence_error(place: str, doing: str, error: StoreUnavailable, *, heard: bool) -> TierdError:
    """Return the error for a missing response that the transport has already described."""
    if tls := _tls_trouble(error):
        return StoreRefused(f"{place}: {doing}: {tls}")
    return error if heard else StoreUnavailable(f"{error}{_UNHEARD}")


def _tls_trouble(error: BaseException) -> str:
    """Describe a TLS error that no retry can resolve: a bad certificate, or TLS on one side only; empty for other
    errors.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in _reason(cause):
            return "the server's certificate does not verify; see AWS_CA_BUNDLE"
        if isinstance(cause, ssl.SSLError) and any(word in _reason(cause) for word in _NO_TLS):
            return "the server does not speak TLS on this port; if that is meant, write endpoint=http://…"
        if isinstance(cause, http.client.BadStatusLine) and str(cause).startswith(_TLS_ALERT):
            return "the server speaks TLS on this port; write endpoint=https://…"
    return ""


def _reason(error: BaseException) -> str:
    """Return OpenSSL's constant for the failure."""
    return next((cause.reason or "" for cause in _causes(error) if isinstance(cause, ssl.SSLError)), "")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the chain of its causes."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        yield cause
        inner = getattr(cause, "kwargs", {}).get("error")  # botocore keeps the cause in this member
        cause = cause.__cause__ or (inner if isinstance(inner, BaseException) else None)
