"""`run.dry`: a recipe checked on paper. `plan(config)` raises BadInput with the reasons, `sections` are its tables."""

from engine.tools.dry.plan import Plan as Plan
from engine.tools.dry.plan import plan as plan
from engine.tools.dry.plan import sections as sections
