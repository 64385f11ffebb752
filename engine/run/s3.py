"""Reads from S3, with its errors in words.

The endpoint and the credentials are in the AWS_* variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.errors import BadInput

SCHEME = "s3://"
"""Scheme of addresses on S3."""


@contextmanager
def s3_errors(what: str) -> Iterator[None]:
    """Raise a BadInput that begins with `what` and says what to do, for an error of the body's S3 client."""
    import botocore.exceptions  # imported here, because it takes seconds, which local files do not need

    try:
        yield
    except FileNotFoundError:
        raise BadInput(f"{what}: no such file or folder on S3") from None
    except TimeoutError:
        raise BadInput(f"{what}: S3 has not sent it in time; does AWS_ENDPOINT_URL hold its address?") from None
    except (OSError, botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        raise BadInput(
            f"{what}: S3 cannot be read ({error}); AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY must hold its address and your credentials"
        ) from None


def open_s3() -> Any:  # noqa: ANN401
    """The file system of S3, which keeps no listing: a file may be new."""
    import s3fs

    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
