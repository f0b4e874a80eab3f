"""Which words of a query stand in a candidate: how far its text covers what was asked, whatever the vectors say.

A query's *names* are its technical terms: identifiers (CamelCase, snake_case, with digits), words in capitals or with a
capital inside a sentence, numbers of three to five digits, and every Latin word of a Chinese query. Names are written
alike in all languages. Its *words* are all its other Latin words without stop words, and the bigrams of its Chinese
runs; they can only be expected in a candidate of the query's own language. Both are compared by stems ("evicted" is
found in "eviction"). Names of instances (``checkout-7d9f5c6b8-x2lqk``, ``worker-3``) are nobody's words.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TERMS = 40

_STOP = frozenset(
    """
    a about above after again all already also am an and any are as at be because been before being below
    between both but by can cannot could did do does doing done down during each few for from get gets got had
    has have having he her here him his how i if in into is it its just keep keeps let like may me might more
    most must my need needs new no nor not now of off old on once one only or other our out over own per please
    same she should since so some still such than that the their them then there these they this those through
    to too under until up us very via want was way we were what when where which while who whom why will with
    within without would yet you your
    """.split()  # noqa: SIM905 (a list of a hundred quoted words is no easier to read)
)
_CHINESE_STOP = re.compile(
    "怎么办|怎么样|怎么|怎样|如何|什么|为什么|哪个|哪些|哪条|哪里|哪一|是谁|谁|一直|已经|应该|可以|需要|能不能|要不要|是不是|有没有|请问|"
    "请|帮我|我们|我|你|的|了|吗|呢|吧|和|与|或|在|是|有|被|把|到|从|对|也|都|就|还|又|很|太|地(?![址域区点图理])|越来越|突然|以及|并且|但是|因为|所以|如果|先做"
)
_HAN = re.compile("[\u3400-\u9fff]+")
_TOKEN = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[_.\-/:][A-Za-z0-9]+)*")
_NUMBER = re.compile(r"(?:(?<![\w.\-:/])|(?<=[A-Z]-))\d{3,5}(?![\w.%:/]|-\d)")
_PARTS = re.compile(r"[_.\-/:]|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SENTENCE_START = re.compile(r"(?:^|[.!?:;\n。！？：；])\s*$")
_ENDINGS = ("ing", "ions", "ion", "ies", "es", "ed", "s", "e")
_SHORT = 4
_INSTANCE = re.compile(r"[a-z][\w.\-/]*-\d{1,3}")


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a query, at most `MAX_TERMS`, in order.

    Attributes:
        names: Stems of the technical terms, lower case.
        words: Stems of the other Latin words, lower case.
        bigrams: Of the Chinese runs.
        chinese: Whether the query is mostly Chinese.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    bigrams: tuple[str, ...]
    chinese: bool


def is_chinese(text: str) -> bool:
    """Whether at least every sixth letter is Chinese: a Chinese sentence full of identifiers is."""
    return 6 * len("".join(_HAN.findall(text))) >= max(1, sum(map(str.isalpha, text)))


def terms_of(text: str) -> Terms:
    """The terms of a query."""
    chinese = is_chinese(text)
    latin: dict[str, bool] = {}
    for token in _TOKEN.finditer(text):
        whole = token.group()
        parts = [part for part in _PARTS.split(whole) if part]
        if _INSTANCE.fullmatch(whole) or any(_looks_random(part) for part in parts):
            continue
        starts = _SENTENCE_START.search(text[max(0, token.start() - 3) : token.start()]) is not None
        camel = len(parts) > 1 + sum(whole.count(mark) for mark in "_.-/:")
        for part in parts:
            word = part.lower()
            if len(word) < 2 or word in _STOP or not word[0].isalpha():
                continue
            technical = chinese or camel or "_" in whole or any(map(str.isdigit, word))
            technical = technical or part.isupper() or (part[0].isupper() and not starts)
            stem = _stem(word)
            latin[stem] = latin.get(stem, False) or technical
    latin |= dict.fromkeys(_NUMBER.findall(text), True)
    runs = _HAN.findall(_CHINESE_STOP.sub(" ", text))
    bigrams = dict.fromkeys(run[at : at + 2] for run in runs for at in range(len(run) - 1))
    kept = list(latin.items())[:MAX_TERMS]
    return Terms(
        names=tuple(stem for stem, technical in kept if technical),
        words=tuple(stem for stem, technical in kept if not technical),
        bigrams=tuple(bigrams)[:MAX_TERMS],
        chinese=chinese,
    )


def standing(terms: Sequence[str], text: str) -> frozenset[str]:
    """The terms that stand in a text; a Latin stem stands where a word, or a part of an identifier, begins with it."""
    lower = text.lower()
    if len(lower) != len(text):  # a few capitals grow when lowered
        text = lower
    return frozenset(term for term in terms if _stands(term, text, lower))


def _stands(term: str, text: str, lower: str) -> bool:
    at = lower.find(term)
    if not term.isascii():
        return at >= 0
    while at >= 0:
        end = at + len(term)
        begins = at == 0 or not lower[at - 1].isalnum() or not lower[at - 1].isascii() or text[at].isupper()
        # A number or short stem must be the whole word, its plural aside: "pod" is no part of "podcast".
        open_ended = len(term) >= _SHORT and not term.isdigit()
        if begins and (open_ended or _ends(lower[end : end + 2], text[end : end + 1])):
            return True
        at = lower.find(term, at + 1)
    return False


def _ends(after: str, next_character: str) -> bool:
    after = after.removeprefix("s")
    return not after or not after[0].isascii() or not after[0].isalnum() or next_character.isupper()


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORT:
            return word[: -len(ending)]
    return word


def _looks_random(word: str) -> bool:
    """Generated parts of names, such as those of pods: digits and small letters change places more than once."""
    return (
        len(word) >= 5
        and word.islower()
        and sum(one.isdigit() != two.isdigit() for one, two in itertools.pairwise(word)) > 1
    )
