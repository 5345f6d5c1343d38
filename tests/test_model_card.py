"""The model card: what the record of a run says of the step that is exported, and nothing that it does not say."""

import dataclasses
import json
import shutil

import pytest
import yaml
from gguf_models import GPT2, LLAMA3_SCALING
from huggingface_hub import ModelCard
from written_run import offender, windows, write_run

from curriculum.model.presets import LoraConfig, ModelConfig
from curriculum.record.windows import read_results, write_results
from curriculum.run import Run, load_run
from curriculum.run_directory import RunDirectory
from curriculum.saved_weights import Weights
from curriculum.views import inspection_text
from curriculum.views.inspection import inspect_run
from curriculum.views.model_card import Exported, model_card

CONFIG = ModelConfig(vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, d_model=8, d_ff=16, max_seq_len=64, num_ids=300)
# Of 300 rows, for the other 20 are padding: 300 * 8 in the embedding; 2 layers of 2 norms of 8, 8 * (8 + 4 + 4 + 8) for
# attention and 3 * 8 * 16 for swiglu; a norm of 8.
NUM_PARAMETERS = 300 * 8 + 2 * (2 * 8 + 8 * 24 + 3 * 8 * 16) + 8
DRAWN = {"web": 5_000, "code": 1_200, "law": 1_803}  # of a ledger: not what shares of the plan would give
EXPORTED = Exported(80, Weights(), "hf", "bf16", CONFIG, DRAWN, "<|endoftext|>")
PEFT = {"kind": "peft", "config": dataclasses.replace(CONFIG, lora=LoraConfig(rank=4))}
LOSSES = {
    "val": lambda step: windows(3 - step / 100, spread=0.1),
    "law": lambda step: 4.0 if step in (0, 60, 100) else None,
}


@pytest.fixture(scope="module")
def happened():
    edit = {"kind": "replay", "reason": "general regressed", "mixture_before": {"law": 0.9, "web": 0.1},
            "mixture_after": {"law": 0.8, "web": 0.2}, "phase": "domain", "until": 100}  # fmt: skip
    gold = {"metric": "primary/loss", "value": 2.2, "previous": 2.4, "previous_step": 60, "path": "gold/80"}
    return {
        60: [("eval_regression", {"phase": "domain", "action": "replay",
                                  "offenders": [offender("law", "best", 40, first_step=60)]})],
        70: [("schedule_edit", edit)],
        80: [("gold_checkpoint", gold)],
        100: [("eval_recovered", {"offenders": [offender("law", "best", 40, first_step=60)]})],
    }  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, happened):
    more = happened | {80: [*happened[70], *happened[80]]}
    del more[70]
    path = write_run(tmp_path_factory.mktemp("card") / "run", LOSSES, more=more, detectable={"val": 0.02})
    resolved = json.loads((path / "config.resolved.json").read_text())
    resolved["command_line"] = ["--set train.steps=100", "--eval-dataset-dir law=a folder"]
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    return path


def sections(card: str) -> dict[str, str]:
    """The text under each heading; the front matter and the headline under ""."""
    parts = ("\n" + card).split("\n## ")
    return {"": parts[0]} | {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts[1:]}


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, without headers' rules."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in found if set("".join(row)) - set("-: ")]


def test_a_card_says_what_was_trained_up_to_the_step(run_dir):
    card = sections(model_card(load_run(run_dir), EXPORTED))
    assert f"of {NUM_PARAMETERS:,} parameters" in card[""] and NUM_PARAMETERS == 3_592
    assert "the parameters after step 80 of 100, the gold checkpoint of the run." in card[""]
    assert ["vocabulary", "300 ids, embeddings tied"] in rows(card[""])
    assert ["key and value heads", "1"] in rows(card[""]) and ["stored as", "bf16"] in rows(card[""])
    trained = card["What it was trained on"]
    assert "8,000 tokens up to step 80." in trained
    # foundation: 60 steps of 100 tokens, 0.8 and 0.2; of domain what the ledger has beyond them.
    assert rows(trained)[1:3] == [
        ["foundation", "0 to 60", "web 0.8, code 0.2", "web 4,800, code 1,200"],
        ["domain", "60 to 80 of 100", "law 0.9, web 0.1", "web 200, law 1,803"],
    ]
    # Each source has 10,000 tokens.
    assert rows(trained)[4:] == [
        ["web", "`web`", "not known", "not known", "5,000", "0.5"],
        ["code", "`code`", "not known", "not known", "1,200", "0.12"],
        ["law", "`law`", "not known", "not known", "1,803", "0.18"],
    ]


def test_a_card_has_the_seed_that_the_run_began_with_and_says_what_no_command_can_train(run_dir):
    run = load_run(run_dir)
    config = {**run.start["config"], "seed": 5}
    derived = {**run.resolved["derived"], "own_optimizer": "mine"}
    edited = {**run.resolved, "seed": 8, "derived": derived}  # as by --accept-past
    card = model_card(Run(run.directory, edited, [{**run.start, "config": config}, *run.events[1:]]), EXPORTED)
    assert "Initialised at random, from the run's seed 5." in card
    assert "\ncurriculum train run.yaml --run-dir runs/" in card and "in OPTIMIZERS" not in model_card(run, EXPORTED)
    assert " # from Python alone, with 'mine' in OPTIMIZERS\n" in card


def test_a_card_has_every_set_with_its_interval_and_verdict(run_dir):
    evals = sections(model_card(load_run(run_dir), EXPORTED))["How well it does"]
    header, val, law = rows(evals)
    found = dict(zip(header, val, strict=True))
    assert found["eval set"] == "val (primary)" and found["text"] == "`val`" and found["documents"] == "25"
    at_80 = next(e for e in load_run(run_dir).events if e["event"] == "eval" and e["step"] == 80)
    assert found["step"] == "80" and found["loss"] == f"{at_80['val_loss']:.4f}"
    low, high = found["95 %"].split(" to ")
    # Of 25 documents: Student's t with 24 degrees of freedom.
    assert (
        float(high) - float(low) == pytest.approx(2 * 2.0639 * at_80["val_sem"], abs=2e-4) and at_80["val_sem"] > 0.01
    )
    # Every window of the set fell by 0.8: the change is sure, though the loss is not.
    assert found["change since the start"] == "-0.8000 (-0.8000 to -0.8000)"
    assert found["verdict"] == "no alarm"
    # Not measured at 80, and what the record says of it at 60 stands.
    assert law[4:6] == ["60", "4.0000"] and law[-1] == "regressed against its best"
    # 4.0 nats a token, 4 bytes a token: 1 / ln 2 bits a byte.
    assert law[7] == "1.4427"
    assert "every token is scored once, in a conversation only those of the answers." in evals
    assert "The intervals cover the choice of held-out text alone; the change is" in evals


@pytest.mark.parametrize(
    "facts, interval",
    [
        ({"documents": 2, "windows": 9, "clusters": 2}, "0.7294 to 3.2706"),  # t of 1 degree of freedom: 12.706
        ({"documents": 3, "windows": 19, "clusters": 3}, "1.5697 to 2.4303"),  # of 2: 4.303
        ({"documents": 3, "windows": 20, "clusters": 20}, "1.7907 to 2.2093"),  # 20 blocks, of 19: 2.093
        ({"documents": 121, "windows": 121, "clusters": 121}, "1.8020 to 2.1980"),  # of 120: 1.980
        ({"documents": 121, "windows": 121, "clusters": 3}, "1.5697 to 2.4303"),  # most are copies
    ],
)
def test_the_interval_is_wider_where_fewer_clusters_tell_the_error(run_dir, tmp_path, facts, interval):
    shutil.copytree(run_dir, tmp_path / "run")
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    events[0]["evalsets"]["primary"] |= facts
    next(e for e in events if e["event"] == "eval" and e["step"] == 80).update(val_loss=2.0, val_sem=0.1)
    (tmp_path / "run/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    told = sections(model_card(load_run(tmp_path / "run"), EXPORTED))["How well it does"]
    header, val, _ = rows(told)
    assert dict(zip(header, val, strict=True))["95 %"] == interval
    few = "Few documents: val: fewer than 20 distinct ones each, in 20 windows or more; their standard errors cover more text from"
    assert (few in told) == (facts["documents"] < facts["clusters"])


def test_a_set_without_a_standard_error_is_not_called_free_of_alarms(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    for event in events:
        if event["event"] == "eval":
            event["val_sem"] = None
    (tmp_path / "run/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = load_run(tmp_path / "run")
    header, val, _ = rows(sections(model_card(run, EXPORTED))["How well it does"])
    found = dict(zip(header, val, strict=True))
    assert (found["95 %"], found["verdict"]) == ("-", "not judged: too little text for a standard error")
    shown = "\n".join(inspection_text.text(inspect_run(run)))
    assert "regressed     none now (val: not judged: too little text for a standard error)" in shown


def test_a_card_tells_what_happened_by_then_and_no_more(run_dir):
    told = sections(model_card(load_run(run_dir), EXPORTED))["What happened in training"]
    assert "eval regression at step 60" in told and "law 2.1000 → 2.6000 (+0.5000, 95 % +0.4000 to +0.6000)" in told
    # The alarm once, with what changed since its baseline.
    assert "- eval regression at step 60 \\| replay\n  - law 2.1000" in told and told.count("+0.5000") == 1
    assert "(since then: " in told
    assert "schedule edit at step 80: general regressed" in told
    assert "recovered" not in told
    # Not the intervals of the table above.
    wider = "over the choice of held-out text and the scatter of neighbouring checkpoints, and so wider than that of the change above."
    assert told.endswith(f"\n\nThe intervals here are {wider}")
    late = sections(model_card(load_run(run_dir), dataclasses.replace(EXPORTED, step=100)))
    assert "eval recovered at step 100" in late["What happened in training"]
    (law,) = [row for row in rows(late["How well it does"]) if row[0] == "law"]
    assert law[-1].startswith("no alarm now, the last was of step 60; ")
    assert "after step 100 of 100; the gold checkpoint of the run is that of step 80." in late[""]
    early = sections(model_card(load_run(run_dir), dataclasses.replace(EXPORTED, step=40)))
    assert early["What happened in training"].startswith("No regression of an eval set, no rollback")
    assert wider not in early["What happened in training"]
    assert "gold" not in early[""] and [row[0] for row in rows(early["What it was trained on"])[1:2]] == ["foundation"]


def test_a_card_of_the_start(run_dir):
    card = sections(model_card(load_run(run_dir), dataclasses.replace(EXPORTED, step=0, tokens_drawn={})))
    assert card["What it was trained on"] == "Nothing yet: these are the parameters that the run began with."
    assert rows(card["How well it does"])[1][9] == "-"


def test_what_was_read_up_to_the_end_of_a_phase(run_dir):
    """A mean of a phase's checkpoints, and a checkpoint where a phase ends: nothing of later phases is counted."""
    for weights, drawn in (("mean:foundation", None), ("raw", {"web": 4_800, "code": 1_201, "law": 0})):
        exported = dataclasses.replace(EXPORTED, step=60, weights=Weights.parse(weights), tokens_drawn=drawn)
        trained = sections(model_card(load_run(run_dir), exported))["What it was trained on"]
        code = "1,201" if drawn else "1,200"  # the ledger's word counts, where there is one
        assert rows(trained)[1] == ["foundation", "0 to 60", "web 0.8, code 0.2", f"web 4,800, code {code}"]
        assert [row[4] for row in rows(trained)[3:]] == ["4,800", code, "0"]


@pytest.mark.parametrize("known", [True, False])
def test_a_source_that_the_run_went_on_without_is_told(tmp_path, known):
    """With what was read of it; its place is that of the config that the run began with, where it was there then."""
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0})
    resolved = json.loads((path / "config.resolved.json").read_text())
    del resolved["sources"]["code"]
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    if not known:
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        del events[0]["config"]["sources"]["code"]
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    exported = dataclasses.replace(EXPORTED, step=100, tokens_drawn=None)
    trained = sections(model_card(load_run(path), exported))["What it was trained on"]
    assert rows(trained)[4:] == [
        ["web", "`web`", "not known", "not known", "5,200", "0.52"],
        ["law", "`law`", "not known", "not known", "3,600", "0.36"],
        ["code", "`code`" if known else "not known", "not known", "not known", "1,200", "0.12"],
    ]


def test_the_verdict_beside_an_average_is_said_to_be_of_the_raw_parameters(run_dir, tmp_path, happened):
    """Alarms are raised by their losses alone."""
    averages = {"ema": lambda step: 2.5}
    run = load_run(
        write_run(tmp_path / "run", LOSSES, more={60: happened[60]}, averages=averages, detectable={"val": 0.02})
    )
    for weights, said in (("raw", ""), ("ema", "raw parameters: ")):
        exported = dataclasses.replace(EXPORTED, step=60, weights=Weights.parse(weights), tokens_drawn=None)
        val, law = rows(sections(model_card(run, exported))["How well it does"])[1:]
        assert (val[-1], law[-1]) == (f"{said}no alarm", f"{said}regressed against its best")


def test_averages_are_measured_as_such(tmp_path):
    averages = {"ema": lambda step: 2.5, "phase_mean": lambda step: 2.25}
    run = load_run(write_run(tmp_path / "run", {"val": lambda step: 3.0}, averages=averages))
    raw = read_results(tmp_path / "run/evals/100.npz")
    averaged = {
        name: {"primary": raw["primary"]._replace(nats_N=of(100) * raw["primary"].tokens_N)}
        for name, of in averages.items()
    }
    write_results(tmp_path / "run/evals/100.npz", raw, averaged)
    for weights, what, loss, change in (
        ("ema", "the moving average", "2.5000", "-0.5000"),
        ("mean:domain", "phase domain", "2.2500", "-0.7500"),
    ):
        exported = dataclasses.replace(EXPORTED, step=100, weights=Weights.parse(weights), tokens_drawn=None)
        card = sections(model_card(run, exported))
        assert what in card[""]
        val = rows(card["How well it does"])[1]
        assert val[5] == loss and val[9] == f"{change} ({change} to {change})"
        # Of a mean of checkpoints no ledger says what was read: the record knows it at the ends of phases.
        assert rows(card["What it was trained on"])[2][3] == "web 400, law 3,600"
    assert "--weights mean:domain --dtype bf16" in card["How to reproduce it"]
    without = load_run(write_run(tmp_path / "without", {"val": lambda step: 3.0}, averages=averages))
    card = sections(model_card(without, dataclasses.replace(EXPORTED, step=100, weights=Weights.parse("ema"))))
    assert rows(card["How well it does"])[1][9] == "-0.5000"
    assert "interval: 'primary@ema.nats' is not in the results of both" in card["What is not known"]
    plain = load_run(write_run(tmp_path / "plain", {"val": lambda step: 3.0}))
    card = sections(model_card(plain, dataclasses.replace(EXPORTED, weights=Weights.parse("ema"))))
    assert rows(card["How well it does"])[1][4] == "not measured"


def test_a_set_that_was_not_measured_with_a_mean_has_no_loss_of_another(tmp_path):
    """law has one of the phase before, at 60."""
    run = load_run(write_run(tmp_path / "run", LOSSES, averages={"phase_mean": lambda step: 2.25}))
    card = model_card(run, dataclasses.replace(EXPORTED, weights=Weights.parse("mean:domain"), tokens_drawn=None))
    val, law = rows(sections(card)["How well it does"])[1:]
    assert val[4:6] == ["80", "2.2500"] and law[4] == "not measured"


def test_the_front_matter_is_the_hubs(run_dir):
    card = model_card(load_run(run_dir), EXPORTED)
    found = ModelCard(card).data.to_dict()
    assert found == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["curriculum", "text-generation"],
    }
    for kind in ({"kind": "gguf"}, PEFT):
        found = ModelCard(model_card(load_run(run_dir), dataclasses.replace(EXPORTED, **kind))).data.to_dict()
        assert found["library_name"] == kind["kind"] and len(found["tags"]) == 3


@pytest.mark.parametrize(
    ("init_from", "base_model"),
    [
        ("/home/me/.cache/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93ef", "HuggingFaceTB/SmolLM2-135M"),
        ("models--org--a-b.c/snapshots/", "org/a-b.c"),
        ("models/SmolLM2-135M", None),  # a folder that need not be a name of the hub's
    ],
)
def test_the_base_model_is_named_where_its_path_says_it(tmp_path, init_from, base_model):
    first = {"init_from": init_from, "kind": "hf", "keep_optimizer": False, "lineage": None}
    second = {"init_from": "runs/first", "run": "first", "step": 70, "keep_optimizer": False, "lineage": first}
    run = load_run(write_run(tmp_path / "run", {"val": lambda step: 3.0}, start={"lineage": second}))
    card = model_card(run, EXPORTED)
    found = ModelCard(card).data.to_dict()
    assert found.get("base_model") == base_model
    assert found.get("base_model_relation") == (base_model and "finetune")
    lineage = sections(card)["Where its parameters come from"].splitlines()
    assert lineage[0] == "- parameters from runs/first (first), step 70" and init_from in lineage[1]
    assert "and that of the model it began from" in sections(card)["What is not known"]


def test_the_same_run_gives_the_same_card_wherever_it_lies(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "elsewhere")
    card = model_card(load_run(run_dir), EXPORTED)
    assert card == model_card(load_run(tmp_path / "elsewhere"), EXPORTED)
    assert str(run_dir.parent) not in card


def test_how_to_make_it_again(run_dir, tmp_path, happened):
    again = sections(model_card(load_run(run_dir), EXPORTED))["How to reproduce it"]
    options = "--set train.steps=100 --eval-dataset-dir 'law=a folder'"
    assert f"curriculum train run.yaml --run-dir runs/written {options}\n" in again
    assert "curriculum export runs/written --format hf --step 80 --weights raw --dtype bf16 -o written-export" in again
    assert "```yaml\nname: written\n```" in again and "Trained on 1 x cpu (cpu)" in again
    assert "curriculum 0.1.0, jax " in again and "resumed or edited" not in again  # but for what the run itself did
    merged = dataclasses.replace(EXPORTED, kind="gguf", dtype="q8_0", merged=True)
    assert "--format gguf --merge --step 80 --weights raw --dtype q8_0" in model_card(load_run(run_dir), merged)

    trunk = {"run": "runs/written", "step": 40, "id": "x", "branched_from": None}
    on, edit = {"plan": load_run(run_dir).plan}, happened[70][0][1]
    edited = [("resume", on), ("schedule_edit", {**edit, "kind": "config"})]
    begun = [("resume", {**on, "begins_branch": True}), ("schedule_edit", {**edit, "kind": "branch"})]
    more = {20: edited, 40: begun, 100: edited}
    write_run(tmp_path / "branch", {"val": lambda step: 3.0}, branched_from=trunk, more=more)
    # It remembers those of its trunk, of which `branch` has no option for what the trunk began from.
    resolved = json.loads((tmp_path / "branch/config.resolved.json").read_text())
    resolved["command_line"] = [
        "--init-from runs/base",
        "--keep-optimizer",
        "--dataset-dir law=a folder",
        "--set seed=3",
    ]
    (tmp_path / "branch/config.resolved.json").write_text(json.dumps(resolved))
    branch = load_run(tmp_path / "branch")
    (tmp_path / "branch/config.yaml").write_text("name: written # ``` and more\n")
    card = sections(model_card(branch, EXPORTED))
    remembered = "--dataset-dir 'law=a folder' --set seed=3"
    # Its config has its trunk's name.
    again = card["How to reproduce it"]
    assert f"curriculum branch runs/written --at 40 --run-dir runs/branch {remembered}\n" in again
    assert "curriculum export runs/branch --format hf --step 80 --weights raw --dtype bf16 -o branch-export" in again
    assert card[""].count("# branch\n") == 1 and "written" not in card[""]
    assert "````yaml\nname: written # ``` and more\n````" in again and "resumed or edited" not in again
    at_the_end = model_card(branch, dataclasses.replace(EXPORTED, step=100))
    assert "The run was resumed or edited on the way; the config is the last one." in at_the_end
    assert card["Where its parameters come from"] == "- branched from runs/written at step 40"
    (tmp_path / "branch/config.yaml").unlink()
    whole = sections(model_card(branch, EXPORTED))["How to reproduce it"]
    config = yaml.safe_load(whole.partition("```yaml\n")[2].partition("\n```")[0])
    assert config == {k: v for k, v in branch.resolved.items() if k not in ("derived", "command_line")}


def test_what_cannot_be_known_is_said(run_dir, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(run_dir, bare)
    for results, said in ((b"damaged", "cannot be read"), ((bare / "evals/20.npz").read_bytes(), "of primary are not")):
        shutil.copy(run_dir / "evals/0.npz", bare / "evals/0.npz")
        (bare / "evals/80.npz").write_bytes(results)
        card = sections(model_card(load_run(bare), EXPORTED))
        assert rows(card["How well it does"])[1][9] == "-0.8000"
        assert "The change of val has no interval: " in card["What is not known"] and said in card["What is not known"]
    (bare / "evals/0.npz").unlink()
    assert "evals/0.npz: cannot be read" in model_card(load_run(bare), EXPORTED)
    assert "No licence is stated here: those of the sources apply;" in card["What is not known"]

    (bare / "training_state.json").write_text("{}")
    mean = dataclasses.replace(EXPORTED, step=100, weights=Weights.parse("mean:domain"), tokens_drawn=None)
    assert "training_state.json: has no step, phase, tokens_drawn, consumed" in model_card(load_run(bare), mean)

    for name in ("events.jsonl", "metrics.jsonl"):
        (bare / name).unlink()
    directory = RunDirectory(bare)
    card = sections(model_card(Run(directory, directory.resolved(), []), EXPORTED))
    assert "The record of the run was missing at export" in card["How well it does"]
    assert "The record of the run was missing at export" in card["What happened in training"]
    assert rows(card["What it was trained on"])[2] == ["domain", "60 to 80 of 100", "law 0.9, web 0.1", "not known"]


def test_what_a_user_named_breaks_no_table(tmp_path):
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0})
    resolved = json.loads((path / "config.resolved.json").read_text())
    resolved["sources"]["web"]["path"] = "a|b\nc"
    resolved["sources"]["law"] |= {"path": None, "hf": "org/laws"}
    resolved["evalsets"]["primary"] = {"held_out_of": "web", "path": None}
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    card = sections(model_card(load_run(path), EXPORTED))
    assert "| web | `a\\|b c` | " in card["What it was trained on"]
    assert "| law | hub: org/laws | " in card["What it was trained on"]
    assert rows(card["How well it does"])[1][1] == "held out of web"


def test_how_to_load_each_kind(run_dir, tmp_path):
    run = load_run(run_dir)
    hf, gguf, peft = (
        sections(model_card(run, dataclasses.replace(EXPORTED, **kind)))["How to load it"]
        for kind in ({}, {"kind": "gguf"}, PEFT)
    )
    assert 'AutoModelForCausalLM.from_pretrained(".")' in hf and "vllm serve ." in hf
    assert "[tokenizer.bos_token_id, *text]" in hf and "from peft" not in hf
    # Not of training: a flat file may hold no bos token, where the tokenizer has one of its own.
    assert "begins with the token that preceded every document of the evals." in hf
    assert "llama-cli -m model.gguf" in gguf and 'CausalLM.from_pretrained(".", gguf_file="model.gguf")' in gguf
    cards = []
    for model in ({**GPT2, "n_kv_head": 2}, {"rope_scaling": LLAMA3_SCALING}):
        exported = dataclasses.replace(EXPORTED, kind="gguf", config=dataclasses.replace(CONFIG, **model))
        cards.append(sections(model_card(run, exported))["How to load it"])
    gpt2, stretched = cards
    assert 'CausalLM.from_pretrained(".", gguf_file="model.gguf", n_positions=64, n_inner=16)' in gpt2
    assert 'Tokenizer.from_pretrained(".", gguf_file="model.gguf")' in gpt2
    assert "llama-cli -m model.gguf" in stretched and "from_pretrained" not in stretched and "--format hf" in stretched
    assert "names a checkpoint of a run" not in peft
    bases = {"hf": {"init_from": "pretrained", "kind": "hf", "keep_optimizer": False, "lineage": None}}
    bases["placed"] = {**bases["hf"], "init_from": "/models/pretrained"}
    bases["run"] = {"init_from": "runs/a b/gold/70", "run": "a", "step": 70, "keep_optimizer": False, "lineage": None}
    told = {}
    for kind, lineage in bases.items():
        path = write_run(tmp_path / kind, {"val": lambda step: 3.0}, start={"lineage": lineage})
        told[kind] = model_card(load_run(path), dataclasses.replace(EXPORTED, **PEFT))
    assert "names a checkpoint of a run" not in told["hf"]
    by_path = "names that model by a path relative to where the run was trained"
    assert by_path in told["hf"] and by_path not in told["placed"] and by_path not in told["run"]
    assert "`curriculum export 'runs/a b' --step 70 --format hf -o base`" in told["run"]
    assert "model = AutoPeftModelForCausalLM.from_pretrained" in peft and "--merge" in peft
    adapters = sections(model_card(run, dataclasses.replace(EXPORTED, **PEFT)))[""]
    assert f"of {NUM_PARAMETERS:,} parameters" in adapters
    assert "Here are LoRA adapters for it, rank 4, of query, value, as they were after step 80" in adapters


@pytest.mark.parametrize(
    "kind, weights, said",
    [
        ({}, "raw", "are the parameters after step 60 of 100."),
        ({}, "ema", "is the moving average of the parameters after step 60 of 100."),
        ({}, "mean:foundation", "is the mean of the last checkpoints of phase foundation, which ends after step 60 of 100."),
        ({"merged": True}, "raw", "are the parameters after step 60 of 100, LoRA adapters folded in."),
        (
            {"merged": True},
            "mean:foundation",
            "is the mean of the last checkpoints of phase foundation, which ends after step 60 of 100, LoRA adapters folded in.",
        ),
        (
            PEFT,
            "mean:foundation",
            "are LoRA adapters for it, rank 4, of query, value, the mean of the last checkpoints of phase foundation, "
            "which ends after step 60 of 100.",
        ),
    ],
)  # fmt: skip
def test_the_headline_is_a_sentence(run_dir, kind, weights, said):
    exported = dataclasses.replace(EXPORTED, step=60, weights=Weights.parse(weights), tokens_drawn=None, **kind)
    assert f"Here {said}\n" in model_card(load_run(run_dir), exported)
