"""Plain requests to a Prefect server's API, with the authentication from this process's environment."""

from __future__ import annotations

import base64
import json
import os
import urllib.request
from collections.abc import Mapping
from typing import Any

CLIENT_AUTH = "PREFECT_API_AUTH_STRING"
"""Environment variable from which Prefect's clients read "user:password"."""
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"
"""The corresponding variable of the server, which refuses requests without these credentials."""
ORIGINS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
"""Environment variable of the server: the origins whose pages a browser lets read its replies. Prefect's default is
all."""

VACUUM = "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED"
"""Environment variable of the server: what it deletes by itself. Orphans are the logs and artifacts of deleted flow
runs."""


def post_json(url: str, body: Mapping[str, Any], auth: str | None = None) -> Any:  # noqa: ANN401
    """The JSON reply to a JSON request. `auth`: "user:password"; None: the value in the environment is used."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    if auth := auth or os.environ.get(CLIENT_AUTH):
        request.add_header("Authorization", basic_auth(auth))
    with urllib.request.urlopen(request, timeout=30.0) as reply:
        return json.load(reply)


def basic_auth(auth: str) -> str:
    """The header `Authorization` for "user:password"."""
    return f"Basic {base64.b64encode(auth.encode()).decode()}"


def server_environment(auth: str, port: int) -> dict[str, str]:
    """Environment of a Prefect server on a loopback port that serves only its own pages and clients."""
    own = ",".join(f"http://{host}:{port}" for host in ("127.0.0.1", "localhost"))
    return {SERVER_AUTH: auth, ORIGINS: own, VACUUM: "events,orphans"}
