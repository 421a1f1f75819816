"""A server on the loopback of one repository, as the Hugging Face Hub answers for it.

Run as a program, it downloads that repository with huggingface_hub into the cache that is named.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import save

REPOSITORY, COMMIT = "org/name", hashlib.sha1(b"commit", usedforsecurity=False).hexdigest()
FILES = {
    "model.safetensors": save({"weight": torch.arange(4.0)}, {"format": "pt"}),
    "config.json": b'{"model_type": "gpt2"}',
    "unet/weights.safetensors": save({"weight": torch.arange(9.0)}),
}


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        data: bytes | None
        if "/resolve/" in path:
            data = FILES.get(path.partition("/resolve/")[2].partition("/")[2])
            headers |= {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'} if data else {"X-Error-Code": "EntryNotFound"}
        elif "/tree/" in path:
            listed = [{"type": "file", "path": name, "size": len(one), "oid": COMMIT} for name, one in FILES.items()]
            data = json.dumps(listed).encode()
        else:
            siblings = [{"rfilename": name} for name in FILES]
            data = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings, "private": False}).encode()
        self.send_response(404 if data is None else 200)
        for name, value in {**headers, "Content-Length": str(len(data or b""))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and data:
            self.wfile.write(data)


def main(cache: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    os.environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    snapshot_download(REPOSITORY, cache_dir=cache)
    try:
        hf_hub_download(REPOSITORY, "adapter_model.safetensors", cache_dir=cache)  # which the cache notes as absent
    except EntryNotFoundError:
        pass


if __name__ == "__main__":
    main(sys.argv[1])
