"""`metronome doctor --device` checks whether Metronome works on the devices of this machine, part by part, in ten
minutes.

`supervisor` runs each part in a separate process (`part`), and `report` describes the results. `comparisons`,
`plain_model` and `broadcast` are also used by the benchmarks.
"""
