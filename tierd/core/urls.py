"""Parsing and checking of a store's URL.

Invariant: a URL names a place and how to reach it, and never contains credentials. Credentials are refused, and no
message repeats a part of a URL that could contain one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal, NoReturn, assert_never
from urllib.parse import SplitResult, quote, unquote, urlsplit

from tierd.core.errors import ConfigError

# Names of buckets, and their description for messages.
_BUCKETS = {
    "s3": (
        re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
        "bucket name: 3 to 63 lower-case letters, digits, '-' or '.'; "
        "a server's address goes into ?endpoint=http://host:port",
    ),
    "gs": (
        re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"),
        "bucket name: 3 to 63 lower-case letters, digits, '-', '_' or '.'",
    ),
    "az": (
        re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]"),
        "container name: 3 to 63 lower-case letters, digits or single '-'; the account goes into ?account=NAME",
    ),
}
_PREFIX = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,255}")
_MAX_PREFIX = 256  # characters; with the longest of tierd's keys this remains below S3's limit of 1,024
_HOST = re.compile(r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*\.?|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_ENDPOINT_PATH = re.compile(r"(/[A-Za-z0-9._-]+)*/?")
_PLAIN = re.compile(r"[A-Za-z_-]{1,32}")  # too short and too plain to be a secret, so that it may be repeated
_SECRET_NAMES = ("key", "secret", "token", "password", "credential")
_CHAIN = (
    "credentials do not belong in a URL, which ends up in logs and argument lists; tierd takes them from the standard "
)
_CHAINS = {
    "s3": "AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or the instance's role",
    "gs": "chain of Google Cloud: GOOGLE_APPLICATION_CREDENTIALS, or the instance's service account",
    "az": "variables of Azure: AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID and others, or the instance's identity",
}
_ENDPOINT = (re.compile(r".+"), "http(s)://host[:port]")
# The parameters after '?': the form of each value, and its description for messages.
_PARAMETERS = {
    "s3": {
        "addressing": (re.compile(r"auto|path|virtual"), "auto, path or virtual"),
        "endpoint": _ENDPOINT,
        "region": (re.compile(r"[a-z0-9-]{1,64}"), "lower-case letters, digits and '-', as in eu-central-1"),
        "sse_kms_key_id": (re.compile(r"[A-Za-z0-9:/_-]{1,512}"), "a KMS key's id, ARN or alias"),
        "storage_class": (re.compile(r"[A-Z_]{1,64}"), "capital letters and '_', as in STANDARD_IA"),
    },
    "gs": {"endpoint": _ENDPOINT},
    "az": {
        "account": (re.compile(r"[a-z0-9]{3,24}"), "a storage account: 3 to 24 lower-case letters and digits"),
        "endpoint": _ENDPOINT,
    },
}
_FORMS = {
    "file": "file:///mnt/tier",
    "s3": "s3://bucket/prefix",
    "gs": "gs://bucket/prefix",
    "az": "az://container/prefix?account=NAME",
}
_PLACES = "file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix?account=NAME"
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")  # storage classes whose objects must be restored before they can be read


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store's place. `str()` gives the canonical URL, which holds no secret and parses to the same `StoreUrl`."""

    scheme: Literal["file", "s3", "gs", "az"]
    path: str = ""  # file: absolute
    bucket: str = ""  # of all but file; Azure calls it a container
    prefix: str = ""  # no '/' at either end; may be empty
    endpoint: str | None = None  # None: the provider's own
    account: str | None = None  # az: the storage account
    region: str | None = None  # s3, like all below
    addressing: str = "auto"  # auto, path (http://host/bucket) or virtual (http://bucket.host)
    sse_kms_key_id: str | None = None
    storage_class: str | None = None

    @property
    def is_directory(self) -> bool:
        """Whether the place is a directory of this machine, `path`."""
        return self.scheme == "file"

    def relation(self, peer: StoreUrl) -> Literal["is", "lies in", "contains", ""]:
        """Return the relation of this place to another one, by their texts alone; "" if no text shows one.

        Region, addressing, storage class and KMS key say how a place is used, so places do not differ by them.
        """
        if self._server() != peer._server():
            return ""
        own_path, peer_path = (url.path or url.prefix for url in (self, peer))
        if own_path == peer_path:
            return "is"
        inner, outer = (f"{text}/" if text else "" for text in (own_path, peer_path))
        return "lies in" if inner.startswith(outer) else "contains" if outer.startswith(inner) else ""

    def _server(self) -> tuple[str, ...]:
        """Return the server and the bucket. HTTP and HTTPS do not differ here, nor do AWS's own endpoints."""
        split = urlsplit(self.endpoint or "")
        host = (split.hostname or "").rstrip(".")
        if self.scheme == "s3" and host.endswith(".amazonaws.com"):  # a bucket's name is unique among AWS's regions
            host = ""
        port = "" if split.port in (None, 80, 443) else str(split.port)
        return self.scheme, self.account or "", host, port, split.path, self.bucket

    def __str__(self) -> str:
        match self.scheme:
            case "file":
                return f"file://{quote(self.path)}"
            case "s3" | "gs" | "az":
                return self._bucket_url()
            case _ as unknown:  # a scheme that was added above and not here
                assert_never(unknown)

    def _bucket_url(self) -> str:
        parameters = {name: getattr(self, name) for name in _PARAMETERS[self.scheme]}
        if parameters.get("addressing") == "auto":
            del parameters["addressing"]
        query = "&".join(
            f"{name}={quote(value, safe=':/[]')}" for name, value in parameters.items() if value is not None
        )
        return f"{self.scheme}://{self.bucket}{'/' * bool(self.prefix)}{self.prefix}{'?' * bool(query)}{query}"


def parse_url(text: str) -> StoreUrl:
    """Parse ``file:///path``, a plain absolute path, or ``s3://bucket[/prefix][?parameter=value&...]``; likewise ``gs://``
    and ``az://``.

    The parameters are `StoreUrl`'s fields. s3: endpoint, region, addressing, sse_kms_key_id, storage_class.
    gs: endpoint. az: account, which is required, and endpoint.

    Raises:
        ConfigError: a piece cannot be used; the message names the piece and a remedy.
    """
    if not text.isprintable() or text != text.strip():
        raise ConfigError("store URL: it holds a control character, or white space at an end")
    if text.startswith("/"):
        return StoreUrl("file", path=_file_path(text))
    scheme, colon, remainder = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,15}", scheme):
        _refuse(f"a store is an absolute path, {_PLACES}; a relative path is none of these")
    if (scheme := scheme.lower()) not in _PARSERS:
        _refuse(f"unknown scheme {scheme!r}{_near(scheme, _PARSERS)}: a store is {_PLACES}")
    if not remainder.startswith("//"):
        _refuse(f"{scheme}: is followed by '//', as in {_FORMS[scheme]}")
    try:
        split = urlsplit(text)
    except ValueError:  # its text may repeat the authority
        _refuse("the part between '//' and the next '/' is not well formed")
    if "@" in split.netloc:
        _refuse(_CHAIN + _CHAINS[scheme] if scheme in _CHAINS else f"a {scheme} URL has neither user nor password")
    if split.fragment or text.endswith("#"):
        _refuse("'#' and what follows it mean nothing here; write it as %23 if it is part of a path")
    return _PARSERS[scheme](split)


def _file(split: SplitResult) -> StoreUrl:
    if split.netloc.lower() not in ("", "localhost"):
        _refuse(f"a file URL has no host, but here is {_shown(split.netloc)}: write file:///path, with three slashes")
    if split.query:
        _refuse("a file URL has no parameters; write '?' as %3F if it is part of the path")
    try:
        path = unquote(split.path, errors="strict")
    except UnicodeDecodeError:
        _refuse("the path's %-escapes are not UTF-8")
    return StoreUrl("file", path=_file_path(path))


def _file_path(path: str) -> str:
    components = [part for part in path.split("/") if part not in ("", ".")]
    if not path.isprintable():
        _refuse("the path holds a control character")
    if ".." in components:
        _refuse(f"'..' in the path {path!r}: write the path that is meant")
    if not components:
        _refuse("the path is the root of the file system; name a directory for tierd's objects")
    return "/" + "/".join(components)


def _s3(split: SplitResult) -> StoreUrl:
    parameters = _parameters("s3", split.query)
    return StoreUrl(
        "s3",
        bucket=_bucket("s3", split.netloc),
        prefix=_prefix(split.path),
        endpoint=_endpoint("s3", parameters),
        region=parameters.get("region"),
        addressing=parameters.get("addressing", "auto"),
        sse_kms_key_id=parameters.get("sse_kms_key_id"),
        storage_class=parameters.get("storage_class"),
    )


def _gs(split: SplitResult) -> StoreUrl:
    parameters, bucket = _parameters("gs", split.query), _bucket("gs", split.netloc)
    return StoreUrl("gs", bucket=bucket, prefix=_prefix(split.path), endpoint=_endpoint("gs", parameters))


def _az(split: SplitResult) -> StoreUrl:
    parameters, bucket = _parameters("az", split.query), _bucket("az", split.netloc)
    if "account" not in parameters:
        _refuse(f"parameter account is missing: write {_FORMS['az']}")
    prefix, endpoint = _prefix(split.path), _endpoint("az", parameters)
    return StoreUrl("az", bucket=bucket, prefix=prefix, endpoint=endpoint, account=parameters["account"])


def _bucket(scheme: str, bucket: str) -> str:
    form, words = _BUCKETS[scheme]
    if not bucket:
        _refuse(f"the {words.split()[0]} is missing: write {_FORMS[scheme]}")
    if not form.fullmatch(bucket):
        _refuse(f"{_shown(bucket)} is no {words}")
    return bucket


def _prefix(path: str) -> str:
    components = [part for part in unquote(path, errors="replace").split("/") if part]
    prefix = "/".join(components)
    for part in components:
        if not _PREFIX.fullmatch(part):
            _refuse(f"{_shown(part)} in the prefix: each component is made of A-Za-z0-9._=- and is not '.' or '..'")
    if len(prefix) > _MAX_PREFIX:
        _refuse(f"the prefix has {len(prefix)} characters; at most {_MAX_PREFIX} leave room for tierd's own keys")
    return prefix


_PARSERS = {"file": _file, "s3": _s3, "gs": _gs, "az": _az}


def _parameters(scheme: str, query: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    allowed = _PARAMETERS[scheme]
    for pair in query.split("&") if query else ():
        name, _, value = (unquote(part, errors="replace") for part in pair.partition("="))
        if name not in allowed:
            if any(word in name.lower() for word in _SECRET_NAMES) and not _near(name, allowed):
                _refuse(_CHAIN + _CHAINS[scheme])
            label = f"{name!r}{_near(name, allowed)}" if _PLAIN.fullmatch(name) else "(not repeated here)"
            _refuse(f"unknown parameter {label}: there are {', '.join(allowed)}")
        if name in parameters:
            _refuse(f"parameter {name} stands twice")
        form, words = allowed[name]
        if not form.fullmatch(value):
            _refuse(f"parameter {name} is {words}{'; here it has no value' if not value else ''}")
        if name == "storage_class" and value in _ARCHIVES:
            _refuse(
                f"parameter storage_class={value}: what lies there cannot be read at once, and tierd reads manifests "
                "and chunks again to list, verify and restore; what lies in GLACIER_IR or STANDARD_IA can be read"
            )
        parameters[name] = value
    return parameters


def _endpoint(scheme: str, parameters: dict[str, str]) -> str | None:
    if (text := parameters.get("endpoint")) is None:
        return None
    try:
        split = urlsplit(text)
        port = split.port
    except ValueError:
        _refuse("parameter endpoint: its host or port is not well formed")
    if "@" in text:
        _refuse(f"parameter endpoint: {_CHAIN}{_CHAINS[scheme]}")
    if split.scheme not in ("http", "https"):
        _refuse("parameter endpoint begins with http:// or https://, as in endpoint=http://127.0.0.1:7480")
    if not _HOST.fullmatch(split.netloc) or port == 0:
        _refuse("parameter endpoint: a host name or address, and perhaps a port, follow http(s)://")
    if split.query or split.fragment or not _ENDPOINT_PATH.fullmatch(split.path):
        _refuse(f"parameter endpoint: nothing but a path may follow the host; the bucket is named by {_FORMS[scheme]}")
    return f"{split.scheme}://{split.netloc.lower()}{split.path.rstrip('/')}"


def _near(word: str, candidates: object) -> str:
    assert isinstance(candidates, (tuple, dict))
    match = difflib.get_close_matches(word.lower(), list(candidates), n=1, cutoff=0.6)
    return f" (is {match[0]!r} meant?)" if match else ""


def _shown(piece: str) -> str:
    """`piece` as a message may show it. Pieces with ':', '@' or '+' are hidden, because credentials get into URLs as
    "key:secret" or "secret@bucket"."""
    return "what stands there (not repeated here)" if re.search(r"[:@+]", piece) or len(piece) > 255 else repr(piece)


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"store URL: {reason}") from None
