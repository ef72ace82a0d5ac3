# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel bench`: send load to a server, measure its TTFT and break it down into stages.

requests     request_factory                   bodies and images; the server's model, context, token IDs
load         load_plan                         which requests, and when; a file's
sending      http_exchange load_driver         one connection; open and closed loop, tokens of the answers
             bench_session                     warm-up and rounds, at rates that limit_search names
numbers      limit_search                      the highest rate
output       result_document terminal_report   percentiles, goodput, differences; JSON, terminal

The flags and the commands `bench` and `bench compare` are in commands/bench.py.
"""
