"""Single-point correlated transfers from correlated trees.

The half-tree of Guo, Yang, Wang, Zhang, Xie, Liu and Zhao ("Half-Tree: Halving the Cost of Tree
Expansion in COT and DPF", EUROCRYPT 2023, sections 3.2 and 4.1, figures 3 and 4). Every node x has
the children H(x) and x ^ H(x), so that the nodes of each level add up to the root's; here the first
level is (seed, seed ^ delta), and all levels add up to delta. The sender knows the whole tree. The
receiver gets, for each level, the sum of the nodes on one side, by a correlated transfer that it
chooses the side with, and grows all leaves but one; that one, plus delta, is the sum of the others.

So leaf by leaf, with w_j the sender's and v_j the receiver's: v_j = w_j ^ u_j delta, where u is one
at a single place, which the receiver's choice bits say and the sender does not know.
"""

from __future__ import annotations

import numpy as np

from spu_llm.offline.ot.blocks import BlockHash


def grow(hashed: BlockHash, delta: np.ndarray, seeds: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    """Grow the sender's trees into `leaves`, blocks [2^depth, trees, 2], from fresh secret seeds
    [trees, 2]; return the sums of left nodes of each level [depth, trees, 2].
    """
    depth = len(leaves).bit_length() - 1
    sums = np.empty((depth, *seeds.shape), np.uint64)
    sums[0] = leaves[1] = seeds
    np.bitwise_xor(seeds, delta, out=leaves[0])
    for i in range(1, depth):
        np.bitwise_xor.reduce(_branch(hashed, leaves, 1 << i), axis=0, out=sums[i])
    return sums


def grow_punctured(
    hashed: BlockHash, sums: np.ndarray, sides: np.ndarray, leaves: np.ndarray
) -> np.ndarray:
    """Grow the receiver's trees into `leaves`, blocks [2^depth, trees, 2]. sums: blocks
    [depth, trees, 2] of the nodes of each level on one side, which `sides` [depth, trees] says
    (1: the right one).

    Returns the place [trees] of the one leaf that is delta plus the sender's.
    """
    depth, trees, _ = sums.shape
    every, path = np.arange(trees), np.zeros(trees, np.int64)
    leaves[0] = 0
    known = leaves[0].copy()  # the sum of the known nodes of a level, and of their children
    for i in range(depth):
        nodes = 1 << i
        left = np.bitwise_xor.reduce(_branch(hashed, leaves, nodes), axis=0)
        # Both children of the unknown node are unknown; one follows from the sum of its side.
        is_left = sides[i] == 0
        left ^= leaves[path + nodes, every]
        other = np.where(is_left[:, None], left, known ^ left) ^ sums[i]
        leaves[path, every] = leaves[path + nodes, every] = 0
        leaves[path + nodes * is_left, every] = other
        known ^= other
        path += nodes * ~is_left
    leaves[path, every] = known
    return path


def _branch(hashed: BlockHash, leaves: np.ndarray, nodes: int) -> np.ndarray:
    """Put the children of the first `nodes` nodes in their place: the right ones where they were,
    the left ones behind, which are returned.
    """
    right, left = leaves[:nodes], leaves[nodes : 2 * nodes]
    hashed(right, out=left)
    right ^= left
    return left
