"""Prefect flows and the `metronome` command line: what happens when, no logic."""
