"""Views of recorded runs: inspect, compare, the report, the model card."""
