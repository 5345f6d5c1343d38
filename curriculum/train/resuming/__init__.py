"""What a run continues from, and what its config may change of what is trained: all of it without jax."""
