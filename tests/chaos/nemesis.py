"""Does the faults of a schedule to a run."""

import contextlib
import shutil
import threading
import time
from pathlib import Path

import psutil

from chaos.world import FILLING
from engine.run.checkpoint_files import latest_checkpoint
from engine.run.process import LIFELINE

TARGET_S = 20.0
"""How long a fault waits for its target: a run that is just resumed has no orchestrator."""
BUCKETS = 3
"""Versions of weights of which a flip of a bucket changes one file. Each version overwrites the one before."""
LOOK_S = 0.002
WRITTEN_S = 0.1
"""How long the writing of a file of weights takes at most."""


class NoTarget(Exception):
    """What a fault is for is not there now."""


class Nemesis:
    """Gives a run its faults; each that lasts is undone by a timer, all of them by `heal`."""

    def __init__(self, run, say):
        self._run = run
        self._say = say
        self._undo = {}
        self._lock = threading.Lock()
        self.given = []
        """(fault, moment) of those that were given."""
        self.skipped = []
        """(fault, why, steps that were finished while it waited for its target)."""

    def play(self, faults, began):
        """Give each fault at its time after the moment `began`."""
        for fault in faults:
            while (left := began + fault.at_s - time.monotonic()) > 0:
                time.sleep(min(1.0, left))
                self._run.look_after()
            self.give(fault)

    def give(self, fault):
        """One fault, now."""
        deadline = time.monotonic() + TARGET_S
        before = self._run.progress.finished
        while True:
            moment = time.monotonic()
            try:
                what, undo = self._do(fault)
                break
            except (NoTarget, psutil.Error, FileNotFoundError) as error:  # it may go while we look at it
                if time.monotonic() > deadline:
                    self.skipped.append((fault, str(error), self._run.progress.finished - before))
                    self._say(f"skipped: {fault.kind}, {fault.target}: {error}")
                    return
            time.sleep(0.2)
        self.given.append((fault, moment))
        self._say(f"{fault.kind}, {fault.target}: {what}" + (f", for {fault.for_s:.0f} s" if fault.for_s else ""))
        if undo is not None:
            self._later(fault, undo)

    def heal(self):
        """Undo what lasts."""
        for timer, end in list(self._undo.values()):
            timer.cancel()
            end()

    def _later(self, fault, undo):
        def end():
            with self._lock:
                if self._undo.pop(id(fault), None) is None:
                    return
            undo()
            self._say(f"over: {fault.kind}, {fault.target}")

        timer = threading.Timer(fault.for_s, end)
        timer.daemon = True
        self._undo[id(fault)] = (timer, end)
        timer.start()

    def _do(self, fault):
        """(what was done to what, how to undo it or None)."""
        by_kind = {
            "kill": self._kill,
            "stop": self._stop,
            "out of memory": self._out_of_memory,
            "link": self._link,
            "no space": self._fill,
            "restart": self._restart,
            "flip a byte": self._flip,
            "garbage": self._garbage,
        }
        return by_kind[fault.kind](fault)

    # processes ------------------------------------------------------------------------------------

    def _one(self, fault):
        found = self._run.processes(fault.target)
        if not found:
            raise NoTarget(f"there is no {fault.target} now")
        return found[int(fault.choice * len(found))]

    def _kill(self, fault):
        process = self._one(fault)
        process.kill()
        return f"process {process.pid}", None

    def _out_of_memory(self, fault):
        """As the kernel does: SIGKILL of the largest."""
        process = self._run.largest()
        if process is None:
            raise NoTarget("the run has no process now")
        line = " ".join(process.cmdline()[1:4])
        process.kill()
        return f"process {process.pid} ({line})", None

    def _stop(self, fault):
        process = self._one(fault)
        process.suspend()

        def resume():
            with contextlib.suppress(psutil.Error):
                process.resume()

        return f"process {process.pid}", resume

    # between processes ----------------------------------------------------------------------------

    def _link(self, fault):
        self._run.guest.set(fault.target)
        return "orchestrator and guest", lambda: self._run.guest.set("pass")

    def _restart(self, fault):
        services = self._run.world.services
        server = services[fault.target]
        server.kill()

        def start():
            if server.child.alive:
                return
            server.start()
            server.wait()
            if fault.target == "s3":  # it has lost everything
                services.make_bucket()

        return "killed", start

    def _garbage(self, fault):
        self._run.guest.set(f"garbage {fault.choice}")
        return "the guest's next replies", None

    # files ----------------------------------------------------------------------------------------

    def _fill(self, fault):
        place = self._run.world.place
        file = place / FILLING
        with contextlib.suppress(OSError), file.open("wb", buffering=0) as filling:
            while True:
                left = shutil.disk_usage(place).free
                filling.write(bytes(min(max(left, 4096), 1 << 20)))
        self._run.excused += 1
        return f"{file.stat().st_size >> 20} MiB more", lambda: file.unlink(missing_ok=True)

    def _flip(self, fault):
        if fault.target == "reply":
            self._run.guest.set(f"flip {fault.choice}")
            return "the guest's next replies", None
        if fault.target == "bucket":
            return self._flip_buckets(fault.choice), None
        newest = latest_checkpoint(self._run.folder / "checkpoints")
        if newest is None:
            raise NoTarget("there is no checkpoint")
        files = sorted(file for file in newest.iterdir() if file.name != "_SUCCESS.json")
        what = flip(files[int(fault.choice * len(files))], fault.choice)
        [orchestrator] = self._run.processes("orchestrator") or [None]
        if orchestrator is not None:
            orchestrator.kill()
        return f"{what}; and the orchestrator is killed", None

    def _flip_buckets(self, choice):
        agents = self._run.processes("agent")
        if not agents:
            raise NoTarget("no trainer publishes weights now")
        scratch = Path(agents[0].environ()[LIFELINE]).parent
        folders = [scratch / "weights", self._run.folder / "weights"]
        began = time.time()
        newest = time.time_ns()
        done = []
        while len(done) < BUCKETS and time.time() < began + TARGET_S:
            for file in done[:1] or [file for folder in folders for file in folder.glob("stage-*.safetensors")]:
                if _written(file) > newest:
                    flip(file, 0.3 + choice * 0.7)
                    time.sleep(WRITTEN_S)
                    newest = _written(file)
                    done.append(file)
                    break
            time.sleep(LOOK_S)
        if not done:
            raise NoTarget("no weights were published")
        return f"{len(done)} versions of {done[0].name}"


def _written(file):
    """When it was written last, in nanoseconds; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime_ns
    return 0


def flip(file, where):
    """Flip one bit of the byte at this fraction of a file; what was done, in words."""
    with file.open("r+b") as opened:
        size = opened.seek(0, 2)
        at = int(where * size)
        if at >= size:
            raise NoTarget(f"{file} is empty")
        opened.seek(at)
        byte = opened.read(1)[0] ^ 1 << at % 8
        opened.seek(at)
        opened.write(bytes([byte]))
    return f"byte {at} of {file.parent.name}/{file.name}"


def told(given, recoveries):
    """A line for each fault and its recovery."""
    return [
        f"  {seconds:6.1f} s  {fault.kind}, {fault.target}"
        for (fault, _), seconds in zip(given, recoveries, strict=True)
    ]
