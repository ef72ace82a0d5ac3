# SPDX-License-Identifier: Apache-2.0
"""The exporter process: reads records from handoff.py's socket and sends them as spans over OTLP.

__main__.py runs it: record_queue.py reads, export_worker.py takes batches, span_writer.py and
span_batch.py make OTLP messages of records, batch_exporter.py sends them (protocol_probe.py
finds a wrong protocol), exporter_counters.py counts. With TTFT_OTEL_METRICS request_metrics.py counts
every request into metric_series.py's series, and sends them.
"""
