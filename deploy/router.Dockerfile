# SPDX-License-Identifier: Apache-2.0
# Our router in a container: docker build -f deploy/router.Dockerfile -t ttft-otel-router . (docker-compose.yml, profile demo)
# Configured by TTFT_OTEL_ROUTER_* and OTEL_*; needs no vLLM, no shell, no root, no writable disk but /tmp.
FROM python:3.12.12-slim-bookworm AS build
# serve,explain: pages and answers of deploy/docker-compose.alerts.yml.
ARG EXTRAS=router
COPY . /src
RUN pip install --no-cache-dir --no-compile --prefix=/install "/src[$EXTRAS]"

FROM python:3.12.12-slim-bookworm
COPY --from=build /install /usr/local
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8000
ENTRYPOINT ["ttft-otel", "router"]
