"""What is known: encoders with their roles, and run folders with results. Numbers come from whichever run holds them.

    evidence = Evidence(roles, (sl.open_run("runs/compare"), sl.open_run("runs/detect")))
    a = evidence.estimate("cka.diagonal", encoder="moco", other="dino", layer_type="block", tokens="all")

Encoders that differ in their seed only are one encoder here, with a name of its own: numbers are means over them, and
intervals are over seeds and images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from sightline.core.contrast import Estimate, Factor, drawn_seeds
from sightline.core.errors import InputError
from sightline.core.provenance import fingerprint
from sightline.core.run_folder import Run
from sightline.core.selection import ENCODERS
from sightline.studies.roles import JE, MASKED_JE, REC, SUPERVISED, Role, known_roles, refuse_circles

# The step that gives a result, where it is not the one pass over all images.
STEPS = {
    "detection": "detect",
    "dynamics": "dynamics",
    "minibatch": "minibatch",
    "rcdm": "rcdm",
    "reinit": "reinit",
    "segmenters": "segment",
}
FLAGS = {JE: "--je", REC: "--rec", SUPERVISED: "--sl", MASKED_JE: "--masked-je", "hybrid": "--hybrid"}
COORDINATES = (*ENCODERS, "start", "model")  # whose values are names of encoders


class Missing(Exception):  # noqa: N818 - no error, but what a finding may answer
    """A number cannot be had; `needs` is one phrase that says what it would need."""

    def __init__(self, needs: str) -> None:
        super().__init__(needs)
        self.needs = needs


@dataclass(frozen=True)
class Evidence:
    """Roles and results."""

    roles: tuple[Role, ...]
    runs: tuple[Run, ...]
    seeds_together: bool = True  # encoders that differ in their seed only are one

    def __post_init__(self) -> None:
        refuse_circles(self.roles)

    # Encoders

    @cached_property
    def seeds(self) -> Mapping[str, tuple[str, ...]]:
        """Encoders that are one but for their seed: the name of the one → the names of its seeds."""
        groups: dict[str, tuple[str, ...]] = {}
        for members in self._alike:
            numbers = {role.seed for role in members}
            if self.seeds_together and len(members) > 1 and len(numbers) == len(members):
                names = tuple(role.name for role in sorted(members, key=lambda role: role.seed))
                others = {role.name for role in self.roles} - {*names}
                groups[_common(names, {*others, *groups})] = names
        return groups

    @property
    def mixed_up(self) -> list[tuple[str, ...]]:
        """Encoders with several seeds that are not taken together, because two of one role have the same seed."""
        return [
            tuple(role.name for role in members)
            for members in self._alike
            if 1 < len({role.seed for role in members}) < len(members)
        ]

    @cached_property
    def _alike(self) -> list[list[Role]]:
        """Encoders that agree in all but their names and seeds."""
        groups: dict[Any, list[Role]] = {}
        for role in self.roles:
            groups.setdefault(self._kind(role), []).append(role)
        return list(groups.values())

    def _kind(self, role: Role) -> tuple[Any, ...]:
        """All that seeds have in common; fine-tuned from seeds of one encoder is fine-tuned from one encoder."""
        settings = [
            getattr(role, field.name) for field in fields(role) if field.name not in ("name", "seed", "tuned_from")
        ]
        start = self._role(role.tuned_from) if role.tuned_from else None
        return (*settings, role.tuned_from if start is None else self._kind(start))

    def _role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)

    def together(self, name: str) -> str:
        """The name under which an encoder's seeds are one, or its own."""
        return next((one for one, members in self.seeds.items() if name in members), name)

    def encoders(
        self, family: str | None = None, network: str | None = "vit", tuned: bool | None = False, **exactly: Any
    ) -> list[Role]:
        """Encoders of a role in the order given, those that differ in their seed only as one; None: any.

        `exactly` are other fields of the role: `encoders(JE, method="dino", multicrop=False)`.
        """
        roles: dict[str, Role] = {}
        for role in self.roles:
            fits = family in (None, role.family) and network in (None, role.network) and tuned in (None, role.tuned)
            if fits and all(getattr(role, key) == value for key, value in exactly.items()):
                name = self.together(role.name)
                start = None if role.tuned_from is None else self.together(role.tuned_from)
                roles.setdefault(name, replace(role, name=name, tuned_from=start))
        return list(roles.values())

    def need(
        self, family: str, network: str | None = "vit", *, count: int = 1, tuned: bool | None = False, **exactly: Any
    ) -> list[Role]:
        """`encoders`, or Missing with what would have to be added."""
        roles = self.encoders(family, network, tuned, **exactly)
        if len(roles) >= count:
            return roles
        what = f"{'fine-tuned ' if tuned else ''}{exactly.get('method') or family} {(network or 'encoder').upper()}"
        what = what.replace("VIT", "ViT").replace("ENCODER", "encoder")
        article = f"{count - len(roles)} more" if roles else "a" if count == 1 else str(count)
        plural = "s" if (roles and count - len(roles) > 1) or (not roles and count > 1) else ""
        flag = FLAGS[family] if network != "cnn" else f"--cnn{FLAGS[family][1:]}"
        add = "add `--steps finetune`" if tuned else f"add `{flag} NAME=REFERENCE`"
        if network == "cnn" and not tuned:
            add += " or `--steps pretrain`"
        raise Missing(f"{article} {what}{plural}: {add}")

    def tuned(self, name: str) -> Role | None:
        start = self.together(name)
        return next((role for role in self.encoders(None, None, tuned=True) if role.tuned_from == start), None)

    def need_tuned(self, name: str) -> Role:
        """`tuned`, or Missing."""
        if (role := self.tuned(name)) is None:
            raise Missing(f"a fine-tuned {name}: add `--steps finetune`")
        return role

    def of_tuned_seeds(self, *families: str) -> Evidence:
        """Without seeds of these families that were not fine-tuned where others were.

        What was fine-tuned is then held against its own start, not against the mean over seeds.
        """
        starts = {role.tuned_from for role in self.roles}
        begun = {self.together(start) for start in starts if start is not None}
        left_out = {
            role.name
            for role in self.roles
            if role.family in families
            and not role.tuned
            and role.name not in starts
            and self.together(role.name) in begun
        }
        return replace(self, roles=tuple(role for role in self.roles if role.name not in left_out))

    def apart(self) -> Evidence:
        """The same with each seed as an encoder of its own, for numbers per seed."""
        return replace(self, seeds_together=False)

    # Numbers

    def estimate(
        self,
        number: str,
        where: Mapping[str, Any] | None = None,
        *,
        among: Callable[[Run], bool] | None = None,
        **both: Any,
    ) -> Estimate:
        """`Run.estimate` of the first run that holds this number of these encoders: "cka.diagonal", encoder=…, ….

        `among` chooses among runs, where several have such a result: detectors on frozen and on trained encoders, say.
        `statistic` and `draws` are those of `sl.estimate`. What nobody has measured is Missing, with what it needs.
        """
        result, chosen = number.partition(".")[0], {**both, **(where or {})}
        named = list(self._named(chosen))
        seeds = {name: list(members) for name, members in self.seeds.items()}
        why = ""
        for run in self._holding(result, named, among):
            try:
                return run.estimate(number, where, seeds=seeds, **both)
            except InputError as error:
                why = str(error)
        if why:
            raise Missing(f"{number} of {' and '.join(named)}, which is not there: {why[:1].lower()}{why[1:]}")
        seeded = [word for word in COORDINATES if isinstance(chosen.get(word), str) and chosen[word] in self.seeds]
        if len(seeded) == 1:  # each seed may have a run of its own
            members, apart = self.seeds[chosen[seeded[0]]], self.apart()  # a member may be called like all of them
            estimates = {name: apart.estimate(number, among=among, **{**chosen, seeded[0]: name}) for name in members}
            return over_seeds(chosen[seeded[0]], estimates)
        raise self._nobody(result, named)

    def after_training(self, number: str, name: str, **where: Any) -> Estimate:
        """A number of `dynamics` at the last epoch of what was fine-tuned from an encoder, over all such trainings."""
        trainings = self.trainings(number.partition(".")[0], name)
        return over_seeds(
            name, {one: run.estimate(number, encoder=epochs[-1], **where) for one, (run, epochs) in trainings.items()}
        )

    def trainings(self, result: str, name: str) -> dict[str, tuple[Run, list[str]]]:
        """What was fine-tuned from an encoder: of each training a run that follows it, and its steps in order."""
        members = self._members([name])
        names = {*members, *(role.name for role in self.roles if role.tuned_from in members)}
        runs: dict[str, tuple[Run, list[str]]] = {}
        for run in self.runs:
            if result in run:
                steps = run[result][["training", "step"]].to_dataframe().sort_values("step")
                for training, of in steps[steps.training.isin(names)].groupby("training"):
                    runs.setdefault(str(training), (run, [str(step) for step in of.index]))
        if not runs:
            raise self._nobody(result, [f"the fine-tuning of {name}"])
        return runs

    def table(self, result: str, *encoders: str, among: Callable[[Run], bool] | None = None) -> xr.Dataset:
        """The result that holds these encoders, for figures; seeds are there under their own names."""
        for run in self._holding(result, self._members(encoders), among):
            return run[result]
        raise self._nobody(result, encoders)

    def tables(
        self, result: str, *encoders: str, among: Callable[[Run], bool] | None = None
    ) -> Iterator[tuple[str, xr.Dataset]]:
        """The result of each encoder, and of each of its seeds, by its own name; each may have a run of its own."""
        apart = self.apart()
        for name in self._members(encoders):
            yield name, apart.table(result, name, among=among)

    def alike(self, result: str, *encoders: str, among: Callable[[Run], bool] | None = None) -> Callable[[Run], bool]:
        """Runs in which all of these encoders were trained upon with the same settings and images, one run or several.

        What was trained otherwise says nothing about encoders, so that numbers of it cannot be held against each other.
        """
        wanted = set(self._members(encoders))
        for group in self.trained_alike(result, among=among):
            if wanted <= {name for run in group.runs for name in _encoders_of(run[result])}:
                return lambda run: any(run is one for one in group.runs)
        missing = [name for name in self._members(encoders) if not self.apart().holds(result, name, among=among)]
        if not missing and wanted:
            raise Missing(f"{result} of {' and '.join(encoders)} with the same settings and images")
        raise self._nobody(result, encoders)

    def trained_alike(
        self, result: str, *, among: Callable[[Run], bool] | None = None, but: Collection[str] = ()
    ) -> list[Evidence]:
        """Evidence of each group of runs that have this result with the same settings, `but` for some, and images."""
        groups = dict[str, list[Run]]()
        for run in self._holding(result, (), among):
            groups.setdefault(_trained_how(run, but), []).append(run)
        return [replace(self, runs=tuple(runs)) for runs in groups.values()]

    @cached_property
    def by_images(self) -> list[Run]:
        """Runs on the images that most encoders have seen first: two encoders are compared on the same images."""
        seen: dict[str, set[str]] = {}
        for run in self.runs:
            names = {str(about["name"]) for about in run.request.get("encoders", [])}
            seen.setdefault(_digest_of(run), set()).update(names)
        return sorted(self.runs, key=lambda run: -len(seen[_digest_of(run)]))

    def holds(self, result: str, *encoders: str, among: Callable[[Run], bool] | None = None) -> bool:
        """Whether some run has this result of these encoders."""
        return any(True for _ in self._holding(result, self._members(encoders), among))

    def _holding(self, result: str, encoders: Iterable[str], among: Callable[[Run], bool] | None) -> Iterator[Run]:
        wanted = set(encoders)
        for run in self.by_images:
            if result in run and wanted <= _encoders_of(run[result]) and (among is None or among(run)):
                yield run

    def _named(self, where: Mapping[str, Any]) -> Iterator[str]:
        """The encoders that a selection is about, seeds one by one."""
        for word in COORDINATES:
            value = where.get(word, ())
            yield from self._members([value] if isinstance(value, str) else value)

    def _members(self, names: Iterable[str]) -> list[str]:
        return [member for name in names for member in self.seeds.get(name, (name,))]

    def _nobody(self, result: str, encoders: Sequence[str]) -> Missing:
        whose = f" of {' and '.join(dict.fromkeys(encoders))}" if encoders else ""
        if (step := STEPS.get(result)) is not None:
            return Missing(f"{result}{whose}: add `--steps {step}`")
        more = (
            " and, if your images are not the embedded ones, `--further conflict=IMAGES`"
            if result == "shape_bias"
            else ""
        )
        return Missing(f"the analysis {result}{whose}: add `--steps passes`{more}")


def evidence_of(*runs: Run, roles: Iterable[Role] = ()) -> Evidence:
    """Evidence of runs alone: roles are those that are given, and those that the references of the encoders tell."""
    given = {role.name: role for role in roles}
    references = {
        str(about["name"]): str(about.get("reference", "")) for run in runs for about in run.request.get("encoders", [])
    }
    others = known_roles({name: reference for name, reference in references.items() if name not in given})
    return Evidence((*given.values(), *(role for role in others.values() if role is not None)), runs)


def over_seeds(name: str, found: Mapping[str, Estimate]) -> Estimate:
    """The mean over the seeds of an encoder, whose numbers may come from several runs; as `sl.estimate` has it."""
    parts = list(found.values())
    value = np.array([part.value for part in parts])
    images = list(dict.fromkeys(factor for part in parts for factor in part.left_out))
    left_out = {
        factor: np.asarray(np.mean(np.broadcast_arrays(*(part.left_out.get(factor, part.value) for part in parts)), 0))
        for factor in images
    }
    used = {
        factor: np.logical_or.reduce([part.used[factor] for part in parts if factor in part.used]) for factor in images
    }
    seeds = Factor(f"seeds of {name}: {', '.join(found)}", f"seeds of {name}", seeds=True)
    if len(parts) > 1:
        left_out[seeds] = np.array([np.delete(value, number).mean() for number in range(len(parts))])
        used[seeds] = np.ones(len(parts), bool)
    draws = [part.draws for part in parts if part.draws is not None]
    drawn = drawn_seeds(seeds, np.stack(draws)) if len(draws) == len(parts) else None
    why = "" if left_out else parts[0].why
    what = parts[0].what.replace(next(iter(found)), name)
    return Estimate(float(value.mean()), left_out, used, drawn, what, why, any(part.of_images for part in parts))


ASIDE = ("log_every", "save_minutes")  # settings that no number depends on


def _trained_how(run: Run, but: Collection[str] = ()) -> str:
    """Settings and images of a run, as one word; `but` for some settings."""
    settings = {key: value for key, value in run.request.get("settings", {}).items() if key not in {*ASIDE, *but}}
    return fingerprint([settings, _digest_of(run)])


def _digest_of(run: Run) -> str:
    """Which images a run has seen."""
    images = run.request.get("images") or {}
    return str(images.get("digest", images.get("name")))


def _encoders_of(table: xr.Dataset) -> set[str]:
    named = (table[name].values.ravel() for name in COORDINATES if name in table.coords)
    return {str(value) for values in named for value in values}


def _common(names: Sequence[str], taken: Collection[str] = ()) -> str:
    """What the names of seeds have in common, without their numbers; all names where that is nothing, or taken.

    >>> _common(["mae-0", "mae-1"]), _common(["mae-0-tuned", "mae-1-tuned"]), _common(["a", "b"])
    ('mae', 'mae-tuned', 'a, b')
    >>> _common(["moco_v3", "moco_v3_1", "moco_v3_2"])  # its 3 is no seed
    'moco_v3'
    """
    first, start, end = names[0], 0, 0
    if all(name.startswith(first) for name in names) and first not in taken:
        return first
    while start < len(first) and len({name[: start + 1] for name in names}) == 1:
        start += 1
    while end < len(first) - start and len({name[len(name) - end - 1 :] for name in names}) == 1:
        end += 1
    before = re.sub(r"[-_ .:]*(seed)?[-_ .:]*\d*$", "", first[:start])
    common = (before + re.sub(r"^\d+", "", first[len(first) - end :])).strip("-_ .:")
    return common if common and common not in taken else ", ".join(names)
