"""The kinds of stores: what each one's URL holds, and what messages say of it.

A new kind of store is a record here, a module in `stores/` that implements `stores.base.Store`, and a line in
`stores/open.py`. The order of the records is only the order in which messages and help list them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

Form: TypeAlias = tuple[re.Pattern[str], str]  # what a value has to match, and its description for messages

_ENDPOINT: Form = re.compile(r".+"), "http(s)://host[:port]"


@dataclass(frozen=True, slots=True)
class StoreScheme:
    """One kind of store."""

    example: str  # the form of its URL, for messages and help
    # the form of a bucket's name; None: the URL names a directory of this machine. It has no default, because a
    # directory is compared with the spool and with other tiers by its path, and a bucket by its name.
    bucket: Form | None
    credentials: str = ""  # from where tierd takes credentials, for messages
    # the form of each parameter after '?', which is a field of `StoreUrl`
    parameters: Mapping[str, Form] = field(default_factory=lambda: MappingProxyType({}))
    required: tuple[str, ...] = ()  # the parameters that a URL must have
    # the groups of `tierd doctor`'s checks, in their order; see `doctor.examination`
    checks: tuple[str, ...] = ("operations",)

    @property
    def is_directory(self) -> bool:
        """Whether the URL names a directory of this machine."""
        return self.bucket is None


SCHEMES: Mapping[str, StoreScheme] = MappingProxyType(
    {
        "file": StoreScheme("file:///path", bucket=None, checks=("directory",)),
        "s3": StoreScheme(
            "s3://bucket/prefix",
            (
                re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
                "bucket name: 3 to 63 lower-case letters, digits, '-' or '.'; "
                "a server's address goes into ?endpoint=http://host:port",
            ),
            "AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or the instance's role",
            {
                "addressing": (re.compile(r"auto|path|virtual"), "auto, path or virtual"),
                "endpoint": _ENDPOINT,
                "region": (re.compile(r"[a-z0-9-]{1,64}"), "lower-case letters, digits and '-', as in eu-central-1"),
                "sse_kms_key_id": (re.compile(r"[A-Za-z0-9:/_-]{1,512}"), "a KMS key's id, ARN or alias"),
                "storage_class": (re.compile(r"[A-Z_]{1,64}"), "capital letters and '_', as in STANDARD_IA"),
            },
            checks=("connection", "operations", "bucket", "credentials"),
        ),
        "gs": StoreScheme(
            "gs://bucket/prefix",
            (
                re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"),
                "bucket name: 3 to 63 lower-case letters, digits, '-', '_' or '.'",
            ),
            "chain of Google Cloud: GOOGLE_APPLICATION_CREDENTIALS, or the instance's service account",
            {"endpoint": _ENDPOINT},
        ),
        "az": StoreScheme(
            "az://container/prefix?account=NAME",
            (
                re.compile(r"(?!.*--)[a-z0-9][a-z0-9-]{1,61}[a-z0-9]"),
                "container name: 3 to 63 lower-case letters, digits or single '-'; the account goes into ?account=NAME",
            ),
            "variables of Azure: AZURE_STORAGE_ACCOUNT_KEY, AZURE_CLIENT_ID and others, or the instance's identity",
            {
                "account": (re.compile(r"[a-z0-9]{3,24}"), "a storage account: 3 to 24 lower-case letters and digits"),
                "endpoint": _ENDPOINT,
            },
            required=("account",),
        ),
    }
)

PLACES = " or ".join(", ".join(scheme.example for scheme in SCHEMES.values()).rsplit(", ", 1))
