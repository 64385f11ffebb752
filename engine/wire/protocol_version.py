"""The version of the rollout protocol (docs/protocol.md). Both sides state it before any other request.

This module imports nothing, because vLLM's environment imports it too.
"""

ROLLOUT_PROTOCOL = 3
"""It rises with every change after which an orchestrator and an instance of different releases would misunderstand each
other."""
