"""The page of a run: what it does now, curves, timeline, pool, conversations; live, or drawn once with its data."""
