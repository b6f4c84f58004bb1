"""A whole system as a plug-in: both parties have a number, and the client learns whose is larger.
One folder, and one line in the register of programs.
"""
