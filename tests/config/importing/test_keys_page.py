"""docs/coming-from-verl-and-trl.md has the tables that the importers read."""

from burnish.config.importing.keys_page import KEYS_PAGE, MARK, page


def test_the_page_has_the_present_tables() -> None:
    text = KEYS_PAGE.read_text(encoding="utf-8")
    assert text.count(MARK) == 1
    assert text == page(text), "the page is stale: run `python -m burnish.config.importing.keys_page`"
