"""An encrypted tier as FORMAT.md describes it, by none of tierd's code: for `faults.corruption`."""

from __future__ import annotations

import base64
import hmac
import json
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher as Block
from cryptography.hazmat.primitives.ciphers import algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from support.by_hand import seal, sealed

UNREADABLE = b"not what this key encrypted under this name"  # what is taken for an object's content where that is so


class Cipher:
    """One tier's."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = hmac.digest(secret, b"tierd id", "sha256")[:8].hex()
        self.opened = lru_cache(maxsize=1 << 14)(self._opened)
        self.shown = lru_cache(maxsize=1 << 14)(lambda key: self._renamed(key, hide=False))
        self.hidden = lru_cache(maxsize=1 << 14)(lambda key: self._renamed(key, hide=True))

    def _derive(self, purpose: str, directory: str) -> bytes:
        return hmac.digest(self._secret, f"tierd {purpose} {directory}".encode(), "sha256")

    def _renamed(self, key: str, *, hide: bool) -> str:
        if "/chunks/" not in key:
            return key
        directory, _, name = key.rpartition("/")
        digest, _, form = name.partition(".")
        block = Block(algorithms.AES(self._derive("names", directory)), modes.ECB())
        turn = block.encryptor() if hide else block.decryptor()
        return f"{directory}/{turn.update(bytes.fromhex(digest)).hex()}.{form}"

    def _opened(self, key: str, data: bytes) -> bytes:
        """The content of an object that is called `key`."""
        if not data or key in ("README.md", "README.md.id"):
            return data
        try:
            if "/chunks/" not in key:
                said = sealed(data)
                if said is None:
                    return UNREADABLE
                data = base64.b64decode(said["encrypted"] + "=" * (-len(said["encrypted"]) % 4))
            return self._box(key).decrypt(data[:12], data[12:], key.encode())
        except (InvalidTag, ValueError, KeyError):  # not of this key, or of none
            return UNREADABLE

    def closed(self, key: str, content: bytes) -> bytes:
        """An object that is called `key` and holds this."""
        if not content or key in ("README.md", "README.md.id"):
            return content
        nonce = hmac.digest(key.encode(), content, "sha256")[:12]
        data = nonce + self._box(key).encrypt(nonce, content, key.encode())
        if "/chunks/" in key:
            return data
        said = {"version": 2, "cipher": "aes-256-gcm", "key_id": self.id}
        said["encrypted"] = base64.b64encode(data).decode().rstrip("=")
        return seal(json.dumps(said, separators=(",", ":")).encode())

    def _box(self, key: str) -> AESGCM:
        return AESGCM(self._derive("objects", key.rpartition("/")[0]))
