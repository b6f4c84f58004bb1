"""A11: gradients of tuning say where labels are equal.

Where the next token has label l, the gradient by the row that came back is J' W' (p - l): the part
of l is the same direction at all such positions, whatever l is called (LTokenizer), up to what the
client's blocks J do. So:

1. Gradients of all positions of all texts, each of length one, are grouped by mean cosine.
2. Groups are matched with tokens by how frequent they are in public text.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from spu_llm.systems.split.attacks import NONE, grouping
from spu_llm.systems.split.attacks.views import HostView, Public


def attack(view: HostView, public: Public) -> list[list[int]]:
    """Return, for each position of each tuning text, the number of the group of its label, the
    largest group first (step 1).
    """
    assert view.gradients is not None
    numbers = grouping.groups_of(np.concatenate(view.gradients), grouping.equal_share(public.texts))
    return grouping.cut(numbers, view.gradients)


def matched(groups: list[list[int]], public: Public) -> list[list[int]]:
    """Return the label of each position by the rank of its group (step 2); `NONE` where no public
    token has that rank.
    """
    counts = Counter(token for text in public.texts for token in text[1:])
    ranked = [token for token, _ in counts.most_common()]
    return [[ranked[g] if g < len(ranked) else NONE for g in of_text] for of_text in groups]
