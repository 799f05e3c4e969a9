"""`torchrun --nproc-per-node 2 -m sightline compare`: two processes share the images, with the results of one."""

from pathlib import Path

import numpy as np
import pytest
from support.processes import under_torchrun
from support.references import SMALL

import sightline as sl

ANALYSES = ["agreement", "attention", "cka", "diversity", "fourier", "knn", "spectra", "tokens"]
IMAGES = "shapes?size=32&train=40&val=8&test=40"


@pytest.mark.processes
def test_two_processes_measure_what_one_measures(tmp_path: Path) -> None:
    words = ["--images", IMAGES, "--only", ",".join(ANALYSES), "--batch", "8", "--workers", "0"]
    under_torchrun("compare", f"a={SMALL}", f"b={SMALL}&seed=1", *words, "-o", str(tmp_path / "two"))
    members = {"a": SMALL, "b": f"{SMALL}&seed=1"}
    one = sl.analyze(members, IMAGES, ANALYSES, batch=8, workers=0, show_progress=False)
    two = sl.open_run(tmp_path / "two")
    assert [run.request["timing"]["processes"] for run in (one, two)] == [1, 2]
    assert sorted(two) == sorted(one) == ANALYSES
    for name in ANALYSES:
        assert one[name].data_vars.keys() == two[name].data_vars.keys()
        for variable, values in one[name].data_vars.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(
                    two[name][variable], values, rtol=1e-9, atol=1e-9, err_msg=f"{name}.{variable}"
                )
            else:
                assert two[name][variable].equals(values), f"{name}.{variable}"
