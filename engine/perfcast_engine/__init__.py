"""The physics of LLM serving steps, as a plain numpy library."""

from perfcast_engine.config import EngineConfig, MoeComm, ParallelConfig, QuantOverrides
from perfcast_engine.predictor import Engine, Predictor

__all__ = ["Engine", "EngineConfig", "MoeComm", "ParallelConfig", "Predictor", "QuantOverrides"]
