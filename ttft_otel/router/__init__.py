# SPDX-License-Identifier: Apache-2.0
"""The router: forwards requests to vLLM instances unmodified and traces each one's TTFT.

A request takes these steps (proxy/endpoint.py): 1 authenticate; 2 parse body and headers; 3 call
encoders; 4 choose and call the backend, or prefill and then decode instances; 5 relay the response.

shared_state/  what replicas know of one another's load, through a store
workers/   several processes on one port: supervisor, shared load
control/   ASGI application, admin API, metrics, limits of connections and memory
proxy/     admission, the data path over one leg or several, what is reported of it, errors
disagg/    what several instances are sent and answer: encoders, bodies, plans, the spliced stream
routing/   policies, prompt readers and prefix sources that choose an instance; requests, with retries
discovery/ instances that DNS or a Kubernetes API names
upstream/  pool of instances with health and circuit breakers, connections to them

timeline.py records what happens to a request and makes stages of its times; proxy/exchange_reporter.py
tells them. types.py and errors.py are used by all.
"""
