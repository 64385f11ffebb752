"""Environment variables that keep torch's watchdogs from ending a process when a weight transfer fails.

By default torch ends every process of a group of NCCL or HCCL in which a member dies or a broadcast takes too long. The
weight transfer has deadlines of its own, and begins again without the member. torch reads the variables when a process
makes its first group. This module is imported before torch, so it imports nothing.
"""

WATCHDOGS = {
    "nccl": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
    "hccl": {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"},
}
"""The variables by `weights.transport`. A value that the user has set stays."""
