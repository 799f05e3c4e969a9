"""docs/words.md: words that are not used appear in nothing that users read."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import sightline as sl

PACKAGE = Path(sl.__file__).parent
DOCS = PACKAGE.parent / "docs"
WORDS = (DOCS / "words.md").read_text("utf-8")


def rows() -> Iterator[list[str]]:
    """Cells of all tables, without their heads."""
    for line in WORDS.splitlines():
        if line.startswith("|") and not line.startswith(("|---", "| word |", "| instead of |")):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def avoided() -> list[str]:
    cells = [row[0] if len(row) == 2 else row[2] for row in rows()]
    return [word for cell in cells for word in cell.split(", ") if word]


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}


def shown() -> Iterator[tuple[Path, str]]:
    """What users read: sentences in the code, docstrings of commands, markup, recipes, README and docs."""
    for path, tree in parsed().items():
        unseen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        if path.parent.name == "cli":
            unseen = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unseen:
                yield path, node.value
    pages = [*DOCS.rglob("*.md"), PACKAGE.parent / "README.md", PACKAGE.parent / "CONTRIBUTING.md"]
    others = [*PACKAGE.glob("report/templates/*"), *PACKAGE.glob("recipes/*.toml")]
    for path in {*pages, *others} - {DOCS / "words.md"}:
        yield path, path.read_text("utf-8")


def test_every_word_has_one_meaning() -> None:
    words = [row[0] for row in rows()]
    assert len(words) > 40
    assert len(words) == len(set(words))
    assert all(row[1] for row in rows())
    assert not set(words) & set(avoided()) - {row[0] for row in rows() if len(row) == 2}


def test_words_that_are_not_used_appear_nowhere() -> None:
    unwanted = re.compile(rf"\b({'|'.join(map(re.escape, avoided()))})s?\b", re.IGNORECASE)
    found = {f"{path.name}: {match.group()}" for path, text in shown() for match in unwanted.finditer(text)}
    assert not sorted(found)


def classes() -> dict[str, list[str]]:
    """Public classes of all modules, and where they are."""
    found: dict[str, list[str]] = {}
    for path, tree in parsed().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    return found


def test_a_class_name_means_one_thing() -> None:
    assert {name: where for name, where in classes().items() if len(where) > 1} == {}
