"""The fixture `tools` for the tests of this folder."""

from tests.tiny_engines import tools  # noqa: F401
