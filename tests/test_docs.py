"""What the pages show can be typed: fragments of a config are valid, and links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from curriculum.config import build_config
from curriculum.model.counts import num_parameters
from curriculum.model.presets import PRESETS
from curriculum.parsing.yaml12 import read_yaml
from curriculum.record.events import STAMPS, eval_key
from curriculum.train.trainer import train
from evalsets.summary import RECORDED

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_a_page_names_are_there(page):
    folders = ("curriculum", "phases", "evalsets", "tools", "tests")
    paths = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in paths)]
    assert len(named) > 30 or page.name != "README.md"


def rows_of(page: str, heading: str) -> dict[str, set[str]]:
    """The tables below a heading: what stands as code in the other columns, by what does in the first one."""
    section = (ROOT / "docs" / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    code = re.compile(r"`([^`]+)`")
    return {name: set(code.findall("|".join(rest))) for first, *rest in rows for name in code.findall(first)}


def test_every_event_has_a_row():
    written = re.compile(r"(?:\.event\(\s*|event: ClassVar\[str\] = |\bevent = )\"([a-z_]+)\"")
    code = [path.read_text() for package in ("curriculum", "evalsets") for path in (ROOT / package).rglob("*.py")]
    names = {name for text in code for name in written.findall(text)}
    assert len(names) > 12 and names == rows_of("run_directory.md", "Events").keys()


def test_what_a_run_writes_is_told(tmp_path):
    text = "one two three four five six seven eight nine ten "
    for name in ("web", "law"):
        (tmp_path / name).mkdir()
        for i in range(60):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i} {text * 3}")
    data = {
        "name": "told",
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 32},
        "sources": {name: {"path": str(tmp_path / name), "held_out": "20%"} for name in ("web", "law")},
        "phases": [
            {"name": "a", "until": 8, "mixture": {"web": 0.5, "law": 0.5}},
            {"name": "b", "until": "end", "mixture": {"law": 1.0}, "lr": {"peak": 20.0}},
        ],
        "evalsets": {
            "primary": {"held_out_of": "web"},
            "sets": {"law": {"held_out_of": "law"}},
            "every": 2,
            "regression": {"action": "checkpoint"},
        },
        "train": {"steps": 12, "batch_size": 4, "seq_len": 32},
        "optim": {"schedule": "constant", "lr": 1e-2, "allow_jump": True},
        "averages": {"ema_decay": 0.5, "phase_mean": 2},
        "checkpoint": {"every": 4},
        "logging": {"every": 2, "generate_every": 4},
    }
    run_dir, stores = tmp_path / "run", tmp_path / "stores"
    train(build_config(data), run_dir, store_dir=stores)
    edited = data | {"train": data["train"] | {"steps": 14}}
    train(build_config(edited), run_dir, store_dir=stores, resume=8)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    told = rows_of("run_directory.md", "Events")
    rare = {"rollback", "eval_recovered", "gold_blocked", "checkpoint_failed", "diverged"}
    assert {e["event"] for e in events} >= told.keys() - rare
    for event in events:
        fields = event.keys() - STAMPS
        known = told[event["event"]] | {eval_key("law", metric) for metric in RECORDED}
        assert fields <= known, (event["event"], fields - known, "tell them in docs/run_directory.md")
        for offender in event.get("offenders", ()):
            assert offender.keys() - {"set", "baseline", "step"} <= told["eval_regression"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    fields = set().union(*rows) - {"loss_web", "loss_law"}
    assert fields <= rows_of("run_directory.md", "Metrics").keys() and len(rows) == 7
    files = {name.split("/")[0] for name in rows_of("run_directory.md", "Files")}
    there = {path.name for path in run_dir.iterdir()}
    # Neither a file nor wandb was given, all parameters are trained, and nothing was rolled back.
    assert there <= files and files - there == {"config.yaml", "wandb", "frozen", "going_back.json"}


def test_the_table_of_presets_has_their_shapes():
    section = (ROOT / "docs/training.md").read_text().partition("\n## The model\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:] for line in section.splitlines() if line.startswith("| `")]
    shapes = {
        name.strip(" `"): [int(n.replace(",", "")) for n in re.findall(r"\d+(?:,\d{3})*", " ".join(rest))]
        for name, *rest in rows
    }
    assert shapes == {
        name: [num_parameters(m), m.n_layer, m.d_model, m.n_head, m.n_kv_head, m.d_ff, m.max_seq_len, m.vocab_size]
        for name, m in PRESETS.items()
    }
