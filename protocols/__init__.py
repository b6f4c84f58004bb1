"""Hand-written two-party protocols.

VERSION is that of all that the parties send, open and prepare: installations whose versions agree
work together, whatever else differs in them. tests/vectors has it beside a digest of what it
records of every op and of the exact figures of whole steps, and fails when that changes, so that
somebody decides whether the version must, too: always when one party alone would do something else.
(Before a call, the parties also compare the whole program, constants included.)
"""

VERSION = 14
