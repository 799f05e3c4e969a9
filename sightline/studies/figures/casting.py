"""Who of a study's encoders stands where the paper has its own.

The paper's methods stand where the paper has them, if all of them are there; otherwise all encoders of the family do,
so that the figure is the same for anyone's encoders. Of several seeds the first is drawn.
"""

from collections.abc import Sequence
from dataclasses import replace

from sightline.studies.evidence import Evidence, Missing
from sightline.studies.roles import JE, REC, Role


def cast(evidence: Evidence, family: str, *methods: str, network: str = "vit") -> list[str]:
    """Names of the encoders of a family: those of the paper's methods, in its order, or all that there are."""
    roles = _one_of_each(evidence.need(family, network))
    places = [[role for role in roles if role.method == method] for method in methods]
    chosen = [role for place in places for role in place] if methods and all(places) else roles
    return [first_seed(evidence, role.name) for role in chosen]


def pair_of_families(evidence: Evidence) -> tuple[list[str], list[str]]:
    """MoCo v3 and DINO, and MAE: those whom Shekhar et al. compare."""
    return cast(evidence, JE, "moco_v3", "dino"), cast(evidence, REC, "mae")


def contrastive_and_masked(evidence: Evidence) -> list[str]:
    """MoCo v3 and SimMIM: those whom Park et al. compare."""
    return [*cast(evidence, JE, "moco_v3"), *cast(evidence, REC, "simmim")]


def tuned(evidence: Evidence, *names: str) -> list[str]:
    return [first_seed(evidence, evidence.need_tuned(name).name) for name in names]


def sizes_of(evidence: Evidence, family: str, *methods: str) -> list[Role]:
    """Encoders of a family and of one method in several sizes, the smallest first."""
    roles = [role for role in evidence.need(family) if role.size is not None and role.window is None]
    roles = [role for role in roles if role.method in methods] or roles
    sizes = {role.size for role in roles}
    if len(sizes) < 2:
        raise Missing(f"{family} encoders of two sizes or more, with their sizes: add `--steps pretrain`")
    return sorted((_drawn(evidence, role) for role in roles), key=lambda role: role.size or 0)


def variants(evidence: Evidence, family: str, what: str) -> list[Role]:
    """Encoders of a family for which `what`, such as the window of attention, is set, in its order."""
    roles = [role for role in evidence.encoders(family) if getattr(role, what) is not None]
    if not roles:
        raise Missing(f"{family} encoders with a {what}: add `--steps pretrain`")
    return sorted((_drawn(evidence, role) for role in roles), key=lambda role: float(getattr(role, what)))


def two_seeds(evidence: Evidence, family: str, *methods: str, network: str = "cnn") -> tuple[str, str]:
    """The first two seeds of an encoder, or twice the only one that there is."""
    roles = evidence.need(family, network)
    roles = [role for role in roles if role.method in methods] or roles
    several = next((evidence.seeds[role.name] for role in roles if role.name in evidence.seeds), None)
    return (several[0], several[1]) if several else (roles[0].name, roles[0].name)


def first_seed(evidence: Evidence, name: str) -> str:
    """The encoder itself, or the first of its seeds."""
    return evidence.seeds.get(name, (name,))[0]


def _drawn(evidence: Evidence, role: Role) -> Role:
    return replace(role, name=first_seed(evidence, role.name))


def _one_of_each(roles: Sequence[Role]) -> list[Role]:
    """Without those that differ from another one in size, window or crops only: the largest is drawn."""
    plain = [role for role in roles if role.window is None] or list(roles)
    kept: dict[tuple[str, ...], Role] = {}
    for role in sorted(plain, key=lambda role: (role.multicrop is False, -(role.size or 0))):
        varied = role.size is not None or role.multicrop is not None
        kept.setdefault((role.method,) if role.method and varied else ("", role.name), role)
    return [role for role in plain if role in kept.values()]
