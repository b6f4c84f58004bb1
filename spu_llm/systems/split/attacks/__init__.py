"""What the host of a middle reads off what it sees (NOIR §4; spec: A1 to A12).

An attack is a function of the host's view and of what is public (`views`), which gives a guess of
every text: one number for each of its tokens, `NONE` where it has no guess. `suite` runs them and
judges guesses by the truth.
"""

NONE = -1
