"""A real S3 server in this process, empty at its start: moto keeps its buckets for all servers of a process."""

from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest
import s3fs


@contextmanager
def s3_server():
    """The address of a server, which the AWS_ variables name."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    urlopen(Request(f"{address}/moto-api/reset", method="POST"), timeout=30).close()
    settings = {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield address
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
