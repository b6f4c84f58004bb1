"""Alignment of a public draft model with a private one (POST, section 4): what the private model
answers, in the clear at its owner, and a student that learns from these answers.
"""
