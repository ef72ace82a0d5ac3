# SPDX-License-Identifier: Apache-2.0
"""`ttft-otel bench`: send load to a server and say where its time to first token went.

before       learn                       the server's model, context and tokens
one request  ask  images  stream         its body; the pictures in it; what its stream says
load         data  replay  rounds  plan  which requests, and when
sending      wire  drive  session        one connection; open and closed loop; warm-up and rounds
after        lookup                      breakdowns that answers did not carry
numbers      figures  compare            percentiles, goodput, the stage behind the p99, differences
out          document  screen  page      JSON, terminal, HTML
doors        options  command            what people type
"""
