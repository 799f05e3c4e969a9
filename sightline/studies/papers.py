"""The built-in studies: which steps the papers' findings need, for encoders with their roles.

passes     one pass over all encoders, and two with noise over those that are compared by it
minibatch  CKA at several batch sizes and numbers of images
finetune   every pre-trained ViT fine-tuned, and one pass over these and their starts
dynamics   their epochs
reinit     fine-tuned with blocks re-initialised
detect     detectors: frozen, end to end, with several blocks
segment    segmenters, and probes on other images where there are some
rcdm       pictures from representations, and one pass over images and mirror images
pretrain   encoders of several sizes, windows, λ and seeds, and CNNs, where they are not given
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from sightline.core import plugins
from sightline.core.errors import InputError, nearest
from sightline.core.files import file_name
from sightline.core.references import parse_reference
from sightline.measure.contract import analysis
from sightline.studies.commands import COMMANDS, PASS
from sightline.studies.findings import all_findings
from sightline.studies.findings.park import HIGH, NOISE
from sightline.studies.keys import Contents
from sightline.studies.roles import FAMILY_OF, HYBRID, JE, MASKED_JE, REC, SUPERVISED, Role, of_one_size
from sightline.studies.steps import Design, Given, Step, with_needed
from sightline.training.backbones import build

GROUPS = ("passes", "minibatch", "finetune", "dynamics", "reinit", "detect", "segment", "rcdm", "pretrain")
STUDIES = {  # the findings of which papers
    "papers": ("Shekhar et al. 2022 and 2023, Park et al. 2023, Grigg et al. 2021", ""),
    "shekhar": ('Shekhar et al. 2023, "Objectives Matter", and their paper of 2022', "S"),
    "park": ('Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?"', "P"),
    "grigg": (
        'Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?"',
        "G",
    ),
}
PAPERS = {
    "000": 'Shekhar et al. 2022, "Understanding Contrastive versus Reconstructive Self-Supervised Learning of Vision '
    'Transformers"',
    "001": 'Shekhar et al. 2023, "Objectives Matter"',
    "003": 'Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?"',
    "004": 'Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?"',
}
SMALL = 128  # pixels up to which encoders have the small recipes
RECIPES = {
    "finetune": "finetune_vit_b16",
    "reinit": "finetune_vit_b16",
    "detect": "detect_vitdet",
    "segment": "segment_linear_ade20k",
    "rcdm": "rcdm_adm128",
}
APART = ("dynamics", "minibatch")  # analyses that have steps of their own
ASKED: Mapping[str, Mapping[str, Any]] = {  # no finding or figure asks for more
    "cka": {"tokens": ["all"]},
    "probes": {"kinds": ["linear", "nonlinear", "multilayer"], "more_on": "first"},
    "transformations": {"transformations": ["mirror"]},
}
OF_CNNS = ("invariance",)  # asked of CNNs alone
BLOCKS = "last-3,last-2,last-1,last"
EMBEDDED_SECOND = "shapes:conflict?size={size}"  # the same classes with the textures of others
EMBEDDED_MANY = "shapes?size={size}&test=8192"  # several numbers of images, each at least two batches of 1024
# Short trainings, all of one budget, so that they can be held against each other.
BUDGET = {"epochs": 4, "evaluate_every": 0}
SMALLER = {"width": 48, "heads": 3, "depth": 6}
RESNET = {"backbone": "resnet18", "stem": "small", "width": 16, "lr": 1e-3}
CONVNEXT = {"backbone": "convnextv2_atto", "patch": 1, "width": 16}  # of stride 8: parts to hide in small images


class Varied(NamedTuple):
    """What a study pre-trains itself: for which findings, how, and what its role says besides."""

    findings: str  # such as "P2 P15"
    objective: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]


OF_RESNETS = "S5 G1 G2 G3 G4 G5 G6 G7"
VARIED: Mapping[str, Varied] = {
    "moco_v3-small": Varied("P2", "moco_v3", SMALLER, {}),
    "moco_v3-large": Varied("P2 P15", "moco_v3", {}, {}),
    "moco_v3-large-1": Varied("P2 P15", "moco_v3", {"seed": 1}, {"seed": 1}),
    "moco_v3-window": Varied("P15", "moco_v3", {"attention_window": 3}, {"window": 3}),
    "mae-small": Varied("P2", "mae", SMALLER, {}),
    "mae-large": Varied("P2", "mae", {}, {}),
    "mae-large-1": Varied("P2", "mae", {"seed": 1}, {"seed": 1}),
    "hybrid-0": Varied("P13", "hybrid", {"weight": 0.0}, {"weight": 0.0}),
    "hybrid-0.2": Varied("P13", "hybrid", {"weight": 0.2}, {"weight": 0.2}),
    "hybrid-1": Varied("P13", "hybrid", {"weight": 1.0}, {"weight": 1.0}),
}
CNNS: Mapping[str, Varied] = {
    "simclr-cnn": Varied(OF_RESNETS, "simclr", RESNET, {}),
    "simclr-cnn-1": Varied(OF_RESNETS, "simclr", {**RESNET, "seed": 1}, {"seed": 1}),
    "supervised-cnn": Varied(OF_RESNETS, "supervised", RESNET, {}),
    "supervised-cnn-1": Varied(OF_RESNETS, "supervised", {**RESNET, "seed": 1}, {"seed": 1}),
    "mae-cnn": Varied("S5", "mae", CONVNEXT, {"method": "fcmae"}),
}


def _noise(kind: str) -> dict[str, Any]:
    """Findings look at high frequencies alone; a figure shows all of them, of the first kind.

    Of the low ones every second is enough for that.
    """
    every = analysis("noise").Config().frequencies
    low = [frequency for frequency in every if frequency < HIGH.start][::2]
    high = [frequency for frequency in every if frequency >= HIGH.start]
    return {"frequencies": [*low, *high]} if kind == NOISE[0] else {"kind": kind, "frequencies": high}


@dataclass(frozen=True)
class Sets:
    """Images for the steps; None: the embedded ones."""

    images: str | None = None
    detection: str | None = None
    segmentation: str | None = None
    second: str | None = None  # other images for probes
    further: Mapping[str, str] = field(default_factory=dict)  # what analyses ask for by name: "conflict"


def papers(
    which: str,
    given: Mapping[str, Given],
    sets: Sets,
    contents: Contents,
    *,
    limit: int | None = None,
    steps: Sequence[str] | None = None,
    findings: Sequence[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Design:
    """The study of the papers for these encoders, with all its steps or those that are chosen.

    `limit` is the most images of each split in those passes that do not say it themselves.
    """
    splits = {split for name in plugins.names("analyses") for split in analysis(name).IMAGES}
    for split in sets.further:
        if split not in splits:
            raise InputError(f"No analysis asks for images called {split!r}{nearest(split, splits)}")
    chosen = _findings(which, findings)
    groups = _groups(steps, chosen)
    plan = _Plan(_sized(given, contents), sets, contents, chosen, groups)
    every = plan.steps()
    wanted = with_needed([step for step in every if step.group in groups], every)
    with_settings = _set([_limited(step, limit) for step in wanted], settings or {})
    names = {step.name for step in with_settings}
    roles = [one.role for one in plan.given.values() if not one.step or one.step in names]
    return Design(which, tuple(roles), tuple(with_settings), tuple(chosen))


def _sized(given: Mapping[str, Given], contents: Contents) -> dict[str, Given]:
    """ViTs with their sizes, if a method is given in several; fine-tuned ones have those of their starts.

    What the user says stands. Sizes that hardly differ, as with and without a head, are one.
    """
    vits = {name: one for name, one in given.items() if one.role.network == "vit"}
    sizes = {name: one.role.size or _millions(contents.encoder(one.reference).module) for name, one in vits.items()}
    methods: dict[str, list[float]] = {}
    for name, one in vits.items():
        if one.role.method:
            methods.setdefault(one.role.method, []).append(sizes[name])
    if all(of_one_size(min(those), max(those)) for those in methods.values()):
        return dict(given)
    counted = {name: sizes.get(one.role.tuned_from or name, sizes[name]) for name, one in vits.items()}
    return {
        name: replace(one, role=replace(one.role, size=one.role.size or counted.get(name)))
        for name, one in given.items()
    }


def _millions(module: nn.Module) -> float:
    return round(sum(weights.numel() for weights in module.parameters()) / 1e6, 2)


def _findings(which: str, findings: Sequence[str] | None) -> list[str]:
    every = all_findings()
    for name in findings or ():
        if name not in every:
            raise InputError(f"There is no finding {name!r}{nearest(name, every)}; see `sightline list findings`")
    return [name for name in every if name.startswith(STUDIES[which][1]) and (not findings or name in findings)]


def _groups(steps: Sequence[str] | None, chosen: Sequence[str]) -> set[str]:
    for step in steps or ():
        if step not in GROUPS:
            raise InputError(f"There are no steps {step!r}{nearest(step, GROUPS)}")
    if steps:
        return set(steps)
    needed = {word for name in chosen for word in groups_of(name)}
    return needed & set(GROUPS)


def groups_of(finding: str) -> set[str]:
    return set(all_findings()[finding].step.split(",")) & set(GROUPS)


def _set(steps: Sequence[Step], settings: Mapping[str, Mapping[str, Any]]) -> list[Step]:
    """The steps with the user's settings, which are those of a group or of one step."""
    changed = list(steps)
    for whose, values in settings.items():
        for key, value in values.items():
            taken = [n for n, step in enumerate(changed) if whose in (step.group, step.name) and _takes(step, key)]
            if not taken:
                names = dict.fromkeys([*(step.group for step in steps), *(step.name for step in steps)])
                hint = nearest(key, PASS) if whose in names else nearest(whose, names)
                raise InputError(f"No step of this study takes the setting {whose}.{key}{hint}")
            for n in taken:
                changed[n] = _with(changed[n], key, value)
    return changed


def _limited(step: Step, limit: int | None) -> Step:
    passes = step.command == "compare" and "limit" not in step.options
    return step if limit is None or not passes else _with(step, "limit", limit)


def _takes(step: Step, key: str) -> bool:
    """Whether a setting can be one of this step; a training says itself what it does not know."""
    if step.command == "compare":
        table, dot, _ = key.partition(".")
        return key in PASS or (bool(dot) and table in step.options["only"])
    return key not in PASS or key in ("limit", "batch", "seed")


def _with(step: Step, key: str, value: Any) -> Step:
    if key in COMMANDS[step.command].options:
        return replace(step, options={**step.options, key: value})
    table, dot, inner = key.partition(".")
    before = step.options.get("set", {})
    new = {table: {**before.get(table, {}), inner: value} if dot else value}
    return replace(step, options={**step.options, "set": {**before, **new}})


def _tuning_of(encoder: str) -> str:
    """The name of the step that fine-tunes an encoder, which is also that of a folder.

    >>> _tuning_of("mae"), _tuning_of("mine/mae?")
    ('finetune-mae', 'finetune-mine-mae-')
    """
    return f"finetune-{file_name(encoder)}"


@dataclass
class _Plan:
    """The steps, and the encoders that they add."""

    given: dict[str, Given]
    sets: Sets
    contents: Contents
    findings: Sequence[str]
    groups: set[str]

    def steps(self) -> list[Step]:
        """All of them; encoders that are trained in one take part in those that follow."""
        before = [*self._passes(), *self._minibatch(), *self._pretrain(), *self._finetune()]
        return [*before, *self._dynamics(), *self._reinit(), *self._detect(), *self._segment(), *self._rcdm()]

    # Encoders

    def _of(
        self, *families: str, network: str = "vit", tuned: bool = False, trained: bool | None = None
    ) -> dict[str, str]:
        """References by name; `trained`: whether a step of the study trains them."""
        return {
            name: one.reference
            for name, one in self.given.items()
            if one.role.family in families
            and one.role.network == network
            and one.role.tuned is tuned
            and trained in (None, bool(one.step))
        }

    @cached_property
    def size(self) -> int:
        """Pixels of the largest encoder that is given."""
        preprocessings = [
            self.contents.encoder(one.reference).preprocess for one in self.given.values() if not one.step
        ]
        return max(max(one.size) for one in preprocessings)

    @property
    def images(self) -> str:
        """Embedded images are drawn at the size of the largest encoder, not enlarged to it."""
        return self.sets.images or f"shapes?size={self.size}"

    def _recipe(self, command: str) -> dict[str, Any]:
        return {} if self.size <= SMALL else {"recipe": RECIPES[command]}

    def _whole(self, one: Given) -> str:
        """The encoder with its decoder or its head, where a finding asks for them and it has them."""
        option = "decoder" if one.role.method == "mae" and one.role.network == "vit" else "head"
        wanted = option == "decoder" or (one.role.network == "cnn" and one.role.family == JE)
        if not wanted or one.role.tuned:
            return one.reference
        if one.step:
            return f"{one.reference}?{option}=true"
        parsed = parse_reference(one.reference)
        whole = str(replace(parsed, options=parsed.options | {option: "true"}))
        try:
            self.contents.encoder(whole)
        except InputError:  # it was saved without
            return one.reference
        return whole

    def _analyses(self, group: str) -> list[str]:
        """What the chosen findings ask of the passes of a group; what stands beside RCDM is measured when RCDM is."""
        analyses: set[str] = set()
        for finding in self.findings:
            groups = groups_of(finding)
            if group in groups and ("rcdm" not in groups or group == "rcdm"):
                analyses.update(all_findings()[finding].analyses)
        return sorted(analyses - set(APART))

    def _over(self, name: str, encoders: Mapping[str, str], analyses: Sequence[str], group: str) -> list[Step]:
        """Passes over encoders: what is asked of all, both kinds of noise, and what is asked of CNNs alone."""
        networks = {key: self.given[key].role.network for key in encoders}
        cnns = {key: reference for key, reference in encoders.items() if networks[key] == "cnn"}
        # Pairs of these are held against each other by noise, which takes more forward passes than all the rest.
        pairs = {
            key: encoders[key]
            for key in encoders
            if networks[key] == "vit" and self.given[key].role.family in (JE, REC) and not self._single(key)
        }
        asked: dict[str, tuple[Mapping[str, str], dict[str, Any]]] = {
            name: (
                encoders,
                {
                    "only": [one for one in analyses if one not in (*OF_CNNS, "noise")],
                    "set": {one: dict(values) for one, values in ASKED.items() if one in analyses},
                },
            ),
            **{
                f"{name}-noise-{kind}": (pairs, {"only": ["noise"], "set": {"noise": _noise(kind)}})
                for kind in NOISE
                if "noise" in analyses
            },
            f"{name}-cnn": (cnns, {"only": [one for one in analyses if one in OF_CNNS]}),
        }
        return [
            Step(step, "compare", dict(members), self.images, self._with_images(options), group=group)
            for step, (members, options) in asked.items()
            if members and options["only"]
        ]

    def _with_images(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a pass, with images that it needs beside its own, if they are given."""
        wanted = {split for name in options["only"] for split in analysis(name).IMAGES}
        further = {split: images for split, images in self.sets.further.items() if split in wanted}
        return {**options, "lenient": True, **({"further": further} if further else {})}

    # Steps

    def _passes(self) -> list[Step]:
        encoders = {name: self._whole(one) for name, one in self.given.items()}
        return self._over("passes", encoders, self._analyses("passes"), "passes")

    def _minibatch(self) -> list[Step]:
        pair = dict([*list(self._of(JE).items())[:1], *list(self._of(REC).items())[:1]])
        large = {"only": ["minibatch"], "batch": 1024, "limit": 0}
        images = self.sets.images or EMBEDDED_MANY.format(size=self.size)
        return [Step("minibatch", "compare", pair, images, large, group="minibatch")] if pair else []

    def _pretrain(self) -> list[Step]:
        """What varies for the chosen findings, in short trainings, and one pass over all of it with what is given."""
        if "pretrain" not in self.groups:
            return []
        there = {one.role.family for one in self.given.values() if one.role.network == "cnn"}
        missing = {name: one for name, one in CNNS.items() if FAMILY_OF[one.objective] not in there}
        trainings = []
        for name, one in {**VARIED, **missing}.items():
            if not set(one.findings.split()) & set(self.findings):
                continue
            options = {"objective": one.objective, "set": {**BUDGET, **one.settings}}
            step = Step(name, "pretrain", {}, self.images, options, group="pretrain")
            cnn = name in CNNS
            role = Role(
                name,
                FAMILY_OF[one.objective],
                **{"method": one.objective, "network": "cnn" if cnn else "vit", **one.about},
                size=None if cnn else self._size_of(step),
            )
            self._add(role, step)
            trainings.append(step)
        if not trainings:
            return []
        encoders = {name: self._whole(one) for name, one in self.given.items()}
        analyses = sorted({*self._analyses("pretrain"), *self._analyses("passes")})
        return [*trainings, *self._over("pretrained", encoders, analyses, "pretrain")]

    def _add(self, role: Role, step: Step) -> None:
        """An encoder that a step trains; it must not take the place of one that is given."""
        if role.name in self.given:
            start = role.tuned_from
            other = f", or say what it is: --role {role.name}:tuned_from={start}" if start else ""
            raise InputError(
                f"An encoder {role.name!r} is given, but the step {step.name!r} trains one of this name; give yours "
                f"another name{other}"
            )
        self.given[role.name] = Given(role, f"step:{step.name}", step.name)

    def _size_of(self, step: Step) -> float:
        """Parameters of what a step is going to train."""
        recipe = COMMANDS["pretrain"].recipe(step)
        return _millions(build(recipe.backbone, 0, 0).module)

    def _finetune(self) -> list[Step]:
        if not self.groups & {"finetune", "dynamics"}:
            return []
        starts = self._of(JE, REC, MASKED_JE, HYBRID)
        starts_of_tuned = {one.role.tuned_from for one in self.given.values()}
        steps = {}
        for name in (name for name in starts if name not in starts_of_tuned):
            steps[name] = self._tuning(name)
            self._add(replace(self.given[name].role, name=f"{name}-tuned", tuned_from=name), steps[name])
        tuned = self._of(JE, REC, MASKED_JE, HYBRID, tuned=True)
        encoders = {**starts, **self._of(SUPERVISED), **tuned}
        return [
            *steps.values(),
            *(self._over("tuned", encoders, self._analyses("finetune"), "finetune") if tuned else []),
        ]

    def _tuning(self, name: str) -> Step:
        """The fine-tuning of an encoder, ten points of it kept."""
        options = {"set": {"keep": 10}, **self._recipe("finetune")}
        return Step(
            _tuning_of(name), "finetune", {name: self.given[name].reference}, self.images, options, group="finetune"
        )

    def _dynamics(self) -> list[Step]:
        """Steps of the fine-tunings of what was given; those of short trainings say nothing new.

        What is given fine-tuned has no steps, so that its start is fine-tuned here as well, for this alone: once, also
        where several were fine-tuned from it.
        """
        if "dynamics" not in self.groups:
            return []
        tuned: dict[str, str] = {}  # by their starts
        for name, one in self.given.items():
            start = one.role.tuned_from
            if start not in self.given or one.role.family not in (JE, REC) or one.role.network != "vit":
                continue
            if start is not None and not self.given[start].step:
                tuned.setdefault(start, name)
        if not tuned:
            return []
        tuning = [self._tuning(start) for start, name in tuned.items() if not self.given[name].step]
        steps = {name: f"step:{_tuning_of(start)}?step=*" for start, name in tuned.items()}
        encoders = {**steps, **self._of(JE, trained=False)}
        only = {"only": ["dynamics"]}
        return [*tuning, Step("dynamics", "compare", encoders, self.images, only, group="dynamics")]

    def _single(self, name: str) -> bool:
        """Whether S12 alone asks for it: without multi-crop, where the same method with it is given."""
        role = self.given[name].role
        return role.multicrop is False and any(
            one.role.multicrop and one.role.method == role.method for one in self.given.values()
        )

    def _of_long_steps(self) -> dict[str, str]:
        """JE and REC without what S12 alone asks for."""
        those = self._of(JE, REC, trained=False)
        return {name: reference for name, reference in those.items() if not self._single(name)}

    def _reinit(self) -> list[Step]:
        encoders, options = self._of_long_steps(), self._recipe("reinit")
        return [Step("reinit", "reinit", encoders, self.images, options, group="reinit")] if encoders else []

    def _detect(self) -> list[Step]:
        encoders = self._of(JE, REC, MASKED_JE, trained=False)
        ways: dict[str, dict[str, Any]] = {"frozen": {}, "tuned": {"frozen": False}, "blocks": {"blocks": BLOCKS}}
        return [
            Step(
                f"detect-{way}",
                "detect",
                encoders,
                self.sets.detection,
                {**self._recipe("detect"), **({"set": values} if values else {})},
                group="detect",
            )
            for way, values in ways.items()
            if encoders
        ]

    def _segment(self) -> list[Step]:
        encoders = {**self._of(JE, REC, trained=False), **self._of(HYBRID)}
        embedded = None if self.sets.images else EMBEDDED_SECOND.format(size=self.size)
        second = self.sets.second or embedded
        steps = [Step("segment", "segment", encoders, self.sets.segmentation, self._recipe("segment"), group="segment")]
        if second:
            probes = {"only": ["probes"], "set": {"probes": {"kinds": ["linear"]}}, "lenient": True}
            steps.append(Step("second", "compare", encoders, second, probes, group="segment"))
        return steps if encoders else []

    def _rcdm(self) -> list[Step]:
        encoders = self._of_long_steps()
        encoders |= {
            name: reference
            for name, reference in self._of(REC, tuned=True).items()
            if self.given[name].role.method == "mae"
            and self.given[name].role.tuned_from in encoders
            and ("finetune" in self.groups or not self.given[name].step)
        }
        if not encoders:
            return []
        pictures = Step("rcdm", "rcdm", encoders, self.images, self._recipe("rcdm"), group="rcdm")
        return [pictures, *self._over("mirrored", encoders, self._analyses("rcdm"), "rcdm")]
