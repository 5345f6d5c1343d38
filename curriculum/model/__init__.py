"""The language model: its shapes (presets) and its arrays (transformer)."""
