"""The command line: the application, exit codes, and errors as one sentence."""

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer

from sightline.core.errors import InputError, first_line, nearest, visible
from sightline.core.extras import explaining
from sightline.core.plugins import PluginWarning
from sightline.core.stopping import Stopped
from sightline.core.version import __version__

DESCRIPTORS = 64  # of files and pipes that a run has open, without worker processes
# What is said where a process of several waited for one that is gone (by gloo, NCCL), and where memory is full
LOST = ("connection closed by peer", "connection reset by peer", "remote process exited", "socket closed")
FULL = ("out of memory", "can't allocate memory", "invalid buffer size", "size calculation overflow")
UsageError: Any = typer.BadParameter.__base__  # of whatever Typer builds upon, which it keeps to itself

_usual = warnings.formatwarning
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
Shows what vision models learn and how they differ.

**Try it:** `sightline demo` compares small reference encoders on embedded images and writes a report.

**Compare encoders:**
`sightline compare timm:vit_small_patch16_224.dino timm:vit_base_patch16_224.mae --images folder:/data/val -o runs/x`

**Train one:** `sightline pretrain moco_v3 --images folder:/data/train -o runs/moco`, then compare `run:runs/moco`.

**Fine-tune one:** `sightline finetune zoo:moco_v3 --images folder:/data/birds -o runs/birds`

Encoders are written `source:id[@weights][?option=value&…]`; `sightline list encoders` shows the sources.
""",
)


def say(text: object, **style: Any) -> None:
    """A line on stdout, or with err=True on stderr; names in it are shown and cannot command the terminal."""
    typer.secho(visible(str(text)), **style)


def _tell_version(asked: bool) -> None:
    if asked:
        say(f"sightline {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What all commands share; the help of the application is above."""


def main() -> None:
    """Run the command line: what the user can mend is one sentence and exit code 2, never a traceback."""
    warnings.formatwarning = _warning
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in a locale without some of the letters of a name
    try:
        _check_descriptors()
        with explaining():
            run(sys.argv[1:])
    except InputError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error.strerror or error}: {str(error.filename)!r}" if error.filename else str(error), 2)
    except RecursionError:
        _fail("Something that was given is nested too deeply to be read; give it in a simpler form", 2)
    except OverflowError as error:
        _fail(f"A number is too large to compute with ({first_line(error)}); lower it", 2)
    except (MemoryError, RuntimeError) as error:
        if _says(error, LOST):
            _fail(
                "Another process of this run has ended, and its results are missing; its own output says why; "
                "run the same command again (for a training, with --resume) to continue",
                1,
            )
        if not isinstance(error, MemoryError) and not _says(error, FULL):
            raise
        _fail("Not enough memory; lower --batch, choose fewer --sites or compare fewer encoders", 2)


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What is said of plugins is meant for the user, without the place in the code; others are as Python shows them."""
    plain = issubclass(category, PluginWarning)
    return f"{visible(str(message))}\n" if plain else _usual(message, category, filename, lineno, line)


def run(words: list[str]) -> None:
    """One command; what its words should not be is an InputError."""
    group: Any = typer.main.get_command(app)
    if words and not words[0].startswith("-") and words[0] not in group.commands:
        raise InputError(f"There is no command {words[0]!r}{nearest(words[0], group.commands)}")
    try:
        code = group.main(words or ["--help"], prog_name="sightline", standalone_mode=False)
    except UsageError as error:
        raise InputError(_sentence(error)) from error
    if code:
        raise SystemExit(code)


def _sentence(error: Any) -> str:
    """What is wrong with the words of a command."""
    name = error.ctx.command_path if error.ctx else "sightline"
    if type(error).__name__ == "NoSuchOption":
        options = [option for parameter in error.ctx.command.params for option in parameter.opts]
        known = [option for option in options if option.startswith("--")]
        return f"`{name}` has no option {error.option_name!r}{nearest(error.option_name, known)}"
    return f"{error.format_message().rstrip('.')}; see `{name} --help`"


@contextlib.contextmanager
def ended(resumed: bool) -> Iterator[Callable[[], bool]]:
    """What is said of a command that was stopped; gives a function that ends the work of several processes together.

    That function says whether this is the first of them, which alone speaks.
    """
    again = f"run the same command again {'with --resume ' if resumed else ''}to continue"
    try:
        yield _first_process
    except Stopped as stop:
        if not _first_process():
            raise SystemExit(0) from stop
        say(f"{stop}; {again}")
        raise SystemExit(128 + stop.signal) from stop
    except KeyboardInterrupt as stop:
        say(f"Interrupted; {again} where it stopped", err=True)
        raise SystemExit(130) from stop


def _first_process() -> bool:
    from sightline.core.processes import leave, rank

    first = rank() == 0
    leave()
    return first


def _check_descriptors() -> None:
    """Say at once that too few files may be open: the libraries of pictures and results say it in ways of their own."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < DESCRIPTORS:
        raise InputError(
            f"Only {soft} files may be open at once, and a run needs up to {DESCRIPTORS}; raise the limit, such as "
            "ulimit -n 1024"
        )


def _says(error: BaseException, words: Sequence[str]) -> bool:
    return any(word in str(error).lower() for word in words)


def _fail(message: str, code: int) -> None:
    say(f"error: {message}", fg=typer.colors.RED, err=True)
    raise SystemExit(code)
