"""The page as a file: complete, escaped, compact, and the same numbers as the results."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import io
import json
import re
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pypdf
import pytest
import xarray as xr
from support.results import (
    SampleRun,
    cka_result,
    constant_site,
    knn_result,
    request,
    resnet_sites,
    sample_run,
    vit_sites,
)

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.report import explorer
from sightline.report.figures import Figure, curve_over_depth
from sightline.report.page import SCRIPTS, write_report

EVIL = '</script><script>document.title="hacked"</script>'
HOSTILE = [
    EVIL,
    '"><img src=x onerror=alert(1)>',
    "{{7*7}} ${title} $nav",
    "模型 α→β 🙂",
    "n" * 300,
    "a\x00b\x1b\udcff",
]


class Scripts(html.parser.HTMLParser):
    """Script elements, tags and policy of a page, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.data = self.policy = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "script":
            self._inside = "data" if found.get("type") == "application/json" else "script"

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = None


def read(run: SampleRun) -> tuple[str, Scripts, dict[str, Any]]:
    text = write_report(run).read_text("utf-8")
    page = Scripts(text)
    return text, page, json.loads(page.data)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[SampleRun, str, Scripts, dict[str, Any]]:
    run = sample_run(tmp_path_factory.mktemp("run"))
    return run, *read(run)


def test_the_page_has_every_part(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, text, page, _ = two
    assert [a["data-page"] for tag, a in page.tags if tag == "a" and "data-page" in a] == [
        "overview",
        "cka",
        "knn",
        "provenance",
    ]
    for word in (
        "dino",
        "mae",
        "21 665 664",
        "timm:vit_small_patch16_224.1",
        "shapes?size=224",
        "val/my_cat/001.jpg",
        "truncated JPEG",
        "2.15.0",
    ):
        assert word in text
    module = plugins.find("analyses", "cka")
    for words in (module.QUESTION, module.FORMULA, module.HOW_TO_READ):
        assert html.escape(words.strip().splitlines()[0], quote=True) in text
    assert run.request["encoders"][0]["weights"] in text


def test_only_our_scripts_may_run_and_nothing_may_be_fetched(
    two: tuple[SampleRun, str, Scripts, dict[str, Any]],
) -> None:
    _, text, page, _ = two
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in page.scripts}
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert set(rules["script-src"].split()) == hashes
    assert rules["default-src"] == "'none'"
    assert "unsafe-eval" not in page.policy
    addresses = [str(a[key]) for tag, a in page.tags for key in ("src", "href", "action") if a.get(key)]
    assert [where for where in addresses if not where.startswith(("#", "data:"))] == []
    assert "@import" not in text.split("</style>")[0]
    assert "url(" not in text.split("</style>")[0]


def test_the_packed_matrices_are_the_result(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, _, _, data = two
    explorer, result = data["explorers"]["cka"], run["cka"]
    values = np.frombuffer(base64.b64decode(explorer["values"]["value"]["base64"]), "<f4")
    n = len(explorer["sites"][0])
    assert explorer["values"]["value"]["symmetric"]
    assert len(values) == 4 * 3 * n * n
    second = values[n * n : 2 * n * n].reshape(n, n)  # tokens "all", dino × mae
    np.testing.assert_allclose(
        second, result.cka.sel(tokens="all", encoder_a="dino", encoder_b="mae").values, rtol=1e-7
    )
    row = explorer["sites"][1].index("block.2")
    assert explorer["reasons"][explorer["reason"][0][1][row]] == "the activations are the same for all images"


def test_a_null_that_is_not_symmetric_is_packed_whole() -> None:
    result = cka_result({"a": ["block.0", "block.1"], "b": ["block.0"]})
    result["cka_null"] = result.cka_null + xr.DataArray([0.0, 0.1], dims="site_b")
    packed = explorer.pack_explorer(result, "CKA")
    assert packed is not None
    assert not packed["values"]["null"]["symmetric"]
    assert len(base64.b64decode(packed["values"]["null"]["base64"])) == 4 * 4 * (4 + 2 + 2 + 1)
    assert packed["sites"] == [["block.0", "block.1"], ["block.0"]]


def test_every_figure_is_there_as_svg_pdf_and_csv(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, _, _, data = two
    folder = run.path / "figures"
    for analysis in ("cka", "knn"):
        for figure in plugins.find("analyses", analysis).figures(run[analysis]):
            stem = f"{analysis}-{figure.name}"
            assert stem in data["figures"]
            assert (folder / f"{stem}.svg").read_text().startswith("<svg")
            assert len(pypdf.PdfReader(folder / f"{stem}.pdf").pages) == 1
            back = pd.read_csv(folder / f"{stem}.csv", keep_default_na=False)
            assert list(back) == list(figure.table)
            for column, values in figure.table.items():
                if pd.api.types.is_float_dtype(values):
                    np.testing.assert_allclose(pd.to_numeric(back[column]), values, rtol=1e-15)
                else:
                    assert list(back[column].astype(str)) == list(values.astype(str))
    assert not list(folder.glob("*.tmp"))


def test_tables_in_the_page_equal_the_figures_tables(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, _, _, data = two
    (figure,) = plugins.find("analyses", "knn").figures(run["knn"])
    table = data["figures"]["knn-depth"]["table"]
    assert table["names"] == list(figure.table.columns)
    np.testing.assert_allclose(table["columns"][table["names"].index("accuracy")], figure.table.accuracy, rtol=1e-7)
    names = table["columns"][table["names"].index("encoder")]
    assert [names["words"][code] for code in names["codes"]] == list(figure.table.encoder)


def test_names_of_users_are_escaped_everywhere(tmp_path: Path) -> None:
    sites = {name: vit_sites(2, ["qkv"]) for name in HOSTILE}
    cka = constant_site(cka_result(sites), HOSTILE[1], "block.1", why=EVIL)
    run = SampleRun(tmp_path, request(HOSTILE, sites, ["cka", "knn"]), {"cka": cka, "knn": knn_result(sites)})
    run.request["images"] |= {"name": EVIL, "classes": HOSTILE}
    run.request |= {"skipped": [[EVIL, EVIL]], "command": ["sightline", EVIL], EVIL: {EVIL: [EVIL]}}
    run.request["left_out"] = {"noise": EVIL, "cka": {EVIL: EVIL}}
    run.request["encoders"][0] |= {"notes": [EVIL], EVIL: {EVIL: EVIL}}
    cka.attrs[EVIL] = EVIL
    text, page, data = read(run)
    assert EVIL not in text
    assert "img" not in {tag for tag, _ in page.tags}
    assert len(page.scripts) == 1 + len(SCRIPTS)
    assert not [a for tag, a in page.tags if any(name.startswith("on") for name in a)]
    assert data["explorers"]["cka"]["encoders"][0] == EVIL
    assert EVIL in data["explorers"]["cka"]["reasons"]
    assert "{{7*7}} ${title} $nav" in text
    assert data["explorers"]["cka"]["encoders"][5] == "a�b�\\udcff"


def test_no_template_leaves_text_as_it_is() -> None:
    for file in (resources.files("sightline.report") / "templates").iterdir():
        assert not re.search(r"\|\s*safe|autoescape", file.read_text("utf-8")), file.name


def minimal(path: Path, results: dict[str, xr.Dataset], names: list[str]) -> SampleRun:
    sites = {name: vit_sites(2) for name in names}
    return SampleRun(path, request(names, sites, list(results)), results)


def test_only_knn_and_one_encoder(tmp_path: Path) -> None:
    text, _, data = read(minimal(tmp_path, {"knn": knn_result({"a": vit_sites(3)})}, ["a"]))
    assert not data["explorers"]
    assert list(data["figures"]) == ["knn-depth"]
    assert 'data-page="cka"' not in text


def test_one_encoder_within_itself(tmp_path: Path) -> None:
    _, _, data = read(minimal(tmp_path, {"cka": cka_result({"a": vit_sites(3)})}, ["a"]))
    assert data["explorers"]["cka"]["encoders"] == ["a"]
    assert "cka-pairs" in data["figures"]


def test_a_resnet_has_its_own_sites_and_no_class_token(tmp_path: Path) -> None:
    sites = {"vit": vit_sites(3), "resnet": resnet_sites(4)}
    _, _, data = read(
        minimal(tmp_path, {"cka": cka_result(sites, ["resnet"]), "knn": knn_result(sites, ["resnet"])}, list(sites))
    )
    explorer = data["explorers"]["cka"]
    assert explorer["sites"] == [sites["vit"], sites["resnet"]]
    assert set(explorer["types"]) == {"block", "embed", "norm1", "qkv", "fc1", "norm", "residual", "all"}
    assert (explorer["types"][0], explorer["types"][-1]) == ("block", "all")
    cls = explorer["tokens"].index("cls")
    assert {explorer["reasons"][code] for code in explorer["reason"][cls][1]} == {"this site has no such token view"}


def test_nothing_but_nan_still_makes_a_page(tmp_path: Path) -> None:
    result = cka_result({"a": vit_sites(2), "b": vit_sites(2)})
    result = result.assign({name: result[name] * np.nan for name in ("cka", "cka_low", "cka_high", "cka_null")})
    result["reason"] = xr.full_like(result.reason, "").astype(object) + "NaN weights"
    result["reason"] = result.reason.astype(str)
    knn = knn_result({"a": vit_sites(2)})
    knn = knn.assign({name: knn[name] * np.nan for name in knn.data_vars})
    text, _, data = read(minimal(tmp_path, {"cka": result, "knn": knn}, ["a", "b"]))
    assert data["explorers"]["cka"]["reasons"] == ["NaN weights"]
    assert 'data-page="knn"' in text


def test_no_analysis_at_all(tmp_path: Path) -> None:
    text, _, _ = read(SampleRun(tmp_path, {}, {}))
    assert "Provenance" in text


def other_analysis(figures: Any) -> SimpleNamespace:
    return SimpleNamespace(
        TITLE="Spectra <b>",
        QUESTION="How many directions?",
        FORMULA="σ₁ ≥ σ₂",
        HOW_TO_READ="…",
        SOURCE="…",
        figures=figures,
        headlines=lambda result: [],
    )


def test_an_analysis_the_report_has_never_heard_of_gets_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pd.DataFrame(
        {"depth": [0, 1], "value": [0.25, 0.5], "series": "b", "site": ["x", "y"], "when": pd.Timestamp(0)}
    )

    def figures(result: xr.Dataset) -> list[Figure]:
        chart = curve_over_depth(table, value_title="rank", depth_title="block", series_title="encoder", series=["b"])
        return [Figure("rank", "Rank", "caption", chart, table)]

    monkeypatch.setattr(plugins, "find", lambda folder, name: other_analysis(figures))
    text, _, data = read(minimal(tmp_path, {"spectra": xr.Dataset({"rank": ("site", [1.0, 2.0])})}, ["a", "b"]))
    assert "Spectra &lt;b&gt;" in text
    spec = data["figures"]["spectra-rank"]["spec"]
    assert {
        tuple(layer["encoding"]["color"]["scale"]["domain"]) for layer in spec["layer"] if "color" in layer["encoding"]
    } == {("a", "b")}


def test_sentences_of_an_analysis_stand_on_top_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = other_analysis(lambda _: [])
    module.summary = lambda result: [f"Take {result.encoder.item()}.", "Or <b>not</b>."]
    monkeypatch.setattr(plugins, "find", lambda folder, name: module)
    result = xr.Dataset({"rank": ("encoder", [1.0])}, {"encoder": [EVIL]})
    text, _, _ = read(minimal(tmp_path, {"spectra": result}, ["a"]))
    page = text[text.index('<section class="page" data-page="spectra"') :]
    assert EVIL not in page
    assert "<h2>In short</h2>\n<p>Take &lt;/script&gt;" in page
    assert "<p>Or &lt;b&gt;not&lt;/b&gt;.</p>" in page
    assert page.index("In short") < page.index("Formula")


@pytest.mark.parametrize(("count", "folded"), [(12, 0), (36, 24)])
def test_an_overview_folds_what_is_too_much(
    count: int, folded: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = other_analysis(lambda _: [])
    module.headlines = lambda result: [(f"pair {i}", "0.5", "") for i in range(count)]
    monkeypatch.setattr(plugins, "find", lambda folder, name: module)
    text, _, _ = read(minimal(tmp_path, {"spectra": xr.Dataset({"rank": ("site", [1.0])})}, ["a"]))
    overview = text[: text.index('<section class="page" data-page="spectra"')]
    shown, _, more = overview.partition("<details>")
    assert shown.count("pair ") == count - folded
    assert more.count("pair ") == folded
    assert (f"<summary>{folded} more</summary>" in more) == bool(folded)


def test_figures_that_fail_are_told_and_cost_no_other_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(result: xr.Dataset) -> list[Figure]:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(plugins, "find", lambda folder, name: other_analysis(figures))
    with pytest.warns(UserWarning, match="could not be drawn: ZeroDivisionError: by design"):
        text, _, _ = read(minimal(tmp_path, {"spectra": xr.Dataset()}, ["a"]))
    assert "could not be drawn" in text


def test_an_analysis_that_is_gone_is_named(tmp_path: Path) -> None:
    text, _, _ = read(minimal(tmp_path, {"gone": xr.Dataset({"x": ("y", [1.0])})}, ["a"]))
    assert "There is no analysis" in text


def test_a_figure_name_that_is_no_file_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        plugins, "find", lambda folder, name: other_analysis(lambda _: [Figure("../x", "", "", None, pd.DataFrame())])
    )
    with pytest.raises(InputError, match="is a file name"):
        read(minimal(tmp_path, {"spectra": xr.Dataset()}, ["a"]))
    assert not (tmp_path / "report.html").exists()


def test_a_run_in_memory_has_no_report() -> None:
    with pytest.raises(InputError, match="in memory"):
        write_report(SampleRun(None, {}, {}))


def test_a_failing_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(SampleRun(tmp_path, {}, {}))
    (tmp_path / "report.html").write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="disk is full"):
        read(SampleRun(tmp_path, {}, {}))
    assert (tmp_path / "report.html").read_text() == "old"
    assert sorted(f.name for f in tmp_path.iterdir()) == [".sightline.json", "report.html"]


def test_ten_encoders_stay_small() -> None:
    sites = {f"encoder {i}": vit_sites(12)[:48] for i in range(10)}
    packed = explorer.pack_explorer(cka_result(sites), "CKA")
    assert (
        len(io.StringIO(json.dumps(packed)).getvalue()) < 12e6
    )  # 4 views × 55 pairs × 48² × 4 numbers × 4 bytes, in base64
