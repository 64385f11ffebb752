"""`run.dry` checks a recipe without devices. `plan_run(config)` raises BadInput with the reasons; `plan_sections` gives
tables."""

from engine.tools.dry_run.duration import describe_duration as describe_duration
from engine.tools.dry_run.plan import RunPlan as RunPlan
from engine.tools.dry_run.plan import evaluation_sections as evaluation_sections
from engine.tools.dry_run.plan import has_device as has_device
from engine.tools.dry_run.plan import plan_run as plan_run
from engine.tools.dry_run.plan import plan_sections as plan_sections
