"""What the pages show can be typed: fragments of a config are valid, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from curriculum.config import build_config
from curriculum.yaml12 import read_yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FRAGMENTS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S), 1)
]
SOURCES = ("web", "law", "code", "books", "talks", "pairs", "docs", "python", "cpp", "stories", "laws")
REST = {
    "tokenizer": {"kind": "byte"},
    "model": {"preset": "tiny", "max_seq_len": 8192},
    "phases": [{"name": "all", "until": "end", "mixture": {"web": 1}}],
    "train": {"steps": 40000, "batch_size": 16, "seq_len": 128},
}


def test_the_pages_have_fragments_and_links():
    assert len({fragment.id.split("-")[0] for fragment in FRAGMENTS}) >= 7
    assert sum(bool(links(page)) for page in PAGES) >= 10


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_fragment_of_a_config_is_valid_beside_what_it_leaves_out(fragment, tmp_path):
    (tmp_path / "fragment.yaml").write_text(fragment)
    given, origin = read_yaml(tmp_path / "fragment.yaml")
    data = REST | given
    data["train"] = REST["train"] | data["train"]
    data["sources"] = {name: {"path": name, "held_out": 0.01} for name in SOURCES} | given.get("sources", {})
    of_web = {"held_out_of": "web"}
    sets = {"general": of_web, "domain": of_web} | given.get("evalsets", {}).get("sets", {})
    data["evalsets"] = {"primary": of_web} | given.get("evalsets", {}) | {"sets": sets}
    config = build_config(data, origin, check_paths=False).to_json()
    assert given and given.keys() <= config.keys()


def links(page: Path) -> list[str]:
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page):
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading in {target.name}"
