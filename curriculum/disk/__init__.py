"""Files and folders that are whole or not there, known to be as written, held by one process, or appended to."""
