"""The command line: one small file per command, with heavy libraries imported inside the command."""
