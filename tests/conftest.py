"""One hypothesis profile for all: a slow machine may slow a test down, never fail it; CI sees the same examples each time."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "burnish", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("burnish")
