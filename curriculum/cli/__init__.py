"""The command line: one small file a group of commands, heavy libraries imported inside them."""
