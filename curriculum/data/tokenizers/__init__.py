"""Tokenizers: every kind of them behind one interface, and the files that they come in and go out as."""
