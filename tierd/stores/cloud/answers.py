"""Translate obstore's errors into tierd's.

Invariant: no message repeats a text of the library or of a server, because it may quote an address that holds a secret.
Of foreign errors it shows class names, HTTP statuses and the servers' error codes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierd.core.errors import DeleteRefused, ObjectNotFound, StoreRefused, StoreUnavailable, TierdError
from tierd.stores.absence import UNNAMED, UnnamedNotFound
from tierd.stores.window import StoreThrottled

_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_NO_OBJECT = {"NoSuchKey", "BlobNotFound"}
_LATER = {"ContainerBeingDeleted", "AccountBeingCreated", "OperationTimedOut"}  # 409 or 500, and over soon
# How obstore's texts tell that the source of the credentials failed, and not the store.
_CREDENTIALS = re.compile(r"token request|credential|managed identity|//169\.254\.169\.254|//metadata\.google", re.I)
# A key or an address in these texts: an account, a bucket, a run may have any of those words for its name.
_NAMES = re.compile(r"(?<=location ).*?(?= not found: | already exists: | not modified: )|(?<=path ).*?(?=: Error )")
_ADDRESS = re.compile(r"(?<=performing )[A-Z]+ https?://(?!169\.254\.169\.254|metadata\.google)\S+")
_ACTIONS = {
    "gs": {
        "put": "storage.objects.create and storage.objects.delete, which replacing an object needs as well",
        "get": "storage.objects.get",
        "scan": "storage.objects.list",
        "delete": "storage.objects.delete",
    },
    "az": dict.fromkeys(("put", "get", "scan", "delete"), "a role such as Storage Blob Data Contributor"),
}
SOURCES = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud's default credentials, or the instance's service account",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET and AZURE_TENANT_ID, a federated token, "
    "or the instance's managed identity",
}


@dataclass(frozen=True, slots=True)
class ErrorText:
    """What obstore's text tells of a response.

    Attributes:
        status: the HTTP status; 0 if there was no response.
        code: the server's error code; empty if it sent none.
        is_of_credentials: whether the source of the credentials responded, or failed to.
    """

    status: int
    code: str
    is_of_credentials: bool


def read(text: str) -> ErrorText:
    """Read the text of an error of obstore."""
    summary = text.partition("Debug source")[0]  # what follows repeats it in another form
    status, code = _STATUS.search(summary), _CODE.search(summary)
    head = summary[: status.start()] if status else summary
    bare = _ADDRESS.sub("", _NAMES.sub("", head))
    return ErrorText(int(status[1]) if status else 0, code[1] if code else "", _CREDENTIALS.search(bare) is not None)


def translated(place: str, doing: str, error: BaseException) -> TierdError:
    """Return the error that corresponds to an error of obstore.

    Args:
        place: the store's URL.
        doing: the operation and the key: ``put``, ``get``, ``scan`` or ``delete`` first.
    """
    answer, name = read(str(error)), type(error).__name__
    if isinstance(error, FileNotFoundError) and not answer.status:  # a store in memory, or one key of a batch
        answer = ErrorText(404, "NoSuchKey", is_of_credentials=False)
    kind, advice = _condition(place.partition(":")[0], doing.partition(" ")[0], answer, str(error))
    codes = " ".join(filter(None, (answer.code, str(answer.status or ""))))
    return kind(f"{place}: {doing}: {codes or name}{advice}")


def _condition(scheme: str, action: str, answer: ErrorText, text: str) -> tuple[type[TierdError], str]:
    status, code = answer.status, answer.code
    if answer.is_of_credentials:
        return _without_credentials(scheme, status)
    if code in _NO_BUCKET or (status == 404 and action in ("put", "scan")):
        return StoreRefused, ": there is no such bucket or container; create it, or check its name and the account"
    if status == 404:
        return (ObjectNotFound, "") if code in _NO_OBJECT else (UnnamedNotFound, UNNAMED)
    if status in (429, 503):
        return StoreThrottled, ""
    if status == 408 or status >= 500 or code in _LATER:
        return StoreUnavailable, ""
    if status == 0 and "certificate" in text.lower():
        return StoreRefused, ": the server's certificate does not verify"
    if status == 0:
        return StoreUnavailable, ": no answer, or not all of it"
    if status == 401:
        return StoreRefused, f": check the credentials: {SOURCES[scheme]}"
    if action == "delete" and status in (403, 405, 409, 412):
        return DeleteRefused, (
            ": the credentials, a retention policy, a hold or a lease allow no deletion; without it this tier is "
            "append-only, and nothing is pruned there"
        )
    if status == 403:
        return (
            StoreRefused,
            f": check the credentials, and what they are allowed: this needs {_ACTIONS[scheme][action]}",
        )
    return StoreRefused, ""


def _without_credentials(scheme: str, status: int) -> tuple[type[TierdError], str]:
    if 400 <= status < 500 and status not in (408, 429):
        return StoreRefused, f": no credentials are found, or they are refused: {SOURCES[scheme]}"
    return StoreUnavailable, f": the source of the credentials does not answer: {SOURCES[scheme]}"
