"""Settings of a recipe as the words of a command."""

import json
from collections.abc import Mapping
from typing import Any

OWN = ("batch", "images", "limit", "precision", "seed")  # which have options of their own


def options(settings: Mapping[str, Any]) -> list[str]:
    """`--batch=8 --set=epochs=2`.

    >>> options({"batch": 8, "epochs": 2, "frozen": False, "optimizer": "sgd"})
    ['--batch=8', '--set=epochs=2', '--set=frozen=false', '--set=optimizer="sgd"']
    """
    return [f"--{key}={one}" if key in OWN else f"--set={key}={json.dumps(one)}" for key, one in settings.items()]
