"""Language identification by script and, among languages of one script, by stop words.

It is accurate enough to check whether an answer is in the requested language. It needs no model and no data files.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

SCRIPTS = {
    "LATIN": "en de fr es it pt nl fi sv tr pl sw vi",
    "DEVANAGARI": "hi mr ne",
    "ARABIC": "ar fa ur",
    "CYRILLIC": "ru bg uk",
    "KANNADA": "kn",
    "GURMUKHI": "pa",
    "GUJARATI": "gu",
    "TELUGU": "te",
    "TAMIL": "ta",
    "THAI": "th",
    "BENGALI": "bn",
    "HANGUL": "ko",
    "HEBREW": "he",
    "GREEK": "el",
    "CJK": "zh",
    "HIRAGANA": "ja",
}
"""The languages written in each script."""

STOP_WORDS = {
    "en": "the and of to in is that it for you was with on are this have be as not at from by they we his her an",
    "de": "der die das und ist nicht ich ein eine zu den mit von auf für sie wir es im dem des auch sich wie als",
    "fr": "le la les et est une des dans pour que qui vous pas sur avec ce au il nous je du plus sont mais",
    "es": "el la los las y es una que en por con para su se no lo como más pero del al sus son está",
    "it": "il la le e è di che un una per non con del della sono nel gli si come più ma anche alla dei",
    "pt": "o a os as e é de que em um uma para com não do da no na por se mais como dos das são ao",
    "nl": "de het een en is van dat niet ik je met op voor zijn er aan te ook maar als wij naar",
    "fi": "ja on ei että se hän oli mutta kun niin olen ovat myös joka tai hänen sen minä kuin voi tämä sinun",
    "sv": "och att det är en som på för med inte av den jag ett om har till men de vi så kan",
    "tr": "ve bir bu için ile da de çok ne ama gibi daha olarak olan ben sen değil var kadar",
    "pl": "i w na nie się jest to z do że jak ale po przez od dla są tak za czy który",
    "sw": "na ya wa kwa ni katika za la kuwa si hii cha yake hiyo lakini kama watu mimi wewe yako hivyo kila sana",
    "vi": "và là của có không một những được cho trong người với các này đã để tôi bạn khi như đó nhưng",
    "hi": "है और के में की का को से हैं यह कि पर नहीं एक लिए भी वह था तो हो ने इस जो",
    "mr": "आहे आणि च्या मध्ये तो ती ते आहेत एक हे या नाही मी आपण होते साठी करा असे त्या पण की",
    "ne": "छ र को मा लाई ले छन् यो हुन्छ गर्न भने पनि एक हो तपाईं छैन का थियो गरेको हामी म",
    "ar": "في من على إلى أن هذا التي الذي مع عن كان لا ما هو هي كل بين أو هذه لم إن",
    "fa": "و در به از که این را با است برای آن یک می های شما من هم تا ما بود نیست او",
    "ur": "ہے اور کے میں کی کا کو سے ہیں یہ کہ پر نہیں ایک لیے بھی وہ تھا تو آپ نے اس",
    "ru": "и в не на что я с он как это по но они мы к у за из от так же для все вы было",
    "bg": "и в не на че се с да от за е са по като но това тази ще който един беше си им към",
    "uk": "і в не на що я з він як це по але вони ми до у за від так для все ви було та є",
}

WORD = re.compile(r"[^\W\d_][\w\u0300-\u036f\u0900-\u0dff]*")


def letter_script(character: str) -> str:
    """The script of a letter, from its Unicode name; the empty string for other characters."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def main_script(text: str) -> str | None:
    """The script of most letters in a text; None for a text without letters."""
    counts = Counter(letter_script(character) for character in text)
    del counts[""]
    if counts["HIRAGANA"] + counts["KATAKANA"]:  # Japanese text often has more Chinese characters than kana
        return "HIRAGANA"
    return counts.most_common(1)[0][0] if counts else None


def detect_language(text: str) -> str | None:
    """The language of a text; None if it cannot be told."""
    script = main_script(text)
    languages = SCRIPTS.get(script or "", "").split()
    if len(languages) < 2:
        return languages[0] if languages else None
    words = Counter(WORD.findall(unicodedata.normalize("NFC", text).lower()))
    hits = {language: sum(words[word] for word in STOP_WORDS[language].split()) for language in languages}
    best = max(languages, key=lambda language: hits[language])
    return best if hits[best] else None


def may_be_language(text: str, language: str) -> bool:
    """Whether a text may be in a language: the language is detected, or cannot be told and the script fits."""
    if language not in {name for names in SCRIPTS.values() for name in names.split()}:
        raise ValueError(f"cannot detect the language {language!r}; known languages: {', '.join(SCRIPTS.values())}")
    found = detect_language(text)
    if found is None:
        script = main_script(text)
        return script is None or language in SCRIPTS.get(script, "").split()
    return found == language
