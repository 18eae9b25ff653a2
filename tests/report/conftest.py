"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.browser import Browser, find


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip(
            "no Chromium or Chrome on this machine (apt-get install chromium; BURNISH_BROWSER names another program)"
        )
    with Browser(program) as opened:
        yield opened
