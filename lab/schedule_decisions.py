# SPDX-License-Identifier: Apache-2.0
"""The decisions of vLLM's schedule() that leave a request out, with the reason that is told for each.

Input: the sources of a release, read as syntax trees. source_check.py and the tests of each release list
those that are not known here: a wait would have a wrong reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# It ends a loop that gives somebody blocks, or concerns requests with a token.
NO_WAIT: Final = "no wait"
# Beginning of the innermost condition around a break or continue -> the reason that is told for it.
DECISIONS: Final = {
    # Running requests.
    "request.num_output_placeholders > 0 and": NO_WAIT,
    "self.current_step < request.next_decode_eligible_step": NO_WAIT,
    "defer_prefills": "prefill_interval",
    "self.ec_connector is not None and request.mm_features": "remote_ec",
    "self._ec_transfer_pending(": "remote_ec",
    # A chunk of no tokens: the encoder's budget; for hybrid models and drafts also an alignment, "other".
    "num_new_tokens == 0": "encoder_budget",
    "new_blocks is not None": NO_WAIT,
    "preempted_req == request": "kv_blocks",
    "self.connector is not None and self.connector.has_pending_block_frees()": "kv_blocks",
    "not self._request_blocks_can_be_freed(preempted_req)": "kv_blocks",
    "self.policy == SchedulingPolicy.PRIORITY and request.status == RequestStatus.PREEMPTED": (
        "kv_blocks"
    ),
    "new_blocks is None": "kv_blocks",
    # Waiting requests.
    "input_budget <= draft_slots": "token_budget",
    "not request_queue or input_budget <= draft_slots": "token_budget",
    "len(self.running) == self.max_num_running_reqs": "max_num_seqs",
    "num_running >= self.max_num_running_reqs": "max_num_seqs",
    "num_running >= self.max_num_active_reqs": "max_num_seqs",
    # By its status: a grammar, blocks on their way, a streaming session.
    "self._is_blocked_waiting_status(request.status)": "remote_kv",
    "not ready_to_schedule": "remote_kv",
    "request.num_stale_output_tokens": "stale_output",
    "self.lora_config and request.lora_request": "lora",
    "ext_tokens is None": "remote_kv",
    "load_kv_async": "remote_kv",
    "not self.scheduler_config.enable_chunked_prefill and num_new_tokens": "token_budget",
    # With drafts a request that lacks a few tokens of the budget for its padding: not looked at.
    "padded_num_tokens > request_token_budget": "other",
    "self.scheduler_reserve_full_isl": "kv_blocks",
}


def list_decisions(package: Path) -> list[tuple[int, str]]:
    """(line, innermost condition) of every break and continue in the scheduler's schedule().

    [] where there is none: that is a target of ours, which source_check.py misses itself.
    """
    path = package / "v1" / "core" / "sched" / "scheduler.py"
    tree = ast.parse(path.read_text("utf-8") if path.is_file() else "")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    bodies = [node.body for node in functions if node.name == "schedule"][:1]
    return [found for body in bodies for each in body for found in _find_leaving(each, "")]


def _find_leaving(node: ast.AST, condition: str) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Break | ast.Continue):
        yield node.lineno, condition
    elif isinstance(node, ast.If):
        for branch in (*node.body, *node.orelse):
            yield from _find_leaving(branch, ast.unparse(node.test))
    elif not isinstance(node, ast.FunctionDef):
        for child in ast.iter_child_nodes(node):
            yield from _find_leaving(child, condition)


def list_unknown(package: Path) -> list[str]:
    """What is to be done for the decisions that nobody has looked at."""
    return [
        f"line {line} of schedule(): `{condition}`: look at it in "
        "ttft_otel/hooks/engine_core/queue_reasons.py, and add it to DECISIONS in "
        "lab/schedule_decisions.py"
        for line, condition in list_decisions(package)
        if not any(condition.startswith(known) for known in DECISIONS)
    ]
