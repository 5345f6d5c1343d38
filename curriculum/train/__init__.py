"""Training: the step, the optimizer and what surrounds them."""
