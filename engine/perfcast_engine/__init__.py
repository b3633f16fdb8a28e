"""The physics of LLM serving steps and the search over configurations, as a plain numpy library."""
