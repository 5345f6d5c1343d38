"""The processes of a run: found, connected, and kept in step."""
