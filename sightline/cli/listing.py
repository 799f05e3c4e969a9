"""What `sightline list` shows, as text: what there is by name, with a line about each."""

from collections.abc import Mapping
from fnmatch import fnmatch

from sightline.core import plugins
from sightline.core.errors import InputError, nearest

PLUGINS = {
    "encoders": ("sources", "source"),
    "images": ("datasets", "source"),
    "analyses": ("analyses", "analysis"),
    "objectives": ("objectives", "objective"),
}


def listed(what: str) -> str:
    """What there is of a kind, by name, with a line about each."""
    if what in PLUGINS:
        folder, heading = PLUGINS[what]
        rows = {name: _about(folder, name) for name in plugins.names(folder)}
        return _table(rows, heading)
    if what == "recipes":
        from sightline.training.recipe import FOLDER, recipe_names

        heads = {name: (FOLDER / f"{name}.toml").read_text("utf-8").partition("\n")[0] for name in recipe_names()}
        return _table({name: head.lstrip("# ") for name, head in heads.items()}, "recipe")
    if what == "studies":
        from sightline.studies.papers import STUDIES

        return _table({name: f"the findings of {about}" for name, (about, _) in STUDIES.items()}, "study")
    if what == "findings":
        from sightline.studies.findings import all_findings

        found = all_findings().values()
        where = max((len(one.where) for one in found), default=0)
        steps = max((len(one.step) for one in found), default=0)
        return _table({one.id: f"{one.where:<{where}}  {one.step:<{steps}}  {one.claim}" for one in found}, "finding")
    from sightline.studies.figures import all_figures

    figures = all_figures().items()
    return _table({name: f"{one.title} ({', '.join(one.results)}; {one.roles})" for name, one in figures}, "figure")


def _about(folder: str, name: str) -> str:
    """The first line of a docstring; of a plugin of another package that cannot be used, why."""
    try:
        text = (plugins.find(folder, name).__doc__ or "").strip()
    except InputError as error:
        text = str(error)
    return (text.splitlines() or [""])[0]


def list_sites(reference: str | None) -> str:
    """The sites of an encoder and their shapes."""
    if reference is None:
        raise InputError("Name an encoder, such as `sightline list sites timm:resnet18@random`")
    from sightline.encoders.loading import load_encoder
    from sightline.measure.plan import probe

    encoder = load_encoder(reference)
    shapes = probe(encoder, encoder.sites)
    return _table({name: f"(B, {', '.join(map(str, shape))})" for name, shape in shapes.items()}, "site")


def matching_encoders(pattern: str) -> str:
    """References of the encoders whose name matches, `vit_small*`, or contains the pattern; `zoo:mae` of one source."""
    from sightline.encoders.contract import source

    usable = plugins.usable("sources", source)
    own, colon, rest = pattern.partition(":")
    if colon:
        if own not in usable:
            raise InputError(f"There is no source {own!r}{nearest(own, usable)}; see `sightline list encoders`")
        usable, pattern = {own: usable[own]}, rest
    every = {name: plugin.names() for name, plugin in usable.items()}
    wanted = pattern if "*" in pattern else f"*{pattern}*"
    found = [f"{source}:{name}" for source, names in every.items() for name in names if fnmatch(name, wanted)]
    if not found:
        known = [name for names in every.values() for name in names]
        raise InputError(f"No encoder matches {pattern!r}{nearest(pattern, known)}")
    return "\n".join(found)


def _table(rows: Mapping[str, str], heading: str) -> str:
    width = max(len(heading), *map(len, rows))
    return "\n".join([f"{heading:<{width}}  ", *(f"{name:<{width}}  {text}" for name, text in rows.items())])
