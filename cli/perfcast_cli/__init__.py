"""perfcast at a terminal."""
