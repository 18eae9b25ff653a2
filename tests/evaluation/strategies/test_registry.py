"""What the registry says of strategies: their plug-ins, their widths, and what they score."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.records import Plugin
from burnish.evaluation.strategies.registry import load_strategy
from burnish.evaluation.strategies.search import Question, Search, SearchProgram
from tests.evaluation.strategies.toy import sampling, toy_tokenizer

PLUGIN = """
from burnish.evaluation.strategies.search import Choice


async def nothing(search):
    pass


async def a_list(search):
    return Choice([search.root])


async def root(search):
    return Choice(search.root)
"""


def started(name: str, folder: Path) -> SearchProgram:
    (folder / "own.py").write_text(PLUGIN)
    tokenizer = toy_tokenizer()
    search = Search(Question("q", "?", tuple(tokenizer.encode("?")), "exact"), tokenizer, sampling(tokenizer))
    return SearchProgram(search, load_strategy(Plugin(name=f"own.py:{name}"), folder)(search))


@pytest.mark.parametrize(("name", "found"), [("nothing", "None"), ("a_list", r"Choice\(node=\[")])
def test_a_plugin_that_returns_no_choice_is_named_with_what_it_returned(name: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"strategy own.py:{name} returned {found}.*expected a Choice"):
        started(name, tmp_path)


def test_the_choice_of_a_plugin_is_that_of_the_search(tmp_path: Path) -> None:
    program = started("root", tmp_path)
    assert program.choice is not None
    assert program.choice.node is program.search.root
