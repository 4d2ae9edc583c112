# The manager. Build from the repository's root: docker build -f docker/manager.Dockerfile -t varuna-manager .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
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
RUN python -m venv /opt/varuna \
    && /opt/varuna/bin/pip install --no-cache-dir -c constraints.txt '.[manager,azure,kubernetes,otel]'
# The planner is compiled here, so that the first plan takes no longer than others.
ENV NUMBA_CACHE_DIR=/opt/varuna/numba
RUN /opt/varuna/bin/python -c 'from varuna_planner.search.auto_config import warm_up; warm_up()'

FROM python:${PYTHON}-slim
# /run/varuna holds what other containers need, such as the join token of docker/compose.yaml.
RUN useradd --uid 10001 --create-home --home-dir /data varuna \
    && install -d -o varuna -g varuna -m 0700 /run/varuna
COPY --from=build /opt/varuna /opt/varuna
# numba uses only a cache that it can write.
COPY --from=build --chown=10001:10001 /opt/varuna/numba /opt/varuna/numba
ENV PATH=/opt/varuna/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/opt/varuna/numba
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8750 8751
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import ssl, urllib.request as u; u.urlopen('https://127.0.0.1:8750/healthz', context=ssl._create_unverified_context(), timeout=4)"]
ENTRYPOINT ["varuna"]
CMD ["manager", "--data-dir", "/data", "--host", "0.0.0.0"]
