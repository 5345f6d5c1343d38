"""The record as the processes have it that do not write it."""

from curriculum.train.processes.unwritten import Unwritten


def test_the_record_of_the_others_tells_what_it_is_given_and_writes_nothing(tmp_path):
    record = Unwritten(tmp_path, lambda step: 10 * step)
    event = record.event("eval", 3, val_loss=2.5)
    assert (event["event"], event["tokens_processed"], event["val_loss"]) == ("eval", 30, 2.5)
    assert record.row({"step": 3, "loss": 1.5}) == {"step": 3, "loss": 1.5}
    before = record.offsets()
    record.cut_back({"events.jsonl": 10**6, "metrics.jsonl": 10**6})  # of files that process 0 has
    assert record.offsets() == before == {"events.jsonl": 0, "metrics.jsonl": 0}
    record.close()
    assert list(tmp_path.iterdir()) == []
