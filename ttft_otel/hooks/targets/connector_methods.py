# SPDX-License-Identifier: Apache-2.0
"""Addresses of connector methods, for the rows of connector_targets.py that have none of their own.

Connectors can be third-party classes, so hooks/{ec_connectors,ec_items,ec_kept,kv}.py wrap these methods
on the class that the factory creates. Here are vLLM's base classes, on which names and parameters can
be checked; the session that serves an encoder's fetches has only one class.
"""

from __future__ import annotations

from typing import Final

from ttft_otel.hooks.targets.patch_target import TargetPlace

_EC: Final = "vllm.distributed.ec_transfer.ec_connector.base"
_SESSION: Final = "vllm.distributed.ec_transfer.ec_connector.cpu.session"
_KV: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"

CONNECTOR_METHODS: Final[dict[str, tuple[TargetPlace, ...]]] = {
    # Before 0.24 an encoder-cache connector could not make a request wait.
    "transfer.wait": (TargetPlace(_EC, "ECConnectorBase.ensure_cache_available", since="0.24"),),
    "transfer.load": (TargetPlace(_EC, "ECConnectorBase.start_load_caches"),),
    "transfer.save": (
        TargetPlace(_EC, "ECConnectorBase.save_caches"),
        # Publishes what an earlier step has encoded: save_caches() is never called for that.
        TargetPlace(_EC, "ECConnectorBase.start_save_caches", since="0.32"),
    ),
    "transfer.flush": (TargetPlace(_EC, "ECConnectorBase.get_finished"),),
    "transfer.place": (TargetPlace(_EC, "ECConnectorBase.update_state_after_alloc"),),
    "transfer.keep": (TargetPlace(_EC, "ECConnectorBase.request_finished"),),
    "transfer.ready": (TargetPlace(_EC, "ECConnectorBase.update_connector_output"),),
    "transfer.fetched": (TargetPlace(_SESSION, "ProducerSession._drain_notifs", since="0.32"),),
    "transfer.lease": (TargetPlace(_SESSION, "ProducerSession._sweep_timeouts", since="0.32"),),
    "kv.match": (TargetPlace(_KV, "KVConnectorBase_V1.get_num_new_matched_tokens"),),
    "kv.keep": (
        TargetPlace(_KV, "KVConnectorBase_V1.request_finished"),
        # The scheduler calls it instead for all SupportsHMA connectors (hybrid KV caches).
        TargetPlace(_KV, "SupportsHMA.request_finished_all_groups"),
    ),
    "kv.load": (TargetPlace(_KV, "KVConnectorBase_V1.start_load_kv"),),
    "kv.save": (TargetPlace(_KV, "KVConnectorBase_V1.wait_for_save"),),
}
