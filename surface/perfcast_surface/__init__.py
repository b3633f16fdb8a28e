"""Compiled surfaces of engines: what evaluates inside the measurements, in the server and in the caller's process.

Needs numpy only and knows no tables, no gRPC: the engine compiles surfaces, the client reads them.
"""
