"""SQL on CSV files and on tables of a row."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.base import Episode
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.table_lookup import RowTableLookup, TableDatabase, TableLookup, tables_of_row

CITIES = "Name,Population,Founded in,Founded in\nRome,2800000,-753,x\nOslo,700000,1040,y\nAtlantis,,,\n"
FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "


@pytest.fixture
def lookup(tmp_path: Path) -> TableLookup:
    (tmp_path / "cities.csv").write_text(CITIES)
    return TableLookup("cities.csv", base=str(tmp_path), timeout_s=0.2, max_rows=3)


def ask(tool: TableLookup, query: str) -> str:
    result = asyncio.run(tool.call({"query": query}))
    return result.text if isinstance(result, ToolResult) else result


def test_numbers_are_numbers_and_empty_cells_are_null(lookup: TableLookup) -> None:
    query = "SELECT Name, Population / 2 AS half FROM cities WHERE Population IS NOT NULL ORDER BY Founded_in DESC"
    assert ask(lookup, query) == "Name | half\nOslo | 350000\nRome | 1400000\n(2 rows)"
    assert ask(lookup, "SELECT * FROM cities WHERE Population IS NULL") == (
        "Name | Population | Founded_in | Founded_in_2\nAtlantis | NULL | NULL | NULL\n(1 row)"
    )


def test_the_schema_for_prompts_has_types_and_first_rows(lookup: TableLookup) -> None:
    assert lookup.database is not None
    assert lookup.database.schema_text(1) == (
        "CREATE TABLE cities (\n  Name TEXT,\n  Population INTEGER,\n  Founded_in INTEGER,\n  Founded_in_2 TEXT\n);\n"
        "-- 3 rows; the first 1:\n-- Name | Population | Founded_in | Founded_in_2\n-- Rome | 2800000 | -753 | x"
    )


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("DELETE FROM cities", "only SELECT"),
        ("INSERT INTO cities VALUES (1, 2, 3, 4)", "only SELECT"),
        ("PRAGMA query_only = 0", "only SELECT"),
        ("ATTACH 'file.db' AS other", "only SELECT"),
        ("CREATE TABLE t AS SELECT 1", "only SELECT"),
        ("SELECT 1; DROP TABLE cities", "one statement"),
        ("", "only SELECT"),
        ("SELECT random()", "not authorized to use function: random"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT hex(zeroblob(100000000))", "too big"),
        (FOREVER + "SELECT count(*) FROM c", "took longer than 0.2 s"),
        ("SELECT name FROM towns", "no such table: towns (tables: cities)"),
        ("SELECT size FROM cities", "columns of cities: Name, Population"),
        ("SELECT " + "1," * 6000 + "1", "12008 characters"),
    ],
)
def test_only_short_reading_queries_run(lookup: TableLookup, query: str, problem: str) -> None:
    text = ask(lookup, query)
    assert text.startswith("Error: ")
    assert problem in text
    assert ask(lookup, "SELECT count(*) AS n FROM cities") == "n\n3\n(1 row)"


def test_rows_and_characters_are_limited_and_said(lookup: TableLookup) -> None:
    assert ask(lookup, FOREVER + "SELECT x FROM c") == "x\n1\n2\n3\n(only the first 3 rows are shown)"
    lookup._max_chars = 30
    assert "characters left out" in ask(lookup, "SELECT hex(zeroblob(100)) AS zeros")


def test_a_row_brings_its_tables_in_three_forms() -> None:
    tables = {
        "a": {"header": ["x", "y"], "rows": [["1", "u"], ["2.5", "v"]]},
        "2nd table": [{"x": 1}, {"x": 2, "z": "w"}],
        "c": "x,y\n1,2\n",
    }
    database = TableDatabase(tables_of_row(tables))
    assert database.query("SELECT sum(x) FROM a", 1.0, 5)[1] == [(3.5,)]
    assert database.query("SELECT z FROM c2_2nd_table WHERE x = 2", 1.0, 5)[1] == [("w",)]
    assert database.query("SELECT x + y FROM c", 1.0, 5)[1] == [(3,)]


def test_a_stateful_lookup_reads_the_tables_of_its_episode() -> None:
    async def play() -> tuple[str, str]:
        tool, texts = RowTableLookup(), []
        for value in (1, 2):
            await tool.start(Episode("r#0.0", 0, ""), {"tables": {"t": [{"x": value}]}})
            texts.append(str(await tool.call({"query": "SELECT x FROM t"})))
            await tool.close()
        return texts[0], texts[1]

    assert asyncio.run(play()) == ("x\n1\n(1 row)", "x\n2\n(1 row)")
    with pytest.raises(UserError, match="needs the argument `tables`"):
        asyncio.run(RowTableLookup().start(Episode("r#0.0", 0, ""), {}))


@pytest.mark.parametrize(
    ("tables", "message"),
    [([], "must map names"), ({"t": 5}, "expected"), ({"t": "a,b\n1\n"}, "row 1 has 1 values"), ({"t": ""}, "header")],
)
def test_tables_that_cannot_be_read_are_refused(tables: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tables_of_row(tables)
