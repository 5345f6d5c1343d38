"""What a run writes: the record (events.py), and what shows it as it grows, console.py, board.py and wandb_log.py."""
