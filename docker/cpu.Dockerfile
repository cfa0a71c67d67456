# What a CPU worker, the MLflow server and the Prefect server run on: every dependency, none of the project's code, which
# a worker clones (docker/enter.sh). Build from the root of the repository:
#   docker build --file docker/cpu.Dockerfile --tag polyturn-cpu .
FROM python:3.11-slim-bookworm

# Where pip finds torch built for CPU; the plain index has the CUDA build, several GB larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git openssh-client tini \
    && rm -rf /var/lib/apt/lists/*

# The versions of docker/constraints-cpu.txt, which are tested together; an empty package stands for the code.
WORKDIR /opt/polyturn
COPY pyproject.toml README.md LICENSE docker/constraints-cpu.txt ./
RUN mkdir polyturn && touch polyturn/__init__.py \
    && pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" --constraint constraints-cpu.txt ".[server]" Flask-WTF==1.3.0 \
    && pip check

COPY docker/enter.sh docker/healthy.py /opt/polyturn/
RUN git config --system --add safe.directory '*' \
    && useradd --create-home --uid 1000 polyturn \
    && mkdir -p /srv && chown polyturn /srv
USER 1000
# Settings of polyturn/environment.py that must stand before its code runs.
ENV POLYTURN_ROOT=/srv/polyturn \
    PYTHONPATH=/srv/polyturn \
    PREFECT_HOME=/home/polyturn/.prefect \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    MLFLOW_DISABLE_TELEMETRY=true \
    DO_NOT_TRACK=1
WORKDIR /srv
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/polyturn/enter.sh"]
CMD ["worker", "polyturn-cpu"]
