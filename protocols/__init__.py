"""Hand-written two-party protocols.

VERSION is that of all that the parties send, open and prepare: installations whose versions agree
work together, whatever else differs. tests/vectors has it beside the digest of what it records of
every op, and fails when that changes, so that somebody decides whether the version must, too.
"""

VERSION = 1
