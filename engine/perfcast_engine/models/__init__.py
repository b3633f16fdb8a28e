"""Models: from a published config.json to the operators of a forward pass (spec/05)."""
