"""`burnish sample`: text, order and time of output, and refused arguments."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burnish.cli.main import main
from burnish.cli.sample import CompletionPrinter
from burnish.config.model import Model, NewModel
from burnish.models.policy import load_policy
from burnish.models.tokenizer import Tokenizer

STORIES = Path(__file__).parents[3] / "shared" / "data" / "models" / "stories260k"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason=f"no model at {STORIES}")
ALPHABET = "0123456789>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, ALPHABET, seed=1).save(path)
    return path


def greedy(path: Path, prompt: list[int], num: int) -> list[int]:
    """The tokens transformers' own generate adds."""
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    tokens = torch.tensor([prompt])
    out = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=num)
    new: list[int] = out[0, len(prompt) :].tolist()
    return new


@needs_stories
def test_greedy_text_is_that_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(STORIES)
    new = greedy(STORIES, tokenizer.encode("Once upon a time", special=True), 100)
    assert main(["sample", str(STORIES), "Once upon a time", "--temperature", "0", "--max-tokens", "100"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(new) + "\n"


@needs_stories
def test_a_stop_text_ends_the_completion(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample", str(STORIES), "Once upon a time", "--temperature", "0", "--max-tokens", "100"]
    assert main(command) == 0
    whole = capsys.readouterr().out
    assert main([*command, "--stop", "Lily"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == whole[: whole.index("Lily") + 4]


@needs_stories
def test_the_prompt_comes_from_stdin_and_max_tokens_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("The cat\n"))
    assert main(["sample", str(STORIES), "-", "--max-tokens", "100000", "--stop", ".", "--seed", "3"]) == 0
    read = capsys.readouterr()
    assert "max_tokens cut from 100000 to" in read.err
    assert main(["sample", str(STORIES), "The cat", "--stop", ".", "--seed", "3"]) == 0
    assert read.out == capsys.readouterr().out


def test_several_samples_come_under_headers_and_differ(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample", str(model), "123>", "--max-tokens", "12", "--dtype", "float64"]
    assert main([*command, "--n", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == [f"--- sample {i} of 3 ---" for i in (1, 2, 3)]
    assert len(set(lines[1::2])) == 3
    assert main(command) == 0  # alone, the first sample is the same
    assert capsys.readouterr().out == lines[1] + "\n"
    assert main([*command, "--seed", "1"]) == 0
    assert capsys.readouterr().out != lines[1] + "\n"


def test_text_is_printed_when_it_is_drawn_and_in_the_order_of_the_samples(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_characters(ALPHABET)
    one, two, end = (*tokenizer.encode("12"), tokenizer.eos_ids[0])
    printer = CompletionPrinter(tokenizer, 2)
    assert capsys.readouterr().out == "--- sample 1 of 2 ---\n"
    printer.hear("0", one)
    assert capsys.readouterr().out == "1"
    printer.hear("1", two)
    printer.hear("1", end)
    printer.end("1")
    assert capsys.readouterr().out == ""
    printer.hear("0", two)
    printer.end("0")
    assert capsys.readouterr().out == "2\n--- sample 2 of 2 ---\n2\n"


def test_another_architecture_prints_whole_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = Tokenizer.from_characters(ALPHABET)
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": tokenizer.vocab_size}
    end = tokenizer.eos_ids[0]
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end, initializer_range=0.5)).save_pretrained(
        tmp_path
    )
    tokenizer.save(tmp_path)
    prompt = tokenizer.encode("123>")
    assert main(["sample", str(tmp_path), "123>", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert shown.out == tokenizer.decode(greedy(tmp_path, prompt, 28)) + "\n"
    assert "each completion is printed when it is complete: forward by transformers" in shown.err
    assert "max_tokens cut from 256 to 28" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["  "], "the prompt is empty"),
        (["abc"], "is not in this tokenizer's alphabet"),
        (["1>", "--n", "2", "--temperature", "0"], "greedy samples are identical"),
        (["1>", "--n", "0"], "--n 0: expected 1 or more"),
        (["1>", "--top-p", "2"], "top_p: got 2.0"),
        (["1>", "--template", "chat"], "has no chat template"),
        (["1>", "--system", "be kind"], "template.system is for chat templates"),
        (["1" * 40 + ">"], "41 tokens, but the model is made for 32 positions"),
    ],
)
def test_bad_input_is_explained(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(model), *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_a_missing_model_names_its_neighbour(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(model.parent / "tinny"), "1>"]) == 2
    assert "did you mean 'tiny'" in capsys.readouterr().err


def test_a_prerendered_prompt_is_parsed_and_others_are_text() -> None:
    import argparse

    from burnish.cli.sample import add_arguments, requests
    from burnish.config.rollout import Sampling
    from tests.serve.conftest import END, START, byte_tokenizer

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    policy: Any = SimpleNamespace(tokenizer=byte_tokenizer(), max_positions=None)
    text = f"{START}user\nhi{END}"
    num_special = {}
    for flags in ((), ("--prerendered",), ("--template", "plain")):
        (request,) = requests(parser.parse_args([".", text, *flags]), policy, Sampling(), text)
        num_special[flags] = sum(map(policy.tokenizer.is_special, request.tokens))
    assert num_special == {(): 3, ("--prerendered",): 2, ("--template", "plain"): 0}


def test_a_terminal_sees_control_characters_and_a_pipe_gets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_characters("a\x1b[2J\r\n")
    text = "a\x1b[2J\r\na"
    for is_terminal, expected in ((True, "a␛[2J␍\na\n"), (False, text + "\n")):
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        printer = CompletionPrinter(tokenizer, 1)
        for token in tokenizer.encode(text):
            printer.hear("0", token)
        printer.end("0")
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize("command", [("sample", "12"), ("eval", "task:addition", "--limit=2"), ("serve", "--port=0")])
def test_a_model_without_probabilities_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    policy = load_policy(Model(device="cpu"), model, None, seed=0)
    dict(policy.module.named_parameters())["layers.0.down.weight"].data[3, 3] = torch.nan
    policy.save(tmp_path / "broken")
    name, *rest = command
    out = ["--out", str(tmp_path / "out")] if name == "eval" else []
    assert main([name, str(tmp_path / "broken"), *rest, *out]) == 2
    said = capsys.readouterr()
    assert "broken gives no probabilities (NaN): its tensor layers.0.down.weight holds values" in said.err
    assert said.out == ""
