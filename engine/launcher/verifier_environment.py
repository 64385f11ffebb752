"""The environment of verifier processes: a reward is a user's code, which needs no token and no key of the run."""

from __future__ import annotations

import os
from collections.abc import Iterable

PASSED = frozenset(
    " ".join(
        (
            "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TERM NO_COLOR VIRTUAL_ENV CONDA_PREFIX",
            "LD_LIBRARY_PATH LD_PRELOAD DYLD_LIBRARY_PATH TOKENIZERS_PARALLELISM",
            "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
            "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE XDG_CACHE_HOME",
            "CUDA_HOME CUDA_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES",
            "ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH PREFECT__FLOW_RUN_ID",
        )
    ).split()
)
"""Variables that a verifier process gets: where programs, libraries and caches are, and which devices it may use.
PREFECT__FLOW_RUN_ID says to whom a process belongs."""
PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")
"""Beginnings of the names of further ones."""


def verifier_environment(named: Iterable[str]) -> dict[str, str]:
    """Return the variables of this process's environment that a verifier process gets. `named`: reward.environment."""
    wanted = PASSED | set(named)
    return {name: value for name, value in os.environ.items() if name in wanted or name.startswith(PASSED_PREFIXES)}
