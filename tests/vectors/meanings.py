"""What a correlation means must not change under its name, by which batches on disk are found.

Of how it is made and stored nothing is compared: masks that a key gives, transfers and slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from spu_llm.core.correlation import Correlation, Part, evaluate, together
from spu_llm.core.values import CLIENT, PROVIDER
from tests.vectors.encoding import Json, correlations_of, fixed_of, parts_of


def changed(recorded: Iterable[Json], correlations: Mapping[str, Correlation]) -> list[str]:
    """Return the names of correlations that give other results for the masks of ops' recorded
    units, or have other parts.
    """
    units = [unit for op in recorded for name, unit in _units(op) if name in correlations]
    names = {unit["name"] for unit in units if not _means(correlations[unit["name"]], unit)}
    return sorted(names)


def _units(recorded: Json) -> Iterator[tuple[str, Json]]:
    for case in recorded["cases"]:
        for call in case["calls"]:
            yield from ((unit["name"], unit) for unit in call["correlations"])


def _means(correlation: Correlation, unit: Json) -> bool:
    """Tell whether recorded units have a correlation's parts, and its results for their masks."""
    kinds = {
        name: [{key: part[key] for key in ("shape", "holder", "form")} for part in unit[name]]
        for name in ("masks", "results")
    }
    if parts_of(correlation) != kinds:
        return False
    client, provider = (correlations_of(unit, rank) for rank in (CLIENT, PROVIDER))

    masks = _plain(correlation.masks, client.masks, provider.masks)
    results = _plain(correlation.results, client.results, provider.results)
    made = evaluate(correlation, masks, fixed_of(unit))
    return all(np.array_equal(x, y) for x, y in zip(made, results, strict=True))


def _plain(
    parts: Sequence[Part], client: Sequence[np.ndarray], provider: Sequence[np.ndarray]
) -> list[np.ndarray]:
    return [together(part, x, y) for part, x, y in zip(parts, client, provider, strict=True)]
