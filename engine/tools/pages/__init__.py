"""What the pages share: frame, style, elements, numbers, colours and curves (parts.css, parts.js); and uPlot, for the
curves (MIT, its licence is beside it; 51 KB).

The page of a run (engine.tools.watch) and the comparison (engine.tools.comparison) are made of them.
"""
