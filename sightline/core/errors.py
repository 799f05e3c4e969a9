"""The one exception that users see as a sentence, and what such sentences are made of."""

import difflib
from collections.abc import Iterable


class InputError(Exception):
    """Something the user gave cannot be used; the message is one sentence and the command line exits with 2."""


def counted(n: float, one: str) -> str:
    """A number of things, one or several.

    >>> counted(1, "weight"), counted(3, "weight"), counted(0, "class"), counted(2, "patch"), counted(2.0, "epoch")
    ('1 weight', '3 weights', '0 classes', '2 patches', '2 epochs')
    """
    several = one + ("es" if one.endswith(("s", "x", "sh", "tch")) else "s")
    number = f"{n:g}" if isinstance(n, float) else f"{n}"
    return f"{number} {one if n == 1 else several}"


def duration(seconds: float) -> str:
    """In words, roughly.

    >>> duration(40), duration(90), duration(7000), duration(300000)
    ('40 s', '2 min', '1.9 h', '3.5 days')
    """
    for unit, length in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def first_line(error: BaseException) -> str:
    """What another library had to say, as a part of one sentence; without PyTorch's advice to read any pickle.

    >>> first_line(ValueError("no such thing\\nat 0x7f")), first_line(AssertionError())
    ('no such thing', 'AssertionError')
    >>> first_line(RuntimeError("Weights only load failed. Re-run with `weights_only` set to `False`."))
    'it holds more than weights'
    """
    if "weights_only" in str(error):
        return "it holds more than weights"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def nearest(given: object, choices: Iterable[str]) -> str:
    """End an error message with the closest valid names.

    >>> nearest("blok.3", ["block.3", "norm", "head.0"])
    "; did you mean 'block.3'?"
    >>> nearest("xyz", ["cka", "knn"])
    '; choose from cka, knn'
    >>> nearest(True, ["cka", "knn"])
    '; choose from cka, knn'
    """
    choices = list(choices)
    close = difflib.get_close_matches(str(given), choices, n=3, cutoff=0.6)
    if close:
        return "; did you mean " + " or ".join(repr(name) for name in close) + "?"
    if not choices:
        return ""
    return f"; choose from {some(choices, most=12)}"


def some(names: Iterable[str], most: int = 3) -> str:
    """The first names of many.

    >>> some(["a", "b", "c"]), some(["a", "b", "c", "d"]), some(["a", "b"], most=1), some([])
    ('a, b, c', 'a, b, c, …', 'a, …', 'nothing')
    """
    names = list(names)
    return ", ".join(names[:most]) + (", …" if len(names) > most else "") or "nothing"


def visible(text: str) -> str:
    r"""Text for the terminal: characters that would command it are shown by their number.

    >>> print(visible("a\x1b[2Jb\u202e, née 像\n\tend"))
    a\u001b[2Jb\u202e, née 像
        end
    """
    if text.isprintable():
        return text
    shown = (letter if letter.isprintable() or letter in "\n\t" else _number(letter) for letter in text)
    return "".join(shown).expandtabs(4)


def _number(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 2**16 else f"\\U{ord(letter):08x}"
