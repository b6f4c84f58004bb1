"""How likely a prompt is reconstructed from its codebook rows: NOIR's bounds, and what holds.

NOIR (§2.6 of the digest; theorem 3, proposition 1 = Eq. 4, theorem 4 = Eq. 5). psi = V - 1, n
tokens, C of them guessed, rho the share that counts as reading the prompt.

| function        | says                                        | holds                            |
|-----------------|---------------------------------------------|----------------------------------|
| `token_bounds`  | P(t|o) within [1/(1 + psi e^eps),           | for a mechanism that holds eps   |
|                 | e^eps / (e^eps + psi)] (theorem 3)          | and a token uniform over V       |
| `posterior`     | P(t|o) for a token of any prior             | for a mechanism that holds eps   |
| `log10_eq4`     | P(C >= rho n) (proposition 1)               | no                               |
| `log10_eq5`     | the same, neighbours known (theorem 4)      | no                               |
| `tail`          | P(C >= rho n)                               | for independent guesses, each    |
|                 |                                             | right with p or less             |
| `any_tail`      | P(C >= rho n)                               | for any guesses, each right with |
|                 |                                             | p or less (Markov)               |

Why Eq. 4 does not hold: its proof takes P(C >= c) <= P(C = c), and for this the probability of c
right guesses *at c given places*: the binomial coefficient and all larger C are missing. (By Eq.
22 and 23, moreover, the second exponent would be n, not n - C.) Eq. 5 takes the advantage gamma of
an attacker who knows a token's neighbours off the chance to be wrong: its bound can fall as the
attacker learns more, and its first base can exceed one.

Theorem 3 is of tokens that are all alike before anything is seen. Text is not: who sees nothing
already guesses its most frequent token, and `posterior` starts there. None of this is about prompts
whose tokens share one codebook: equal tokens have equal rows, which no bound of a token covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.special import bdtrc, gammaln, logsumexp


@dataclass(frozen=True)
class Bounds:
    """All of them for one prompt. `stated`: as in the paper, `holds`: what is true in their place;
    the chances that a share of the tokens is read have their log10 here.
    """

    token_stated: tuple[float, float]
    token_holds: float
    prompt_stated: float
    prompt_holds: float
    neighbours_stated: float
    neighbours_hold: float
    any_guesses: float


def bounds(
    vocab: int, epsilon: float, tokens: int, share: float, advantage: float, prior: float
) -> Bounds:
    """Return the bounds of a prompt of `tokens`, of which a `share` counts as reading it; `prior`
    is the chance of each before anything is seen, `advantage` what neighbours add to a guess.
    """
    chance = posterior(prior, epsilon)
    known = min(1.0, chance + advantage)
    return Bounds(
        token_bounds(vocab, epsilon),
        chance,
        log10_eq4(vocab, epsilon, tokens, share),
        log10_tail(chance, tokens, share),
        log10_eq5(vocab, epsilon, tokens, share, advantage),
        log10_tail(known, tokens, share),
        math.log10(any_tail(known, share)),
    )


def token_bounds(vocab: int, epsilon: float) -> tuple[float, float]:
    """Return the least and the largest P(t|o) of theorem 3."""
    psi, odds = vocab - 1, math.exp(-epsilon)
    return odds / (odds + psi), 1 / (1 + psi * odds)


def posterior(prior: float, epsilon: float) -> float:
    """Return the largest P(t|o) of a token of this prior, by a mechanism that holds epsilon: seeing
    o changes the odds of t by e^epsilon at most. It is theorem 3's bound for the prior 1 / V.
    """
    return prior / (prior + (1 - prior) * math.exp(-epsilon))


def log10_eq4(vocab: int, epsilon: float, tokens: int, share: float) -> float:
    """Return log10 of Eq. 4's right side, 0 at most. **Not a bound** (see above)."""
    return log10_eq5(vocab, epsilon, tokens, share, 0.0)


def log10_eq5(vocab: int, epsilon: float, tokens: int, share: float, advantage: float) -> float:
    """Return log10 of Eq. 5's right side, 0 at most. **Not a bound** (see above). advantage: gamma,
    of an attacker who knows neighbours.
    """
    first, second = eq5_bases(vocab, epsilon, advantage)
    if second <= 0:
        return -math.inf
    right = share * tokens
    return min(0.0, right * math.log10(first) + (tokens - right) * math.log10(second))


def eq5_bases(vocab: int, epsilon: float, advantage: float) -> tuple[float, float]:
    """Return Eq. 5's two bases, (psi e^eps + 1) / (psi e^eps + psi^2) + gamma, which can exceed
    one, and psi e^eps / (psi e^eps + 1) - gamma.
    """
    psi, odds = vocab - 1, math.exp(-epsilon)
    return (1 + odds / psi) / (1 + psi * odds) + advantage, psi / (psi + odds) - advantage


def tail(chance: float, tokens: int, share: float) -> float:
    """Return P(C >= rho n) for n independent guesses that are right with `chance` each: the
    binomial tail. With `chance` from `token_bounds` or `posterior` (plus gamma, where neighbours
    are known).
    """
    return float(bdtrc(_least(tokens, share) - 1, tokens, min(1.0, chance)))


def log10_tail(chance: float, tokens: int, share: float) -> float:
    """Return log10 of `tail`, also where it is below the smallest float64."""
    if chance >= 1:
        return 0.0
    counts = range(_least(tokens, share), tokens + 1)
    terms = [
        gammaln(tokens + 1)
        - gammaln(c + 1)
        - gammaln(tokens - c + 1)
        + c * math.log(chance)
        + (tokens - c) * math.log1p(-chance)
        for c in counts
    ]
    return min(0.0, float(logsumexp(terms)) / math.log(10))


def any_tail(chance: float, share: float) -> float:
    """Bound P(C >= rho n), however the guesses depend on each other: chance / rho at most."""
    return min(1.0, chance / share)


def _least(tokens: int, share: float) -> int:
    """Return the fewest right guesses that are a share of `share`, 1 or more."""
    return max(1, math.ceil(share * tokens - 1e-9))
