"""Table lookup: SQL queries on CSV files or on tables that a row of the data brings.

Tables are loaded into a database in memory. A query may only read: an authorizer refuses every statement but SELECT, and functions whose
result changes from call to call. A query has limits on time, on the number of rows and on the length of its text.
"""

from __future__ import annotations

import csv
import io
import re
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from burnish.config.errors import UserError
from burnish.environments.base import Episode
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import WrongArguments, check_arguments, cut_middle, error_result, tool_schema

MAX_VALUE_BYTES = 1 << 20
MAX_SQL_CHARS = 10_000
STEPS_BETWEEN_CHECKS = 1000
SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_SQL_CHARS * 4,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
}
ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
REFUSED_FUNCTIONS = {"load_extension", "random", "randomblob"}
INTEGER = re.compile(r"[+-]?\d{1,18}")
REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Table:
    """A table with named columns."""

    name: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


# --- reading tables --------------------------------------------------------------------------------------------------


def read_csv(path: Path, name: str | None = None, delimiter: str | None = None) -> Table:
    """Read a CSV file with a header; `.tsv` files are separated by tabs. The table is named after the file."""
    if not path.is_file():
        raise UserError(f"table lookup: there is no file {path}")
    delimiter = delimiter or ("\t" if path.suffix.lower() == ".tsv" else ",")
    with path.open(newline="", encoding="utf-8-sig") as file:
        return _from_csv(name or _identifier(path.stem, 0), csv.reader(file, delimiter=delimiter), str(path))


def tables_of_row(tables: Any) -> list[Table]:
    """The tables of a data row: a mapping from names to `{header, rows}`, to a list of records, or to the text of a CSV."""
    if not isinstance(tables, Mapping) or not tables:
        raise UserError(f"the row's argument `tables` must map names to tables, not {type(tables).__name__}")
    return [_table_of_value(_identifier(str(name), index), value) for index, (name, value) in enumerate(tables.items())]


def _table_of_value(name: str, value: Any) -> Table:
    where = f"table {name!r} of the row"
    if isinstance(value, str):
        return _from_csv(name, csv.reader(io.StringIO(value)), where)
    if isinstance(value, Mapping) and "header" in value and "rows" in value:
        return _checked_table(name, list(value["header"]), [list(row) for row in value["rows"]], where)
    if isinstance(value, list) and value and all(isinstance(record, Mapping) for record in value):
        columns = list(dict.fromkeys(key for record in value for key in record))
        return _checked_table(name, columns, [[record.get(column) for column in columns] for record in value], where)
    raise UserError(f"{where}: expected {{header, rows}}, a list of records or the text of a CSV")


def _from_csv(name: str, reader: Iterable[list[str]], where: str) -> Table:
    rows = [row for row in reader if row]
    if not rows:
        raise UserError(f"{where}: there is no header line")
    return _checked_table(name, rows[0], rows[1:], where)


def _checked_table(name: str, header: Sequence[Any], rows: list[list[Any]], where: str) -> Table:
    """A table with distinct column names. Columns whose texts are all numbers become numbers; an empty text is NULL."""
    if not header:
        raise UserError(f"{where}: there is no column")
    columns: list[str] = []
    for index, column in enumerate(header):
        plain = _identifier(str(column), index)
        taken = {c.lower() for c in columns}
        number, unique = 2, plain
        while unique.lower() in taken:
            unique, number = f"{plain}_{number}", number + 1
        columns.append(unique)
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise UserError(f"{where}: row {number + 1} has {len(row)} values, and the header has {len(columns)}")
    typed = [_typed_column([row[index] for row in rows]) for index in range(len(columns))]
    return Table(name, tuple(columns), list(zip(*typed, strict=True)))


def _identifier(text: str, index: int) -> str:
    """A name that needs no quotes in SQL."""
    plain = re.sub(r"\W+", "_", text.strip()).strip("_")
    return plain if plain and not plain[0].isdigit() else f"c{index + 1}_{plain}".rstrip("_")


def _typed_column(values: list[Any]) -> list[Any]:
    plain = [
        value if value is None or isinstance(value, int | float | str) else str(value)
        for value in (None if isinstance(value, str) and not value.strip() else value for value in values)
    ]
    texts = [value.strip() for value in plain if isinstance(value, str)]
    for pattern, make in ((INTEGER, int), (REAL, float)):
        if texts and all(pattern.fullmatch(text) for text in texts):
            return [make(value) if isinstance(value, str) else value for value in plain]
    return plain


# --- the database ----------------------------------------------------------------------------------------------------


class QueryFailed(Exception):
    """The query is wrong or passed a limit. The message is for the model."""


class TableDatabase:
    """Tables in memory that can only be read."""

    def __init__(self, tables: Sequence[Table]) -> None:
        names = [table.name.lower() for table in tables]
        if len(set(names)) != len(names):
            raise UserError(f"two tables have the same name ({', '.join(names)}): rename one of them")
        self.tables = tuple(tables)
        self._deadline = 0.0
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        for table in tables:
            columns = ", ".join(f'"{column}" {kind}' for column, kind in _column_types(table))
            self._connection.execute(f'CREATE TABLE "{table.name}" ({columns})')
            marks = ", ".join("?" * len(table.columns))
            self._connection.executemany(f'INSERT INTO "{table.name}" VALUES ({marks})', table.rows)
        self._connection.commit()
        self._connection.execute("PRAGMA query_only = 1")
        for limit, value in SQLITE_LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_authorizer(_authorize)
        self._connection.set_progress_handler(self._is_late, STEPS_BETWEEN_CHECKS)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def query(self, sql: str, timeout_s: float, max_rows: int) -> tuple[list[str], list[tuple[Any, ...]], bool]:
        """Column names, rows, and whether there were more rows; QueryFailed with the reason if the query fails."""
        if len(sql) > MAX_SQL_CHARS:
            raise QueryFailed(f"the query has {len(sql)} characters, and {MAX_SQL_CHARS} are allowed")
        self._deadline = time.monotonic() + timeout_s
        try:
            cursor = self._connection.execute(sql)
            rows = cursor.fetchmany(max_rows + 1)
            columns = [description[0] for description in cursor.description or ()]
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, UnicodeError) as error:
            raise QueryFailed(self._reason(error, timeout_s)) from error
        if not columns:
            raise QueryFailed("only SELECT queries are allowed")
        return columns, rows[:max_rows], len(rows) > max_rows

    def _reason(self, error: Exception, timeout_s: float) -> str:
        words = str(error)
        if words == "interrupted":
            return f"the query took longer than {timeout_s:g} s"
        if words == "not authorized":
            return "only SELECT queries are allowed"
        if words.startswith("no such table"):
            return f"{words} (tables: {', '.join(table.name for table in self.tables)})"
        if words.startswith("no such column"):
            columns = "; ".join(f"{table.name}: {', '.join(table.columns)}" for table in self.tables)
            return f"{words} (columns of {columns})"
        return words

    def schema_text(self, num_examples: int = 3) -> str:
        """The tables as CREATE TABLE statements with their number of rows and the first rows, for a prompt."""
        return "\n\n".join(_schema_of(table, num_examples) for table in self.tables)

    def close(self) -> None:
        self._connection.close()


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    is_allowed = action in ALLOWED_ACTIONS
    if action == sqlite3.SQLITE_FUNCTION:
        is_allowed = (second or "").lower() not in REFUSED_FUNCTIONS
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY


def _column_types(table: Table) -> list[tuple[str, str]]:
    kinds = []
    for index, column in enumerate(table.columns):
        types = {type(row[index]) for row in table.rows} - {type(None)}
        numbers = types <= {int, bool, float}
        kinds.append((column, "TEXT" if not types or not numbers else "REAL" if float in types else "INTEGER"))
    return kinds


def _schema_of(table: Table, num_examples: int) -> str:
    columns = ",\n".join(f"  {column} {kind}" for column, kind in _column_types(table))
    text = f"CREATE TABLE {table.name} (\n{columns}\n);\n-- {len(table.rows)} rows"
    if num_examples and table.rows:
        text += f"; the first {min(num_examples, len(table.rows))}:\n-- " + " | ".join(table.columns)
        for row in table.rows[:num_examples]:
            text += "\n-- " + " | ".join(_cell(value) for value in row)
    return text


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text.replace("\n", " ")


# --- the tools -------------------------------------------------------------------------------------------------------


class TableLookup(Tool):
    """Answers SELECT queries on CSV files. All episodes share the tables."""

    def __init__(
        self,
        path: str | Sequence[str] | Mapping[str, str],
        base: str | None = None,
        name: str = "sql",
        delimiter: str | None = None,
        max_rows: int = 20,
        max_chars: int = 2000,
        timeout_s: float = 2.0,
    ) -> None:
        """`path` is a CSV file, a list of them, or a mapping from table names to files. Relative paths start at `base`."""
        files = {None: path} if isinstance(path, str) else path if isinstance(path, Mapping) else None
        named = files.items() if files is not None else [(None, file) for file in path]
        tables = [read_csv(Path(base or ".") / file, table, delimiter) for table, file in named]
        if not tables:
            raise UserError("table lookup: `path` names no file")
        self.database: TableDatabase | None = TableDatabase(tables)
        self._set_limits(name, max_rows, max_chars, timeout_s, f"these tables:\n{self.database.schema_text(0)}")

    def _set_limits(self, name: str, max_rows: int, max_chars: int, timeout_s: float, tables: str) -> None:
        for key, value in (("max_rows", max_rows), ("max_chars", max_chars), ("timeout_s", timeout_s)):
            if not value > 0:
                raise UserError(f"table lookup: {key} must be above 0, not {value}")
        self._max_rows, self._max_chars, self._timeout_s = max_rows, max_chars, timeout_s
        description = f"Run a SELECT query of SQLite on {tables}"
        query = {"type": "string", "description": "One SELECT statement."}
        self.schema = tool_schema(name, description, {"query": query}, ["query"])

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Run the query and return its rows, separated by ` | `."""
        assert self.database is not None, "`start` comes before the first call"
        try:
            sql = check_arguments(self.schema, arguments)["query"]
            columns, rows, has_more = self.database.query(sql, self._timeout_s, self._max_rows)
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        except QueryFailed as error:
            return error_result(str(error))
        lines = [" | ".join(columns), *(" | ".join(_cell(value) for value in row) for row in rows)]
        lines.append(
            f"(only the first {len(rows)} rows are shown)"
            if has_more
            else f"({len(rows)} {'row' if len(rows) == 1 else 'rows'})"
        )
        return cut_middle("\n".join(lines), self._max_chars)


class RowTableLookup(TableLookup):
    """Answers SELECT queries on the tables of the episode's row, which the row gives as this tool's argument `tables`."""

    is_stateful: ClassVar[bool] = True

    def __init__(self, name: str = "sql", max_rows: int = 20, max_chars: int = 2000, timeout_s: float = 2.0) -> None:
        self.database = None
        self._set_limits(name, max_rows, max_chars, timeout_s, "the tables of the question")

    async def start(self, episode: Episode, arguments: Mapping[str, Any]) -> None:
        if "tables" not in arguments:
            raise UserError(f"row of episode {episode.id}: the tool {self.name!r} needs the argument `tables`")
        self.database = TableDatabase(tables_of_row(arguments["tables"]))

    async def close(self) -> None:
        if self.database is not None:
            self.database.close()
            self.database = None
