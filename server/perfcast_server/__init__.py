"""perfcast over gRPC: caches, limits, metrics and life cycle around the engine. Knows no physics."""
