"""Environments and tools in TRL's convention."""

import subprocess
import sys

import pytest

from burnish.config.errors import UserError
from burnish.environments.adapters.trl import TrlEnvironment
from burnish.environments.base import End, Observation
from tests.environments.adapters.episodes import USER_FILES, call, contents, episode, play


def trl(target=None, **options):
    return TrlEnvironment(target, base=USER_FILES, **options)


def test_safe_is_opened_at_the_second_try():
    row = episode(
        prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Open it. "}], code="17"
    )
    seen = play(trl("trl_env.py:Safe"), row, call("try_code", code="71"), call("try_code", code="17"), "Done.")
    first = seen[0]
    assert contents(first) == ["Be brief.", "Open it. The safe has a code of 2 digits."]
    assert row.prompt[1]["content"] == "Open it. "  # the row stays as it was
    assert [tool["function"]["name"] for tool in first.tools] == ["try_code"]
    assert first.tools[0]["function"]["parameters"]["required"] == ["code"]
    assert seen[1].messages == ({"role": "tool", "name": "try_code", "content": "locked"},)
    assert contents(seen[2]) == ["open"]
    assert seen[3] == End(reward=0.9)


def test_object_is_reused_and_reset_for_the_next_episode():
    environment = trl("trl_env.py:Safe")
    assert environment.is_reusable
    play(environment, episode(), call("try_code", code="1"))
    instance = environment.instance
    seen = play(environment, episode(code="9"), call("try_code", code="9"), "Done.")
    assert environment.instance is instance
    assert seen[-1] == End(reward=1.0)


def test_failures_are_texts_in_the_order_of_the_calls():
    calls = [
        call("burn"),
        call("look_up", word="fire"),
        call("wriet", note="x"),
        "<tool_call>\n{not json}\n</tool_call>",
        call("write", pen="x"),
        call("write", note="ash"),
    ]
    seen = play(trl("trl_more.py:Notebook"), episode(topic="t"), "\n".join(calls), "Done.")
    texts = contents(seen[1])
    assert texts[:2] == [str({"error": "the notes are wet"}), "fire is a word"]
    assert texts[2] == str({"error": "Tool wriet not found; did you mean 'write'?"})
    assert texts[3].startswith("{'error': ")
    assert "unexpected keyword argument 'pen'" in texts[4]
    assert texts[5] == "wrote ash"
    kinds = [(event.kind, event.what) for event in seen[1].events]
    assert kinds == [
        ("tool_raised", "burn"),
        ("tool_unknown", "wriet"),
        ("tool_malformed", ""),
        ("tool_raised", "write"),
    ]
    assert "RuntimeError: the notes are wet" in seen[1].events[0].traceback
    assert seen[2] == End(reward=2.0)  # one note and one look-up, from an async get_reward


def test_row_chooses_the_environment():
    environment = trl({"safe": "trl_env.py:Safe", "notes": "trl_more.py:Notebook"})
    seen = play(environment, episode(environment="notes", topic="t"), "Done.")
    assert [tool["function"]["name"] for tool in seen[0].tools] == ["burn", "look_up", "write"]
    assert seen[1] == End(reward=0.0)
    assert contents(play(environment, episode(environment="safe"))[0]) == ["Go.The safe has a code of 2 digits."]
    with pytest.raises(UserError, match="'environment' is 'saef'; did you mean 'safe'"):
        play(environment, episode(environment="saef"))


def test_without_get_reward_the_configured_reward_scores():
    assert play(trl("trl_more.py:Unscored"), episode(), "Done.")[-1] == End()


def test_reward_that_is_not_finite_fails_the_episode():
    with pytest.raises(ValueError, match=r"Infinite\.get_reward returned the reward nan"):
        play(trl("trl_more.py:Infinite"), episode(), "Done.")


def test_method_without_type_hints_is_refused():
    with pytest.raises(UserError, match=r"tool Untyped\.add: parameter 'a' of add has no type hint"):
        play(trl("trl_more.py:Untyped"), episode())


def test_plain_functions_are_tools():
    seen = play(trl(tools=["trl_more.py:double"]), episode(), call("double", number=4), "8")
    assert contents(seen[0]) == ["Go."]
    assert contents(seen[1]) == ["8"]
    assert seen[2] == End()


def test_calls_past_the_limit_are_not_run():
    environment = trl("trl_env.py:Safe", max_calls=1)
    seen = play(environment, episode(), call("try_code", code="1") + call("try_code", code="42"), "Done.")
    assert contents(seen[1]) == ["locked", str({"error": "not run: the limit of 1 call(s) is reached"})]
    assert seen[1].events[0].kind == "tool_refused"
    assert seen[2] == End(reward=0.0)


def test_template_without_tools_gets_them_in_a_system_message():
    environment = trl("trl_env.py:Safe", format="smollm2")
    one = '<tool_call>[{"name": "try_code", "arguments": {"code": "42"}}]</tool_call>'
    seen = play(environment, episode(), one)
    system, user = seen[0].messages
    assert system["role"] == "system"
    assert '"try_code"' in system["content"]
    assert user["content"] == "Go.The safe has a code of 2 digits."
    assert isinstance(seen[1], Observation)
    assert seen[1].messages == ({"role": "user", "content": "<tool_response>\nopen\n</tool_response>"},)


def test_tools_do_not_load_torch():
    """Each worker process would need hundreds of megabytes more."""
    program = (
        "import sys; from burnish.environments.adapters.trl import TrlEnvironment; "
        f"environment = TrlEnvironment(tools=['trl_more.py:double'], base={USER_FILES!r}); "
        "assert list(environment.functions) == ['double']; print('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_unknown_format_and_missing_target_are_errors():
    with pytest.raises(UserError, match="hermess"):
        trl("trl_env.py:Safe", format="hermess")
    with pytest.raises(UserError, match="give target"):
        trl()
