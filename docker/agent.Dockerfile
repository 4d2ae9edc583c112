# An agent with the runtime, for CPUs or GPUs: docker build -f docker/agent.Dockerfile -t varuna-agent .
# BASE may be an image with CUDA and Python 3.11 or newer; PIP_FLAGS may name the index of PyTorch's wheels that fit it.
ARG BASE=python:3.12-slim

# hadolint ignore=DL3006 # its tag is in BASE
FROM ${BASE} AS build
ARG PIP_FLAGS=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs docs
COPY deploy deploy
COPY proto proto
COPY planner planner
COPY varuna_runtime varuna_runtime
COPY agent agent
COPY manager manager
COPY client client
RUN python3 -m venv /opt/varuna \
    && /opt/varuna/bin/pip install --no-cache-dir -c constraints.txt ${PIP_FLAGS} '.[runtime,otel]'

# hadolint ignore=DL3006
FROM ${BASE}
RUN useradd --uid 10001 --create-home --home-dir /data varuna \
    && install -d -o varuna -g varuna -m 0700 /run/varuna /checkpoints
COPY --from=build /opt/varuna /opt/varuna
ENV PATH=/opt/varuna/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /data
VOLUME /data
# Workers connect to the agent at this socket.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).connect('/data/agent.sock')"]
ENTRYPOINT ["varuna", "agent", "--vm-dir", "/data"]
