"""Tokenizers of every kind behind one interface, and the file formats that they are read from and written to."""
