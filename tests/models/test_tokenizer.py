from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.models.tokenizer import Tokenizer

SHARED = Path(__file__).parents[2] / "../shared/data"
DIRECTORIES = {
    "qwen2.5": SHARED / "tokenizers/qwen2.5",
    "smollm2": SHARED / "tokenizers/smollm2",
    "stories260k": SHARED / "models/stories260k",
}
DIGITS = "0123456789>"
_loaded: dict[str, Tokenizer] = {}


def real(name: str) -> Tokenizer:
    if not DIRECTORIES[name].is_dir():
        pytest.skip(f"the {name} tokenizer is not on this machine")
    if name not in _loaded:
        _loaded[name] = Tokenizer.load(DIRECTORIES[name])
    return _loaded[name]


def test_a_character_tokenizer_has_its_alphabet_and_two_special_tokens() -> None:
    tokenizer = Tokenizer.from_characters(DIGITS)
    assert tokenizer.vocab_size == 13
    assert tokenizer.pad_id == 0
    assert tokenizer.eos_ids == (1,)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("09>") == [2, 11, 12]
    assert tokenizer.encode("09>", special=True) == [2, 11, 12]
    assert tokenizer.decode([2, 11, 12, 1]) == "09>"
    assert tokenizer.decode([2, 1], skip_special=False) == "0<eos>"
    assert tokenizer.pieces([2, 12, 1]) == ["0", ">", ""]
    assert [tokenizer.is_special(t) for t in (0, 1, 2)] == [True, True, False]


@given(st.text(alphabet="ab \n\té漢😀", max_size=20))
def test_a_character_tokenizer_gives_back_every_text(text: str) -> None:
    tokenizer = Tokenizer.from_characters("ab \n\té漢😀")
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_character_is_named_also_after_saving_and_loading(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_characters(DIGITS)
    tokenizer.save(tmp_path)
    for each in (tokenizer, Tokenizer.load(tmp_path)):
        for text, character in (("12x>", "'x'"), ("1<eos>", "'<'")):
            with pytest.raises(UserError, match=character):
                each.encode(text)


def test_a_saved_character_tokenizer_is_the_same_for_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_characters(DIGITS + " ")
    tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    text = "507508>  1 2"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (len(loaded), loaded.eos_token_id, loaded.pad_token_id) == (14, 1, 0)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_real_tokenizer_survives_saving(name: str, tmp_path: Path) -> None:
    tokenizer = real(name)
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    text = "Hello, wörld! 漢字 1+1=2\n\n  x"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.eos_ids, again.pad_id, again.vocab_size) == (
        tokenizer.eos_ids,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    assert again.has_chat_template == tokenizer.has_chat_template


@pytest.mark.parametrize("name", DIRECTORIES)
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab 1\n.é漢😀ﷺ"), max_size=25), cut=st.integers(0, 30))
def test_pieces_join_to_the_decoded_text(name: str, text: str, cut: int) -> None:
    tokenizer = real(name)
    tokens = tokenizer.encode(text)[cut % 3 :]  # a cut may begin inside a character
    for skip_special in (True, False):
        pieces = tokenizer.pieces([*tokens, *tokenizer.eos_ids], skip_special)
        assert len(pieces) == len(tokens) + len(tokenizer.eos_ids)
        assert "".join(pieces) == tokenizer.decode([*tokens, *tokenizer.eos_ids], skip_special)


def test_a_character_over_several_tokens_belongs_to_the_last() -> None:
    tokenizer = real("stories260k")
    tokens = tokenizer.encode("a漢")
    assert tokenizer.pieces(tokens)[-3:] == ["", "", "漢"]


def test_chat_ends_where_the_assistant_starts_and_matches_transformers() -> None:
    tokenizer = real("qwen2.5")
    messages = [{"role": "user", "content": "hi {x}"}]
    text = tokenizer.chat_text(messages)
    assert text.endswith("<|im_start|>user\nhi {x}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.chat(messages), skip_special=False) == text
    expected = tokenizer._inner.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert tokenizer.chat(messages) == expected
    assert tokenizer.chat_template_mentions("tools")
    assert not tokenizer.chat_template_mentions("enable_thinking")


def test_special_adds_what_stands_before_a_text_and_never_an_end_token(tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = Tokenizer.from_characters("ab")
    inner = tokenizer._inner
    inner.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    inner.add_tokens(["ab"])  # a word of two letters: no longer a character tokenizer
    rebuilt = Tokenizer(inner)
    assert rebuilt.encode("b", special=True) == [0, *rebuilt.encode("b")]


def test_end_tokens_of_the_generation_config_count_and_travel(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    Tokenizer.from_characters(DIGITS).save(first)
    (first / "generation_config.json").write_text(json.dumps({"eos_token_id": [12, 1]}))
    tokenizer = Tokenizer.load(first)
    assert tokenizer.eos_ids == (1, 12)
    tokenizer.save(second)
    assert Tokenizer.load(second).eos_ids == (1, 12)


def test_missing_or_broken_files_are_errors_for_people(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"expected one of tokenizer\.json"):
        Tokenizer.load(tmp_path)
    Tokenizer.from_characters(DIGITS).save(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json: not valid JSON"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="does not load"):
        Tokenizer.load(tmp_path)


def test_a_chat_without_a_template_and_a_refused_chat_are_errors() -> None:
    with pytest.raises(UserError, match="no chat template"):
        Tokenizer.from_characters("ab").chat_text([{"role": "user", "content": "a"}])
    tokenizer = Tokenizer.from_characters("ab")
    tokenizer._inner.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        Tokenizer(tokenizer._inner).chat_text([{"role": "user", "content": "a"}])


def test_an_alphabet_with_a_character_twice_is_refused() -> None:
    with pytest.raises(UserError, match="twice"):
        Tokenizer.from_characters("aba")


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_a_tokenizer_that_is_not_mistrals_raises_no_alarm_about_mistral(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging

    heard: list[str] = []
    logger = logging.get_logger("transformers.tokenization_utils_tokenizers")
    monkeypatch.setattr(logger, "warning", lambda text, *_: heard.append(text))
    real("qwen2.5").save(tmp_path)  # only large vocabularies are suspected
    heard.clear()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    loaded = Tokenizer.load(tmp_path)
    assert ["incorrect regex" in text for text in heard] == [True] * (kind == "mistral")
    loaded.save(tmp_path / "again")
    if kind == "qwen2":
        assert "mistral" not in (tmp_path / "again/tokenizer_config.json").read_text()


@pytest.mark.parametrize("content", ["[]", "{", '{"a": ' + "[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_one_line(name: str, content: str, tmp_path: Path) -> None:
    Tokenizer.from_characters("ab").save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_of_a_directory_is_never_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tok: ...\nclass Conf: ...\n")
    auto_map = {"AutoTokenizer": ["evil.Tok", None], "AutoConfig": "evil.Conf"}
    (tmp_path / where).write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # what transformers would ask on a terminal
    with pytest.raises(UserError, match=rf"{where} asks to run Python code of the directory .*evil.*never does"):
        Tokenizer.load(tmp_path)
    assert not (tmp_path / "ran").exists()
