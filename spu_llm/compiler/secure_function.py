"""A secure function: an ordinary JAX function, the owners of its arguments, and its plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from spu_llm.compiler.plan import Plan, make_plan
from spu_llm.core._jax import shape_of
from spu_llm.core.settings import OWN
from spu_llm.core.values import Owner

# Both parties may be threads of one process: there is one plan for both.
_planning = threading.RLock()


@dataclass(frozen=True, eq=False)
class SecureFunction:
    """`fn(*args)` with the owner of each argument (every leaf of a pytree has the same one)."""

    fn: Callable[..., Any]
    owners: tuple[Owner, ...]
    name: str
    backend: str = OWN  # what computes a model's forward
    _plans: dict[Any, tuple[Plan, Any]] = field(default_factory=dict, repr=False)

    def plan(self, *args: Any) -> tuple[Plan, Any]:
        """Return plan and result structure for arguments of these shapes (arrays or values)."""
        leaves, tree = jax.tree.flatten(args)
        shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in leaves]
        key = (tree, tuple((s.shape, s.dtype) for s in shapes))
        with _planning:
            if key not in self._plans:
                counts = [len(jax.tree.leaves(a)) for a in args]
                owners = [o for o, n in zip(self.owners, counts, strict=True) for _ in range(n)]
                out_trees = []

                def flat(*xs: Any) -> list[Any]:
                    leaves, out_tree = jax.tree.flatten(self.fn(*jax.tree.unflatten(tree, xs)))
                    out_trees.append(out_tree)
                    return leaves

                plan = self._make_plan(flat, shapes, owners)
                self._plans[key] = plan, out_trees[0]
            return self._plans[key]

    def results(self, *args: Any) -> Any:
        """Return the shapes and dtypes of what a call with such arguments gives."""
        plan, out_tree = self.plan(*args)
        return jax.tree.unflatten(out_tree, [shape_of(v) for v in plan.outputs])

    def _make_plan(
        self, flat: Callable[..., list[Any]], shapes: Sequence[Any], owners: Sequence[Owner]
    ) -> Plan:
        return make_plan(flat, shapes, owners, backend=self.backend)
