"""The command line: one small file a command, heavy libraries imported inside them."""
