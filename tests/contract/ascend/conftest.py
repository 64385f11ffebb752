"""MindSpeed for the tests of this folder."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from support.runs import ROOT

ON_HOST = ROOT / "tests/support/ascend/on_host.py"


@pytest.fixture(scope="session")
def on_host(tmp_path_factory):
    """The start of a command that runs a script of real ranks as on a machine with NPUs: by adaptor, "plain" or
    "mindspeed". METRONOME_MINDSPEED names the archive of MindSpeed, or the folder that it holds."""
    place = os.environ.get("METRONOME_MINDSPEED")
    if place is None:
        pytest.skip("METRONOME_MINDSPEED is unset: MindSpeed is not part of the project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METRONOME_MINDSPEED", str(_folder(Path(place), tmp_path_factory)))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        # the adaptor deletes locks of builds in this folder
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
        yield {adaptor: (sys.executable, "-W", "ignore", str(ON_HOST), adaptor) for adaptor in ("plain", "mindspeed")}


def _folder(place, tmp_path_factory):
    """The folder with the package mindspeed."""
    if place.is_file():
        unpacked = tmp_path_factory.mktemp("mindspeed")
        shutil.unpack_archive(place, unpacked)
        place = next(package.parent for package in unpacked.rglob("mindspeed") if package.is_dir())
    assert (place / "mindspeed/megatron_adaptor.py").exists(), f"METRONOME_MINDSPEED: there is no MindSpeed in {place}"
    return place
