"""Files of wheels that Metronome is written for, read from the package index without a download of the whole wheel."""

import io
import urllib.error
import zipfile

import pytest

from support import index


def wheel(name, version):
    """The wheel that a machine with Python 3.11 on x86-64 would install. The test is skipped where the index has none,
    or can't be reached."""
    try:
        found = index.fitting(index.files(name), version, index.MACHINES[0])
        if not found:
            pytest.skip(f"the package index has no wheel of {name} {version}")
        (file, *_) = found
        return zipfile.ZipFile(io.BufferedReader(index.Remote(file["url"], file["size"]), index.BLOCK))
    except (urllib.error.URLError, RuntimeError) as error:
        pytest.skip(f"the wheel of {name} {version} can't be read: {error}")
