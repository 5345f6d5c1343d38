"""The run: the only package that touches disk, devices and time."""
