"""From a chosen configuration to files that deploy it, and back. Specification 08."""
