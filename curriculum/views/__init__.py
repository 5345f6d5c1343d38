"""Views of runs that are read back: inspect, compare, the report, the model card."""
