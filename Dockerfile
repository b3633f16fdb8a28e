# syntax=docker/dockerfile:1
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY protos protos
COPY surface surface
COPY systems systems
COPY engine engine
COPY planning planning
COPY server server
COPY client client
COPY cli cli
COPY deploy deploy
RUN python -m venv /opt/perfcast && /opt/perfcast/bin/pip install --no-cache-dir '.[server]'

FROM python:3.11-slim
COPY --from=build /opt/perfcast /opt/perfcast
RUN useradd --system --uid 10001 --no-create-home perfcast
USER 10001
ENV PATH=/opt/perfcast/bin:$PATH PYTHONUNBUFFERED=1 \
    PERFCAST_HOST=0.0.0.0 PERFCAST_PORT=50051 PERFCAST_METRICS_HOST=0.0.0.0 PERFCAST_METRICS_PORT=9464
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["perfcast", "health"]
ENTRYPOINT ["perfcast"]
CMD ["serve"]
