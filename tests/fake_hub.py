"""A Hugging Face hub of one folder, on a socket of its own: what huggingface_hub asks for, and a record of it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """folder: the files of the model `repo_id`. gated: whether they may be read. sent: bytes of each file's answers."""

    folder: Path
    repo_id: str = "owner/model"
    gated: bool = False
    url: str = ""
    sent: dict[str, int] = field(default_factory=dict)


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves it on 127.0.0.1 until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def _answer(self, has_body: bool) -> None:
            path = self.path.partition("?")[0]
            files = f"/{hub.repo_id}/resolve/{COMMIT}/"
            if path in (f"/api/models/{hub.repo_id}", f"/api/models/{hub.repo_id}/revision/{COMMIT}"):
                siblings = [{"rfilename": file.name, "size": file.stat().st_size} for file in hub.folder.iterdir()]
                body = json.dumps({"id": hub.repo_id, "sha": COMMIT, "siblings": siblings}).encode()
                self._send(200, body, {}, has_body)
            elif path.startswith(files) and hub.gated:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"}, has_body)
            elif path.startswith(files) and (hub.folder / path.removeprefix(files)).is_file():
                self._send_file(path.removeprefix(files), has_body)
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, has_body)

        def _send_file(self, name: str, has_body: bool) -> None:
            data = (hub.folder / name).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            wanted = self.headers.get("Range")
            if wanted is None:
                self._send(200, data, headers, has_body)
            else:
                first, last = wanted.removeprefix("bytes=").split("-")
                data = data[int(first) : int(last) + 1]
                self._send(206, data, headers, has_body)
            if has_body:
                hub.sent[name] = hub.sent.get(name, 0) + len(data)

        def _send(self, status: int, body: bytes, headers: dict[str, str], has_body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
