"""The probe inside vLLM's worker, put there by vLLM's own seam: `worker_extension_cls`."""

from __future__ import annotations

import json
from typing import Any

from harness.case import Case
from harness.engine import capacity, compat, observe, selector
from harness.engine.observe import Observed
from harness.record import to_json


class Extension:
    """Mixed into the worker class by vLLM; its method is reached through `collective_rpc`."""

    vllm_config: Any
    model_runner: Any

    def kvmatrix_observe(self, case: str) -> str:
        """What this worker's KV cache became, for a Case as JSON: parts of a Record as JSON."""
        config = self.model_runner.kv_cache_config
        seen = Observed(
            vllm_config=self.vllm_config,
            built=True,
            specs=compat.planned_specs(self, config),
            kv_cache_config=config,
            drafts=compat.draft_layers(self.model_runner),
        )
        holders = observe.layers(seen)
        seen.tensors = {
            name: holders[name].kv_cache
            for name in seen.specs
            if hasattr(holders[name], "kv_cache")
        }
        asked = Case(**json.loads(case))
        room = capacity.capacity(seen.vllm_config, config, seen.specs)
        return json.dumps(
            {
                "resolved": to_json(observe.resolved(seen)),
                "kv": [to_json(one) for one in observe.kv(seen)],
                "groups": [to_json(one) for one in observe.groups(seen)],
                "num_blocks": observe.num_blocks(seen),
                "kv_bytes_per_token": observe.bytes_per_token(seen),
                "capacity": None if room is None else to_json(room),
                "candidates": [to_json(one) for one in selector.candidates(seen.vllm_config)],
                "declared": [to_json(one) for one in observe.declared(seen, asked)],
                "weights_bytes": compat.weights_bytes(self.model_runner.get_model()),
                "planned_bytes": sum(int(one.size) for one in config.kv_cache_tensors),
                "model_runner": compat.model_runner(self.model_runner),
            }
        )
