# An agent with the runtime, for NVIDIA's GPUs: docker build -f docker/agent-cuda.Dockerfile -t varuna-agent-cuda .
# PyTorch's wheels bring CUDA's libraries along; the base has what the driver of the host needs to be found.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

# hadolint ignore=DL3006 # its tag is in BASE
FROM ${BASE} AS build
ARG PIP_FLAGS=
# hadolint ignore=DL3008 # Python of the distribution, with its security updates
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
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
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /data varuna \
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
