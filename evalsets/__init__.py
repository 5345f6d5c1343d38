"""How well the model does on fixed held-out sets, and whether it got worse."""
