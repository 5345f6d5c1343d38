"""Checkpoints: written, verified, kept and read."""
