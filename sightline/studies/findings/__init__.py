"""The findings of the papers, decided by what was measured: one module per paper, with its words in TOML beside it.

accuracies  of linear probes and after fine-tuning, from whoever measured them
contract    what a finding, a verdict and their parts are
deciding    from contrasts to verdicts, of one finding and of many at once
grigg       G1–G7: Grigg et al. 2021, "Do Self-Supervised and Supervised Methods Learn Similar Visual Representations?"
park        P1–P21: Park et al. 2023, "What Do Self-Supervised Vision Transformers Learn?"
shekhar     S1–S21: Shekhar et al. 2022 and 2023, "Objectives Matter"
"""

from sightline.studies.findings.contract import Case, Finding, Part, Verdict
from sightline.studies.findings.deciding import all_findings, by_chance, decide_all

__all__ = ["Case", "Finding", "Part", "Verdict", "all_findings", "by_chance", "decide_all"]
