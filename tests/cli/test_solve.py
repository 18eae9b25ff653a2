"""`burnish solve`: what it prints, what it streams, and what it refuses."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.cli.main import main
from burnish.cli.solve import SearchDisplay, search_block
from burnish.config.model import Model, NewModel
from burnish.core.engine import Completion
from burnish.evaluation.strategies.registry import load_strategy, strategy_record
from burnish.evaluation.strategies.search import Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.models.policy import load_policy
from tests.evaluation.strategies.toy import sampling, solve, toy_tokenizer

ALPHABET = "0123456789>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, ALPHABET, seed=1).save(path)
    return path


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["solve", *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_answer_has_the_most_votes_of_the_tree(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(model), "12>", "--max-tokens", "1", "--reward", "exact", "strategy.n=20"]
    result = found(capsys, *words)
    texts = [node["text"] for node in result["tree"][1:] if node["text"]]
    assert result["votes"] == Counter(texts)
    assert result["votes"][result["answer"]] == max(result["votes"].values())
    assert (result["requests"], result["strategy"]) == (20, {"name": "majority", "n": 20})
    assert found(capsys, *words, "--seed", "1")["tree"] != result["tree"]
    assert found(capsys, *words)["tree"] == result["tree"]


def test_text_has_the_tree_the_votes_the_answer_and_the_cost(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["solve", str(model), "12>", "--max-tokens", "1", "--reward", "exact", "strategy.n=3"]
    assert main(words) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("* 12>  (prompt)")
    chosen = [line for line in lines[:4] if line.startswith("*   ")]
    assert len(chosen) == 1
    assert f"answer      {chosen[0].split()[1]}" in lines
    assert "3 tokens in 3 requests over 9 context tokens, 0 verifier calls" in lines[-1]
    assert shown.err.splitlines()[-1].startswith("3 tokens; 3 requests; 3 answers; so far ")
    assert main([*words, "--tree"]) == 0
    assert "    node 1  (1 token" in capsys.readouterr().out.replace("*", " ")


def test_the_question_comes_from_stdin(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "2", "--strategy", "single"]
    typed = found(capsys, str(model), "12>", *options)
    monkeypatch.setattr("sys.stdin", io.StringIO("12>\n"))
    assert found(capsys, str(model), "-", *options)["tree"] == typed["tree"]


def test_a_verifier_scores_and_a_budget_ends_the_search(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(model), "12>", "--strategy", "best_of_n", "--max-tokens", "3", "--budget", "7"]
    result = found(capsys, *words, "strategy.verifier=self_certainty")
    sampled = [node for node in result["tree"] if node["sampled"]]
    assert result["tokens"] == sum(node["tokens"] for node in sampled) <= 7
    assert result["verifier_calls"] == len(sampled) < 16
    assert result["score"] == max(node["score"] for node in sampled) > 0
    assert result["verifier_tokens"] == sum(3 + node["tokens"] for node in sampled)  # the question has three
    assert main(["solve", *words, "strategy.verifier=self_certainty"]) == 0
    calls = f"{result['verifier_calls']} verifier calls of {result['verifier_tokens']} tokens, "
    assert calls in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["12>", "--strategy", "best_of_n", "strategy.verifier=oracle"], "a question here has none"),
        (["12>", "--strategy", "best_of_n", "strategy.verifier=task"], "a typed question has no columns"),
        (["12>", "--temperature", "0"], "they are all alike"),
        (["12>", "--strategy", "majorty"], "did you mean 'majority'"),
        (["12>", "strategy.m=3"], "m"),
        (["12>", "--budget", "0"], "budget"),
        (["12>", "--reward", "numbr"], "did you mean 'number'"),
        (["12>", "34>"], "two questions"),
        (["--budget", "4"], "needs a question"),
        (["12>", "--json", "--tree"], "leave --tree out"),
        (["1" * 40, "--max-tokens", "2"], "the prompt has 40 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["solve", str(model), *words]) == 2
    assert message in capsys.readouterr().err


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_ends_of_the_texts_that_are_being_written_and_the_tree() -> None:
    tokenizer = toy_tokenizer()
    search = Search(Question("q", "?", (1,), "exact"), tokenizer, sampling(tokenizer))
    program = SearchProgram(search, load_strategy(strategy_record("beam_search", step="."))(search))
    requests = program.requests()
    texts = {request.id: "so " * 40 + str(k) for k, request in enumerate(requests)}
    running = {one: tokenizer.encode(text) for one, text in texts.items()}
    block = search_block(program, running, 60, 8)
    assert block[0].startswith(f"{sum(map(len, texts.values())):,} tokens")
    assert block[1:3] == [f"  > …{texts[request.id][-55:]}" for request in requests[:2]]
    assert len(block) <= 8
    for k, request in enumerate(requests):
        tokens = np.array(tokenizer.encode(f"{k}."))
        program.take(Completion(request.id, tokens, np.zeros(2, dtype=np.float32), "stop", version=0))
    while program.score_by(lambda node: 0.25):
        program.requests()
    block = search_block(program, {}, 60, 40)
    assert "(prompt)" in block[1]
    assert sum("score 0.25" in line for line in block) == len(requests)


def test_a_terminal_shows_votes_and_is_clean_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    _, program = solve("majority", lambda text: {"1": 0.7, "2": 0.3}, n=8, max_tokens=1)
    stream = Terminal()
    with SearchDisplay(stream) as display:
        display.on_step(program)
        shown = stream.getvalue()
        votes = program.choice.votes if program.choice is not None else {}
        assert shown.count("\n") == 1 + len(votes)
        for answer, count in votes.items():
            assert f"  {answer}  {count:g}" in shown
    assert stream.getvalue() == f"{shown}\x1b[{shown.count(chr(10))}F\x1b[J"
