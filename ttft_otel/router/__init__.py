# SPDX-License-Identifier: Apache-2.0
"""The router before the servers: forwards bytes untouched, says where the client's TTFT went.

command (flags: config; process: server) -> app (control plane) and forward (data path)
forward   gate lets in, body and headers read, fan calls encoders, legs any instance, stream gives
with prefill and decode instances plan says which legs, pair calls them, seam joins their streams
legs      fleet says who is offered, choose picks, retry says whether to try again; wire connects
fleet     told by requests (legs), probes (health), operators (admin); metrics shows it
path cuts the trip into stages; report turns it into Records and /ttft_report
"""
