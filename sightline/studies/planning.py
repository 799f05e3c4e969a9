"""Which findings a step decides, and which ones no step of a study can."""

import re
from collections.abc import Sequence

from sightline.studies.evidence import Evidence, Missing
from sightline.studies.findings import all_findings
from sightline.studies.papers import GROUPS, STUDIES, groups_of
from sightline.studies.roles import Role
from sightline.studies.steps import Step
from sightline.studies.study import Study


def decided_by(step: Step, findings: Sequence[str]) -> list[str]:
    """The findings that need this step: by what a pass measures, or else by its group or command."""
    every, analyses = all_findings(), set(step.options.get("only") or ())
    groups = {step.group, step.command}
    return [
        name
        for name in findings
        if (analyses & set(every[name].analyses) if analyses - {"dynamics", "minibatch"} else groups & groups_of(name))
        and (step.group not in GROUPS or step.group in groups_of(name))
    ]


def undecided(study: Study) -> dict[str, str]:
    """Findings that the study cannot decide, with what they would need: encoders of other roles, or other steps."""
    groups, built_in = {placed.step.group for placed in study.steps}, study.name in STUDIES
    lacking = {}
    for name in study.findings:
        wanted = groups_of(name)
        # Steps that bring encoders are not needed where these are there, if what is given is measured.
        bringing = {"pretrain", "finetune"} if {"passes", *wanted} & groups else {"pretrain"}
        if needs := _roles_missing(name, study.roles):
            words = set(re.findall(r"\w+", "".join(re.findall(r"--steps ([\w,]+)", needs))))
            if not words or words - groups:  # else a step of the study is going to bring it
                lacking[name] = needs
        elif built_in and (wanted - groups - bringing):
            lacking[name] = f"`--steps {','.join(group for group in GROUPS if group in wanted - {'pretrain'})}`"
    return lacking


def _roles_missing(finding: str, roles: tuple[Role, ...]) -> str:
    """What a finding lacks of encoders; their numbers are asked for later."""
    evidence = Evidence(roles, ())
    try:
        cases = all_findings()[finding].cases(evidence)
    except Missing as missing:
        return missing.needs
    # Accuracies after fine-tuning are those of encoders that the cases do not name.
    if "finetune" not in groups_of(finding) or "agreement" not in all_findings()[finding].analyses:
        return ""
    lacking = [[name for name in case.encoders if evidence.tuned(name) is None] for case in cases]
    return "" if not all(lacking) or not lacking else f"a fine-tuned {lacking[0][0]}: add `--steps finetune`"
