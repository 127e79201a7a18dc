"""The report page: what it says of result folders, and in a real browser how it looks and what it loads."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from evaluation.report import Options, Section, claim_rows, columns_of, latest_folders, main, render
from evaluation.results.folder import ResultFolder, flat_record
from tests.evaluation.headless_browser import open_browser

HOSTILE = '<script>alert("x")</script> & "quotes"'
VOID = {"meta", "link", "img", "br", "hr"}


def row(system: str, rate: float, **values) -> dict:
    known = {"backend": "simulated", "gpu": "a10", "workload": "azure-conv", "output_len": 100.0, "completed": 9}
    return flat_record({"system": system, "output_tokens_per_s": rate, "failed": 0, **known, **values})


@pytest.fixture(scope="module")
def results_dir(tmp_path_factory) -> Path:
    """Two experiments: a simulated one with a figure, a measured one with failures and text that needs escaping."""
    results = tmp_path_factory.mktemp("results")
    folder = ResultFolder(
        "fig5", {"seed": 0, "simulated": [{"key": "a"}, {"key": "b"}], "torch": {"points": [{"key": "c"}]}}, results
    )
    folder.record_invocation()
    folder.record_invocation()
    folder.save_point("a", {"values": {}}, [])
    folder.save_error("b", "Traceback\nRuntimeError: no such luck <b>at all</b>")
    folder.save_summary([row("swiftllm", 100.0), row("neo", 8.5), row("apex", 126.0), row("vllm", None)])
    figure, ax = plt.subplots(figsize=(2, 1))
    ax.plot([0, 1])
    for suffix in ("png", "svg", "pdf"):
        figure.savefig(folder.path / f"figure.{suffix}")
    figure.savefig(folder.path / "timeline.png")
    plt.close(figure)
    folder = ResultFolder("validate", {"seed": 1}, results)
    folder.record_invocation()
    measured = {"backend": "torch-cpu", "gpu": None, "trace_note": HOSTILE, "simulated_error": 0.25}
    folder.save_summary([row("neo", 5.0, **measured), row(HOSTILE, 7.0, **measured | {"failed": 2})])
    return results


@pytest.fixture(scope="module")
def page(results_dir, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(Options(output=path, results_dir=results_dir)) == 0
    return path


class Outline(HTMLParser):
    """Collects tags and text, and checks that every tag is closed in the right place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_well_formed_and_fetches_nothing(page):
    text = page.read_text()
    outline = Outline(text)
    assert not outline.open
    sources = [attrs[name] for _, attrs in outline.tags for name in ("src", "href", "action", "data") if name in attrs]
    assert len(sources) > 5 and all(source.startswith(("data:", "#")) for source in sources)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", text)
    ids = [attrs["id"] for _, attrs in outline.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {source[1:] for source in sources if source.startswith("#")} <= set(ids)


def test_page_says_what_the_folders_hold(page, results_dir):
    words = " ".join(" ".join(Outline(page.read_text()).text).split())
    for value in ("8.5", "126.0", "no such luck <b>at all</b>", HOSTILE, "not yet run: c", "1 failed point"):
        assert value in words
    for folder in latest_folders(results_dir):
        provenance = json.loads((folder / "provenance.json").read_text())
        invocation = provenance["invocations"][-1]
        assert provenance["source_hash"] in words and provenance["machine"]["cpu"] in words
        assert f"Python {provenance['versions']['python']}" in words and invocation["date"] in words
        assert (invocation["git"]["commit"] or "no git checkout")[:12] in words


def test_rows_say_simulated_or_measured(results_dir):
    simulated, measured = (Section(folder) for folder in latest_folders(results_dir))
    assert simulated.origins == {"simulated": 4} and measured.origins == {"measured here": 2}
    assert measured.failed_requests == 2
    assert [column["name"] for column in measured.full["columns"] if column["simulated"]] == ["simulated_error"]
    badge = '<tr><td data-order="{0}"><span class="badge {0}">{0}</span></td>'
    assert render([simulated]).count(badge.format("simulated")) == 2 * 4  # short table and full one
    assert '<td data-order="measured here">' not in render([simulated])


def test_figures_are_inlined_once_and_scalable_first(results_dir):
    section = Section(results_dir / "fig5" / "latest")
    assert list(section.figures) == ["figure", "timeline"]
    assert section.figures["figure"].startswith("data:image/svg+xml;") and "image/png" in section.figures["timeline"]


def test_claims_stand_beside_ours(results_dir):
    rows = Section(results_dir / "fig5" / "latest").claims
    (azure,) = [claim for claim in rows if claim["workload"] == "azure-conv" and "neo" in claim["what"]]
    assert (azure["origin"], azure["claimed"], azure["ours"]) == ("simulated", "1.13", "14.82")
    assert azure["difference"] == f"{126 / 8.5 / 1.13 - 1:+.0%}"
    assert any(claim["ours"] == "not run" and claim["difference"] == "" for claim in rows)


def test_claims_are_held_against_predictions_and_measurements_apart():
    measured = [row("neo", 10.0, backend="torch-cpu"), row("apex", 20.0, backend="torch-cpu")]
    rows = claim_rows("fig5", [row("neo", 10.0), row("apex", 30.0), *measured])
    ours = {
        claim["origin"]: claim["ours"] for claim in rows if claim["workload"] == "azure-conv" and "neo" in claim["what"]
    }
    assert ours == {"simulated": "3.00", "measured here": "2.00"}


def test_rows_need_no_system(tmp_path):
    """Rows of a kernel benchmark or of a calibration have other fields."""
    folder = ResultFolder("pacpu", {}, tmp_path)
    folder.record_invocation()
    folder.save_summary([{"kernel": "native", "gbps": 12.0, "backend": "measured: CPU attention speed"}])
    section = Section(tmp_path / "pacpu" / "latest")
    assert section.claims == [] and section.origins == {"measured here": 1}
    assert "native" in render([section])


def card(results: Path, gpu: str, setting: str, workload: str, rates: dict[str, float]) -> Path:
    """A result folder of Figure 5 with rows that one card measured."""
    folder = ResultFolder("fig5", {"experiment": "fig5", "gpu": gpu}, results)
    folder.record_invocation()
    provenance = json.loads((folder.path / "provenance.json").read_text())
    provenance["machine"]["gpus"] = [gpu]
    (folder.path / "provenance.json").write_text(json.dumps(provenance))
    here = {
        "gpu": gpu,
        "setting": setting,
        "setting_title": f"{gpu} + Llama",
        "setting_origin": "papers",
        "workload": workload,
    }
    backend = {"vllm": "server"}
    folder.save_summary([row(s, r, backend=backend.get(s, "torch-cuda"), **here) for s, r in rates.items()])
    return folder.path


def test_two_cards_stand_side_by_side(tmp_path):
    """Each claim is judged by the card that measured it; figures that were not run are listed."""
    t4 = card(tmp_path, "Tesla T4", "apex-t4", "osc", {"vllm": 10.0, "neo": 10.0, "apex": 19.0})
    a10 = card(tmp_path, "NVIDIA A10G", "apex-a10", "livebench", {"vllm": 10.0, "apex": 12.0})
    sections = [Section(folder) for folder in (t4, a10)]
    assert [section.device for section in sections] == ["Tesla T4", "NVIDIA A10G"]
    page = render(sections)
    claims = Outline(page[page.index('<section id="claims"') : page.index(f'<section id="{sections[0].anchor}"')])
    words = " ".join(" ".join(claims.text).split()).replace("\u2013", "-")
    on_t4 = "Tesla T4 + Llama, paper's KV pools"
    assert f"apex / vllm T4 + Llama-2-7B osc up to 1.96 1.90 {on_t4} - - agrees within 10% measured" in words
    assert f"apex / neo T4 + Llama-2-7B osc up to 1.71 1.90 {on_t4} - - larger measured" in words
    assert "apex / vllm A10 + Llama-3.1-8B livebench 1.22 1.20 NVIDIA A10G + Llama, paper's KV pools" in words
    assert "apex / neo A10 + Llama-3.1-8B livebench 1.06 - - - not run" in words
    assert words.count("not run") > 20 and "NEO 5.5" in words
    assert len({section.anchor for section in sections}) == 2


def test_a_failed_point_begins_with_its_last_line(results_dir):
    section = Section(results_dir / "fig5" / "latest")
    (point,) = section.errors
    assert point["key"] == "b" and point["reason"] == "RuntimeError: no such luck <b>at all</b>"
    assert "<summary><strong>RuntimeError: no such luck" in render([section])


def test_errors_say_what_to_do(tmp_path, capsys):
    assert main(Options(results_dir=tmp_path, output=tmp_path / "r.html")) == 2
    assert "make fig5" in capsys.readouterr().out
    assert main(Options(folders=(tmp_path,), output=tmp_path / "r.html")) == 2
    assert "no summary.json and no provenance.json" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "r.html").exists()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("width", [1280, 360])
def test_browser_shows_it_without_network_or_complaint(browser, page, width):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 500)
    browser.open(page.as_uri())
    complaints = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [event for event in browser.events if event["method"] in complaints] == []
    asked = [e["params"]["request"]["url"] for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert asked[0] == page.as_uri() and all(url.startswith("data:") for url in asked[1:])
    assert browser.evaluate("[...document.images].map((i) => i.complete && i.naturalWidth > 0)") == [True, True]
    assert min(browser.evaluate("[...document.querySelectorAll('tbody')].map((body) => body.rows.length)")) > 0
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page itself scrolls sideways"
    assert browser.evaluate("document.querySelector('#results script')") is None


def test_browser_sorts_by_keyboard(browser, page):
    browser.open(page.as_uri())
    title = "[...document.querySelectorAll('.data th button')].find((b) => b.textContent === 'output tok/s')"
    place = f"{title}.parentElement.cellIndex"
    column = f"[...{title}.closest('table').tBodies[0].rows].map((row) => row.cells[{place}].textContent)"
    browser.evaluate(f"{title}.focus()")
    seen = []
    for _ in range(2):
        for kind in ("keyDown", "keyUp"):
            key = {"key": "Enter", "code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}
            browser.call("Input.dispatchKeyEvent", type=kind, **key)
        seen.append((browser.evaluate(column), browser.evaluate(f"{title}.parentElement.ariaSort")))
    assert seen[0] == (["8.5", "100.0", "126.0", "\u2013"], "ascending")
    assert seen[1] == (["126.0", "100.0", "8.5", "\u2013"], "descending")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_finds_enough_contrast(browser, page, scheme):
    """WCAG AA for text (4.5:1) and something drawn at all, in both colour schemes."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(page.as_uri())
    pairs = browser.evaluate("""[...document.querySelectorAll('p, td, th button, .badge, a, summary, pre')].map((e) => {
        let back = e; while (getComputedStyle(back).backgroundColor === 'rgba(0, 0, 0, 0)') back = back.parentElement;
        return [getComputedStyle(e).color, getComputedStyle(back).backgroundColor, e.textContent.trim().slice(0, 20)];
    })""")

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(ink: str, paper: str) -> float:
        dark, light = sorted((luminance(ink), luminance(paper)))
        return (light + 0.05) / (dark + 0.05)

    assert len(pairs) > 50 and [pair for pair in pairs if contrast(pair[0], pair[1]) < 4.5] == []


def test_browser_paints_the_page(browser, page, tmp_path):
    browser.open(page.as_uri())
    browser.screenshot(tmp_path / "page.png")
    assert len({tuple(pixel) for line in plt.imread(tmp_path / "page.png") for pixel in line}) > 20


def test_the_short_table_leaves_out_the_points_of_lines() -> None:
    rows = [
        {"system": name, "perplexity": 10.0 + i, "worst_head_error_layer_3": i, "kl_up_to_50": i}
        for i, name in enumerate("ab")
    ]
    short, full, _ = columns_of(rows)
    assert "perplexity" in short and not {"worst_head_error_layer_3", "kl_up_to_50"} & set(short)
    assert {"worst_head_error_layer_3", "kl_up_to_50"} < set(full)
