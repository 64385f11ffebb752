"""The version of the rollout protocol (docs/protocol.md), which both sides say before anything else is asked.

Imports nothing: vLLM's environment imports it, too.
"""

ROLLOUT_PROTOCOL = 2
"""It goes up with every change by which an orchestrator and an instance of different releases would misunderstand each
other."""
