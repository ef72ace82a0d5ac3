# SPDX-License-Identifier: Apache-2.0
"""The exporter process: reads records from handoff.py's socket and sends them as spans over OTLP.

__main__.py runs it: record_queue.py reads and counts, export_worker.py takes batches and sends them,
span_writer.py and span_batch.py make OTLP messages of records, otlp_exporter.py builds what sends. With
TTFT_OTEL_METRICS request_metrics.py counts every request into series, and sends them.
"""
