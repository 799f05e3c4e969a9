"""The page as a file: complete, escaped, compact, and the same numbers as the results."""

import base64
import hashlib
import html.parser
import json
import re
import zlib
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import markupsafe
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
from support.verdicts import finding, part, verdict

from sightline.core import plugins
from sightline.core.errors import InputError
from sightline.report import explorer
from sightline.report.figures import Figure, curve_over_depth
from sightline.report.packing import compressed
from sightline.report.page import CAPTION, FigureText, write_report
from sightline.report.shell import SCRIPTS
from sightline.report.standing import stand

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
        self.blocks: dict[str, str] = {}
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
            self._inside = {"application/json": "data", "text/plain": "block"}.get(found.get("type") or "", "script")
            self._block = found.get("data-block") or ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside == "block":
            self.blocks[self._block] = data
        elif self._inside == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = None


def read(run: SampleRun, **more: Any) -> tuple[str, Scripts, dict[str, Any]]:
    """The page, its parts, and the data of all its pages together."""
    text = write_report(run, **more).read_text("utf-8")
    page = Scripts(text)
    blocks = {key: json.loads(zlib.decompress(base64.b64decode(block))) for key, block in page.blocks.items()}
    data = json.loads(page.data) | {"figures": {k: v for block in blocks.values() for k, v in block["figures"].items()}}
    for kind in ("explorer", "viewer"):
        data[f"{kind}s"] = {key: block[kind] for key, block in blocks.items() if block.get(kind)}
    return text, page, data


def numbers(packed: str, places: int) -> np.ndarray[Any, Any]:
    """What the page makes of packed numbers."""
    low, high = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).reshape(2, -1).astype(np.uint16)
    whole = np.cumsum(low + 256 * high, dtype=np.uint16).view(np.int16)
    return np.where(whole == -32768, np.nan, whole / 10.0**places)


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
        "everything",
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
    parts = {name: numbers(part["packed"], explorer["places"]) for name, part in explorer["values"].items()}
    n = len(explorer["sites"][0])
    assert explorer["values"]["value"]["symmetric"]
    assert explorer["places"] == 4  # as many as are shown
    for name, sign in {"value": 0, "low": -1, "high": 1, "null": 0}.items():
        assert len(parts[name]) == 4 * 3 * n * n
        found = parts["value"] + sign * parts[name] if sign else parts[name]
        second = found[n * n : 2 * n * n].reshape(n, n)  # tokens "all", dino × mae
        true = result["cka" if name == "value" else f"cka_{name}"].sel(tokens="all", encoder_a="dino", encoder_b="mae")
        np.testing.assert_allclose(second, np.round(true.values, 4), atol=1e-9)
    row = explorer["sites"][1].index("block.2")
    assert explorer["reasons"][explorer["reason"][0][1][row]] == "the activations are the same for all images"


def test_a_null_that_is_not_symmetric_is_packed_whole() -> None:
    result = cka_result({"a": ["block.0", "block.1"], "b": ["block.0"]})
    result["cka_null"] = result.cka_null + xr.DataArray([0.0, 0.1], dims="site_b")
    packed = explorer.pack_explorer(result, "CKA")
    assert packed is not None
    assert not packed["values"]["null"]["symmetric"]
    assert len(numbers(packed["values"]["null"]["packed"], 4)) == 4 * (4 + 2 + 2 + 1)
    assert packed["sites"] == [["block.0", "block.1"], ["block.0"]]


def test_every_figure_is_there_as_svg_pdf_and_csv(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, _, _, data = two
    folder = run.path / "figures"
    for analysis in ("cka", "knn"):
        for figure in plugins.find("analyses", analysis).figures(run[analysis]):
            stem = f"{analysis}-{figure.name}"
            assert (stem in data["figures"]) != figure.linked  # the linked view shows the same
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
    drawn = data["figures"]["knn-depth"]
    assert drawn["table"]["names"] == list(figure.table.columns)
    assert drawn["fields"] == ["series"]

    def column(name: str) -> Any:
        found = drawn["table"]["columns"][drawn["table"]["names"].index(name)]
        return drawn["datasets"][found["of"][0]]["columns"][found["of"][1]] if "of" in found else found

    np.testing.assert_allclose(column("accuracy"), figure.table.accuracy, rtol=1e-5)
    assert [column("encoder")["words"][code] for code in column("encoder")["codes"]] == list(figure.table.encoder)
    assert all("of" in found for found in drawn["table"]["columns"])  # nothing is there twice


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
    assert EVIL in [encoder["name"] for encoder in data["encoders"]]
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
    assert data["explorers"]["cka"]["order"] == [0]
    assert (tmp_path / "figures" / "cka-pairs.svg").is_file()


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
    assert '<h2>In short</h2>\n<ul class="sentences">\n<li>Take &lt;/script&gt;' in page
    assert "<li>Or &lt;b&gt;not&lt;/b&gt;.</li>" in page
    assert page.index("In short") < page.index("Formula")


def test_what_is_longer_than_five_sentences_is_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = other_analysis(lambda _: [])
    module.summary = lambda result: ["First of 0.5 points. Second.", *(f"Number {i} is here." for i in range(9))]
    monkeypatch.setattr(plugins, "find", lambda folder, name: module)
    text, _, _ = read(minimal(tmp_path, {"spectra": xr.Dataset({"rank": ("site", [1.0])})}, ["a"]))
    page = text[text.index('<section class="page" data-page="spectra"') :]
    short, _, more = page.partition("<details>")
    assert short.count("<li>") == 5
    assert "<li>First of 0.5 points.</li>" in short
    assert "Number 3" not in short
    assert more.count("<p>") >= 10


def test_a_long_caption_is_folded_after_its_first_sentences() -> None:
    first, second, third = "Dots are classes.", "A" * (CAPTION - 30) + ".", "Overall: dino."
    assert FigureText("s", "t", f"{first} {second}", "", "").parts == (f"{first} {second}", "")
    assert FigureText("s", "t", f"{first} {second} {third}", "", "").parts == (f"{first} {second}", third)
    assert FigureText("s", "t", f"{second}{second} {first}", "", "").parts == (f"{second}{second}", first)
    assert FigureText("s", "t", "", "", "").parts == ("", "")


def test_pages_are_grouped_by_what_they_ask(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    _, text, _, _ = two
    nav = text[text.index('<nav aria-label="Pages">') : text.index("</nav>")]
    assert re.findall(r"<h2>(.*?)</h2>|data-page=\"(\w+)\"", nav) == [
        ("", "overview"),
        ("Who is alike?", ""),
        ("", "cka"),
        ("What can be separated?", ""),
        ("", "knn"),
        ("", "provenance"),
        ("", "everything"),
    ]


def test_the_overview_has_the_table_of_the_terminal(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, text, page, _ = two
    overview = text[text.index('data-page="overview"') : text.index('<section class="page" data-page="cka"')]
    standing = stand(run)
    assert [column.number.title for column in standing.columns] == ["CKA", "best k-NN"]
    for column in standing.columns:
        for name in standing.encoders:
            assert column.number.write(name) in overview
    values = [float(a["data-value"]) for tag, a in page.tags if tag == "td" and a.get("data-value")]
    expected = [column.number.values[name] for name in standing.encoders for column in standing.columns]
    np.testing.assert_allclose(values, expected)
    assert overview.count("●") == 1  # k-NN can be best, CKA cannot


def test_every_figure_says_how_to_get_its_numbers(two: tuple[SampleRun, str, Scripts, dict[str, Any]]) -> None:
    run, text, _, data = two
    for stem in data["figures"]:
        assert markupsafe.escape(f"pd.read_csv({f'{run.path.name}/figures/{stem}.csv'!r})") in text
        assert (run.path / "figures" / f"{stem}.csv").is_file()


def test_findings_are_shown_and_escaped(tmp_path: Path) -> None:
    run = sample_run(tmp_path)
    judged = [
        verdict("S10", "holds", sentence=EVIL, parts=[part(EVIL, 0.3, encoders=("dino",)), part("seed 1", 0.05)]),
        verdict("S2", "not measured"),
    ]
    claims = {"S10": finding("S10", claim=EVIL, paper_says=EVIL, where=EVIL)}
    text, page, _ = read(run, verdicts=judged, findings=claims, kinds={"dino": "joint-embedding", "mae": EVIL})
    assert EVIL not in text
    found = [a for tag, a in page.tags if tag == "details" and "finding" in str(a.get("class"))]
    assert [(a["id"], a["data-verdict"]) for a in found] == [("finding-S2", "not measured"), ("finding-S10", "holds")]
    assert "Of 1 finding that these encoders can decide, 1 holds." in text
    assert "+0.3 (95 % +0.2 to +0.4)" in text


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
    assert [f.name for f in tmp_path.iterdir()] == ["report.html"]


def test_ten_encoders_stay_small() -> None:
    """CKA of 48 sites is the largest of all: 4 views × 55 pairs × 48² × 4 numbers; here no two of them are alike."""
    sites = {f"encoder {i}": vit_sites(12)[:48] for i in range(10)}
    result = cka_result(sites)
    rng = np.random.default_rng(0)
    for name in ("cka", "cka_low", "cka_high", "cka_null"):
        noise = rng.normal(0, 0.003, result[name].shape)
        result[name] = result[name] + (noise + noise.transpose(0, 2, 1, 4, 3)) / 2
    assert len(compressed(explorer.pack_explorer(result, "CKA"))) < 5.5e6


def test_encoders_that_are_alike_stand_side_by_side() -> None:
    sites = {name: vit_sites(2) for name in ("a", "x", "b", "y")}
    result = cka_result(sites)
    near = np.array([[1, 0, 1, 0], [0, 1, 0, 1]] * 2)[None, :, :, None, None] * 0.8 + 0.1
    packed = explorer.pack_explorer(result.assign(cka=result.cka * 0 + near), "CKA")
    assert packed is not None
    order = [packed["encoders"][i] for i in packed["order"]]
    assert abs(order.index("a") - order.index("b")) == 1
    assert abs(order.index("x") - order.index("y")) == 1
