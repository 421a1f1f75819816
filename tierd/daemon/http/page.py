"""The page: one HTML document with its style and script inside, and the policy that lets a browser run only these."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources


def _file(kind: str) -> str:
    return resources.files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE, _SCRIPT = _file("css"), _file("js")
PAGE = _file("html").replace("@STYLE@", _STYLE).replace("@SCRIPT@", _SCRIPT).encode()
POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
