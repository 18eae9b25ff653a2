"""Passages and multi-hop questions from the tables, with the passages that hold each answer.

A question names one thing (a city, a province, a calling code, an element) and follows one to three relations from there. Every relation
stands in one passage, so a question of three hops needs three. Names that the tables use twice are left out, so that answers are unique.

Countries are divided among train, validation and test. Cities and provinces follow their country, elements the country of their discovery.
So no question of the test split is about a thing that occurs in a question of the train split. The splits also differ in their phrasing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from burnish.config.errors import UserError
from burnish.core.random_keys import fold, hash_text, permutation
from burnish.data.search_corpus.tables import City, Country, Element, Subdivision, Tables, plain_name

SPLITS = ("train", "validation", "test")
SHARES = {"train": 0.7, "validation": 0.1}
"""Shares of the countries; the rest is the test split."""
NUM_LISTED_CITIES = 5
MAX_CITIES_PER_COUNTRY = 30
MAX_SUBDIVISIONS_PER_COUNTRY = 30

Document = dict[str, str]
"""A passage: id, title, text."""


@dataclass(frozen=True)
class Question:
    """A question before it is phrased."""

    kind: str
    owner: str
    """The code of the country that decides the split; for an element without one, its name."""
    slots: dict[str, str]
    answer: tuple[str, ...]
    needs: tuple[str, ...]
    """Ids of the passages on the way, one per hop."""
    searches: tuple[str, ...]
    """A good query for each hop."""

    @property
    def hops(self) -> int:
        return len(self.needs)


# --- passages ---------------------------------------------------------------------------------------------------------------


def passages(tables: Tables) -> list[Document]:
    """All passages of the corpus."""
    ranked = ranked_cities(tables)
    found = [passage for country in tables.countries.values() for passage in _country_passages(country, ranked)]
    found += [_city_passage(city, tables, ranked) for city in tables.cities]
    found += [_subdivision_passage(one, tables) for one in tables.subdivisions]
    found += [passage for element in tables.elements for passage in _element_passages(element)]
    return found


def ranked_cities(tables: Tables) -> dict[str, list[City]]:
    """The cities of each country, largest first."""
    by_country: dict[str, list[City]] = {code: [] for code in tables.countries}
    for city in sorted(tables.cities, key=lambda c: (-c.population, c.id)):
        by_country[city.country].append(city)
    return by_country


def _document(id: str, title: str, text: str) -> Document:
    return {"id": id, "title": title, "text": text}


def _country_passages(country: Country, ranked: dict[str, list[City]]) -> Iterator[Document]:
    code, name = country.code, country.name
    yield _document(
        f"country/{code}",
        name,
        f"{name} is a country in {country.continent}. Its capital is {country.capital.name}. It covers {country.area:,} square "
        f"kilometres and has {country.population:,} inhabitants. Its ISO codes are {code} and {country.iso3}.",
    )
    yield _document(
        f"country/{code}/money",
        f"Money of {name}",
        f"People in {name} pay with the {country.currency_name}, whose currency code is {country.currency_code}.",
    )
    yield _document(
        f"country/{code}/contact",
        f"Telephone and internet in {name}",
        f"The international calling code of {name} is {country.phone}. Web addresses of {name} end in the domain {country.domain}.",
    )
    borders = (
        f"{name} has a land border with {_listed(country.neighbours)}."
        if country.neighbours
        else f"{name} has no land border with another country."
    )
    yield _document(f"country/{code}/borders", f"Borders of {name}", borders)
    largest = [city.name for city in ranked[code][:NUM_LISTED_CITIES]]
    if len(largest) > 1:
        text = f"The largest cities of {name}, by number of inhabitants, are {_listed(largest)}, in this order."
        yield _document(f"country/{code}/cities", f"Cities of {name}", text)


def _listed(names: Any) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _city_passage(city: City, tables: Tables, ranked: dict[str, list[City]]) -> Document:
    country = tables.countries[city.country]
    north = f"{abs(city.latitude):.2f} degrees {'north' if city.latitude >= 0 else 'south'}"
    east = f"{abs(city.longitude):.2f} degrees {'east' if city.longitude >= 0 else 'west'}"
    return _document(
        f"city/{city.id}",
        city.name,
        f"{city.name} is a city in {country.name}. It has {city.population:,} inhabitants and lies at {north} and {east}. Its clocks "
        f"follow the time zone {city.timezone}.",
    )


def _subdivision_passage(one: Subdivision, tables: Tables) -> Document:
    country = tables.countries[one.country]
    return _document(
        f"subdivision/{one.code}",
        one.name,
        f"{one.name} is a subdivision of {country.name}, of the kind {one.kind}. Its ISO 3166-2 code is {one.code}.",
    )


def _element_passages(element: Element) -> Iterator[Document]:
    name = element.name
    text = f"{name} is the chemical element with the atomic number {element.number} and the symbol {element.symbol}. Its atomic weight is {element.weight:g}."
    if element.melting_point is not None:
        text += f" It melts at {element.melting_point:g} degrees Celsius."
    yield _document(f"element/{element.number}", name, text)
    facts = []
    if element.year is not None:
        facts.append(f"{name} was discovered in {element.year}" + (f" in {element.place}." if element.place else "."))
    if element.discoverers:
        facts.append(f"Discovery: {element.discoverers}.")
    if element.origin:
        facts.append(f"Origin of the name: {element.origin.rstrip('.')}.")
    if facts:
        yield _document(f"element/{element.number}/history", f"History of {name}", " ".join(facts))


# --- questions --------------------------------------------------------------------------------------------------------------

PHRASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # kind: (phrasings of train, phrasings of validation and test)
    "city_population": (
        ("How many inhabitants does the city of {city} have?", "What is the number of inhabitants of {city}?"),
        ("How many people live in the city of {city}?",),
    ),
    "city_timezone": (
        ("Which time zone do the clocks of {city} follow?", "What is the time zone of the city of {city}?"),
        ("In which time zone is the city of {city}?",),
    ),
    "subdivision_code": (
        ("What is the ISO 3166-2 code of {subdivision}?", "Give the ISO 3166-2 code of the subdivision {subdivision}."),
        ("Which ISO 3166-2 code does {subdivision} have?",),
    ),
    "element_melting": (
        ("At how many degrees Celsius does {element} melt?", "What is the melting point of {element} in degrees Celsius?"),
        ("How many degrees Celsius does it take to melt {element}?",),
    ),
    "element_year": (
        ("In which year was {element} discovered?", "When was the element {element} discovered?"),
        ("What was the year of the discovery of {element}?",),
    ),
    "city_capital": (
        ("What is the capital of the country in which {city} lies?", "{city} is a city in a country with which capital?"),
        ("Name the capital of the country that the city of {city} belongs to.",),
    ),
    "city_phone": (
        ("What is the calling code of the country in which {city} lies?", "Which calling code does the country of the city {city} have?"),
        ("To phone someone in {city}, which international calling code do you need?",),
    ),
    "city_money": (
        ("What is the currency code of the country in which {city} lies?", "Which currency code has the money that people in {city} pay with?"),
        ("Give the code of the currency used in the country that {city} belongs to.",),
    ),
    "subdivision_domain": (
        ("Which internet domain does the country have that {subdivision} is a part of?", "What is the internet domain of the country of {subdivision}?"),
        ("In which domain do web addresses of the country end of which {subdivision} is a subdivision?",),
    ),
    "subdivision_capital": (
        ("What is the capital of the country that {subdivision} is a part of?", "{subdivision} is a subdivision of a country with which capital?"),
        ("Name the capital of the country whose subdivisions include {subdivision}.",),
    ),
    "phone_capital": (
        ("What is the capital of the country with the calling code {phone}?", "The calling code {phone} belongs to a country with which capital?"),
        ("Name the capital of the country that you phone with the international code {phone}.",),
    ),
    "money_largest": (
        ("What is the largest city of the country whose money is the {money}?", "Which city is the largest of the country that pays with the {money}?"),
        ("The {money} is the currency of one country. Name its largest city.",),
    ),
    "country_capital_population": (
        ("How many inhabitants does the capital of {country} have?", "What is the number of inhabitants of the capital of {country}?"),
        ("How many people live in the capital city of {country}?",),
    ),
    "only_neighbour_capital": (
        ("What is the capital of the only country that {country} has a land border with?", "{country} has one neighbour on land. What is the capital of that neighbour?"),
        ("Name the capital of the single country that shares a land border with {country}.",),
    ),
    "element_capital": (
        ("What is the capital of the country in which {element} was discovered?", "{element} was discovered in a country with which capital?"),
        ("Name the capital of the country where the element {element} was discovered.",),
    ),
    "city_capital_population": (
        ("How many inhabitants does the capital of the country have in which {city} lies?", "What is the number of inhabitants of the capital of the country of {city}?"),
        ("{city} belongs to a country. How many people live in the capital of that country?",),
    ),
    "city_second_population": (
        ("How many inhabitants does the second largest city of the country have in which {city} lies?", "What is the number of inhabitants of the second largest city in the country of {city}?"),
        ("{city} belongs to a country. How many people live in the city of that country that is the second largest?",),
    ),
    "subdivision_capital_timezone": (
        ("Which time zone does the capital of the country follow that {subdivision} is a part of?", "What is the time zone of the capital of the country of {subdivision}?"),
        ("{subdivision} is a subdivision of a country. In which time zone is the capital of that country?",),
    ),
    "phone_capital_population": (
        ("How many inhabitants does the capital of the country with the calling code {phone} have?", "What is the number of inhabitants of the capital of the country with the calling code {phone}?"),
        ("How many people live in the capital of the country that you phone with the international code {phone}?",),
    ),
    "element_capital_population": (
        ("How many inhabitants does the capital of the country have in which {element} was discovered?", "What is the number of inhabitants of the capital of the country where {element} was discovered?"),
        ("{element} was discovered in a country. How many people live in the capital of that country?",),
    ),
}  # fmt: skip


@dataclass
class _Maker:
    """Makes all questions of the tables."""

    tables: Tables
    seed: int
    ranked: dict[str, list[City]] = field(init=False)

    def __post_init__(self) -> None:
        self.ranked = ranked_cities(self.tables)
        tables = self.tables
        names = [*(c.name for c in tables.countries.values()), *(s.name for s in tables.subdivisions)]
        names += [element.name for element in tables.elements]
        self._other_names = {plain_name(name) for name in names}

    def questions(self) -> Iterator[Question]:
        for code, country in self.tables.countries.items():
            cities = [city for city in self.ranked[code] if self._is_unique(city)]
            for city in self._some(cities, MAX_CITIES_PER_COUNTRY, code):
                yield from self._city_questions(city, country)
            own = [one for one in self.tables.subdivisions if one.country == code and self._is_no_city(one)]
            for one in self._some(own, MAX_SUBDIVISIONS_PER_COUNTRY, code):
                yield from self._subdivision_questions(one, country)
            yield from self._country_questions(country)
        for element in self.tables.elements:
            yield from self._element_questions(element)

    def _is_unique(self, city: City) -> bool:
        name = plain_name(city.name)
        return self.tables.city_names[name] == 1 and name not in self._other_names

    def _is_no_city(self, one: Subdivision) -> bool:
        return plain_name(one.name) not in self.tables.city_names

    def _some(self, items: list[Any], most: int, code: str) -> list[Any]:
        order = permutation(len(items), self.seed, "entities", hash_text(code))
        return [items[i] for i in sorted(order[:most])]

    def _city_questions(self, city: City, country: Country) -> Iterator[Question]:
        code, name, here = country.code, country.name, f"city/{city.id}"
        slots, find = {"city": city.name}, f"{city.name} city country"
        yield Question("city_population", code, slots, _number(city.population), (here,), (f"{city.name} inhabitants",))
        yield Question("city_timezone", code, slots, (city.timezone,), (here,), (f"{city.name} time zone",))
        contact, money = f"country/{code}/contact", f"country/{code}/money"
        yield Question(
            "city_phone", code, slots, (country.phone,), (here, contact), (find, f"{name} international calling code")
        )
        yield Question("city_money", code, slots, (country.currency_code,), (here, money), (find, f"Money of {name}"))
        if country.capital.id != city.id:
            capital = (f"country/{code}", f"{name} country capital")
            yield Question("city_capital", code, slots, (country.capital.name,), (here, capital[0]), (find, capital[1]))
            yield Question(
                "city_capital_population",
                code,
                slots,
                _number(country.capital.population),
                (here, capital[0], f"city/{country.capital.id}"),
                (find, capital[1], f"{country.capital.name} city in {name} inhabitants"),
            )
        if len(self.ranked[code]) > 1 and (second := self.ranked[code][1]).id != city.id:
            yield Question(
                "city_second_population",
                code,
                slots,
                _number(second.population),
                (here, f"country/{code}/cities", f"city/{second.id}"),
                (find, f"Cities of {name} largest", f"{second.name} city in {name} inhabitants"),
            )

    def _subdivision_questions(self, one: Subdivision, country: Country) -> Iterator[Question]:
        code, name, here = country.code, country.name, f"subdivision/{one.code}"
        slots, find = {"subdivision": one.name}, f"{one.name} subdivision"
        yield Question("subdivision_code", code, slots, (one.code,), (here,), (f"{one.name} ISO 3166-2 code",))
        yield Question(
            "subdivision_domain",
            code,
            slots,
            (country.domain,),
            (here, f"country/{code}/contact"),
            (find, f"{name} internet domain"),
        )
        capital = (f"country/{code}", f"{name} country capital")
        yield Question(
            "subdivision_capital", code, slots, (country.capital.name,), (here, capital[0]), (find, capital[1])
        )
        yield Question(
            "subdivision_capital_timezone",
            code,
            slots,
            (country.capital.timezone,),
            (here, capital[0], f"city/{country.capital.id}"),
            (find, capital[1], f"{country.capital.name} city in {name} time zone"),
        )

    def _country_questions(self, country: Country) -> Iterator[Question]:
        code, name, here = country.code, country.name, f"country/{country.code}"
        capital, city = country.capital, f"city/{country.capital.id}"
        populous = f"{capital.name} city in {name} inhabitants"
        yield Question(
            "country_capital_population",
            code,
            {"country": name},
            _number(capital.population),
            (here, city),
            (f"{name} country capital", populous),
        )
        if country.phone and self.tables.all_phones[country.phone] == 1:
            slots, find = {"phone": country.phone}, f"international calling code {country.phone}"
            way = (f"{here}/contact", here)
            searches = (find, f"{name} country capital")
            yield Question("phone_capital", code, slots, (capital.name,), way, searches)
            yield Question(
                "phone_capital_population",
                code,
                slots,
                _number(capital.population),
                (*way, city),
                (*searches, populous),
            )
        if self.tables.all_currencies[country.currency_name] == 1 and len(self.ranked[code]) > 1:
            yield Question(
                "money_largest",
                code,
                {"money": country.currency_name},
                (self.ranked[code][0].name,),
                (f"{here}/money", f"{here}/cities"),
                (f"pay with the {country.currency_name}", f"Cities of {name} largest"),
            )
        others = [c for c in self.tables.countries.values() if c.name in country.neighbours]
        if len(country.neighbours) == 1 and len(others) == 1:
            other = others[0]
            yield Question(
                "only_neighbour_capital",
                f"{code}+{other.code}",
                {"country": name},
                (other.capital.name,),
                (f"{here}/borders", f"country/{other.code}"),
                (f"Borders of {name}", f"{other.name} country capital"),
            )

    def _element_questions(self, element: Element) -> Iterator[Question]:
        country = next((c for c in self.tables.countries.values() if c.name == element.country), None)
        owner = country.code if country is not None else element.name
        slots, history = {"element": element.name}, f"element/{element.number}/history"
        if element.melting_point is not None:
            where = (f"element/{element.number}",)
            answer = (f"{element.melting_point:g}",)
            yield Question("element_melting", owner, slots, answer, where, (f"{element.name} chemical element melts",))
        if element.year is not None:
            yield Question(
                "element_year",
                owner,
                slots,
                (str(element.year),),
                (history,),
                (f"History of {element.name} discovered",),
            )
        if country is not None and country.name == element.place:
            find = (f"History of {element.name} discovered in", f"{country.name} country capital")
            way, capital = (history, f"country/{country.code}"), country.capital
            yield Question("element_capital", owner, slots, (capital.name,), way, find)
            yield Question(
                "element_capital_population",
                owner,
                slots,
                _number(capital.population),
                (*way, f"city/{capital.id}"),
                (*find, f"{capital.name} city in {country.name} inhabitants"),
            )


def _number(value: int) -> tuple[str, ...]:
    return (f"{value:,}", str(value))


# --- splits -----------------------------------------------------------------------------------------------------------------


def split_of_owners(tables: Tables, seed: int) -> dict[str, str]:
    """The split of each country, by its code, and of each element without a country, by its name."""
    found: dict[str, str] = {}
    lone = [e.name for e in tables.elements if e.country is None]
    for owners in (list(tables.countries), lone):
        order = permutation(len(owners), seed, "splits", len(owners))
        for place, index in enumerate(order):
            share = (place + 0.5) / len(owners)
            is_train, is_seen = share < SHARES["train"], share < SHARES["train"] + SHARES["validation"]
            found[owners[index]] = "train" if is_train else "validation" if is_seen else "test"
    return found


def make_questions(tables: Tables, seed: int, numbers: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """Rows of each split: at most the given number, with all kinds of a split as equally frequent as possible."""
    owners = split_of_owners(tables, seed)
    by_split: dict[str, dict[str, list[Question]]] = {split: {} for split in SPLITS}
    for question in _Maker(tables, seed).questions():
        splits = {owners[owner] for owner in question.owner.split("+")}
        text = " ".join(question.slots.values()).casefold()
        if len(splits) == 1 and not any(answer.casefold() in text for answer in question.answer):
            by_split[splits.pop()].setdefault(question.kind, []).append(question)
    rows = {split: _chosen(by_split[split], split, seed, numbers[split]) for split in SPLITS}
    _check_unique([row for split in SPLITS for row in rows[split]])
    return rows


def _chosen(by_kind: dict[str, list[Question]], split: str, seed: int, number: int) -> list[dict[str, Any]]:
    """Take one question of each kind in turn, then shuffle."""
    shuffled = {
        kind: [items[i] for i in permutation(len(items), seed, split, hash_text(kind))]
        for kind, items in sorted(by_kind.items())
    }
    taken: list[Question] = []
    for turn in range(max(map(len, shuffled.values()), default=0)):
        taken += [items[turn] for items in shuffled.values() if turn < len(items)]
    taken = taken[:number]
    order = permutation(len(taken), seed, split, "order")
    return [_row(taken[i], split, seed) for i in order]


def _row(question: Question, split: str, seed: int) -> dict[str, Any]:
    phrasings = PHRASES[question.kind][0 if split == "train" else 1]
    key = fold(seed, question.kind, *question.slots.values())
    return {
        "prompt": phrasings[key % len(phrasings)].format(**question.slots),
        "answer": list(question.answer),
        "hops": question.hops,
        "kind": question.kind,
        "needs": list(question.needs),
        "searches": list(question.searches),
        "data_source": f"search_{question.hops}_hop" if question.hops == 1 else f"search_{question.hops}_hops",
    }


def _check_unique(rows: list[dict[str, Any]]) -> None:
    """Raise if a text is asked twice with different answers. The tables would then not determine the answer."""
    known: dict[str, list[str]] = {}
    for row in rows:
        other = known.setdefault(row["prompt"], row["answer"])
        if other != row["answer"]:
            raise UserError(f"the question {row['prompt']!r} has two answers, {other} and {row['answer']}")
