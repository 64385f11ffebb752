"""A server that speaks the Hugging Face hub's API as `huggingface_hub` and `datasets` use it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_a_member"
"""Of a user who has accepted the terms of every gated repository."""


class Hub:
    """Repositories by kind ("models", "datasets") and name. The newest revision is the branch main."""

    def __init__(self):
        self.url = ""
        self.requests = []
        """(method, path) of each request."""
        self.gated = set()
        """Names of repositories of which only members may read files."""
        self._revisions = {}

    def put(self, kind, name, files, *also):
        """A new revision with these files (path → bytes), also under the names `also` (tags). Returns its commit."""
        text = repr(sorted((path, hashlib.sha256(content).hexdigest()) for path, content in files.items()))
        commit = hashlib.sha1(text.encode()).hexdigest()
        there = self._revisions.setdefault((kind, name), {})
        there.update(dict.fromkeys(("main", commit, *also), (commit, files)))
        return commit

    def find(self, kind, name, revision):
        """(commit, files), or the hub's name of the error and its status."""
        there = self._revisions.get((kind, name))
        if there is None:
            return "RepoNotFound", 401
        return there.get(revision, ("RevisionNotFound", 404))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        if path.startswith(("/api/models/", "/api/datasets/")):
            self._api(hub, *path.removeprefix("/api/").split("/", 3))
        elif "/resolve/" not in path:
            self._fail("NotFound", 404)
        else:
            kind, rest = ("datasets", path[10:]) if path.startswith("/datasets/") else ("models", path[1:])
            name, _, file = rest.partition("/resolve/")
            self._file(hub, kind, name, *file.split("/", 1))

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass

    def _api(self, hub, kind, owner, name, rest=""):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        action, _, revision = rest.partition("/")
        commit, files = hub.find(kind, f"{owner}/{name}", revision.partition("/")[0] or "main")
        if not isinstance(files, dict):
            return self._fail(commit, files)
        if action == "auth-check" and not self._may_read(hub, f"{owner}/{name}"):
            return self._fail("GatedRepo", 401)
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        folders = {path.rpartition("/")[0] for path in files} - {""}
        entries += [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders]
        if action == "tree":
            below = f"{revision.partition('/')[2]}/".lstrip("/")
            if below and below.rstrip("/") not in folders:
                return self._fail("EntryNotFound", 404)
            return self._json([one for one in entries if one["path"].startswith(below)])
        if action == "paths-info":
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            return self._json([one for one in entries if one["path"] in asked])
        siblings = [{"rfilename": path} for path in files]
        gated = "auto" if f"{owner}/{name}" in hub.gated else False
        return self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings, "tags": [], "gated": gated})

    def _may_read(self, hub, name):
        return name not in hub.gated or self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _file(self, hub, kind, name, revision, path):
        commit, files = hub.find(kind, name, revision)
        if not isinstance(files, dict):
            return self._fail(commit, files)
        if not self._may_read(hub, name):
            return self._fail("GatedRepo", 401)
        if path not in files:
            return self._fail("EntryNotFound", 404)
        content = files[path]
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        return None

    def _json(self, value):
        self._answer(200, json.dumps(value).encode())

    def _fail(self, name, status):
        self._answer(status, b"" if self.command == "HEAD" else b"{}", {"X-Error-Code": name})

    def _answer(self, status, body, headers=None):
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def hub_server():
    """A hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub()
    server.hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()


def at_hub(hub, cache, *command, **variables):
    """Run Python with arguments, in a process to which `hub` is the Hugging Face hub and `cache` its cache: (exit code,
    output, errors). A variable that is None is unset."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "COLUMNS": "200", **variables}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        if name not in variables:
            environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    return done.returncode, done.stdout, done.stderr
