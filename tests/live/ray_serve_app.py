# SPDX-License-Identifier: Apache-2.0
"""Ray Serve LLM on this machine's CPU, with one model; test_front_doors.py starts and ends it.

Arguments: the model's folder and an HTTP port. The variables of this process are its engine's.
"""

from __future__ import annotations

import os
import signal
import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

MODEL, PORT = sys.argv[1], int(sys.argv[2])
PREFIXES = ("TTFT_", "OTEL_", "VLLM_", "OMP_", "HF_", "PYTHONPATH")


def main() -> None:
    """Serve until a signal comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Not a cluster that runs here already; replica, ingress and proxy ask for a CPU each.
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    own = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": MODEL},
        engine_kwargs={
            "enforce_eager": True,
            "max_model_len": 4096,
            "distributed_executor_backend": "mp",
        },
        accelerator_config={"kind": "cpu"},
        runtime_env={"env_vars": own},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(build_openai_app({"llm_configs": [config]}))
    try:
        signal.pause()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
