"""Verdicts and findings as the report gets them, made up."""

from collections.abc import Sequence
from typing import Any

from sightline.studies.findings.contract import Finding, Part, Verdict


def part(label: str, value: float, half: float = 0.1, **more: Any) -> Part:
    low, high = value - half, value + half
    agrees = True if low > 0 else False if high < 0 else None
    return Part(label, value, low, high, 0.01, agrees, 0.01, 0.99, **more)


def verdict(id: str, word: str, p: float = 0.01, sentence: str = "So it is.", parts: Sequence[Part] = ()) -> Verdict:
    known = word != "not measured"
    effect, low, high = (0.3, 0.2, 0.4) if known else (float("nan"),) * 3
    return Verdict(
        id,
        word,
        effect,
        low,
        high,
        p,
        0.0,
        sentence,
        tuple(parts),
        needs="" if known else "a fine-tuned MAE",
        p_adjusted=min(1.0, 4 * p),
    )


def finding(id: str, paper: str = "001", **more: Any) -> Finding:
    words: dict[str, Any] = {
        "where": "Fig 1a",
        "claim": f"Claim of {id}",
        "measure": "CKA(a, b) > CKA(a, c)",
        "figure": "001 Fig 1a",
        "paper_says": "0.8 and 0.3",
        "step": "passes",
        "analyses": ("cka",),
    }
    return Finding(id, paper, **(words | more), cases=lambda evidence: [])
