# SPDX-License-Identifier: Apache-2.0
"""The router before the servers: forwards bytes untouched, says where the client's TTFT went.

command -> app (control plane) and forward (data path); forward uses body, headers, legs, choose;
with prefill and decode instances plan says which legs, pair calls them, seam joins their streams;
path cuts the trip into stages; report turns it into Records and /ttft_report.
"""
