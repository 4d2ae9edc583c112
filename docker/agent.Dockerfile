# An agent with the runtime, for CPUs or GPUs: docker build -f docker/agent.Dockerfile -t varuna-agent .
# BASE may be an image with CUDA and Python 3.11 or newer; PIP_FLAGS may name the index of PyTorch's wheels that fit it.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG PIP_FLAGS=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY proto proto
COPY varuna_runtime varuna_runtime
COPY agent agent
COPY manager manager
RUN python3 -m venv /opt/varuna \
    && /opt/varuna/bin/pip install --no-cache-dir ${PIP_FLAGS} '.[runtime]'

FROM ${BASE}
RUN useradd --uid 10001 --create-home --home-dir /data varuna
COPY --from=build /opt/varuna /opt/varuna
ENV PATH=/opt/varuna/bin:$PATH PYTHONUNBUFFERED=1
USER 10001
WORKDIR /data
VOLUME /data
# The agent holds a lock on its folder for as long as it runs.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python3", "-c", "import fcntl, sys; f = open('/data/agent.lock')\ntry: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\nexcept BlockingIOError: sys.exit(0)\nsys.exit(1)"]
ENTRYPOINT ["varuna", "agent", "--vm-dir", "/data"]
