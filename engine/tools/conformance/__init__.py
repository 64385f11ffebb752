"""The rules of the rollout protocol (docs/protocol.md), tried on a running inference engine: `metronome conform`."""
