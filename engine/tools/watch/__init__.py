"""The page of a run: what it does now, curves, timeline, pool, conversations; live, or drawn once with its data."""

PORT = 8390
"""Where `metronome watch` listens by default."""
