"""Which findings a step decides, and which ones no step of a study can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings import all_findings
from sightline.studies.papers import GROUPS, STUDIES, groups_of
from sightline.studies.steps import Step

if TYPE_CHECKING:
    from sightline.studies.study import Study

__all__ = ["decided_by", "undecided"]


def decided_by(step: Step, findings: Sequence[str]) -> list[str]:
    """The findings that need this step: by what a pass measures, or else by its group or command."""
    known, analyses = all_findings(), set(step.options.get("only") or ())
    own = {step.group, step.command}
    return [
        name
        for name in findings
        if (analyses & set(known[name].analyses) if analyses - {"dynamics", "minibatch"} else own & groups_of(name))
        and (step.group not in GROUPS or step.group in groups_of(name))
    ]


def undecided(study: Study) -> dict[str, str]:
    """Findings that the study cannot decide, with what they would need: steps, or encoders of other roles."""
    groups, built_in = {placed.step.group for placed in study.steps}, study.name in STUDIES
    found = {}
    for name in study.findings:
        lacking = groups_of(name) - groups if built_in else set()
        if lacking:
            found[name] = f"`--steps {','.join(group for group in GROUPS if group in groups_of(name))}`"
            continue
        try:
            all_findings()[name].cases(Evidence(study.roles, ()))  # the roles alone; numbers are asked for later
        except Missing as missing:
            if "--steps" not in missing.needs:
                found[name] = missing.needs
    return found
