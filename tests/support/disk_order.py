"""What a function puts on the disk, in order."""

import os
from pathlib import Path


def disk_order(monkeypatch):
    """A list that fills with "sync NAME" for each file or folder that is synced, "name NAME" for each that is named."""
    noted = []
    fsync = os.fsync

    def sync(descriptor):
        noted.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def named(rename):
        def note(source, target, **given):
            noted.append(f"name {Path(target).name}")
            rename(source, target, **given)

        return note

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", named(os.rename))
    monkeypatch.setattr(os, "replace", named(os.replace))
    return noted
