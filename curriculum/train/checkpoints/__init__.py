"""Checkpoints: written, verified, chosen and read."""
