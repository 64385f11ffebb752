"""`run.dry`: a recipe checked on paper. `plan(config)` raises BadInput with the reasons, `sections` are its tables."""

from engine.dry.plan import Plan as Plan
from engine.dry.plan import plan as plan
from engine.dry.plan import sections as sections
