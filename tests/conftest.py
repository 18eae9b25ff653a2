"""One hypothesis profile for all: a slow machine may slow a test down, never fail it."""

from hypothesis import HealthCheck, settings

settings.register_profile("burnish", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("burnish")
