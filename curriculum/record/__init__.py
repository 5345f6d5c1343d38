"""What a run leaves behind: the record (events.py) and its views, TensorBoard (board.py) and console.py."""
