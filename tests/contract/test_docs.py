"""README and docs say what is there: imports, calls and commands as they are written."""

import ast
import functools
import importlib
import inspect
import re
from typing import Any

import pytest
import typer
from support.documents import PAGES, ROOT, Block, blocks, commands

import sightline as sl
from sightline import cli
from sightline.cli.compare import chosen_analyses
from sightline.core import plugins
from sightline.core.settings import parse_settings
from sightline.training.recipe import make_recipe

PYTHON = blocks("python")
COMMANDS = commands()
RECIPES = {path.stem for path in (ROOT / "sightline" / "recipes").glob("*.toml")}
# Stand for what the user puts there.
PLACEHOLDERS = {"REF", "RUN", "FILE", "OUT", "DATA", "FOLDER"}


def test_there_are_blocks_and_commands() -> None:
    assert len(PYTHON) > 20
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_what_a_block_imports_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sightline"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_calls_of_the_public_api_fit_its_signatures(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "sl":
            continue
        assert node.func.attr in sl.__all__
        words: dict[str, Any] = {str(keyword.arg): None for keyword in node.keywords}
        inspect.signature(getattr(sl, node.func.attr)).bind(*node.args, **words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_a_page_names_are_there(page: Any) -> None:
    for name in re.findall(r"`(sightline(?:\.[a-z_0-9]+)+(?:\.[A-Za-z_0-9]+)?)`", page.read_text(encoding="utf-8")):
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for part in parts[cut:]:
                found = getattr(found, part)
            break


@functools.cache
def known_commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(cli.app)
    return group.commands


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_can_be_typed(words: list[str]) -> None:
    """It parses, and its recipes, references, images, analyses and settings are of things that are there."""
    name, known = words[0], known_commands()
    assert name in known, name
    given = known[name].make_context(name, words[1:]).params
    for key in parse_settings(given.get("settings") or []):
        assert key not in given, f"--set {key}= instead of --{key}"
    if given.get("recipe"):
        assert given["recipe"] in RECIPES
    for reference in _encoders(name, given):
        assert reference.partition("=")[2].partition(":")[0] in plugins.names("sources") or (
            reference.partition(":")[0] in plugins.names("sources")
        ), reference
    for images in (given.get("images"), *(word.partition("=")[2] for word in given.get("further") or ())):
        if isinstance(images, str) and images and images not in ("…", *PLACEHOLDERS):  # `imagine` takes files
            assert images.partition(":")[0].partition("?")[0] in plugins.names("datasets"), images
    if name == "compare":
        only, also = ([name for word in given[key] or () for name in word.split(",")] for key in ("only", "also"))
        chosen_analyses(only or None, also, parse_settings(given["settings"] or []))
    if name == "pretrain" and given["objective"] and not given["recipe"]:
        make_recipe(given["objective"], parse_settings(given["settings"] or []))


def _encoders(name: str, given: dict[str, Any]) -> list[str]:
    """References among the parameters of a command."""
    if name not in ("compare", "finetune", "reinit", "detect", "segment", "rcdm"):
        return []
    values = [given.get(key) for key in ("encoders", "encoder")]
    flat = [word for value in values if value for word in ([value] if isinstance(value, str) else value)]
    return [word for word in flat if word not in PLACEHOLDERS]
