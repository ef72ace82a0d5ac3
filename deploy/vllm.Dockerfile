# SPDX-License-Identifier: Apache-2.0
# The official vLLM image with ttft-otel in it; arguments stay those of `vllm serve`:
#   docker build -f deploy/vllm.Dockerfile -t vllm-ttft .
#   docker run --gpus all --network ttft-otel_default -e OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 vllm-ttft --model MODEL
# Any release in README's table: --build-arg VLLM=v0.29.0
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
COPY . /opt/ttft-otel
# Dependencies are lower bounds that the image meets already: nothing of vLLM's changes.
RUN python3 -m pip install --no-cache-dir /opt/ttft-otel
ENV TTFT_OTEL=1
