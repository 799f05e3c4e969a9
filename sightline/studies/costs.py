"""What steps will take, from short trials: some batches through the encoders, some steps of a training.

Trials are remembered in ~/.cache/sightline for this machine, so that a plan is quick the second time.
"""

import contextlib
import json
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sightline.core.errors import InputError
from sightline.core.files import user_cache, write_atomically
from sightline.core.provenance import fingerprint
from sightline.core.schedules import points
from sightline.encoders.encoder import Encoder
from sightline.images.sets import FEWEST, Images
from sightline.measure.contract import analysis
from sightline.measure.feature_cache import describe_encoder
from sightline.measure.plan import make_plans
from sightline.measure.request import with_further
from sightline.studies.commands import Machine, Work, analyses_of, command_of
from sightline.studies.folders import StepFolder
from sightline.studies.keys import Contents
from sightline.studies.rcdm.measures import Extent
from sightline.studies.steps import Step, step_of
from sightline.training.backbones import build
from sightline.training.monitor import read_metrics
from sightline.transfer.trainings import finished, folder_of

BATCH = 32  # images of a trial
MORE = 1.4  # what analyses add to the forward passes, with the end of a pass
MANY = 10**6  # steps, more than points are kept at
STEPS = 3  # of a training that are timed
EVALUATION = 1.1  # what a training takes besides its steps
FILE = "speeds.json"


@dataclass(frozen=True)
class StepCost:
    """Seconds and bytes, as far as a trial tells."""

    seconds: float
    disk: float


def cost_of(
    placed: StepFolder, steps: Mapping[str, StepFolder], contents: Contents, machine: Machine
) -> StepCost | None:
    """What a step that is not done will take, None where no trial can tell."""
    trial = _Trial(steps, contents, machine)
    with contextlib.suppress(InputError, RuntimeError, OSError):
        return trial.passing(placed.step) if placed.step.command == "compare" else trial.training(placed)
    return None


@dataclass(frozen=True)
class _Trial:
    steps: Mapping[str, StepFolder]
    contents: Contents
    machine: Machine

    # Encoders

    def encoder(self, reference: str) -> Encoder:
        """The encoder, or of one that is yet to be trained, one of the same architecture."""
        needed = step_of(reference)
        if needed is None:
            return self.contents.encoder(reference)
        step = self.steps[needed.id].step
        if step.command == "finetune":
            return self.encoder(next(iter(step.encoders.values())))
        recipe = command_of(step).recipe(step)
        return build(recipe.backbone, 0, recipe.training.seed)

    def members(self, step: Step) -> dict[str, Encoder]:
        """Those of a step; steps that are not there yet are as many as there will be."""
        encoders = {}
        for name, reference in step.encoders.items():
            needed, encoder = step_of(reference), self.encoder(reference)
            if needed is None or needed.options.get("step") != "*":
                encoders[name] = encoder
                continue
            tuning = self.steps[needed.id].step
            for point in points(command_of(tuning).recipe(tuning).config.keep, MANY):
                encoders[f"{name}, step {point}"] = replace(encoder, reference=f"run:{needed.id}?step={point}")
        return encoders

    # A pass

    def passing(self, step: Step) -> StepCost:
        """Forward passes of all views through all encoders, and features on disk."""
        members, configs = self.members(step), analyses_of(step)
        images = with_further(command_of(step).images(step), step.options.get("further", {}), configs)
        configs = {
            name: config
            for name, config in configs.items()
            if all(split in images.splits for split in analysis(name).IMAGES)
        }
        settings = {"batch": BATCH, "seed": 0, "precision": "float32"}
        with tempfile.TemporaryDirectory(prefix="sightline-") as cache:
            plans = make_plans(members, images, configs, None, settings, Path(cache), torch.device("cpu"))
            disk = 0
            for name, plan in plans.items():
                with contextlib.suppress(InputError):
                    disk += analysis(name).cost(configs[name], plan).disk if plan.encoders else 0
        seconds = 0.0
        for key, encoder in members.items():
            asking = [plan for plan in plans.values() if key in plan.encoders]
            views = {(split, view) for plan in asking for split in plan.splits for view in plan.views[split]}
            passes = sum(len(images.indices(split)) for split, _ in views)
            seconds += passes * self._forward(encoder)
        return StepCost(MORE * seconds, disk)

    def _forward(self, encoder: Encoder) -> float:
        return self._remembered(["forward", _shape(encoder)], lambda: _forward(encoder, self.machine.device))

    # A training

    def training(self, placed: StepFolder) -> StepCost:
        """All steps of all its trainings that are not made yet, at the speed of the first ones."""
        step = placed.step
        command = command_of(step)
        recipe = command.recipe(step)
        optimization, images = recipe.optimization, command.images(step)
        members = self.members(step)
        seen = optimization.epochs * len(images.indices("train"))
        seconds = disk = 0.0
        for name, encoder in members.items() or [("", None)]:
            times = _variants(step, encoder) if step.command == "reinit" else 1
            times -= min(times, len(_made(placed, name))) if command.apart else 0
            if not times:
                continue
            kind = {k: v for k, v in command.decisive(step).items() if k not in ("epochs", "limit", "seed", "counts")}
            speed = self._remembered(
                [step.command, kind, None if encoder is None else _shape(encoder)],
                lambda e=encoder: self._speed(step, e, images),
            )
            seconds += EVALUATION * times * seen / speed
            size = sum(p.numel() * 4 for p in self._trained(step, encoder).parameters())
            kept = len(points(getattr(recipe.config, "keep", ""), MANY)) / 2  # in bfloat16
            disk += times * size * (8 + kept)  # two checkpoints of weights, their copy and Adam's two moments
            if step.command == "rcdm":  # one model for all encoders
                seconds += self._pictures(step, members, images, 1 / speed)
                break
        return StepCost(seconds, disk)

    def _pictures(self, step: Step, members: Mapping[str, Encoder], images: Images, learned: float) -> float:
        """What RCDM takes besides its training, a picture of which takes `learned` seconds.

        That is about three evaluations of the network. Heun's method needs two for each of its steps, a likelihood gap
        as many as docs/rcdm.md says; and all images go through the encoders, as they are and mirrored.
        """
        extent = Extent(**{key: step.options[key] for key in ("samples", "sources", "compared") if key in step.options})
        transformations = len(step.options.get("transformations") or extent.transformations)
        drawn: int = extent.samples * extent.sources * 2 * command_of(step).recipe(step).config.sampling_steps
        evaluations = drawn + extent.compared * (8 + 24 * transformations)
        views = 2 * sum(len(images.indices(split)) for split in ("train", "test"))
        return sum(evaluations * learned / 3 + views * self._forward(encoder) for encoder in members.values())

    def _trained(self, step: Step, encoder: Encoder | None) -> torch.nn.Module:
        if encoder is not None:
            return encoder.module
        recipe = command_of(step).recipe(step)
        return build(recipe.backbone, 0, recipe.training.seed).module

    def _speed(self, step: Step, encoder: Encoder | None, images: Images) -> float:
        """Images a second in the first steps of the training itself, in a folder that is thrown away."""
        batch = command_of(step).recipe(step).optimization.batch
        short = {"limit": max(FEWEST, STEPS * batch), "epochs": 1, "evaluate_every": 0, "log_every": 1}
        options: dict[str, Any] = {**step.options, "set": {**step.options.get("set", {}), **short}}
        name = step.command
        if name == "reinit":
            name = "finetune"
            options = {key: value for key, value in options.items() if key in ("recipe", "set")}
        if name == "rcdm":
            options |= {"samples": 2, "sources": 2, "compared": 2, "transformations": ["mirror"]}
        trial = replace(step, command=name, options=options)
        with tempfile.TemporaryDirectory(prefix="sightline-") as folder:
            out = Path(folder) / "trial"
            members = {} if encoder is None else {"trial": encoder}
            command_of(replace(trial, encoders=dict.fromkeys(members, ""))).run(
                Work(trial, members, out, False, replace(self.machine, show_progress=False))
            )
            metrics = next(out.rglob("metrics.csv"))
            rows = [float(row["images_per_second"]) for row in read_metrics(metrics) if row.get("images_per_second")]
        return sorted(rows)[len(rows) // 2]

    def _remembered(self, what: Any, measure: Any) -> float:
        """A number that was measured before on this machine, or is measured now."""
        threads = torch.get_num_threads()
        key = fingerprint([what, platform.node(), threads, self.machine.device])
        seconds = _recall()
        if key not in seconds:
            seconds[key] = float(measure())
            with contextlib.suppress(OSError, InputError, RuntimeError):
                write_atomically(user_cache() / FILE, json.dumps({**_recall(), **seconds}).encode())
        return seconds[key]


def _recall() -> dict[str, float]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return {str(key): float(value) for key, value in json.loads((user_cache() / FILE).read_text()).items()}
    return {}


def _shape(encoder: Encoder) -> Any:
    """What its speed depends on; encoders of one architecture share a trial, wherever they are from."""
    return {key: value for key, value in describe_encoder(encoder).items() if key not in ("weights", "reference")}


def _forward(encoder: Encoder, device: str) -> float:
    where = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    home = next(encoder.module.parameters()).device
    pixels = torch.full((BATCH, 3, *encoder.preprocess.size), 128, dtype=torch.uint8, device=where)
    encoder.module.to(where)
    with encoder.evaluating(), torch.inference_mode():
        inputs = encoder.preprocess.normalize(pixels)
        encoder(inputs)
        _wait(where)
        began = time.perf_counter()
        encoder(inputs)
        _wait(where)
        seconds = time.perf_counter() - began
    encoder.module.to(home)
    return seconds / BATCH


def _wait(device: torch.device) -> None:
    """Until a GPU has computed what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _made(placed: StepFolder, encoder: str) -> set[str]:
    """The trainings upon an encoder that are finished here or can be taken over from another step."""
    folders = set()
    for run in (placed.folder, *placed.reuse.get(encoder, ())):
        folder = folder_of(run, encoder)
        folders |= {str(file.parent.relative_to(folder)) for file in folder.rglob("run.json") if finished(file.parent)}
    return folders


def _variants(step: Step, encoder: Encoder | None) -> int:
    depth = 1 if encoder is None else encoder.depth
    counts: Sequence[int] = step.options.get("counts") or [2**k for k in range(depth.bit_length()) if 2**k < depth]
    return 1 + len({*counts} - {0}) * len(step.options.get("ends") or ("first", "last"))
