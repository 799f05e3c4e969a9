"""What each analysis adds to the bare forward pass, alone and all together, in real passes.

    python benchmarks/battery.py [--rounds 8] [--only cka,attention] [--also transformations] [--together]
    python benchmarks/battery.py --encoder zoo:moco_v3 --encoder zoo:mae --size 48      # other encoders

By default two ViT-S/16 (224 px, random weights), batches of 32, a round is a batch. Before each batch the same encoders
see as many images bare; `step` is the median ratio of a step of the pass to the bare forwards before and after it, with
the tenths of the rounds on either side, and `around` the seconds before the first step and after the last: hashes of
the weights, what is computed from samples, intervals.
"""

from __future__ import annotations

import statistics

from shared import TINY, Beside, arguments, begin

import sightline as sl

VIT = "timm:vit_small_patch16_224@random"
TRAIN = 32  # images, for the analyses that fit a classifier


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, rounds=8)
    parser.add_argument("--encoder", action="append", help="a reference; may be repeated")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", help="these analyses, separated by commas; by default those of `sightline compare`")
    parser.add_argument("--also", help="these, too")
    parser.add_argument("--together", action="store_true", help="all in one pass, and nothing else")
    asked = begin(parser, encoder=[TINY, TINY], size=16, batch=8, only="attention,cka,knn")
    names = asked.encoder or [VIT, f"{VIT}?seed=1"]
    encoders = {f"{number}": sl.load_encoder(name) for number, name in enumerate(names)}
    test = (asked.rounds + 2) * asked.batch  # the last batch of a split has no bare forward of its own after it
    images = sl.load_images(f"shapes?size={asked.size}&train={TRAIN}&val=0&test={test}")
    only = asked.only.split(",") if asked.only else None
    also = asked.also.split(",") if asked.also else []

    def measured(**which: object) -> tuple[Beside, list[str]]:
        beside = Beside(encoders, asked.clock)
        return beside, list(beside.measure(images, asked.batch, **which))

    together, chosen = measured(only=only, also=also)
    print(f"bare forward of a batch of {asked.batch}: {statistics.median(together.bares):.3f} s")
    print(f"{'':24}{'step':>8}{'tenths':>18}{'around':>10}")
    line(f"all {len(chosen)} in one pass", together)
    for name in [] if asked.together else chosen:
        line(name, measured(only=[name])[0])


def line(label: str, beside: Beside) -> None:
    """One row of the table."""
    ratios = beside.ratios()
    tenths = f"{ratios[len(ratios) // 10]:.3f} … {ratios[-1 - len(ratios) // 10]:.3f}"
    print(f"{label:24}{statistics.median(ratios):8.3f}{tenths:>18}{beside.around:8.2f} s", flush=True)


if __name__ == "__main__":
    main()
