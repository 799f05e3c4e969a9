"""Which findings a step decides, and which ones no step of a study can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sightline.studies.findings import all_findings
from sightline.studies.papers import GROUPS, groups_of
from sightline.studies.steps import Step

if TYPE_CHECKING:
    from sightline.studies.study import Study

__all__ = ["decided_by", "undecided"]


RESULTS = {"detect": "detection", "finetune": "finetune", "rcdm": "rcdm", "reinit": "reinit", "segment": "segmenters"}


def decided_by(step: Step, findings: Sequence[str]) -> list[str]:
    """The findings that need this step."""
    known = all_findings()
    if step.group in GROUPS:
        return [name for name in findings if step.group in groups_of(name)]
    analyses = set(step.options.get("only") or ())  # of a study file, whose steps have names of their own
    return [name for name in findings if analyses & set(known[name].analyses) or step.command in groups_of(name)]


def undecided(study: Study) -> dict[str, str]:
    """Findings whose steps are not part of the study, with what they would need."""
    groups = {placed.step.group for placed in study.steps}
    if not groups <= set(GROUPS):
        return {}
    missing = {name: groups_of(name) - groups for name in study.findings}
    return {name: f"`--steps {','.join(sorted(groups_of(name)))}`" for name, lacking in missing.items() if lacking}
