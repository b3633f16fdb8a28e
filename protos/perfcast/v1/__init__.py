"""Version 1 of the contract: generated messages and stubs."""
