"""The findings of the papers, decided by what was measured: one file per paper.

contract  what a finding, a verdict and their parts are
deciding  from contrasts to verdicts, of one finding and of many at once
shekhar   S1–S21: Shekhar et al. 2022 and 2023, "Objectives Matter"
"""

from sightline.studies.findings.contract import Case, Finding, Part, Verdict
from sightline.studies.findings.deciding import all_findings, by_chance, decide_all

__all__ = ["Case", "Finding", "Part", "Verdict", "all_findings", "by_chance", "decide_all"]
