"""Where numbers come from: a hash of all that decides them, and the versions and machine that made them."""

import hashlib
import json
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "sightline", "timm", "torch", "torchmetrics", "torchvision", "transformers", "xarray")


def fingerprint(question: Any) -> str:
    """Sha256 of anything JSON can hold: equal questions have equal answers."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def provenance() -> dict[str, Any]:
    """Versions, machine and time, for every run."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "machine": f"{platform.system()} {platform.machine()}",
        "command": " ".join(["sightline", *sys.argv[1:]]) if Path(sys.argv[0]).stem == "sightline" else "Python",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
