"""First and last names for the game alphabet_sort, in alphabetical order and without repeats."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Ada Adam Agnes Albert Alice Amir Anna Anton Arthur Astrid Ava Basil Beatrice Benno Bianca Boris "
    "Bruno Camila Carl Cecilia Chloe Clara Conrad Cyrus Daisy Dario Delia Dmitri Dora Edgar Edith Elena "
    "Elias Emil Emma Enzo Erik Esther Ethan Eva Fabio Farid Felix Fiona Flora Frank Frida Gavin Georg "
    "Gina Gloria Grace Greta Gustav Hana Hannah Harold Hazel Hector Helen Henrik Hugo Ida Igor Ines "
    "Ingrid Irene Isaac Ivan Ivy Jakob Jamal Jane Jasper Joan Jonas Judith Julia Kamal Karen Kenji Kira "
    "Lars Laura Leila Leon Lidia Linus Lucas Lucy Luis Lydia Magnus Marco Maria Martha Max Maya Mei Mila "
    "Milo Miriam Mona Nadia Naomi Nils Nina Noah Nora Oleg Olga Oliver Omar Oscar Otto Paula Pedro Petra "
    "Philip Quinn Rachel Ralph Ravi Rita Robert Rosa Ruth Samir Sara Selma Simon Sofia Stella Sven Tara "
    "Thea Theo Tomas Ursula Vera Victor Viola Walter Wanda Xenia Yara Yusuf Zara Zoe"
)
"""First names."""

LAST_NAMES = _words(
    "Abbott Adler Ahmed Albers Almeida Andersen Archer Arias Bachmann Baker Barnes Bauer Becker Bell "
    "Berger Bianchi Bishop Blake Bosch Brandt Brooks Calder Campos Carver Castro Chandler Chen Clarke "
    "Coleman Conti Cooper Costa Curtis Dahl Dalton Das Dawson Delgado Diaz Dietrich Dixon Duarte Dubois "
    "Eaton Eberhard Ekman Ellis Engel Evans Falk Farrell Fernandez Ferrari Fischer Fleming Fontaine "
    "Forster Frost Fuchs Gallo Garcia Gibson Goldberg Gomez Graham Grant Gupta Haas Hale Hansen Harper "
    "Hayes Heller Herrera Hoffman Holt Horvath Hughes Ibarra Ivanov Jansen Jensen Joshi Kaplan Kaur "
    "Keller Kim Klein Kovac Kramer Kumar Lambert Lang Larsen Lee Lindberg Lopez Lund Maier Marino Marsh "
    "Mendez Meyer Miller Molina Moreau Moretti Morris Nakamura Nash Nielsen Novak Nowak Olsen Ortiz "
    "Osborne Palmer Park Patel Pereira Perez Peters Petrov Popov Quintana Ramos Reed Reyes Ricci Richter "
    "Rivera Rossi Russo Sato Schmidt Schneider Sharma Silva Singh Solberg Stone Suzuki Tanaka Torres "
    "Turner Ueda Vargas Vogel Wagner Walsh Weber Winter Wolf Wright Yamada Young Ziegler Zimmer"
)
"""Last names."""
