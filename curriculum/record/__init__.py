"""What a run writes: the record (events.py), and the views of it: console.py, board.py and wandb_log.py."""
