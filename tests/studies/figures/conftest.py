"""Figures of the papers, drawn from a study in which everything was measured."""

import pytest
from support.figures import everything

from sightline.studies.evidence import Evidence


@pytest.fixture(scope="session")
def evidence() -> Evidence:
    return everything()
