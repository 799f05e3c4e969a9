"""Coarse classes from fine ones: what the 1000 ImageNet classes of a head say of cats, dogs and cars.

    score of a coarse class = mean probability of the fine classes that belong to it

A mapping is a CSV file with the columns `fine` and `coarse`: `fine` is a class that the head knows by name, or the
index of its output; further columns and lines that begin with # are for readers. `imagenet16` comes along: the 16
categories of the cue-conflict images of Geirhos et al. 2019, who score them in this way.
"""

import csv
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import softmax

from sightline.core.errors import InputError, counted, nearest

AUTO = "imagenet16"
FOLDER = Path(__file__).parent / "mappings"
COLUMNS = ("fine", "coarse")


@dataclass(frozen=True)
class ClassMapping:
    """Which fine classes belong to each coarse one."""

    name: str
    members: dict[str, tuple[str, ...]]  # coarse → fine, names or indices
    outputs: int | None = None  # of the heads that it is for, if the file says so
    digest: str = ""  # of the file

    def members_of(
        self, classes: Sequence[str], known: Sequence[str] | None, outputs: int
    ) -> tuple[tuple[int, ...], ...]:
        """The outputs of a head that make up each of these classes; an InputError says what does not fit."""
        if self.outputs not in (None, outputs):
            raise InputError(f"the mapping {self.name} is for heads with {self.outputs} outputs, not {outputs}")
        if missing := [name for name in classes if name not in self.members]:
            raise InputError(f"the mapping {self.name} has no class {missing[0]!r}{nearest(missing[0], self.members)}")
        numbers = {name: number for number, name in enumerate(known or ())}
        numbers |= {str(number): number for number in range(outputs) if str(number) not in numbers}
        for fine in (fine for name in classes for fine in self.members[name]):
            if fine not in numbers:
                whose = "its classes" if known else f"its {counted(outputs, 'output')}, whose names are not known"
                raise InputError(f"the mapping {self.name} names a class {fine!r} that is not among {whose}")
        return tuple(tuple(numbers[fine] for fine in self.members[name]) for name in classes)


def load_mapping(where: str) -> ClassMapping:
    """A mapping that comes along by its name, or that of a CSV file.

    >>> mapping = load_mapping("imagenet16")
    >>> len(mapping.members), mapping.members["cat"]
    (16, ('281', '282', '283', '284', '285', '286'))
    """
    packaged = FOLDER / f"{where}.csv"
    path = packaged if packaged.is_file() else Path(where).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(sorted(file.stem for file in FOLDER.glob("*.csv")))
        raise InputError(
            f"There is no mapping of classes {where!r}; give {names}, or a CSV file with the columns fine and coarse"
        ) from error
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    if not set(COLUMNS) <= set(rows.fieldnames or ()):
        raise InputError(
            f"The mapping {where!r} needs the columns fine and coarse, not {', '.join(rows.fieldnames or ['none'])}"
        )
    members: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for row in rows:
        fine, coarse = ((row[column] or "").strip() for column in COLUMNS)
        if not fine or not coarse:
            raise InputError(f"Line {rows.line_num} of the mapping {where!r} lacks a fine or a coarse class")
        if seen.setdefault(fine, coarse) != coarse or fine in members.get(coarse, ()):
            raise InputError(
                f"The mapping {where!r} names the fine class {fine!r} twice; each belongs to one coarse class"
            )
        members[coarse] = (*members.get(coarse, ()), fine)
    if not members:
        raise InputError(f"The mapping {where!r} has no rows; give at least one fine and coarse class")
    stated = re.search(r"^#.*\boutputs: (\d+)", "\n".join(lines), re.MULTILINE)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return ClassMapping(path.stem, members, int(stated[1]) if stated else None, digest)


def mean_probabilities(outputs: npt.NDArray[np.float64], members: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Mean probability, by softmax over all outputs (n, fine), of the members of each class: (n, C).

    >>> mean_probabilities(np.log([[0.5, 0.3, 0.2]]), [[0], [1, 2]]).round(2)
    array([[0.5 , 0.25]])
    """
    probabilities = softmax(outputs, axis=1)
    return np.stack([probabilities[:, list(some)].mean(1) for some in members], 1)
