"""A full disk, which is a small file system of its own, and the limit of open files."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from engine.errors import DiskError, TooManyFiles
from engine.run.disk import ENOUGH, NO_FILE, named_disk_errors, raise_limit, reachable_limit
from support.runs import ROOT

FILLS = """
import sys
from pathlib import Path
from engine.config import Config, Run
from engine.errors import DiskError
from engine.run.disk import ENOUGH, NO_FILE, named_disk_errors, raise_limit, reachable_limit
from engine.run.files import append_line, read_lines, write_atomically
from engine.run.folder import RunFolder
from engine.run.identity import claim_run
disk = Path(sys.argv[1])
config = Config(run=Run(name="full", output=str(disk)))
folder = RunFolder(config.folder)
claim_run(config, resume=False)
folder.create(config, resume=False)
stages = folder.path / "run.json"
stages.write_text("{}")
try:
    with named_disk_errors(folder.path):
        for step in range(10**6):
            append_line(folder.steps, {"step": step, "text": "x" * 1000})
except DiskError as error:
    folder.write_failure(error)
try:
    write_atomically(stages, "y" * 10**6)
except OSError:
    pass
assert stages.read_text() == "{}", "a state file was lost"
assert not list(folder.path.glob(".*.partial")), "half of a file takes the space"
whole = len(list(read_lines(folder.steps)))
print(whole, folder.failure.read_text())
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a file system of its own")
def test_the_reason_is_written_and_no_state_is_lost(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=1m tmpfs {disk} && {sys.executable} -c "$0" {disk}'
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, FILLS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    whole, _, told = done.stdout.partition(" ")
    assert int(whole) > 500
    failure = json.loads(told)
    assert failure["error"] == "DiskError"
    assert failure["message"].startswith(f"run folder {disk / 'full'}: No space left on device (0 MiB are free")
    assert "\n" not in failure["message"]


def test_it_is_found_in_a_group_and_other_errors_pass(tmp_path):
    full = ExceptionGroup(
        "of tasks", [ExceptionGroup("of tasks", [OSError(errno.ENOSPC, "full")]), ValueError("other")]
    )
    with pytest.raises(DiskError, match="No space left on device"), named_disk_errors(tmp_path):
        raise full
    with pytest.raises(OSError, match="no such"), named_disk_errors(tmp_path):
        raise OSError(errno.ENOENT, "no such")
    with pytest.raises(ExceptionGroup), named_disk_errors(tmp_path):
        raise ExceptionGroup("of tasks", [ValueError("other")])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE])
def test_each_reason_is_named(tmp_path, number):
    files = number in NO_FILE
    said = rf"{os.strerror(number)}{'.*whose limit is [0-9]+; raise it' if files else ''}"
    with pytest.raises(TooManyFiles if files else DiskError, match=said), named_disk_errors(tmp_path):
        raise ExceptionGroup("of tasks", [OSError(number, "it can't be opened")])


RAISE = """
import resource
from engine.run.disk import raise_limit, reachable_limit
print(reachable_limit())
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 1000), (1000, 1000)])
def test_the_soft_limit_of_open_files_becomes_the_hard_one(soft, hard):
    """In a process of its own: a limit that was lowered can't be raised again."""

    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    done = subprocess.run([sys.executable, "-c", RAISE], preexec_fn=lower, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "1000", "1000"]


@pytest.mark.parametrize(
    ("limits", "reachable", "raised"),
    [
        ((1024, 1_000_000_000), ENOUGH, (ENOUGH, 1_000_000_000)),
        ((1024, resource.RLIM_INFINITY), ENOUGH, (ENOUGH, resource.RLIM_INFINITY)),
        ((1_000_000, 1_000_000_000), 1_000_000, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), ENOUGH, None),
    ],
)
def test_a_huge_hard_limit_is_not_used_up_and_none_is_lowered(monkeypatch, limits, reachable, raised):
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, value: given.append(value))
    assert reachable_limit() == reachable
    raise_limit()
    assert given == ([raised] if raised else [])
