"""Requests with a `strategy`: what comes back is what the same search gives by hand, beside other requests, and it ends with its client."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from burnish.config.errors import UserError
from burnish.evaluation.strategies.registry import STRATEGIES, strategy_record, strategy_verifier
from burnish.evaluation.strategies.search_program import SearchProgram, node_index
from burnish.evaluation.strategies.search_tree import mean_logp
from burnish.evaluation.strategies.spec import STRATEGY_RECORDS
from burnish.evaluation.strategies.verifiers import SelfCertainty
from burnish.gateway.openai_schema import ChatRequest, CompletionRequest, validate_fields
from burnish.inference.native.dense_engine import DenseEngine
from burnish.rewards.score_types import Score
from burnish.serve.request_to_engine import chat_prompt, completion_prompts, engine_requests
from burnish.serve.search_request import open_search, search_request
from burnish.serve.server_verifiers import ServerVerifier, load_verifiers, read_verifiers

MESSAGES = [{"role": "user", "content": "Hi é"}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "seed": 4}
TEXT = {"model": "tiny", "prompt": "abc", "max_tokens": 2, "seed": 4}
VOTE = {"name": "majority", "n": 9, "answer": "exact"}


def chat(running: Any, strategy: Any, **options: Any) -> Any:
    return running.client().chat.completions.create(**(CHAT | options), extra_body={"strategy": strategy})


def by_hand(
    running: Any, strategy: dict[str, Any], score: Callable[[Any], float] | None = None, **options: Any
) -> SearchProgram:
    """The search of `CHAT`, on an engine of its own that runs one wave after the other."""
    asked = validate_fields(ChatRequest, CHAT | {"strategy": strategy} | options)
    found = search_request(asked, {}, 2**20)
    assert found is not None
    (one,) = engine_requests(asked, [chat_prompt(asked, running.served)], running.served, "x")
    program = open_search(asked, found, one, running.served)
    engine = DenseEngine(running.model, 8, running.tokenizer.decode)
    while not program.is_done:
        engine.submit(program.requests())
        for completion in engine.stream():
            program.take(completion)
        for request in program.score_requests():
            node = program.search.nodes[node_index(request.id)]
            program.take_score(Score(request.id, mean_logp(node) if score is None else score(request), None))
    return program


def timeless(facts: dict[str, Any]) -> dict[str, Any]:
    """What two searches that are equal have in common."""
    assert facts["wall_s"] > 0
    return facts | {"wall_s": None}


def test_the_answer_its_votes_and_its_cost_are_those_of_the_search(random_server: Any) -> None:
    found = chat(random_server, VOTE)
    program = by_hand(random_server, VOTE)
    assert program.choice is not None
    facts = found.strategy
    assert facts["votes"] == program.choice.votes
    assert sum(facts["votes"].values()) > 1
    assert facts["answer"] == max(facts["votes"], key=facts["votes"].get)
    assert found.choices[0].message.content == program.search.text(program.choice.node)
    assert len(found.choices) == 1
    assert (facts["tokens"], facts["requests"], facts["verifier_calls"]) == (program.search.cost.tokens, 9, 0)
    prompt = len(program.search.root.tokens)
    assert found.usage.prompt_tokens == prompt
    assert found.usage.completion_tokens == program.search.cost.tokens
    assert found.usage.total_tokens == prompt + program.search.cost.tokens
    assert random_server.log[-1].endswith("tokens, strategy majority, 9 completions")


def is_keyless(name: str) -> bool:
    """Whether a strategy needs no expected answer by default."""
    part = strategy_verifier(strategy_record(name))
    return part is None or part.name != "oracle"


@pytest.mark.parametrize("name", list(filter(is_keyless, STRATEGIES)))
def test_every_strategy_is_served_and_is_the_search_by_hand(random_server: Any, name: str) -> None:
    strategy = {"name": name, "answer": "exact", "budget": 400}
    limit = 128 if name == "budget_forcing" else 12  # it keeps some for the answer
    found = chat(random_server, strategy, max_tokens=limit)
    program = by_hand(random_server, strategy, max_tokens=limit)
    assert program.choice is not None
    cost = program.search.cost
    facts = found.strategy
    assert found.choices[0].message.content == program.search.text(program.choice.node)
    assert (facts["tokens"], facts["requests"], facts["verifier_calls"]) == (cost.tokens, cost.requests, cost.scores)
    assert facts.get("votes", {}) == pytest.approx(dict(program.choice.votes))


def test_a_strategy_that_asks_again_needs_a_chat(random_server: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions"):
        random_server.client().completions.create(**TEXT, extra_body={"strategy": "revise"})


def test_no_strategy_has_an_option_named_as_a_key_of_the_request() -> None:
    taken = {key for record in STRATEGY_RECORDS for key in record.model_fields} & {"budget", "answer"}
    assert not taken


def test_without_a_seed_searches_differ_and_with_one_they_repeat(random_server: Any) -> None:
    strategy = {"name": "single", "answer": "exact"}
    texts = [chat(random_server, strategy, seed=None, max_tokens=20).choices[0].message.content for _ in range(2)]
    assert texts[0] != texts[1]
    again = [chat(random_server, "single", max_tokens=20).choices[0].message.content for _ in range(2)]
    assert again[0] == again[1]


def test_a_text_is_completed_by_a_strategy_too(random_server: Any) -> None:
    found = random_server.client().completions.create(**TEXT, extra_body={"strategy": VOTE})
    votes = found.strategy["votes"]
    assert votes[found.choices[0].text.strip()] == max(votes.values())
    assert found.object == "text_completion"


def test_self_certainty_scores_with_the_served_model(random_server: Any) -> None:
    strategy = {"name": "best_of_n", "n": 5, "verifier": "self_certainty"}
    certainty = SelfCertainty(random_server.model)
    program = by_hand(random_server, strategy, lambda request: certainty([request])[0])
    assert program.choice is not None
    facts = chat(random_server, strategy).strategy
    assert facts["score"] == pytest.approx(program.choice.node.score, rel=1e-9)
    assert (facts["verifier"], facts["verifier_calls"]) == ("self_certainty", 5)
    # It reads the question with each answer.
    assert facts["verifier_tokens"] == facts["context_tokens"] + facts["tokens"]


def test_a_stream_has_progress_as_comments_and_the_answer_as_one_chunk(random_server: Any) -> None:
    whole = chat(random_server, VOTE)
    chunks = list(chat(random_server, VOTE, stream=True, stream_options={"include_usage": True}))
    first, last = chunks
    assert first.choices[0].delta.content == whole.choices[0].message.content
    assert first.choices[0].finish_reason == whole.choices[0].finish_reason
    assert timeless(first.strategy) == timeless(whole.strategy)
    assert last.usage == whole.usage


def test_a_stream_says_what_was_spent_while_the_search_runs(start_server: Any) -> None:
    running = start_server(max_rows=1, max_queue=3)  # a search has one request at a time
    submit = running.loop.submit_when_free
    num_waves = 0

    async def held(requests: Any) -> Any:
        nonlocal num_waves
        num_waves += 1
        if num_waves == 2:
            running.model.gate.clear()
        return await submit(requests)

    running.loop.submit_when_free = held
    connection = http.client.HTTPConnection(running.url.split("/")[2], timeout=300)
    body = {"model": "tiny", "prompt": [65], "max_tokens": 4, "stream": True, "strategy": {"name": "majority", "n": 2}}
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.readline().decode()
    assert json.loads(first.removeprefix(": "))["strategy"] == {
        "tokens": 4,
        "requests": 2,
        "verifier_calls": 0,
        "budget": 2**20,
    }
    running.model.gate.set()
    *comments, answer, end, nothing = response.read().decode().lstrip("\n").split("\n\n")
    assert all(line.startswith(": ") for line in comments)
    assert json.loads(answer.removeprefix("data: "))["strategy"]["tokens"] == 8
    assert (end, nothing) == ("data: [DONE]", "")
    connection.close()


def test_searches_and_ordinary_requests_do_not_change_each_other(random_server: Any) -> None:
    plain = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "seed": 6}
    client = random_server.client()
    alone = client.completions.create(**plain).choices[0].text
    vote = chat(random_server, VOTE)
    with ThreadPoolExecutor(12) as pool:
        searches = [pool.submit(chat, random_server, VOTE) for _ in range(6)]
        others = [pool.submit(client.completions.create, **plain) for _ in range(6)]
        assert {other.result().choices[0].text for other in others} == {alone}
        for search in searches:
            assert timeless(search.result().strategy) == timeless(vote.strategy)
            assert search.result().choices[0].message.content == vote.choices[0].message.content
    random_server.wait_until(random_server.is_idle)


def test_a_search_larger_than_the_queue_comes_in_waves(start_server: Any) -> None:
    running = start_server(max_rows=2, max_queue=6)  # eight in all, of which one search has two
    seen: list[int] = []
    submit = running.loop._submit

    def counted(requests: Any, wants_tokens: bool) -> Any:
        seen.append(len(requests))
        return submit(requests, wants_tokens)

    running.loop._submit = counted
    found = running.client().completions.create(**TEXT, extra_body={"strategy": {"name": "majority", "n": 7}})
    assert found.strategy["requests"] == sum(seen) == 7
    assert max(seen) == 2


def test_a_search_waits_for_room_and_a_later_request_does_not_take_it(start_server: Any) -> None:
    running = start_server(max_rows=4, max_queue=0)
    running.model.gate.clear()
    plain = {"model": "tiny", "prompt": [65], "max_tokens": 1}
    client = running.client()
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(client.completions.create, **plain) for _ in range(3)]
        running.wait_until(lambda: running.loop.num_unfinished == 3)
        search = pool.submit(client.completions.create, **plain, extra_body={"strategy": {"name": "majority", "n": 3}})
        running.wait_until(lambda: running.loop.num_unfinished == 4)
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            client.completions.create(**plain, extra_body={"strategy": "single"})
        running.model.gate.set()
        assert search.result().strategy["requests"] == 3
        assert [other.result().usage.completion_tokens for other in others] == [1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_search(script_server: Any, stream: bool) -> None:
    script_server.model.gate.clear()
    connection = http.client.HTTPConnection(script_server.url.split("/")[2], timeout=300)
    body = {
        "model": "tiny",
        "prompt": [65],
        "max_tokens": 50_000,
        "strategy": {"name": "majority", "n": 5},
        "stream": stream,
    }
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    script_server.wait_until(lambda: script_server.loop.num_unfinished == 5)
    connection.close()
    script_server.wait_until(lambda: "499" in script_server.log[-1])
    script_server.model.gate.set()
    script_server.wait_until(script_server.is_idle)


def test_a_budget_bounds_all_branches(random_server: Any) -> None:
    found = chat(random_server, {"name": "majority", "n": 30, "budget": 11, "answer": "exact"})
    assert found.usage.completion_tokens <= 11
    assert found.strategy["requests"] < 30


@pytest.fixture
def length_verifier(tmp_path: Path, random_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server's verifier from a file, which prefers answers with a low first character."""
    (tmp_path / "mine.py").write_text(
        "def low(data_source, solution_str, ground_truth, extra_info):\n    return -float(ord((solution_str or 'z')[0]))\n"
        "def bad(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError('no way')\n"
    )
    monkeypatch.chdir(tmp_path)
    found = load_verifiers(
        read_verifiers(["mine.py:low", "mine.py:bad"]), random_server.tokenizer, random_server.log.append
    )
    random_server.server.api.verifiers = found
    yield found
    random_server.server.api.verifiers = {}
    for one in found.values():
        one.close()


def test_a_verifier_of_the_server_chooses_by_the_name_of_its_function(
    random_server: Any, length_verifier: dict[str, ServerVerifier]
) -> None:
    strategy = {"name": "best_of_n", "n": 6, "verifier": "low"}
    asked = validate_fields(ChatRequest, CHAT | {"strategy": strategy})
    assert search_request(asked, length_verifier, 10) is not None
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: chat(random_server, strategy), range(4)))
    votes = by_hand(random_server, VOTE | {"n": 6})
    texts = [votes.search.text(node) for node in votes.search.nodes[1:]]
    best = max(-float(ord((text or "z")[0])) for text in texts)
    for found in results:
        assert found.strategy["score"] == best
        assert (found.strategy["verifier"], found.strategy["verifier_calls"]) == ("low", 6)
        assert found.strategy["verifier_tokens"] is None


def test_a_search_has_the_steps_that_the_verifier_of_the_server_scores(
    random_server: Any, length_verifier: dict[str, ServerVerifier]
) -> None:
    length_verifier["low"].delimiter = ";"
    with pytest.raises(openai.BadRequestError, match=r"with '\\n\\n' \(strategy.step\).*reads steps that end with ';'"):
        chat(random_server, {"name": "beam_search", "n": 4, "verifier": "low"})
    found = chat(random_server, {"name": "beam_search", "n": 4, "step": ";", "verifier": "low"})
    assert found.strategy["verifier"] == "low"


def test_a_verifier_that_fails_is_an_error_whose_cause_is_in_the_log_alone(
    random_server: Any, length_verifier: dict[str, ServerVerifier]
) -> None:
    with pytest.raises(openai.BadRequestError, match="the verifier failed for every candidate") as caught:
        chat(random_server, {"name": "best_of_n", "n": 2, "verifier": "bad"})
    assert caught.value.code == "search_failed"
    assert "no way" not in caught.value.message
    assert any("verifier bad: 2 of 2 scores failed" in line and "no way" in line for line in random_server.log)


@pytest.mark.parametrize(
    ("strategy", "param", "message"),
    [
        ("majorty", "strategy.name", "did you mean 'majority'"),
        ({"n": 3}, "strategy.name", "missing"),
        ({"name": 3}, "strategy.name", "no such strategy"),
        ({"name": "mine.py:search"}, "strategy.name", "no such strategy"),
        ({"name": "majority", "m": 3}, "strategy.m", "majority takes n, budget, answer"),
        ({"name": "majority", "n": 0}, "strategy.n", "greater than or equal to 1"),
        ({"name": "majority", "n": 10**9}, "strategy.n", "expected 65536 at most"),
        ({"name": "majority", "n": 60_000}, "strategy", "more than 8192 nodes"),
        ({"name": "majority", "budget": 2**30}, "strategy.budget", "the limit of this server"),
        ({"name": "majority", "budget": True}, "strategy.budget", "expected a number of tokens"),
        ({"name": "majority", "answer": "oracle"}, "strategy.answer", "one of number, math, choice, exact"),
        ({"name": "best_of_n", "verifier": "oracle"}, "strategy.verifier", "has the verifiers likelihood, self_certainty"),
        ({"name": "best_of_n", "verifier": "mine.py:low"}, "strategy.verifier", "start it with --verifier"),
        ({"name": "best_of_n", "verifier": {"name": "model", "options": {"path": "/x"}}}, "strategy.verifier", "--verifier"),
        ({"name": "best_of_n", "verifier": {"name": "likelihood", "options": {"a": 1}}}, "strategy.verifier.options", "alone"),
        ("budget_forcing", "strategy", "tokens for the answer"),
        ({"name": "revise", "feedback": "verifier"}, "strategy", "measures how sure the model was"),
        (7, "strategy", "dictionary"),
    ],
)  # fmt: skip
def test_what_a_client_may_not_ask_of_a_strategy_is_refused(
    random_server: Any, strategy: Any, param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        chat(random_server, strategy)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": 0}, "strategy"),
    ],
)
def test_fields_without_a_meaning_beside_a_strategy_are_refused_by_name(
    random_server: Any, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(random_server, VOTE, **options)
    assert caught.value.param == param


def test_several_prompts_an_echo_and_token_ids_are_refused(random_server: Any) -> None:
    for name, value in (("prompt", ["a", "b"]), ("echo", True), ("return_token_ids", True)):
        with pytest.raises(openai.BadRequestError, match="not with strategy") as caught:
            random_server.client().completions.create(**TEXT | {"extra_body": {"strategy": "single", name: value}})
        assert caught.value.param == name


def test_a_stop_text_is_cut_from_the_answer(script_server: Any) -> None:
    prompt = script_server.tokenizer.encode("abc")
    script_server.model.say(script_server.tokenizer.encode("one two STOP three"), after=len(prompt))
    found = script_server.client().completions.create(
        model="tiny", prompt="abc", max_tokens=40, stop=["STOP"], extra_body={"strategy": "single"}
    )
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("one two ", "stop")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["oracle"], "requests have none"),
        (["self_certainty"], "without this option"),
        (["format", "format"], "two verifiers named format"),
    ],
)
def test_verifiers_that_no_server_can_have_are_refused(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_verifiers(given)


def test_an_unknown_verifier_names_the_nearest_one(random_server: Any) -> None:
    with pytest.raises(UserError, match="did you mean 'format'"):
        load_verifiers(read_verifiers(["formt"]), random_server.tokenizer, print)


def test_a_prompt_of_token_ids_has_the_search_of_its_text(random_server: Any) -> None:
    tokens = random_server.tokenizer.encode("abc", special=True)
    found = [
        random_server.client().completions.create(**TEXT | {"prompt": prompt}, extra_body={"strategy": VOTE}).strategy
        for prompt in ("abc", tokens)
    ]
    assert timeless(found[0]) == timeless(found[1])
    asked = validate_fields(CompletionRequest, TEXT | {"prompt": tokens})
    assert list(completion_prompts(asked, random_server.served)[0].tokens) == tokens
