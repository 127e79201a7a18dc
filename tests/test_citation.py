"""What others cite: CITATION.cff and .zenodo.json are whole and name the same papers."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
ZENODO = json.loads((ROOT / ".zenodo.json").read_text())
PAPERS = ("APEX", "NEO", "SwiftLLM", "FastDecode", "split-point", "OmniServe", "vLLM", "sarathi", "llumnix")
"""What the systems of this project come from, each named in the title or the notes of a reference."""


def test_every_paper_is_cited_with_its_authors() -> None:
    words = [f"{entry['title']} {entry['notes']}" for entry in CITATION["references"]]
    for paper in PAPERS:
        assert sum(paper in text for text in words) == 1 or paper in ("APEX", "NEO"), paper
    for entry in CITATION["references"]:
        assert entry["type"] and entry["authors"] and (entry["type"] == "software" or entry["year"] >= 2022)


def test_both_files_agree() -> None:
    for name in ("title", "version", "keywords", "license"):
        assert ZENODO[name] == CITATION[name], name
    assert ZENODO["description"] == CITATION["abstract"]
    assert [entry["name"] for entry in ZENODO["creators"]] == [entry["name"] for entry in CITATION["authors"]]
    titles = [entry["title"] for entry in CITATION["references"]]
    assert len(titles) == len(ZENODO["references"])
    assert all(title in text for title, text in zip(titles, ZENODO["references"], strict=True))
    preprints = [item["value"] for entry in CITATION["references"] for item in entry.get("identifiers", ())]
    articles = [entry["doi"] for entry in CITATION["references"] if "doi" in entry]
    assert [item["identifier"] for item in ZENODO["related_identifiers"]] == preprints + articles
