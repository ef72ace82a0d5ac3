# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel bench`: send load to a server, measure its TTFT and break it down into stages.

preparation  model_discovery                              the server's model, context, token IDs
requests     request_factory noise_images                 bodies and images
load         synthetic_datasets trace_replay multi_round load_plan  which requests, and when
sending      http_exchange kernel_timestamps load_driver  one connection; open and closed loop
             bench_session                                warm-up and rounds
responses    stream_parser report_lookup                  tokens; breakdowns missing in responses
numbers      request_statistics comparison                percentiles, goodput, differences
output       result_document terminal_report html_report  JSON, terminal, HTML
commands     bench_options command compare_command        flags, `bench`, `bench compare`
"""
