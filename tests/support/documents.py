"""README and docs as tests read them: their blocks of code and the commands that they show."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    """All fenced blocks in a language, page by page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start(1)) + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1]))
    return found


def commands() -> dict[str, list[str]]:
    """What follows `sightline` in every whole command that the pages show, by page and line."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r" *\\\n *", lambda match: " " * len(match[0]), text)  # a command may go on in the next line
        lines = re.finditer(r"^    (?:\.venv/bin/)?sightline (.+)$", text, re.MULTILINE)
        inline = re.finditer(r"`sightline ([^`]+)`", text)
        for match in [*lines, *inline]:
            words = shlex.split(match[1], comments=True)
            # Schemes and abbreviated commands: `compare … -o RUN`, `list encoders|images`, `COMMAND --help`.
            schematic = any(word in ("…", "COMMAND") or "|" in word for word in words)
            schematic |= words[0] in ("convert", "export") and words[1:2] != [] and words[1].startswith("-")
            if not schematic and len(words) > 1:
                line = text.count("\n", 0, match.start()) + 1
                found[f"{page.relative_to(ROOT)}:{line}: {' '.join(words)}"] = words
    return found
