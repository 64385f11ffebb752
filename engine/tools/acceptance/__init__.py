"""`metronome doctor --device`: whether Metronome works on the devices of this machine, part by part, in ten minutes.

`supervisor` runs each part in a process of its own (`part`), and `report` says what was seen. `comparisons`,
`plain_model`, `flops` and `broadcast` are also used by the benchmarks.
"""
