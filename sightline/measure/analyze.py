"""The one streaming pass: all encoders, all analyses, every image decoded once and forwarded once per encoder.

batch → every encoder's own preprocessing → forward, sites watched → each analysis reduces an activation inside the
hook (the activation is gone when the layer is) → analyses add the small reductions of all encoders to their sums

"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xarray as xr
from torch import Tensor, nn

from sightline.core import progress
from sightline.core.errors import InputError, counted, first_line
from sightline.core.processes import agreed, barrier, by_first, gathered, join, rank, world
from sightline.core.provenance import provenance
from sightline.core.run_folder import Run, plan_run
from sightline.core.stopping import Stopped, signals
from sightline.encoders.attention import AttentionProduct
from sightline.encoders.encoder import Encoder
from sightline.encoders.watching import watch
from sightline.images.loading import load_images
from sightline.images.pipeline import Batch, batch_count, batches
from sightline.images.sets import Images
from sightline.images.views import make_view
from sightline.measure.contract import Analysis, analysis, measured_of
from sightline.measure.estimators.attention import attend
from sightline.measure.plan import Key, Plan, analysis_fingerprint, announce, make_plans
from sightline.measure.pooled import share
from sightline.measure.request import (
    check_settings,
    choose_analyses,
    describe_request,
    lacking_images,
    left_out_of,
    make_metrics,
    named_encoders,
    with_further,
)
from sightline.measure.resume import Reached, Sums


def analyze(
    encoders: Mapping[str, Encoder | str | nn.Module] | Sequence[Encoder | str | nn.Module] | Encoder | str,
    images: Images | str | None = None,
    only: Sequence[str] | Mapping[str, Any] | None = None,
    *,
    also: Sequence[str] | Mapping[str, Any] = (),
    further: Mapping[str, Images | str] | None = None,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    sites: Sequence[str] | str | None = None,
    limit: int = 0,
    batch: int = 32,
    seed: int = 0,
    precision: str = "float32",
    strict: bool = False,
    overwrite: bool = False,
    lenient: bool = False,
    device: str = "auto",
    workers: int | None = None,
    show_progress: bool = True,
) -> Run:
    """Measure encoders on images in one pass and return the results by analysis, `run["cka"]`.

    `images` are by default embedded ones of the size of the largest encoder; of each split at most `limit` are taken,
    0: all, and with `strict` the first one that cannot be read is an error. `only` names analyses, with their settings
    as {"knn": {"k": 10}}; by default those that need one forward pass of each image are made, with "all" all; `also`
    adds to them. What was not named, or with `lenient` anything, is left out where it makes no sense, and `run.request`
    says why. `further` are images that analyses ask for by name, such as {"conflict": …}, the cue-conflict images of
    shape bias. With `out` the run is a folder that can be resumed: what is finished there is not computed again;
    `cache` is a folder for features that several runs share, which is inside the run by default: what one of them has
    written, the others need not compute. `sites` replaces the sites of those analyses that can take any. Started by
    torchrun, the processes share the images, and the results are those of one process.
    """
    join(on_gpu=torch.cuda.is_available() and device in ("auto", "cuda"))
    target = _device(device)
    out = agreed(out)
    configs, named = choose_analyses(only, also)
    named = set() if lenient else named
    on_cpu_in_bf16 = target.type == "cpu" and (precision == "bf16" or _trains_in_bf16(configs))
    if on_cpu_in_bf16:
        from sightline.core import bfloat16

        bfloat16.ensure()  # before anything is computed
    members = named_encoders(encoders)
    if images is None:  # drawn at the size of the largest encoder, not enlarged to it
        images = f"shapes?size={max(max(encoder.preprocess.size) for encoder in members.values())}"
    load = functools.partial(load_images, limit=limit or None, seed=seed, strict=strict)
    sets = {name: load(others) for name, others in (further or {}).items()}
    images = with_further(load(images), sets, configs)
    sites = [sites] if isinstance(sites, str) else sites
    settings = {"batch": batch, "seed": seed, "precision": precision}
    check_settings(batch, precision, seed)
    with contextlib.ExitStack() as stack:
        for encoder in members.values():
            stack.enter_context(encoder.evaluating())
            if (home := next(encoder.module.parameters(), torch.empty(0)).device) != target:
                encoder.module.to(target)
                stack.callback(encoder.module.to, home)
        features = agreed(_cache_folder(cache, out, stack))
        lacking = lacking_images(configs, images, named)
        configs = {name: config for name, config in configs.items() if name not in lacking}
        stack.enter_context(progress.showing(show_progress and rank() == 0))
        plans = make_plans(members, images, configs, sites, settings, features, target)
        metrics, declined = make_metrics(configs, plans, target, named)
        plans = {name: plans[name] for name in metrics}
        keys = {name: analysis_fingerprint(name, configs[name], plan) for name, plan in plans.items()}
        request = describe_request(members, images, plans, configs, settings) | {
            "left_out": left_out_of(plans, lacking | declined)
        }
        run = plan_run(None if out is None else Path(out), request, overwrite)
        todo = {name: plan for name, plan in plans.items() if not run.finished(name, keys[name])}
        # All have looked at the folder before one of them writes to it.
        agreed_keys, unfinished = agreed((keys, [*todo]))
        if agreed_keys != keys:
            raise InputError("The encoders or images changed while several processes loaded them; run it again")
        todo = {name: plans[name] for name in unfinished}
        barrier()
        if todo:
            shown = show_progress and rank() == 0
            announce(todo, configs, shown)
            if shown and on_cpu_in_bf16:
                bfloat16.tell_if_slower()
            by_first(run.begin)
            _pass({name: metrics[name] for name in todo}, todo, keys, run, target, workers, shown)
    return run


# Where it runs


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', rank())}"
    try:
        device = torch.empty(0, device=name, dtype=torch.float64).device  # sums need float64, which MPS has not
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"Device {name!r} cannot be used here: {first_line(error)}") from error
    if device.type == "cuda" and world() > 1:
        torch.cuda.set_device(device)  # NCCL talks through the current device
    return device


def _trains_in_bf16(configs: Mapping[str, Any]) -> bool:
    """Whether an analysis does: probes."""
    return any(analysis(name).precision(config) == "bf16" for name, config in configs.items())


def _cache_folder(cache: str | Path | None, out: str | Path | None, stack: contextlib.ExitStack) -> Path:
    if shared := os.environ.get("SIGHTLINE_CACHE") or cache:
        return Path(shared)
    if out is not None:
        return Path(out) / "cache"
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sightline-")))


# The pass


def _pass(
    metrics: Mapping[str, Analysis],
    plans: Mapping[str, Plan],
    keys: Mapping[str, str],
    run: Run,
    device: torch.device,
    workers: int | None,
    shown: bool,
) -> None:
    began = time.monotonic()
    forwards = frozenset(agreed(_forwards(metrics, plans)))
    streamed = {name: metrics[name] for name in metrics if name in {forward.analysis for forward in forwards}}
    if shown and (ready := sorted(metrics.keys() - streamed.keys())):
        progress.console().print(f"Features are there already: no forward pass for {', '.join(ready)}")
    share(streamed.values())
    sums = Sums(run.path, {name: keys[name] for name in streamed}, streamed)
    total, skipped = _stream(streamed, plans, forwards, sums, device, workers, shown) if streamed else (0, [])
    skipped = [pair for part in gathered(skipped) for pair in part]
    if total and len(skipped) == total:
        name = plans[next(iter(metrics))].images.name
        raise InputError(f"None of {counted(total, 'image')} of {name} could be read: {': '.join(skipped[0])}")
    reported = {name for name, _ in skipped}
    skipped += [pair for name in sorted(metrics) for pair in metrics[name].unread() if pair[0] not in reported]
    skipped = list(dict.fromkeys(skipped))
    _report_skipped(skipped, shown)
    timing = {"seconds": round(time.monotonic() - began, 3), "images": total, "processes": world()}
    for name in progress.one_by_one("Computing", metrics):
        result, kept = measured_of(metrics[name])
        if rank() == 0:
            run.save(name, _signed(result, name, keys[name], plans[name], run), kept)
        elif run.path is None:
            run.save(name, result, kept)
    if rank() == 0:
        run.request["timing"] = timing
        earlier = [tuple(pair) for pair in run.request.get("skipped", [])]  # by analyses that were finished before
        run.request["skipped"] = [list(pair) for pair in dict.fromkeys([*earlier, *skipped])]
        run.save_request()
    barrier()
    sums.forget()


def _stream(
    metrics: Mapping[str, Analysis],
    plans: Mapping[str, Plan],
    forwards: Set[_Forward],
    sums: Sums,
    device: torch.device,
    workers: int | None,
    shown: bool,
) -> tuple[int, list[tuple[str, str]]]:
    """All batches, or those that an interrupted pass has left; how many images they have, and which are unreadable."""
    plan = plans[next(iter(metrics))]
    # Sorted, so that a batch has the same number whichever analyses are chosen, in whichever order.
    fresh = Reached(tuple(sorted({one.split for one in forwards})))
    # All processes go through the same splits; one that was ended before it could save begins anew.
    begun = {one.splits for one in gathered(sums.reached()) if one is not None}
    reached = fresh if len(begun) != 1 else sums.restore() or Reached(next(iter(begun)))
    loader = batches(
        plan.images,
        {encoder.preprocess for name in metrics for encoder in plans[name].encoders.values()},
        splits=reached.splits,
        batch=plan.batch,
        seed=plan.seed,
        workers=workers,
        rank=rank(),
        world=world(),
        start=reached.batch,
        targets={split for name in metrics if analysis(name).TARGETS for split in plans[name].splits},
    )
    total = sum(len(plan.images.indices(split)) for split in reached.splits)
    count = sum(batch_count(len(plan.images.indices(split)), plan.batch) for split in reached.splits)
    done, signalled = total * reached.batch // count, list[int]()
    if reached.batch and shown:
        progress.console().print(f"Continuing the interrupted pass at image {done} of {total}")
    with (
        progress.bar("Comparing", total, done, shown) as move,
        contextlib.closing(loader),
        torch.inference_mode(),
        signals(signalled),
    ):
        for batch in loader:
            if batch.ids:
                concerned = {name: metric for name, metric in metrics.items() if batch.split in plans[name].splits}
                _step(batch, concerned, plans, forwards, device)
            reached = replace(reached, batch=batch.number + 1, skipped=(*reached.skipped, *batch.skipped))
            # Other processes have the batches between this one and the last one of this process.
            before, done = done, total * reached.batch // count
            move(done - before)
            if signalled or sums.due:
                sums.save(reached)
            if signalled and sums.path is not None:
                where = f"image {done} of {total}"
                raise Stopped(signalled[-1], f"Stopped and saved after {where}")
            if signalled:
                raise KeyboardInterrupt
        move(total - done)
    sums.save(replace(reached, batch=count))  # should writing the results be interrupted
    return total, list(reached.skipped)


class _Forward(NamedTuple):
    """A forward pass of the images of a split in a view through an encoder, and the analysis that needs it."""

    analysis: str
    encoder: str
    split: str
    view: str


def _forwards(metrics: Mapping[str, Analysis], plans: Mapping[str, Plan]) -> list[_Forward]:
    """All but those whose features are there already, where nothing else is asked of them."""
    every = (
        _Forward(name, encoder, split, view)
        for name in metrics
        for encoder in plans[name].encoders
        for split in plans[name].splits
        for view in plans[name].views[split]
    )
    return [forward for forward in every if metrics[forward.analysis].lacks(*forward[1:])]


def _step(
    batch: Batch,
    metrics: Mapping[str, Analysis],
    plans: Mapping[str, Plan],
    forwards: Set[_Forward],
    device: torch.device,
) -> None:
    """One batch through all encoders; analyses see activations inside the hooks, then add up what they kept."""
    encoders = {key: encoder for name in metrics for key, encoder in plans[name].encoders.items()}
    for metric in metrics.values():
        metric.begin(batch)
    reduced = [_forward(key, encoder, batch, metrics, plans, forwards, device) for key, encoder in encoders.items()]
    for name, metric in metrics.items():
        metric.update(batch, {key: value for of_one in reduced for key, value in of_one[name].items()})


def _forward(
    key: str,
    encoder: Encoder,
    batch: Batch,
    metrics: Mapping[str, Analysis],
    plans: Mapping[str, Plan],
    forwards: Set[_Forward],
    device: torch.device,
) -> dict[str, dict[Key, Any]]:
    """All views of a batch through one encoder that are needed; what each analysis keeps of them."""
    plan = plans[next(iter(metrics))]
    reductions: dict[str, dict[Key, Any]] = {name: {} for name in metrics}
    pixels = batch.pixels[encoder.preprocess].to(device, non_blocking=True)
    for view in dict.fromkeys(view for name in metrics for view in plans[name].views[batch.split]):
        sites_of = {name: set(plans[name].sites[key]) for name in metrics if (name, key, batch.split, view) in forwards}
        see = _see(Key(key, "", view), len(pixels), sites_of, metrics, reductions, device)
        watched = [site for site in encoder.sites if any(site in sites for sites in sites_of.values())]
        if not watched:
            continue
        inputs = encoder.preprocess.normalize(make_view(view, pixels, batch.ids, plan.seed))
        with (
            watch(encoder.sites, watched, see, functools.partial(attend, tokens=encoder.tokens)),
            torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bf16"),
        ):
            encoder(inputs)
        for name, sites in sites_of.items():
            if missed := sorted(site for site in sites if Key(key, site, view) not in reductions[name]):
                raise InputError(
                    f"Encoder {key!r} reached site {missed[0]!r} with grey images and does not with these; leave it out"
                )
    return reductions


def _see(
    place: Key,
    images: int,
    sites_of: Mapping[str, set[str]],
    metrics: Mapping[str, Analysis],
    reductions: Mapping[str, dict[Key, Any]],
    device: torch.device,
) -> Callable[[str, Any], None]:
    """Hands an activation to the analyses that ask for it; they keep what they make of it."""

    def see(site: str, activation: Tensor | AttentionProduct) -> None:
        key = place._replace(site=site)
        whole: Tensor | None = None if isinstance(activation, AttentionProduct) else activation
        if whole is not None and len(whole) != images:
            raise InputError(
                f"Site {site!r} of encoder {place.encoder!r} gives a tensor of shape {tuple(whole.shape)} for {images} "
                "images, not a row for each; leave the site out, or correct the encoder"
            )
        with torch.autocast(device.type, enabled=False):  # the model may run in bf16, measurements do not
            for name, sites in sites_of.items():
                if site not in sites:
                    continue
                product = isinstance(activation, AttentionProduct) and metrics[name].products
                if not product and whole is None:
                    whole = activation.map() if isinstance(activation, AttentionProduct) else activation
                reductions[name][key] = metrics[name].reduce(key, activation if product else whole)

    return see


def _report_skipped(skipped: Sequence[tuple[str, str]], shown: bool) -> None:
    if skipped and shown:
        images, were = counted(len(skipped), "image"), "was" if len(skipped) == 1 else "were"
        progress.console().print(f"{images} could not be read and {were} skipped:", style="yellow")
        for name, reason in skipped[:10]:
            progress.console().print(f"  {name}: {reason}", markup=False)


def _signed(result: xr.Dataset, name: str, key: str, plan: Plan, run: Run) -> xr.Dataset:
    """A result with what it takes to reproduce it."""
    about = {k: run.request[k] for k in ("encoders", "images", "settings")}
    about |= {k: v for k, v in provenance().items() if k in ("versions", "date")}  # the folder may be older
    return result.assign_attrs(analysis=name, fingerprint=key, provenance=json.dumps(about))
