"""A Hugging Face hub of one's own on loopback: enough of its HTTP interface for downloads.

    with HubServer({"owner/name": directory}) as hub:
        subprocess.run(..., env={**os.environ, **hub.environment(tmp_path)})

The client reads HF_ENDPOINT when it is imported, so it has to run in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves directories as model repositories until the `with` block ends.

    `gated` ids can be listed, but their files answer 403. `requests` collects "METHOD /path" of
    everything asked.
    """

    def __init__(self, repositories: dict[str, Path], gated: frozenset[str] = frozenset()) -> None:
        self.repositories = repositories
        self.gated = gated
        self.requests: list[str] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        # Port 0: the system picks a free one.
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables that make a process use this hub alone, and `cache` for what it fetches."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet; see `HubServer.requests`."""

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server_hub.requests.append(f"{self.command} {path}")
        for repo_id, directory in self.server_hub.repositories.items():
            if path.startswith((f"/api/models/{repo_id}/", f"/{repo_id}/resolve/")):
                if path.startswith("/api/"):
                    self._describe(repo_id, directory, path.removeprefix(f"/api/models/{repo_id}/"))
                elif repo_id in self.server_hub.gated:
                    self._refuse(403, "GatedRepo", "Access to this model is restricted.")
                else:
                    self._serve(directory, path.removeprefix(f"/{repo_id}/resolve/"), with_body)
                return
        # What the real hub says to an anonymous client, so as not to tell private from absent.
        self._refuse(401, "RepoNotFound", "Repository not found")

    def _describe(self, repo_id: str, directory: Path, call: str) -> None:
        names = sorted(
            path.relative_to(directory).as_posix()
            for path in directory.rglob("*")
            if path.is_file()
        )
        if call.startswith("revision/"):
            siblings = [{"rfilename": name} for name in names]
            answer: Any = {"id": repo_id, "sha": _commit(directory), "siblings": siblings}
        elif call.startswith("tree/"):
            answer = [_tree_entry(directory, name) for name in names]
        else:
            self._refuse(404, "EntryNotFound", f"no such call: {call}")
            return
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, True)

    def _serve(self, directory: Path, revision_and_name: str, with_body: bool) -> None:
        name = revision_and_name.partition("/")[2]
        file = directory / name
        if not file.is_file() or not file.resolve().is_relative_to(directory.resolve()):
            self._refuse(404, "EntryNotFound", f"no such file: {name}")
            return
        data = file.read_bytes()
        headers = {
            "ETag": f'"{_digest(data)}"',
            "X-Repo-Commit": _commit(directory),
            "Content-Type": "application/octet-stream",
        }
        self._send(200, data, headers, with_body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers, self.command != "HEAD")

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _commit(directory: Path) -> str:
    """Stands in for the commit hash; 40 hexadecimal digits."""
    return _digest(str(directory).encode())


def _tree_entry(directory: Path, name: str) -> dict[str, Any]:
    data = (directory / name).read_bytes()
    return {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
