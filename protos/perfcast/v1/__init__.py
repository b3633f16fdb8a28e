"""Version 1 of the contract: generated messages and stubs."""

API_REVISION = 3
"""Grows with every addition to the contract; server and client tell each other."""
