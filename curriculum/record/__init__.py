"""What a run writes: the record (events.py), its views (console.py, board.py, wandb_log.py), and what they name."""
