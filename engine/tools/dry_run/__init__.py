"""`run.dry`: a recipe checked on paper. `plan(config)` raises BadInput with the reasons, `sections` are its tables."""

from engine.tools.dry_run.plan import RunPlan as RunPlan
from engine.tools.dry_run.plan import plan as plan
from engine.tools.dry_run.plan import sections as sections
