"""Makes text that somebody else wrote harmless before a person sees it.

A peer's reason, a model's text, a server's answer or a file's name may hold what a terminal obeys
(escape sequences) or what disguises the text around it (order of writing turned round, characters
without width, unassigned ones that are never drawn, private ones). Each of these is shown as what
it is: a control character by its picture, as ␛, all others by number, as <U+202E>.

Kept is what writing needs: newlines and tabs, one variation selector after a character, joiners
between emoji, flags of regions (England, Scotland, Wales), and a joiner or non-joiner between two
characters of one of the scripts that are written with them: Arabic and its kin, where they choose a
letter's form, as Persian does, and those of India and around it, where they choose a conjunct's.
Between other letters, as in Latin words, they can only disguise, and are shown.
"""

from __future__ import annotations

import regex

# Letters of these scripts join, or have viramas: Unicode Standard Annex 31, section 2.3. Common and
# inherited characters (a mark that several scripts share) belong to what they stand beside.
_CURSIVE = "Arab Syrc Mand Mong Nkoo Phag Adlm Rohg"
_CONJOINING = "Deva Beng Guru Gujr Orya Taml Telu Knda Mlym Sinh Mymr Khmr Tibt Bali Java Newa"
_WORD = "".join(rf"\p{{Script_Extensions={script}}}" for script in _CURSIVE.split())
_WORD += "".join(rf"\p{{Script_Extensions={script}}}" for script in _CONJOINING.split())
_LETTER = rf"[[{_WORD}]&&[\p{{L}}\p{{M}}]]"
_HIDDEN = (
    r"[[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]"
    r"--\p{Prepended_Concatenation_Mark}--[\n\t]]"
)
_PICTURE = r"\p{Extended_Pictographic}"
_TAGS = r"[\U000E0030-\U000E0039\U000E0061-\U000E007A]"
_CHARACTERS = regex.compile(
    rf"""(?V1)(?P<kept>
        (?<={_PICTURE}\uFE0F?\p{{Emoji_Modifier}}?)\u200D(?={_PICTURE})
        | (?<={_LETTER})[\u200C\u200D](?={_LETTER})
        | (?<!{_HIDDEN}|[\n\t]|^)\p{{Variation_Selector}}
        | (?<=\U0001F3F4){_TAGS}{{3,6}}\U000E007F
    ) | {_HIDDEN}""",
    regex.VERBOSE,
)
# What is decided by characters to come, and how many before these it may depend on.
_UNDECIDED = regex.compile(rf"(?:[\u200C\u200D]|(?<=\U0001F3F4){_TAGS}{{1,6}})\Z")
_LOOKS_BACK = 3


def printable(text: str) -> str:
    """Return `text` with everything shown that would act on a terminal or hide in it."""
    return str(_CHARACTERS.sub(_shown, text))


def one_line(text: str) -> str:
    """Return `text` as a single harmless line, each run of white space as one space."""
    return printable(" ".join(text.split()))


class Streamed:
    """Makes text harmless that comes in parts: all parts together come out as `printable` would
    make the whole.
    """

    def __init__(self) -> None:
        self._before = ""
        self._held = ""

    def push(self, part: str) -> str:
        """Return what can be shown now: a joiner, say, waits for what it joins."""
        new = self._held + part
        undecided = _UNDECIDED.search(self._before + new)
        cut = len(new) - (0 if undecided is None else len(undecided[0]))
        self._held = new[cut:]
        return self._settled(new[:cut])

    def finish(self) -> str:
        """Return what waited, since nothing follows it."""
        held, self._held = self._held, ""
        return self._settled(held)

    def _settled(self, new: str) -> str:
        whole, start = self._before + new, len(self._before)
        self._before = whole[-_LOOKS_BACK:]
        return str(_CHARACTERS.sub(_shown, whole, pos=start))[start:]


def _shown(match: regex.Match[str]) -> str:
    character: str = match[0]
    if match["kept"] is not None:
        return character
    if character < " ":
        return chr(0x2400 + ord(character))
    return "␡" if character == "\x7f" else f"<U+{ord(character):04X}>"
