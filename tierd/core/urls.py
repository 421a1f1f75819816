"""Parsing and checking of a store's URL.

Invariant: a URL names a place and how to reach it, and never contains credentials. Credentials are refused, and no
message repeats a part of a URL that could contain one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NoReturn
from urllib.parse import SplitResult, quote, unquote, urlsplit

from tierd.core.errors import ConfigError
from tierd.core.store_schemes import PLACES, SCHEMES

_PREFIX = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,255}")
_MAX_PREFIX = 256  # characters; with the longest of tierd's keys this remains below S3's limit of 1,024
_HOST = re.compile(r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*\.?|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_ENDPOINT_PATH = re.compile(r"(/[A-Za-z0-9._-]+)*/?")
_PLAIN = re.compile(r"[A-Za-z_-]{1,32}")  # too short and too plain to be a secret, so that it may be repeated
_SECRET_NAMES = ("key", "secret", "token", "password", "credential")
_CHAIN = (
    "credentials do not belong in a URL, which ends up in logs and argument lists; tierd takes them from the standard "
)
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")  # storage classes whose objects must be restored before they can be read


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A store's place. `str()` gives the canonical URL, which holds no secret and parses to the same `StoreUrl`."""

    scheme: str  # a key of `SCHEMES`
    path: str = ""  # of a directory: absolute
    bucket: str = ""  # Azure calls it a container
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
        return SCHEMES[self.scheme].is_directory

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
        if self.is_directory:
            return f"{self.scheme}://{quote(self.path)}"
        parameters = {name: getattr(self, name) for name in SCHEMES[self.scheme].parameters}
        if parameters.get("addressing") == "auto":
            del parameters["addressing"]
        query = "&".join(
            f"{name}={quote(value, safe=':/[]')}" for name, value in parameters.items() if value is not None
        )
        return f"{self.scheme}://{self.bucket}{'/' * bool(self.prefix)}{self.prefix}{'?' * bool(query)}{query}"


def parse_url(text: str) -> StoreUrl:
    """Parse ``file:///path``, a plain absolute path, or ``s3://bucket[/prefix][?parameter=value&...]``, and so on for
    each of `SCHEMES`.

    Raises:
        ConfigError: a piece cannot be used; the message names the piece and a remedy.
    """
    if not text.isprintable() or text != text.strip():
        raise ConfigError("store URL: it holds a control character, or white space at an end")
    if text.startswith("/"):
        return StoreUrl("file", path=_file_path(text))
    scheme, colon, remainder = text.partition(":")
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]{0,15}", scheme):
        _refuse(f"a store is an absolute path, {PLACES}; a relative path is none of these")
    if (scheme := scheme.lower()) not in SCHEMES:
        _refuse(f"unknown scheme {scheme!r}{_near(scheme, SCHEMES)}: a store is {PLACES}")
    if not remainder.startswith("//"):
        _refuse(f"{scheme}: is followed by '//', as in {SCHEMES[scheme].example}")
    try:
        split = urlsplit(text)
    except ValueError:  # its text may repeat the authority
        _refuse("the part between '//' and the next '/' is not well formed")
    is_directory = SCHEMES[scheme].is_directory
    if "@" in split.netloc:
        _refuse(f"a {scheme} URL has neither user nor password" if is_directory else _no_secrets(scheme))
    if split.fragment or text.endswith("#"):
        _refuse("'#' and what follows it mean nothing here; write it as %23 if it is part of a path")
    return _directory(scheme, split) if is_directory else _bucket(scheme, split)


def _directory(scheme: str, split: SplitResult) -> StoreUrl:
    if split.netloc.lower() not in ("", "localhost"):
        example = SCHEMES[scheme].example
        _refuse(f"a {scheme} URL has no host, but here is {_shown(split.netloc)}: write {example}, with three slashes")
    if split.query:
        _refuse(f"a {scheme} URL has no parameters; write '?' as %3F if it is part of the path")
    try:
        path = unquote(split.path, errors="strict")
    except UnicodeDecodeError:
        _refuse("the path's %-escapes are not UTF-8")
    return StoreUrl(scheme, path=_file_path(path))


def _file_path(path: str) -> str:
    components = [part for part in path.split("/") if part not in ("", ".")]
    if not path.isprintable():
        _refuse("the path holds a control character")
    if ".." in components:
        _refuse(f"'..' in the path {path!r}: write the path that is meant")
    if not components:
        _refuse("the path is the root of the file system; name a directory for tierd's objects")
    return "/" + "/".join(components)


def _bucket(scheme: str, split: SplitResult) -> StoreUrl:
    parameters, bucket = _parameters(scheme, split.query), _bucket_name(scheme, split.netloc)
    for name in SCHEMES[scheme].required:
        if name not in parameters:
            _refuse(f"parameter {name} is missing: write {SCHEMES[scheme].example}")
    if "endpoint" in parameters:
        parameters["endpoint"] = _endpoint(scheme, parameters["endpoint"])
    return StoreUrl(scheme, bucket=bucket, prefix=_prefix(split.path), **parameters)


def _bucket_name(scheme: str, name: str) -> str:
    form = SCHEMES[scheme].bucket
    assert form is not None
    if not name:
        _refuse(f"the {form[1].split()[0]} is missing: write {SCHEMES[scheme].example}")
    if not form[0].fullmatch(name):
        _refuse(f"{_shown(name)} is no {form[1]}")
    return name


def _prefix(path: str) -> str:
    components = [part for part in unquote(path, errors="replace").split("/") if part]
    prefix = "/".join(components)
    for part in components:
        if not _PREFIX.fullmatch(part):
            _refuse(f"{_shown(part)} in the prefix: each component is made of A-Za-z0-9._=- and is not '.' or '..'")
    if len(prefix) > _MAX_PREFIX:
        _refuse(f"the prefix has {len(prefix)} characters; at most {_MAX_PREFIX} leave room for tierd's own keys")
    return prefix


def _parameters(scheme: str, query: str) -> dict[str, str]:
    parameters: dict[str, str] = {}
    allowed = SCHEMES[scheme].parameters
    for pair in query.split("&") if query else ():
        name, _, value = (unquote(part, errors="replace") for part in pair.partition("="))
        if name not in allowed:
            if any(word in name.lower() for word in _SECRET_NAMES) and not _near(name, allowed):
                _refuse(_no_secrets(scheme))
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


def _endpoint(scheme: str, text: str) -> str:
    try:
        split = urlsplit(text)
        port = split.port
    except ValueError:
        _refuse("parameter endpoint: its host or port is not well formed")
    if "@" in text:
        _refuse(f"parameter endpoint: {_no_secrets(scheme)}")
    if split.scheme not in ("http", "https"):
        _refuse("parameter endpoint begins with http:// or https://, as in endpoint=http://127.0.0.1:7480")
    if not _HOST.fullmatch(split.netloc) or port == 0:
        _refuse("parameter endpoint: a host name or address, and perhaps a port, follow http(s)://")
    if split.query or split.fragment or not _ENDPOINT_PATH.fullmatch(split.path):
        example = SCHEMES[scheme].example
        _refuse(f"parameter endpoint: nothing but a path may follow the host; the bucket is named by {example}")
    return f"{split.scheme}://{split.netloc.lower()}{split.path.rstrip('/')}"


def _no_secrets(scheme: str) -> str:
    return _CHAIN + SCHEMES[scheme].credentials


def _near(word: str, candidates: Iterable[str]) -> str:
    match = difflib.get_close_matches(word.lower(), list(candidates), n=1, cutoff=0.6)
    return f" (is {match[0]!r} meant?)" if match else ""


def _shown(piece: str) -> str:
    """`piece` as a message may show it. Pieces with ':', '@' or '+' are hidden, because credentials get into URLs as
    "key:secret" or "secret@bucket"."""
    return "what stands there (not repeated here)" if re.search(r"[:@+]", piece) or len(piece) > 255 else repr(piece)


def _refuse(reason: str) -> NoReturn:
    raise ConfigError(f"store URL: {reason}") from None
