"""The sections of a config that no other part owns, and what has to hold between sections."""
