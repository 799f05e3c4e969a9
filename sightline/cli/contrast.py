"""`sightline contrast`: a difference of measured numbers, with its interval."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sightline.cli.application import say
from sightline.cli.command import command
from sightline.core.errors import InputError, some

if TYPE_CHECKING:
    from sightline.core.run_folder import Run


@command("Measure")
def contrast(
    run: Annotated[Path, "Run folder, as given to -o."],
    name: Annotated[str | None, "A number of a result, such as `knn.accuracy`; without it, all are listed."] = None,
    *,
    this: Annotated[str, "Which numbers: `encoder=dino,depth=last half`; `a|b` means both, `0.5..1` a range."] = "",
    that: Annotated[str, "Numbers to subtract, chosen in the same way, or a plain number such as 0.25."] = "0",
    where: Annotated[str, "What to choose for both: `layer_type=block,tokens=all`."] = "",
    seeds: Annotated[
        Mapping[str, str] | None,
        "Encoders that differ only in their seed: `mae=mae-0|mae-1`; then choose `encoder=mae`.",
    ] = None,
    statistic: Annotated[Literal["mean", "median", "max", "min", "std"], "mean, median, max, min or std."] = "mean",
    confidence: Annotated[float, "Confidence of the interval."] = 0.95,
    method: Annotated[
        Literal["jackknife", "bootstrap"], "jackknife; or bootstrap, for statistics that are not smooth (a maximum)."
    ] = "jackknife",
    json: Annotated[bool, "Print JSON, for programs."] = False,
) -> None:
    """Compare two measured numbers on the same images: their difference, its interval and its p.

    Is MoCo more like DINO than like MAE?

    `sightline contrast runs/x cka.diagonal --this other=dino --that other=mae
    --where encoder=moco,layer_type=block,tokens=all`

    Which encoder attends farther in its last half? How many points does DINO lead in k-NN at the last block?

    `sightline contrast runs/x attention.distance_mean --this encoder=moco --that encoder=mae --where 'depth=last half'`

    `sightline contrast runs/x knn.accuracy --this encoder=dino --that encoder=mae --where site=block.11,feature=cls`

    The mean is taken over all layers and heads that you do not choose from; `sightline contrast runs/x` lists the
    numbers and what they can be chosen by.
    """
    import numpy as np

    from sightline.core.run_folder import open_run

    opened = open_run(run)
    if name is None:
        say(_numbers(opened))
        return
    if not this:
        raise InputError(
            f"Say which numbers are meant, --this encoder=NAME; {name} can be chosen by {_choices(opened, name)}"
        )
    found = opened.contrast(
        name,
        parse_choice(this),
        _number_or_choice(that),
        statistic=getattr(np, statistic),
        seeds={encoder: members.split("|") for encoder, members in (seeds or {}).items()},
        confidence=confidence,
        method=method,
        **_for_both(where, opened, name),
    )
    say(found.table().to_json(orient="records", lines=True, force_ascii=False).strip() if json else str(found))


def parse_choice(text: str) -> dict[str, Any]:
    """Words and what is meant by them.

    >>> parse_choice("encoder=a|b, site=block.*,frequency=0.6..0.9,depth=last half")
    {'encoder': ['a', 'b'], 'site': 'block.*', 'frequency': slice(0.6, 0.9, None), 'depth': 'last half'}
    """
    found: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+=)", text) if text.strip() else []:
        word, sign, value = part.strip().partition("=")
        if not sign or not word.isidentifier() or not value:
            raise InputError(
                f"{part.strip()!r} chooses nothing; write word=value, such as encoder=mae or tokens=all|cls"
            )
        ends = re.fullmatch(r"([\d.]*?)\.\.([\d.]*)", value)
        if ends and (ends[1] or ends[2]):
            found[word] = slice(*(_end(part.strip(), end) for end in ends.groups()))
        else:
            found[word] = value.split("|") if "|" in value else value
    return found


def _end(part: str, text: str) -> float | None:
    """An end of a range, which may be open."""
    try:
        return float(text) if text else None
    except ValueError:
        word = part.partition("=")[0]
        raise InputError(f"{part!r} is no range, since {text!r} is no number; write {word}=0.5..1") from None


def _for_both(text: str, opened: Run, name: str) -> dict[str, Any]:
    """What is chosen for both numbers; words that mean something else to `contrast` choose none."""
    from inspect import signature

    from sightline.core.contrast import contrast as differ

    chosen = parse_choice(text)
    others = {key for key, one in signature(differ).parameters.items() if one.kind is not one.VAR_KEYWORD}
    for word in chosen:
        if word in others:
            raise InputError(
                f"--where {text}: nothing can be chosen by {word!r}; {name} can be chosen by {_choices(opened, name)}"
            )
    return chosen


def _number_or_choice(text: str) -> dict[str, Any] | float:
    try:
        return float(text)
    except ValueError:
        return parse_choice(text)


def _numbers(run: Run) -> str:
    """All numbers of a run that can be contrasted, and what they can be chosen by."""
    lines = []
    for analysis in run:
        measured = run.measured(analysis)
        if measured.kept is None:
            lines.append(f"{analysis}: keeps nothing that an interval of a difference could be computed from")
            continue
        names = [f"{analysis}.{variable}" for variable in measured.variables]
        lines += [f"{name}: {_choices(run, name)}" for name in names]
    return "\n".join(lines)


def _choices(run: Run, name: str) -> str:
    analysis, _, variable = name.partition(".")
    measured = run.measured(analysis)
    values = measured.table[measured.chosen(variable or None)]
    dims = {str(dim): values[dim].values.tolist() if dim in values.coords else [] for dim in values.dims}
    return ", ".join(f"{dim} ({some(map(str, names), most=4)})" if names else dim for dim, names in dims.items())
