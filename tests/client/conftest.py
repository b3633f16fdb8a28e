"""The server needs the engine's facade; without it there is nothing to serve."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("perfcast_engine.predictor") else ["test_*.py"]
