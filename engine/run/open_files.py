"""The limit of open files of a process: each response in flight is a socket, in the orchestrator and in its
instance."""

from __future__ import annotations

import errno
import resource

ENOUGH = 65_536
"""The soft limit is raised to the hard limit, but not beyond this, because some programs loop over every number up to
it."""

NO_FILE = (errno.EMFILE, errno.ENFILE)
"""Numbers of the errors that say that no further file can be opened."""


def reachable_limit() -> int:
    """How many files this process can allow itself to open without more rights: the hard limit, at most ENOUGH."""
    soft, hard = (
        ENOUGH if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return max(soft, min(hard, ENOUGH))


def open_limit() -> int:
    """How many files this process may open now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Raise the soft limit, often 1,024, to `reachable_limit`. Processes that this one starts inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < reachable_limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable_limit(), hard))
