"""`run.dry` checks a recipe without devices. `plan(config)` raises BadInput with the reasons; `sections` gives
tables."""

from engine.tools.dry_run.plan import RunPlan as RunPlan
from engine.tools.dry_run.plan import plan as plan
from engine.tools.dry_run.plan import sections as sections
