"""The built-in studies: which steps the papers' findings need, for encoders with their roles.

passes     one pass over all encoders, and one with another kind of noise
minibatch  CKA at several batch sizes and numbers of images
finetune   every pre-trained ViT fine-tuned, and one pass over these and their starts
dynamics   their epochs
reinit     fine-tuned with blocks re-initialised
detect     detectors: frozen, end to end, with several blocks
segment    segmenters, and probes on other images where there are some
rcdm       pictures from representations
pretrain   encoders of several sizes, windows, λ and seeds, and CNNs, where they are not given
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sightline.core.errors import InputError, nearest
from sightline.core.references import parse_reference
from sightline.studies.commands import COMMANDS
from sightline.studies.design import Design, Given
from sightline.studies.findings import all_findings
from sightline.studies.keys import Contents
from sightline.studies.roles import HYBRID, JE, MASKED_JE, REC, SUPERVISED
from sightline.studies.steps import Step, with_needed

__all__ = ["GROUPS", "STUDIES", "Sets", "papers"]


GROUPS = ("passes", "minibatch", "finetune", "dynamics", "reinit", "detect", "segment", "rcdm", "pretrain")
STUDIES = {  # the findings of which papers
    "papers": ("Shekhar et al. 2022 and 2023, Park et al. 2023, Grigg et al. 2021", ""),
    "shekhar": ('Shekhar et al. 2023, "Objectives Matter", and their paper of 2022', "S"),
    "park": ('Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?"', "P"),
    "grigg": ('Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Representations?"', "G"),
}
SMALL = 128  # pixels up to which encoders have the small recipes
RECIPES = {"finetune": "finetune_vit_b16", "reinit": "finetune_vit_b16", "detect": "detect_vitdet",
           "segment": "segment_linear_ade20k", "rcdm": "rcdm_adm128"}  # fmt: skip
AGAIN = ("cka", "knn", "probes", "attention", "fourier", "shape_bias", "noise", "orientation", "inversion",
         "transformations", "agreement")  # fmt: skip
BLOCKS = "last-3,last-2,last-1,last"


@dataclass(frozen=True)
class Sets:
    """Images for the steps; None: the embedded ones."""

    images: str | None = None
    detection: str | None = None
    segmentation: str | None = None
    second: str | None = None  # other images for probes


def papers(
    which: str,
    given: Mapping[str, Given],
    sets: Sets,
    contents: Contents,
    *,
    steps: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Design:
    """The study of the papers for these encoders, with all its steps or those that are chosen."""
    chosen = _findings(which, findings)
    groups = _groups(steps, findings, chosen)
    plan = _Plan(dict(given), sets, contents, chosen, groups)
    every = plan.steps()
    wanted = with_needed([step for step in every if step.group in groups], every)
    found = [_with(step, settings or {}) for step in wanted]
    for group in settings or {}:
        if group not in GROUPS and group not in {step.name for step in every}:
            raise InputError(f"There is no step {group!r} to set something of{nearest(group, GROUPS)}")
    names = {step.name for step in found}
    roles = [one.role for one in plan.given.values() if not one.step or one.step in names]
    return Design(which, tuple(roles), tuple(found), tuple(chosen))


def _findings(which: str, findings: Sequence[str] | None) -> list[str]:
    known = all_findings()
    for name in findings or ():
        if name not in known:
            raise InputError(f"There is no finding {name!r}{nearest(name, known)}; see `sightline list findings`")
    return [name for name in known if name.startswith(STUDIES[which][1]) and (not findings or name in findings)]


def _groups(steps: Sequence[str] | None, findings: Sequence[str] | None, chosen: Sequence[str]) -> set[str]:
    for step in steps or ():
        if step not in GROUPS:
            raise InputError(f"There are no steps {step!r}{nearest(step, GROUPS)}")
    if steps:
        return set(steps)
    needed = {word for name in chosen for word in groups_of(name)}
    return needed & set(GROUPS)


def groups_of(finding: str) -> set[str]:
    """The steps that a finding needs."""
    words = all_findings()[finding].step.replace(",", " ").replace("+", " ").split()
    return {word for word in words if word in GROUPS}


def _with(step: Step, settings: Mapping[str, Mapping[str, Any]]) -> Step:
    """A step with the user's settings: of its group, then of itself."""
    known, options = COMMANDS[step.command].options, {**step.options}
    for values in (settings.get(step.group, {}), settings.get(step.name, {})):
        for key, value in values.items():
            table, dot, inner = key.partition(".")
            if key in known and key != "set":
                options[key] = value
            elif dot:
                inside = {**options.get("set", {})}
                options["set"] = inside | {table: {**inside.get(table, {}), inner: value}}
            else:
                options["set"] = {**options.get("set", {}), key: value}
    return replace(step, options=options)


@dataclass
class _Plan:
    """The steps, and the encoders that they add."""

    given: dict[str, Given]
    sets: Sets
    contents: Contents
    findings: Sequence[str]
    groups: set[str]
    added: dict[str, Given] = field(default_factory=dict)

    def steps(self) -> list[Step]:
        """All of them; what is trained anew comes first and takes part in the others."""
        found = self._passes()
        found += self._finetune()
        return [*found, *self._dynamics(), *self._reinit(), *self._detect(), *self._segment(), *self._rcdm()]

    # Encoders

    def _of(self, *families: str, network: str = "vit", tuned: bool = False) -> dict[str, str]:
        return {
            name: one.reference
            for name, one in self.given.items()
            if one.role.family in families and one.role.network == network and one.role.tuned is tuned
        }

    @property
    def size(self) -> int:
        """Pixels of the largest encoder."""
        sizes = [
            max(self.contents.encoder(one.reference).preprocess.size) for one in self.given.values() if not one.step
        ]
        return max(sizes, default=48)

    @property
    def images(self) -> str:
        """Embedded images are drawn at the size of the largest encoder, not enlarged to it."""
        return self.sets.images or f"shapes?size={self.size}"

    def _recipe(self, group: str) -> dict[str, Any]:
        return {} if self.size <= SMALL else {"recipe": RECIPES[group]}

    def _whole(self, name: str, one: Given) -> str:
        """The encoder with its decoder or its head, where a finding asks for them and it has them."""
        option = "decoder" if one.role.method == "mae" and one.role.network == "vit" else "head"
        wanted = option == "decoder" or (one.role.network == "cnn" and one.role.family == JE)
        if not wanted or one.step or one.role.tuned:
            return one.reference
        parsed = parse_reference(one.reference)
        whole = str(replace(parsed, options=parsed.options | {option: "true"}))
        try:
            self.contents.encoder(whole)
        except InputError:  # it was saved without
            return one.reference
        return whole

    def _analyses(self, group: str) -> list[str]:
        """What the chosen findings ask of the passes of a group."""
        wanted = {name for finding in self.findings if group in groups_of(finding)
                  for name in all_findings()[finding].analyses}  # fmt: skip
        return sorted(wanted - {"dynamics", "minibatch"})

    # Steps

    def _passes(self) -> list[Step]:
        encoders = {name: self._whole(name, one) for name, one in self.given.items() if not one.step}
        analyses = self._analyses("passes")
        if not analyses or not encoders:
            return []
        found = [Step("passes", "compare", encoders, self.images, {"only": analyses, "lenient": True}, group="passes")]
        if "noise" in analyses:
            sign = {"only": ["noise"], "set": {"noise": {"kind": "sign"}}, "lenient": True}
            found.append(Step("passes-noise", "compare", encoders, self.images, sign, group="passes"))
        pair = {**dict([*self._of(JE).items()][:1]), **dict([*self._of(REC).items()][:1])}
        if pair:
            large = {"only": ["minibatch"], "batch": 1024, "limit": 0}
            found.append(Step("minibatch", "compare", pair, self.images, large, group="minibatch"))
        return found

    def _finetune(self) -> list[Step]:
        starts = self._of(JE, REC, MASKED_JE, HYBRID)
        tuned = {
            name: Step(
                f"finetune-{name}", "finetune", {name: reference}, self.images,
                {"set": {"save_epochs": True}, **self._recipe("finetune")}, group="finetune",
            )
            for name, reference in starts.items()
            if not any(one.role.tuned_from == name for one in self.given.values())
        }  # fmt: skip
        for name, step in tuned.items():
            role = replace(self.given[name].role, name=f"{name}-tuned", tuned_from=name)
            self.given[role.name] = Given(role, f"step:{step.name}", step.name)
        encoders = {**starts, **self._of(SUPERVISED), **self._of(JE, REC, MASKED_JE, HYBRID, tuned=True)}
        analyses = [name for name in AGAIN if name in self._analyses("finetune")]
        if not tuned or not analyses:
            return [*tuned.values()]
        options = {"only": analyses, "lenient": True}
        return [*tuned.values(), Step("tuned", "compare", encoders, self.images, options, group="finetune")]

    def _dynamics(self) -> list[Step]:
        epochs = {
            name: f"{one.reference}?epoch=*" for name, one in self.given.items()
            if one.step.startswith("finetune-") and one.role.family in (JE, REC)
        }  # fmt: skip
        others = self._of(JE)
        if not epochs:
            return []
        return [
            Step("dynamics", "compare", {**epochs, **others}, self.images, {"only": ["dynamics"]}, group="dynamics")
        ]

    def _reinit(self) -> list[Step]:
        encoders = self._of(JE, REC)
        options = self._recipe("reinit")
        return [Step("reinit", "reinit", encoders, self.images, options, group="reinit")] if encoders else []

    def _detect(self) -> list[Step]:
        encoders = self._of(JE, REC, MASKED_JE)
        ways: dict[str, dict[str, Any]] = {"frozen": {}, "tuned": {"frozen": False}, "blocks": {"blocks": BLOCKS}}
        return [
            Step(
                f"detect-{way}", "detect", encoders, self.sets.detection,
                {**self._recipe("detect"), **({"set": values} if values else {})}, group="detect",
            )
            for way, values in ways.items()
            if encoders
        ]  # fmt: skip

    def _segment(self) -> list[Step]:
        encoders = self._of(JE, REC, HYBRID)
        if not encoders:
            return []
        found = [Step("segment", "segment", encoders, self.sets.segmentation, self._recipe("segment"), group="segment")]
        if self.sets.second:
            probes = {"only": ["probes"], "lenient": True}
            found.append(Step("second", "compare", encoders, self.sets.second, probes, group="segment"))
        return found

    def _rcdm(self) -> list[Step]:
        encoders = self._of(JE, REC)
        if "finetune" in self.groups:
            encoders |= {name: reference for name, reference in self._of(REC, tuned=True).items()
                         if self.given[name].role.method == "mae"}  # fmt: skip
        return [Step("rcdm", "rcdm", encoders, self.images, self._recipe("rcdm"), group="rcdm")] if encoders else []
