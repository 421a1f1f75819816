"""A bucket on loopback that anybody may use, over a dict: as much S3 as tierd asks for, and no judge of integrity.

`PYTHONPATH=tests python -m support.s3stub [ADDRESS]` serves one until it is interrupted, and prints its URL.
"""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

MODIFIED = "Thu, 01 Jan 2026 00:00:00 GMT"


_etags: dict[tuple[int, int], str] = {}  # by the hash, which Python keeps with each object, and the size in bytes


def _etag(data: bytes) -> str:
    """Computed once, because each range of an object, and each listing, shows it."""
    key = hash(data), len(data)
    if key not in _etags:
        _etags[key] = hashlib.md5(data).hexdigest()
    return _etags[key]


class Bucket:
    """What lies there. `refuse` is told each request's headers: what it gives, if anything, is answered with `refusal`.

    `denied` is by action (PutObject, GetObject, ListBucket, DeleteObject): the status and the code that each request
    for it is answered with. A DeleteObjects is answered as S3 does it, with 200 and the code for each key. `keys` of
    the access are those that are taken; None takes all.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.denied: dict[str, tuple[int, str]] = {}
        self.keys: set[str] | None = None
        self.asked: Counter[str] = Counter()  # by action
        self.times: defaultdict[str, list[float]] = defaultdict(list)  # of each, monotonic seconds
        self.headers: dict[str, str] = {}  # of each answer, on top
        self.heads: list[str] = []
        self.settings: dict[str, bytes | tuple[int, str]] = {}  # by subresource: its XML, or a status and a code
        self.refuse = lambda headers: None
        self.ignores_ranges = self.ignores_conditions = False
        self.refusal = (403, "AccessDenied")
        self.host, self.port = "127.0.0.1", 0

    def deny(self, *actions: str, status: int = 403, code: str = "AccessDenied") -> None:
        """Refuse these actions from now on, and allow all others."""
        self.denied = dict.fromkeys(actions, (status, code))

    def url(self, prefix: str = "p") -> str:
        return f"s3://bucket/{prefix}?endpoint=http://{self.host}:{self.port}&addressing=path&region=us-east-1"


@contextmanager
def serving(bucket: Bucket) -> Iterator[Bucket]:
    """Serve it while the context lasts."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def _say(self, status: int, body: bytes = b"", etag: str = "e", extent: str = "") -> None:
            self.send_response(status)
            if extent:
                self.send_header("Content-Range", extent)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Last-Modified", MODIFIED)
            for name, value in bucket.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _ask(self, action: str) -> tuple[str, dict[str, list[str]], bytes] | None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            bucket.heads.append(str(self.headers))
            bucket.asked[action] += 1
            bucket.times[action].append(time.monotonic())
            if message := bucket.refuse(self.headers):
                self._deny(*bucket.refusal, message)
                return None
            if bucket.keys is not None and not any(
                f"Credential={key}/" in self.headers.get("Authorization", "") for key in bucket.keys
            ):
                self._deny(403, "InvalidAccessKeyId")
                return None
            if action in bucket.denied and self.command != "POST":
                self._deny(*bucket.denied[action])
                return None
            split = urlsplit(self.path)
            return unquote(split.path).removeprefix("/bucket").lstrip("/"), parse_qs(split.query), body

        def _deny(self, status: int, code: str, message: str = "") -> None:
            self._say(status, f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode())

        def do_PUT(self) -> None:
            if asked := self._ask("PutObject"):
                is_conditional = "If-None-Match" in self.headers or "x-goog-if-generation-match" in self.headers
                is_conditional = is_conditional and not bucket.ignores_conditions
                if is_conditional and bucket.objects.setdefault(asked[0], asked[2]) is not asked[2]:
                    self._deny(412, "PreconditionFailed")
                    return
                bucket.objects[asked[0]] = asked[2]
                self._say(200, etag=_etag(asked[2]))

        def do_DELETE(self) -> None:
            if asked := self._ask("DeleteObject"):
                bucket.objects.pop(asked[0], None)
                self._say(204)

        def do_POST(self) -> None:
            if asked := self._ask("DeleteObject"):
                found = [one.text or "" for one in ElementTree.fromstring(asked[2]).iter() if one.tag.endswith("Key")]
                if "DeleteObject" in bucket.denied:
                    code = f"<Code>{bucket.denied['DeleteObject'][1]}</Code>"
                    bad = "".join(f"<Error><Key>{escape(key)}</Key>{code}</Error>" for key in found)
                    self._say(200, f"<DeleteResult>{bad}</DeleteResult>".encode())
                    return
                for key in found:
                    bucket.objects.pop(key, None)
                gone = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in found)
                self._say(200, f"<DeleteResult>{gone}</DeleteResult>".encode())

        def do_GET(self) -> None:
            listing = urlsplit(self.path).path.rstrip("/") == "/bucket"
            asked = self._ask("ListBucket" if listing else "GetObject")
            if asked is None:
                return
            key, query, _ = asked
            subresource = re.split("[=&]", urlsplit(self.path).query)[0]
            if subresource in ("lifecycle", "object-lock", "versioning", "uploads"):
                found = bucket.settings.get(subresource, (501, "NotImplemented"))
                self._say(200, found) if isinstance(found, bytes) else self._deny(*found)
            elif not key:
                self._list(query)
            elif key in bucket.objects:
                self._give(bucket.objects[key])
            else:
                self._say(404, b"<Error><Code>NoSuchKey</Code></Error>")

        def do_HEAD(self) -> None:
            if asked := self._ask("GetObject"):
                found = bucket.objects.get(asked[0])
                self.send_response(404 if found is None else 200)
                self.send_header("Content-Length", str(len(found or b"")))
                self.end_headers()

        def _give(self, data: bytes) -> None:
            if self.headers.get("If-Match", f'"{_etag(data)}"') != f'"{_etag(data)}"':
                self._deny(412, "PreconditionFailed")
            elif bucket.ignores_ranges or not (
                ends := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            ):
                self._say(200, data, _etag(data))
            else:
                first, last = int(ends[1]), min(int(ends[2]), len(data) - 1)
                self._say(206, data[first : last + 1], _etag(data), f"bytes {first}-{last}/{len(data)}")

        def _list(self, query: dict[str, list[str]]) -> None:
            prefix = query.get("prefix", [""])[0]
            after = query.get("continuation-token", query.get("start-after", [""]))[0]
            most = int(query.get("max-keys", ["1000"])[0])
            keys = sorted(key for key in list(bucket.objects) if key.startswith(prefix) and key > after)
            items = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(bucket.objects[key])}</Size>"
                f"<ETag>{_etag(bucket.objects[key])}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                for key in keys[:most]
            )
            more = (
                f"<NextContinuationToken>{escape(keys[most - 1])}</NextContinuationToken>" if len(keys) > most else ""
            )
            cut = "true" if more else "false"
            self._say(
                200, f"<ListBucketResult><IsTruncated>{cut}</IsTruncated>{more}{items}</ListBucketResult>".encode()
            )

    server = ThreadingHTTPServer((bucket.host, bucket.port), Answers)
    server.daemon_threads = True
    bucket.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    own = Bucket()
    own.host = sys.argv[1] if len(sys.argv) > 1 else own.host
    with serving(own) as served:
        print(served.url(), flush=True)
        threading.Event().wait()
