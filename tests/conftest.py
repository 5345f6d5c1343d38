"""What holds for every test."""

from hypothesis import HealthCheck, settings

# A slow machine is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
