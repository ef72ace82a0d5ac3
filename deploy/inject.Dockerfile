# SPDX-License-Identifier: Apache-2.0
# ttft-otel for vLLM images that are not ours to build: an init container copies /autoinstrumentation into the pod.
#   docker build -f deploy/inject.Dockerfile -t ttft-otel-inject .
# Also the OpenTelemetry Operator's Instrumentation.spec.python.image. docs/guides/inject.md has both.
FROM python:3.12.12-slim-bookworm AS build
ARG PYTHONS="3.10 3.11 3.12 3.13"
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /src \
  && /src/deploy/inject/build_folder /autoinstrumentation /wheel/*.whl $PYTHONS

# Its `cp` is all that an init container needs; glibc or not does not matter, because nothing of ours runs here.
FROM busybox:1.37.0
COPY --from=build /autoinstrumentation /autoinstrumentation
USER 10001:10001
CMD ["sh", "-c", "cp -r /autoinstrumentation/. \"${TTFT_OTEL_TARGET:-/ttft-otel}\""]
