"""The token tree of a session: calls find their place by messages, and what was sampled stays as it was sampled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.core.trajectory import Trajectory, pack
from burnish.data.row import Message
from burnish.environments.tools.call_formats import ParsedCall, call_format
from burnish.gateway.message_keys import CallRefused
from burnish.gateway.session_renderer import SessionRenderer
from burnish.gateway.token_tree import SessionTree
from tests.environments.chat_templates import small_tokenizer
from tests.environments.test_dialogue import TOOLS
from tests.gateway.answered_session import Session, hermes, result, system, user

# --- rule 1: a call takes its tokens from the tree ----------------------------------------------------------------------------


def test_a_prompt_is_the_sampled_tokens_and_the_rendering_of_new_messages_only() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")])
    # The tokenizer would write `the` as one token; the model wrote three.
    spelled = [session.tokenizer.encode(letter)[0] for letter in "the"]
    message = session.tree.record(prompt, spelled, [-1.0, -2.0, -3.0], 7, "length", "r0")
    assert message == {"role": "assistant", "content": "the"}
    again = session.tree.place([user("1+1?"), message, user("and?")])
    assert again.kind == "continued"
    assert again.tokens[: len(prompt.tokens) + 3] == (*prompt.tokens, *spelled)
    assert session.shown(again).endswith("the<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n")
    assert session.tokenizer.encode("the") != spelled


def test_what_the_caller_does_with_its_messages_does_not_change_the_tree() -> None:
    session = Session("qwen3", "as_template")
    _, message = session.call([user("1+1?")], f"<think>\nhm\n</think>\n\n{hermes(1)}", TOOLS)
    answer = dict(message)
    message["tool_calls"][0]["function"].clear()
    message.clear()
    assert session.tree.answers[0].message["reasoning_content"] == answer["reasoning_content"] == "hm"
    assert session.tree.answers[0].message["tool_calls"][0]["function"]["name"] == "add"


def test_placing_a_call_renders_and_tokenises_only_what_is_new() -> None:
    session = Session()
    renderer, encoded = session.tree.renderer.renderer(None), list[int]()
    messages, lengths = [user("1+1?")], list[int]()
    inner, encode = session.tokenizer._inner, session.tokenizer._inner.encode

    def counting(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return list(encode(text, **options))

    for turn in range(24):
        before = renderer.render.num_messages
        encoded.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inner, "encode", counting)
            prompt = session.tree.place(messages)
        lengths.append(sum(encoded))
        assert turn < 4 or renderer.render.num_messages == before
        messages += [session.record(prompt, f"it is {turn:02d}"), user(f"no, not {turn:02d}")]
    new = "<|im_end|>\n<|im_start|>user\nno, not 00<|im_end|>\n<|im_start|>assistant\n"
    assert set(lengths[4:]) == {len(new)}


# --- rule 2: what a client changes ------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "stripped text": lambda m: {**m, "content": f" {m['content']}\n"},
    "null text": lambda m: {**m, "content": m["content"] or None},
    "parts": lambda m: {**m, "content": [{"type": "text", "text": m["content"]}]},
    "unknown fields": lambda m: {**m, "refusal": None, "annotations": [], "audio": None, "function_call": None},
    "spaces": lambda m: _with_arguments(m, '{"b":1.0,\n "a" :  3}'),
    "values": lambda m: _with_arguments(m, {"a": 3, "b": 1}),
    "ids": lambda m: {**m, "tool_calls": [{**c, "id": f"x{k}"} for k, c in enumerate(m["tool_calls"])]},
    "no reasoning": lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
}


def _with_arguments(message: Message, arguments: Any) -> Message:
    calls = [{**call, "function": {"name": "add", "arguments": arguments}} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("change", CHANGES)
def test_a_message_is_recognised_whatever_the_client_changes(change: str) -> None:
    session = Session("qwen3")
    call = call_format("hermes").write([ParsedCall("add", {"a": 3, "b": 1})])
    prompt, message = session.call([user("1+1?")], f"<think>\nhm\n</think>\n\n{call}", TOOLS)
    assert message["reasoning_content"] == "hm"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 3, "b": 1}
    changed = CHANGES[change](message)
    results = [{"role": "tool", "tool_call_id": changed["tool_calls"][0]["id"], "content": "4"}]
    again = session.tree.place([user("1+1?"), changed, *results], TOOLS)
    assert again.kind == "continued"
    assert again.tokens[: len(prompt.tokens)] == prompt.tokens


@pytest.mark.parametrize(
    "other",
    [
        {"role": "assistant", "content": "tow"},
        {"role": "assistant", "content": "two", "reasoning_content": "ah"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "two", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]},
    ],
)
def test_another_message_is_not_recognised(other: Message) -> None:
    session = Session("qwen3")
    _, message = session.call([user("1+1?")], "<think>\nhm\n</think>\n\ntwo")
    assert message == {"role": "assistant", "content": "two", "reasoning_content": "hm"}
    assert session.tree.place([user("1+1?"), other, user("so?")]).kind == "fork"
    assert session.tree.place([user("1+1?"), message, user("so?")]).kind == "continued"


def test_tools_and_template_variables_belong_to_the_conversation() -> None:
    session = Session("qwen3")
    _, message = session.call([user("1+1?")], "two")
    dialogue = [user("1+1?"), message, user("so?")]
    assert session.tree.place(dialogue, TOOLS).kind == "relinked"
    quiet = session.tree.place(dialogue, template_variables={"enable_thinking": False})
    assert quiet.kind == "fork", "it has the tokens of the first call and its answer"
    assert session.tree.calls[-1].extends is None
    assert session.shown(quiet).endswith("<think>\n\n</think>\n\n")
    with pytest.raises(CallRefused, match=r"chat_template_kwargs\.no_such has no effect"):
        session.tree.place(dialogue, template_variables={"no_such": 1})


def test_of_equal_answers_the_one_whose_ids_come_back_is_continued() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")], TOOLS)
    first, second = session.record(prompt, hermes(1)), session.record(prompt, hermes(1))
    assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]
    for message, number in ((first, 0), (second, 1)):
        session.tree.place([user("1+1?"), message, result(message, 0, f"of {number}")], TOOLS)
        assert session.tree.calls[-1].extends is session.tree.answers[number]


def test_of_equal_answers_the_one_with_the_response_id_is_continued_else_the_latest() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")])
    message = session.record(prompt, "two")
    session.record(prompt, "two")
    session.tree.place([user("1+1?"), {**message, "id": "r0"}, user("a")])
    assert session.tree.calls[-1].extends is session.tree.answers[0]
    session.tree.place([user("1+1?"), message, user("b")])
    assert session.tree.calls[-1].extends is session.tree.answers[1]
    session.record(prompt, " two")
    session.tree.place([user("1+1?"), message, user("c")])
    assert session.tree.calls[-1].extends is session.tree.answers[1], "the third has a space before it"


def test_token_ids_decide_what_the_engine_reads_and_which_answer_is_continued() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")])
    message = session.record(prompt, "the")
    spelled = [session.tokenizer.encode(letter)[0] for letter in "the"]
    session.tree.record(prompt, spelled, [-1.0] * 3, 1, "length", "spelled")
    rest = session.tokenizer.encode("<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\nHm")
    first = session.tree.answers[0].node.tokens.tolist()
    for answer, said in ((1, spelled), (0, first)):
        given_tokens = [*prompt.tokens, *said, *rest]
        again = session.tree.place([user("1+1?"), message, user("so?")], token_ids=given_tokens)
        assert again.tokens == tuple(given_tokens)
        assert again.kind == "continued"
        assert session.tree.calls[-1].extends is session.tree.calls[-1].link is session.tree.answers[answer]
    # A later call without token ids goes on behind them.
    reply = session.record(again, "yes")
    last = session.tree.place([user("1+1?"), message, user("so?"), reply, user("sure?")])
    assert last.tokens[: len(again.tokens)] == again.tokens


# --- rules 3 and 4: new system messages, rewritten history -----------------------------------------------------------------------


def test_a_leading_system_message_that_changes_is_a_branch_with_a_link() -> None:
    session = Session()
    _, message = session.call([system("it is noon"), user("1+1?")], "two")
    again, _ = session.call([system("it is one"), user("1+1?"), message, user("so?")], "yes")
    assert again.kind == "relinked"
    assert list(again.tokens) == session.tokenizer.chat([system("it is one"), user("1+1?"), message, user("so?")])
    assert session.tree.export().links == [-1, 0]
    assert session.tree.export(train="main").not_trained == {}


def test_keep_goes_on_where_the_template_rewrites_and_as_template_branches() -> None:
    thought = "<think>\nhm\n</think>\n\ntwo"
    found = {}
    for history in ("keep", "as_template"):
        session = Session("qwen3", history)
        prompt, message = session.call([user("1+1?")], thought)
        again, _ = session.call([user("1+1?"), message, user("so?")], "yes")
        assert again.kind == "continued"
        assert session.tree.metrics["rewritten"] == 1
        found[history] = again.tokens[: len(prompt.tokens)] == prompt.tokens, session.shown(again), session.tree
    assert "hm" in found["keep"][1]
    assert found["keep"][2].metrics["branches"] == 1
    assert found["as_template"][1] == small_tokenizer("qwen3").unmarked(
        small_tokenizer("qwen3").chat_text([user("1+1?"), {"role": "assistant", "content": "two"}, user("so?")])
    )
    export = found["as_template"][2].export()
    assert found["as_template"][2].metrics["branches"] == 2
    assert export.links == [-1, 0]
    # The branch forks in the middle of the first prompt's nodes, and shares what is equal.
    assert sum(node.parent == -1 for node in export.nodes) == 1


# --- rule 5 and 6: export and rewards ---------------------------------------------------------------------------------------------


def test_a_shared_answer_is_trained_once_and_rewards_are_of_their_turns() -> None:
    session = Session()
    _, message = session.call([user("1+1?")], "two")
    for text in ("so?", "sure?"):
        session.call([user("1+1?"), message, user(text)], f"yes {text}")
    session.tree.place([user("nobody answers this")])
    session.tree.reward("r2", 0.25)
    session.tree.reward("r2", 0.5)
    export = session.tree.export()
    assert [span.reward for span in export.turns] == [0.0, 0.0, 0.5]
    assert export.links == [-1, 0, 0]
    found = Trajectory("p", 0, 0, export.nodes, "stop", "", reward=1.0, turns=export.turns)
    batch = pack([found])
    assert len(found.sequences) == 2
    assert int(batch.loss_mask.sum()) == sum(len(answer.node.tokens) for answer in session.tree.answers)
    assert "nobody" not in session.tokenizer.decode(batch.tokens.tolist())
    assert session.tree.metrics == {
        "calls": 4, "roots": 2, "continued": 1, "forks": 1, "retries": 0, "relinked": 0, "compactions": 0,
        "rewritten": 0, "unmatched": 0, "branches": 2,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen2.5", "llama3"])
def test_what_follows_an_answer_is_marked_once_with_its_role(name: str) -> None:
    """llama3 has no role for tools: their results are messages of the user, and yet what a tool said."""
    session = Session(name)
    format = call_format("hermes")
    session.tree = SessionTree(SessionRenderer(session.tokenizer, None, "keep", format, marks_bodies=True))
    _, message = session.call([user("1+1?")], hermes(1), TOOLS)
    told = "No, 17 is too low."
    for text in ("so?", "so it is?"):  # the second forks inside what the first has added
        session.call([user("1+1?"), message, result(message, 0, told), user(text)], "two", TOOLS)
    export = session.tree.export()
    batch = pack([Trajectory("p", 0, 0, export.nodes, "stop", "", reward=1.0, turns=export.turns)])
    marks = batch.token["observed"]
    found = [session.tokenizer.decode(batch.tokens[marks == role].tolist()) for role in (1, 2)]
    assert found[0] == told, "once, though two conversations read it"
    assert found[1].replace(" ", "") in ("so?soitis?", "so?itis?")


def test_a_reward_without_a_place_is_an_error() -> None:
    session = Session()
    prompt, _ = session.call([user("1+1?")], "two")
    session.tree.record(prompt, [], [], 1, "stop", "empty")
    with pytest.raises(UserError, match="no response of this session has the id 'r1'; did you mean 'r0'"):
        session.tree.reward("r1", 1.0)
    with pytest.raises(UserError, match="the reward of 'r0' is nan"):
        session.tree.reward("r0", float("nan"))
    with pytest.raises(UserError, match="'empty' has no tokens"):
        session.tree.reward("empty", 1.0)
    with pytest.raises(ValueError, match="2 tokens were sampled but there are 1 log-probs"):
        session.tree.record(prompt, [1, 2], [-1.0], 1, "stop", "r9")


def test_an_answer_without_tokens_is_continued_and_left_out_of_the_export() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")])
    message = session.tree.record(prompt, [], [], 1, "stop", "empty")
    again, _ = session.call([user("1+1?"), message, user("so?")], "two")
    assert again.kind == "continued"
    export = session.tree.export()
    assert (export.response_ids, export.links) == (["r0"], [-1])
    (sequence,) = Trajectory("p", 0, 0, export.nodes, "stop", "", turns=export.turns).sequences
    assert tuple(sequence.tokens[~sequence.action_mask].tolist()) == again.tokens


# --- rule 7 and 8: several choices, retries, cut streams ---------------------------------------------------------------------------


def not_trained(session: Session, **options: Any) -> list[str]:
    export = session.tree.export(**options)
    places = [span.node for span in export.turns]
    assert sum(export.not_trained.values()) == sum(not export.nodes[place].is_trained for place in places)
    return [name for name, at in zip(export.response_ids, places, strict=True) if not export.nodes[at].is_trained]


def test_choices_that_nothing_continues_are_not_trained_unless_asked_for() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")])
    messages = [session.record(prompt, text) for text in ("two", "three", "four")]
    session.call([user("1+1?"), messages[1], user("so?")], "yes")
    assert not_trained(session) == ["r0", "r2"]
    assert session.tree.export().not_trained == {"unused": 2}
    assert not_trained(session, n_leaves=True) == []


def test_an_answer_is_retried_if_the_same_call_comes_after_it() -> None:
    session = Session()
    first, message = session.call([user("1+1?")], "two")
    again, other = session.call([user("1+1?")], "three")
    assert (again.kind, again.tokens, again.parent) == ("retry", first.tokens, first.parent)
    assert not_trained(session) == ["r0"]
    assert session.tree.export().not_trained == {"retried": 1}
    assert not_trained(session, retried=True) == []
    session.call([user("1+1?"), message, user("so?")], "yes")
    assert not_trained(session) == [], "it was continued after all"
    session.call([user("1+1?"), other, user("so?")], "yes")
    assert session.tree.metrics["retries"] == 1


def test_equal_calls_at_the_same_time_are_samples_and_not_retries() -> None:
    session = Session()
    prompts = [session.tree.place([user("1+1?")]) for _ in range(2)]
    for prompt in prompts:
        session.record(prompt, "two")
    assert not_trained(session) == []


def test_a_cut_stream_is_kept_and_trained_only_if_asked_for() -> None:
    session = Session()
    session.record(session.tree.place([user("1+1?")]), "tw", is_cut=True)
    assert not_trained(session) == ["r0"]
    assert not_trained(session, cut=True) == []
    export = session.tree.export()
    found = Trajectory("p", 0, 0, export.nodes, "stop", "", reward=1.0, turns=export.turns)
    assert int(pack([found]).action_mask.sum()) > int(pack([found]).loss_mask.sum()) == 0


def test_the_client_gets_no_stop_string_but_the_tree_has_its_tokens() -> None:
    session = Session()
    prompt = session.tree.place([user("1+1?")])
    message = session.record(prompt, "two Observation: x", stops=["Observation:", "x"], agent="adder")
    assert message["content"] == "two "
    tokens = session.tokenizer.encode("three.")
    other = session.tree.record(prompt, tokens, [-1.0] * len(tokens), 1, "stop", "r1", stop_tokens=tokens[-1:])
    assert other["content"] == "three"
    assert session.tree.export().agents == ["adder", None]
    again = session.tree.place([user("1+1?"), message, user("4")])
    assert again.kind == "continued"
    assert "two Observation: x<|im_end|>" in session.shown(again)


# --- rule 9: parallel calls, compaction, side calls --------------------------------------------------------------------------------


def test_results_come_in_any_order_and_are_rendered_in_the_order_sent() -> None:
    session = Session()
    _, message = session.call([user("1+1?")], hermes(1, 2), TOOLS)
    results = [result(message, 0, "one"), result(message, 1, "other")]
    orders = [results, results[::-1]]
    prompts = [session.tree.place([user("1+1?"), message, *order], TOOLS) for order in orders]
    assert [prompt.kind for prompt in prompts] == ["continued", "fork"]
    shown = [session.shown(prompt) for prompt in prompts]
    assert shown[0].index("one") < shown[0].index("other")
    assert shown[1].index("one") > shown[1].index("other")


def test_results_name_their_call_although_the_client_has_renamed_it() -> None:
    """Mistral's template writes the id of the call: it must be the one that the model wrote."""
    session = Session("mistral")
    call = '[{"name": "add", "arguments": {"a": 1}, "id": "abcdefgh1"}, {"name": "add", "arguments": {"a": 2}, "id": "abcdefgh2"}]'
    _, message = session.call([user("1+1?")], f"[TOOL_CALLS]{call}", TOOLS)
    renamed = {**message, "tool_calls": [{**c, "id": f"mine-{k}"} for k, c in enumerate(message["tool_calls"])]}
    results = [{"role": "tool", "tool_call_id": f"mine-{k}", "content": str(k)} for k in (1, 0)]
    again = session.tree.place([user("1+1?"), renamed, *results], TOOLS)
    assert again.kind == "continued"
    assert session.shown(again).endswith(
        '[TOOL_RESULTS]{"content": 1, "call_id": "abcdefgh2"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": 0, "call_id": "abcdefgh1"}[/TOOL_RESULTS]'
    )


def test_a_compacted_context_is_a_root_that_follows_the_dialogue() -> None:
    session = Session()
    _, first = session.call([system("be kind"), user("1+1?")], "two")
    session.call([system("be kind"), user("1+1?"), first, user("so?")], "yes")
    session.call([user("a title for: 1+1?")], "sums")
    compacted, _ = session.call([system("be kind"), user("so far we had 2")], "right")
    assert compacted.kind == "compacted"
    assert session.tree.export().links == [-1, 0, -1, 1]
    assert not_trained(session, train="main") == ["r2"]
    assert session.tree.export(train="main").not_trained == {"side": 1}


def test_a_title_at_the_end_is_not_the_main_branch() -> None:
    session = Session()
    _, message = session.call([user("1+1?")], "two")
    session.call([user("1+1?"), message, user("so?")], "yes")
    session.call([user("a title for: 1+1?")], "sums")
    assert not_trained(session, train="main") == ["r2"]
    alone = Session()
    alone.call([user("1+1?")], "two")
    assert not_trained(alone, train="main") == []


# --- rule 10, and what is refused -----------------------------------------------------------------------------------------------------


def test_an_agent_that_writes_tool_rounds_back_as_text_is_named() -> None:
    session = Session()
    messages = [user("1+1?")]
    for step in range(4):
        prompt, _ = session.call(messages, hermes(step), TOOLS)
        assert (session.tree.note() is None) == (step < 3)
        messages += [{"role": "assistant", "content": f"Calling add({step})"}, user(f"Observation: {step}")]
        assert prompt.kind == ("fork" if step else "root")
    session.call(messages, "done", TOOLS)
    assert "none of them is as it was sampled" in str(session.tree.note())
    assert session.tree.metrics["unmatched"] == 4
    assert not_trained(session, train="main") == [], "the steps are linked all the same"
    # What the contexts share is in the tree once.
    export = session.tree.export()
    found = Trajectory("p", 0, 0, export.nodes, "stop", "", turns=export.turns)
    assert sum(len(node.tokens) for node in export.nodes) < 0.5 * sum(len(s.tokens) for s in found.sequences)


def test_text_that_has_the_sampled_tokens_continues_them() -> None:
    session = Session()
    session.call([user("1+1?")], hermes(1), TOOLS)
    again = session.tree.place([user("1+1?"), {"role": "assistant", "content": hermes(1)}, user("4")], TOOLS)
    assert again.kind == "continued"
    assert session.tree.calls[-1].link is session.tree.answers[0]
    assert session.tree.metrics["unmatched"] == 0


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ([user("1+1?"), {"role": "assistant", "content": "It is"}], "prefill_not_supported", "cannot be continued"),
        ([], "invalid_value", "at least one message"),
        ([{"role": "robot", "content": "x"}], "invalid_value", r"messages\[0\].role: expected one of"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "unsupported_content",
            "an image should be a data: URL",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": 1}]}, user("x")], "invalid_value", r"tool_calls\[0\]"),
        ([user("half \ud800")], "invalid_value", "half of a surrogate pair"),
    ],
)
def test_a_call_that_cannot_be_placed_is_refused_with_the_reason(messages: Any, code: str, words: str) -> None:
    session = Session()
    with pytest.raises(CallRefused, match=words) as error:
        session.tree.place(messages)
    assert error.value.code == code
    assert session.tree.metrics["calls"] == 0


def test_tools_need_a_known_format_of_calls() -> None:
    tree = SessionTree(SessionRenderer(small_tokenizer("qwen2.5")))
    with pytest.raises(CallRefused, match="the format in which this model writes tool calls is not known"):
        tree.place([user("1+1?")], TOOLS)


def test_a_template_without_tools_gets_them_as_text_and_the_client_gets_calls() -> None:
    session = Session("gemma")
    text = call_format("gemma3").write([ParsedCall("add", {"a": 1})])
    prompt, message = session.call([user("1+1?")], text, TOOLS)
    assert '"name": "add"' in session.shown(prompt)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    again = session.tree.place([user("1+1?"), message, result(message, 0, "4")], TOOLS)
    assert again.kind == "continued"
    assert "```tool_output\n4\n```" in session.shown(again)
