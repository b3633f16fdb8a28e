"""Compiled surfaces of engines: what evaluates steps in the server and in the caller's process with the same digits.

Needs numpy only and knows no tables, no gRPC: the engine compiles surfaces, the client reads them.
"""
