"""The S3 endpoint of `make services`: moto, behind checks of who asks. `python -m tasks.cluster.s3_endpoint PORT`

moto itself takes requests from anybody, and gives web pages of every origin access.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

from engine.run.process import watch_lifeline
from engine.wire.access_token import refuse_source

HEALTH = "/metronome-health"
"""Path that answers everybody on this machine."""
KEY = "AWS_ACCESS_KEY_ID"
"""Environment variable with the access key of all clients."""
CHECKED = {"host": "HTTP_HOST", "origin": "HTTP_ORIGIN", "sec-fetch-site": "HTTP_SEC_FETCH_SITE"}

Environ = dict[str, Any]
Start = Callable[..., Any]
Application = Callable[[Environ, Start], Iterable[bytes]]


def guard(application: Application, key: str) -> Application:
    """Return the WSGI application behind checks: no request of a web page, and only those with the access key `key`,
    which is secret here because moto checks no signature."""

    def answer(environ: Environ, start: Start) -> Iterable[bytes]:
        refused = refuse_source({name: environ[field] for name, field in CHECKED.items() if field in environ})
        if refused is None and environ["PATH_INFO"] == HEALTH:
            return _say(start, "200 OK", "it answers")
        if refused is None and _access_key(environ) != key:
            refused = 403, f"the access key is not that of this endpoint; set {KEY} as `make services` prints it"
        if refused is not None:
            return _say(start, f"{refused[0]} Refused", refused[1])
        return application(environ, start)

    return answer


def _access_key(environ: Environ) -> str:
    """Return the access key of a request with AWS's signature, in its header or its query; "" without one."""
    signed = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
    asked = parse_qs(environ.get("QUERY_STRING", ""))
    presigned = (asked.get("X-Amz-Credential") or asked.get("AWSAccessKeyId") or [""])[0]
    return str(signed or presigned).partition("/")[0]


def _say(start: Start, status: str, text: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text.encode())))])
    return [text.encode()]


def main() -> None:
    """Serve on loopback until the process is ended."""
    watch_lifeline()
    moto = DomainDispatcherApplication(create_backend_app)
    application = guard(moto, os.environ[KEY])
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main()
