"""Stems of English words, and the words that carry no meaning of their own: what is left of a text
when endings and function words change.

Endings are stripped by rule (the plural, -ed, -ing, -ly, a last -e, and -y for -ie), much as the
first step of Porter's stemmer does. Synonyms keep different stems. Words of other languages mostly
stay as they are.
"""

from __future__ import annotations

_VOWELS = frozenset("aeiouy")
_DOUBLED_AS_WRITTEN = frozenset("lsz")  # call, pass, buzz
FUNCTION_WORDS = frozenset(
    "a an the this that these those some any no every each all both either neither such "
    "i me my mine myself we us our ours ourselves you your yours yourself he him his himself she "
    "her hers herself it its itself they them their theirs themselves who whom whose which what "
    "one ones someone anyone everyone something anything everything nothing "
    "am is are was were be been being have has had having do does did doing will would shall "
    "should can could may might must ought "
    "and or but nor so yet if then else than because since while although though unless until "
    "when where why how whether as "
    "of in on at by for with about against between into through during before after above below "
    "to from up down out off over under within without upon among across along around behind "
    "beside beyond near toward towards via per "
    "not only also too very just more most much many few less least own same other another again "
    "ever never always often here there now even still almost quite rather "
    "re ve ll don doesn didn isn aren wasn weren won wouldn couldn shouldn".split()
)


def is_function_word(word: str) -> bool:
    """Tell whether a word in lower case carries no meaning of its own: a function word of English,
    or a single letter.
    """
    return word in FUNCTION_WORDS or (len(word) == 1 and word.isalpha())


def stem(word: str) -> str:
    """Return the stem of a word in lower case; short words, numbers and other alphabets stay."""
    if len(word) <= 3 or not (word.isascii() and word.isalpha()):
        return word
    word = _without_plural(word)
    for ending in ("ing", "ed"):
        rest = word.removesuffix(ending)
        if rest != word and not word.endswith("eed") and len(rest) > 1 and _has_vowel(rest):
            word = _single(rest)
            break
    if word.endswith("ly") and len(word) > 5:
        word = word[:-2]
    if word.endswith("e") and len(word) > 3:
        word = word[:-1]
    if word.endswith("y") and len(word) > 2 and word[-2] not in _VOWELS:
        word = word[:-1] + "i"
    return word


def _without_plural(word: str) -> str:
    if word.endswith("sses"):
        return word[:-2]
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        return word[:-1]
    return word


def _has_vowel(word: str) -> bool:
    return any(letter in _VOWELS for letter in word)


def _single(word: str) -> str:
    """Return a word with one consonant where its ending had doubled the last (running)."""
    doubled = len(word) > 2 and word[-1] == word[-2] and word[-1] not in _VOWELS
    return word[:-1] if doubled and word[-1] not in _DOUBLED_AS_WRITTEN else word
