"""Sentences with personal data, made up, by class; and the form that the data of a class has.

The classes are those of "Confidential Prompting" (Gim, Li, Zhong), figures 5 to 7 (clinical notes,
resumes, locations), and five more that presidio's pattern recognizers know. The data is of nobody:
numbers and names that are reserved for examples, or freely combined. Where each secret stands is
marked by hand, so that no other library says what counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

from spu_llm.systems.confidential.spans import Marked, parse

SENTENCES = Path(__file__).with_name("personal.jsonl")
# The name of a class in `SENTENCES`: in words.
CLASSES = {
    "name": "person's name",
    "date": "date",
    "gender": "gender",
    "medication": "medication",
    "age": "age",
    "email": "e-mail",
    "company": "company",
    "ethnicity": "ethnicity",
    "location": "location",
    "phone": "phone number",
    "card": "credit card",
    "iban": "IBAN",
    "ip": "IP address",
    "url": "URL",
}
# Those of the paper.
PUBLISHED = tuple(CLASSES)[:9]
_DATES = ("%B %d, %Y", "%d %B %Y", "%m/%d/%Y", "%d/%m/%Y", "%Y-%m-%d", "%B %d")


def sentences(kind: str) -> list[Marked]:
    """Return the sentences of a class, each with one secret."""
    lines = map(json.loads, SENTENCES.read_text(encoding="utf-8").splitlines())
    return [parse(line["text"]) for line in lines if line["kind"] == kind]


def secret_of(marked: Marked) -> str:
    """Return the secret of a sentence."""
    ((start, stop),) = marked.redacted
    return marked.text[start:stop]


# ---- forms


def _date(text: str) -> bool:
    """Return whether a text is a day of the calendar, of 1900 to 2099."""
    plain = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
    for form in _DATES:
        try:
            return 1900 <= datetime.strptime(plain, form).year < 2100
        except ValueError:
            pass
    return False


def _age(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 120


def _card(text: str) -> bool:
    """Return whether a text is 13 to 19 digits in groups whose Luhn checksum is right (ISO/IEC
    7812-1).
    """
    if not re.fullmatch(r"\d{4}( \d{3,6}){2,4}", text):
        return False
    digits = [int(c) for c in text.replace(" ", "")][::-1]
    doubled = [sum(divmod(2 * d, 10)) for d in digits[1::2]]
    return 13 <= len(digits) <= 19 and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _iban(text: str) -> bool:
    """Return whether a text is a country, check digits that are right, and an account (ISO
    13616).
    """
    if not re.fullmatch(r"[A-Z]{2}\d{2}[A-Z0-9]{11,30}", text):
        return False
    return int("".join(str(int(c, 36)) for c in text[4:] + text[:4])) % 97 == 1


def _ip(text: str) -> bool:
    try:
        return str(IPv4Address(text)) == text
    except AddressValueError:
        return False


def _matches(pattern: str) -> Callable[[str], bool]:
    whole = re.compile(pattern)
    return lambda text: whole.fullmatch(text) is not None


_HOST = r"([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)+[a-z]{2,}"
# Of classes that have a form, whether a text has it.
FORMS: dict[str, Callable[[str], bool]] = {
    "date": _date,
    "age": _age,
    "email": _matches(rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_HOST}"),
    "phone": _matches(r"(\+1 )?(\(\d{3}\) |\d{3}-)\d{3}-\d{4}"),
    "card": _card,
    "iban": _iban,
    "ip": _ip,
    "url": _matches(rf"https?://{_HOST}(/[\w.?=&%-]*)*"),
}
