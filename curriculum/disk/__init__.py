"""Files and folders that are whole or not there, that are known to be as written, and that one process holds."""
