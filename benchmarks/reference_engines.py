"""Runs under the interpreter of the reference engine: prefill and decode of engines as a single estimate resolves them.

Reads one engine a line, answers one line: for each phase latencies in ms, or [error class, message] in their place.
"""

import json
import logging
import sys
from functools import lru_cache


def main() -> None:
    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the reference prints must not mix with the answers
    from aiconfigurator.sdk.engine import EngineHandle
    from aiconfigurator.sdk.moe_comm_resolver import resolve_model_config_moe_comm
    from aiconfigurator_core import _aiconfigurator_core as core
    from aiconfigurator_core.sdk import config_builders, engine, models, perf_database

    view = lru_cache(2)(perf_database.get_database_view)

    def compiled(asked):
        model, system, backend, version = (asked[name] for name in ("model", "system", "backend", "version"))
        db = view(system, backend, version, database_mode=asked["mode"])
        config = config_builders.build_model_config(*asked["parallel"], None, None, None, None, None)
        config.nextn = 0
        if models.check_is_moe(model):
            resolve_model_config_moe_comm(
                config,
                model_path=model,
                backend_name=backend,
                database=db,
                required_phases=("context", "generation"),
                fmha_quant_mode_explicit=False,
                kvcache_quant_mode_explicit=False,
            )
        if config.moe_comm_backend is None:
            models.resolve_context_fmha_by_data(config, model, db, backend, is_context_role=True)
        models.resolve_dsv4_moe_arch(config, model, system_name=system, backend_name=backend)
        models.resolve_nvfp4_for_system(config, system, model, backend_name=backend)
        spec = engine.build_engine_spec_json(
            models.get_model(model, config, backend),
            model_path=model,
            system=system,
            backend=backend,
            backend_version=version,
            kv_block_size=None,
            systems_path=None,
            nextn=0,
            database=db,
        )
        return EngineHandle(core.engine_spec_bincode_from_json(spec))

    def attempt(call, *arguments):
        try:
            return call(*arguments)
        except Exception as error:
            return [type(error).__name__, str(error)[:300]]

    for line in sys.stdin:
        asked = json.loads(line)
        handle = attempt(compiled, asked)
        told = {}
        for phase, name in (("prefill", "predict_prefill_latency"), ("decode", "decode_step_latency")):
            refused = isinstance(handle, list)
            told[phase] = [handle if refused else attempt(getattr(handle, name), *point) for point in asked[phase]]
        print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
