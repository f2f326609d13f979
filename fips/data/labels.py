"""Labels of a data set to class indices of a model."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from fips.errors import CalibrationError

Label = str | int
_WORDNET = re.compile(r"n\d{8}")


class NumberedName(str):
    """A class name that remembers its number among the classes of its data set.

    Attributes:
        number: Index of the class in the data set.
        classes: How many classes the data set has.
    """

    __slots__ = ("classes", "number")
    number: int
    classes: int

    def __new__(cls, name: str, number: int, classes: int) -> "NumberedName":
        """A string, and the two numbers beside it."""
        made = super().__new__(cls, name)
        made.number, made.classes = number, classes
        return made


def class_indices(labels: Sequence[Label], id2label: Mapping[int, str]) -> tuple[list[int], str]:
    """The model's class index of every label, and in a few words how it was found.

    Tried in this order: names (as written; then without regard to case and to `_`, `-`, `/` and spaces; then each of
    the comma-separated synonyms), numbers, WordNet ids in sorted order when there are as many as the model has
    classes, and the numbers that a data set gives its own class names, unless a name contradicts them.

    Args:
        labels: One label per image.
        id2label: The class names of the model's config.

    Raises:
        CalibrationError: Naming labels that are not among the model's classes.
    """
    distinct = list(dict.fromkeys(labels))
    names = _by_name(distinct, id2label)
    ways = (
        (names if len(names) == len(distinct) else None, "by name"),
        (_by_number(distinct, id2label), "by number"),
        (_by_wordnet(distinct, id2label), "WordNet ids in sorted order"),
        (_by_own_number(distinct, names, id2label), "by the data set's class numbers"),
    )
    for found, how in ways:
        if found is not None:
            return [found[label] for label in labels], how
    raise CalibrationError(_not_among(distinct, names, id2label))


def _plain(name: str) -> str:
    return re.sub(r"[_\-/\s]+", " ", name).strip().casefold()


def _by_name(distinct: list[Label], id2label: Mapping[int, str]) -> dict[Label, int]:
    """Index of every label that names one class; what fits several classes equally well is left out."""
    exact, plain, synonym = (defaultdict[str, set[int]](set) for _ in range(3))
    for index, name in id2label.items():
        exact[name].add(index)
        plain[_plain(name)].add(index)
        for word in name.split(","):
            synonym[_plain(word)].add(index)
    found: dict[Label, int] = {}
    for label in distinct:
        text = str(label)
        hits = exact.get(text) or plain.get(_plain(text)) or synonym.get(_plain(text)) or set()
        if len(hits) == 1:
            found[label] = next(iter(hits))
    return found


def _by_number(distinct: list[Label], id2label: Mapping[int, str]) -> dict[Label, int] | None:
    if not all(isinstance(label, int) or re.fullmatch(r"[0-9]+", label) for label in distinct):
        return None
    found = {label: int(label) for label in distinct}
    return found if all(index in id2label for index in found.values()) else None


def _by_wordnet(distinct: list[Label], id2label: Mapping[int, str]) -> dict[Label, int] | None:
    if len(distinct) != len(id2label) or not all(_WORDNET.fullmatch(str(label)) for label in distinct):
        return None
    indices = sorted(id2label)
    return {label: indices[position] for position, label in enumerate(sorted(distinct, key=str))}


def _by_own_number(distinct: list[Label], names: dict[Label, int],
                   id2label: Mapping[int, str]) -> dict[Label, int] | None:  # fmt: skip
    found: dict[Label, int] = {}
    for label in distinct:
        if not isinstance(label, NumberedName) or label.classes != len(id2label) or label.number not in id2label:
            return None
        if names.get(label, label.number) != label.number:
            return None
        found[label] = label.number
    return found


def _not_among(distinct: list[Label], names: dict[Label, int], id2label: Mapping[int, str]) -> str:
    unnamed = [label for label in distinct if label not in names]
    lost = [label for label in unnamed if _by_number([label], id2label) is None] or unnamed
    shown = ", ".join(repr(str(label)) for label in lost[:3])
    known = ", ".join(f"{index}: {name!r}" for index, name in list(id2label.items())[:3])
    return (
        f"{len(lost)} of {len(distinct)} labels name none, or more than one, of the model's {len(id2label)} classes: "
        f"{shown}. The model's classes are {known} and so on. Name the class folders or the labels like these, or by "
        "index."
    )
