"""What defines the answer, as values that can be written down and compared. Never a hash of pickles.

``look`` says what a value is made of (``objects`` and ``arrays`` say it of their kinds; ``source`` and ``bytecode``
read code, ``definition.packages`` tells the user's from what is installed), ``graph`` makes hashes and paths of that,
and ``compare`` says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.definition.fields import Definition
from phalanx.definition.fingerprint.arrays import hashed
from phalanx.definition.fingerprint.compare import FUNCTIONS, Comparison, compared, placed, values_of
from phalanx.definition.fingerprint.graph import CODE, SHARED, TREE, Graph
from phalanx.definition.fingerprint.look import Look
from phalanx.definition.fingerprint.objects import VERSION

__all__ = ["Comparison", "compare", "fingerprint", "hashed", "shared"]

FORMAT = 2


def fingerprint(definition: Definition) -> dict[str, Any]:
    """Fields of a recipe by name; steps and epochs are left out, so that a finished run can be extended."""
    look = Look()
    fields = {}
    for name, graph in _graphs(definition, look).items():
        tree, code = graph.hash(TREE), graph.hash(CODE)
        fields[name] = {
            "tree": tree, "code": code, "sourceless": graph.sourceless, "parts": graph.named(TREE),
            "soft": graph.soft(TREE), "unseen": graph.unseen(),
        }  # fmt: skip
    values = values_of(definition)
    return {
        "format": FORMAT, "python": VERSION, "packages": look.packages.versions(), "values": values, "fields": fields
    }  # fmt: skip


def shared(definition: Definition) -> tuple[dict[str, str], dict[str, str]]:
    """What processes that do one run have in common, one text per name: what must be equal, and what should be.

    Nothing of it changes in use. Code is compared as it runs, as one process may have the source and another not. What
    should be equal are plain values that functions read of their modules: one may be the rank of the process.
    """
    look = Look()
    must = values_of(definition) | {"python": VERSION}
    should: dict[str, str] = {}
    for name, graph in _graphs(definition, look).items():
        for path, told in graph.named(SHARED).items():  # the nearest to the root first, each without what it holds
            must[placed(name, path)] = " ".join([told[0], *told[2:3]])
        must[f"{name} as a whole"] = graph.hash(SHARED)
        should |= {placed(name, path): told for path, told in graph.ambient().items()}
    return must | {f"version of {name}": version for name, version in look.packages.versions().items()}, should


def compare(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Comparison:
    """How the fingerprint of a recipe compares with another.

    Raises
    ------
    ValueError
        That is no fingerprint.
    """
    try:
        if theirs["format"] != FORMAT:
            raise ValueError(f"its recipe is of format {theirs['format']!r}, and this phalanx reads format {FORMAT}")
        return compared(mine, theirs)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("its recipe has no form that is known") from error


def _graphs(definition: Definition, look: Look) -> dict[str, Graph]:
    values = {name: getattr(definition, name) for name in (*FUNCTIONS, "data")}
    if definition.phases is not None:
        values["phases"] = [phase.look() for phase in definition.phases]
    return {name: Graph(value, look) for name, value in values.items()}
