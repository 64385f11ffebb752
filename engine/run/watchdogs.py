"""Environment variables that keep torch's watchdogs from ending a process when a weight transfer fails.

By default, if a member of an NCCL or HCCL group dies or a broadcast takes too long, torch ends every process of the
group. The weight transfer has its own deadlines, and restarts without the member. torch reads the variables when a
process creates its first group. They must be in the environment before torch's elastic agent starts a rank, because
the agent sets TORCH_NCCL_ASYNC_ERROR_HANDLING to 1 in the ranks unless its own environment has it. This module is
imported before torch, so it imports nothing.
"""

WATCHDOGS = {
    "nccl": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
    # torch_npu 2.10.0 reads the first name, later releases the second
    "hccl": {"HCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"},
}
"""The variables by `weights.transport`. Values set by the user are kept."""
